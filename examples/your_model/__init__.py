"""A template for your own training: data-parallel, with four marked places to change."""
