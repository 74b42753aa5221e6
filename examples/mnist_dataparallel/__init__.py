"""Digits with nn.DataParallel: one process trains on several devices."""
