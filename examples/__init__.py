"""Examples: self-contained programs that import only `common` and their own modules."""
