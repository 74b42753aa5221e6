"""Data-parallel training with every distributed step written out."""
