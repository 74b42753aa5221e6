"""Programs for use with the examples. `common` does not import them."""
