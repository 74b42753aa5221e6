"""Programs beside the main one; each runs by itself."""
