"""MNIST with nn.DataParallel: one process drives several devices."""
