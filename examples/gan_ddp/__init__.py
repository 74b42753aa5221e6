"""A GAN under DDP: one forward and one backward per network and iteration."""
