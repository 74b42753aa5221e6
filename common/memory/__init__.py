"""An estimate of the memory that a training step needs: `python -m common.memory`."""
