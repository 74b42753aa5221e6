"""A ResNet cut into stages, one per process, which work on different micro-batches."""
