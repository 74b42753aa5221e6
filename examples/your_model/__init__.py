"""A template for your own training, with four marked places, and the same with a language model."""
