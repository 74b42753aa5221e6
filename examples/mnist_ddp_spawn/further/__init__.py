"""Additional programs, which train.py does not need."""
