"""nn.DataParallel and its eight steps by hand: one process, several devices."""
