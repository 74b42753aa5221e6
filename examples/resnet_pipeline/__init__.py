"""A ResNet cut into stages, one per process; the stages work on different micro-batches."""
