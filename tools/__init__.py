"""Programs beside the examples; common does not import them."""
