"""Additional programs; each one runs on its own."""
