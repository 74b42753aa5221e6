"""Train a GAN with DDP: one forward and one backward pass per network and step."""
