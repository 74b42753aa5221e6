"""Further programs; train.py does not need them."""
