"""The examples: each a self-contained program that imports `common` and itself only."""
