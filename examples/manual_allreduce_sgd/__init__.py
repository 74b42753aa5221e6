"""Synchronous SGD with an all-reduce written by hand."""
