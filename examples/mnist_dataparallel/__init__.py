"""The eight steps of nn.DataParallel by hand: one process, several devices."""
