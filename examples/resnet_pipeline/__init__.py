"""Model parallelism: a ResNet cut into stages that work at the same time on micro-batches."""
