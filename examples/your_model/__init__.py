"""A template for your own data-parallel training, with four marked places to change."""
