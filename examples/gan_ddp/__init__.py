"""Train a GAN with DDP: one forward and one backward per network and iteration."""
