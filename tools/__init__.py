"""Programs to use with the examples. `common` does not import them."""
