"""Programs beside mnist_ddp_spawn; train.py does not need them."""
