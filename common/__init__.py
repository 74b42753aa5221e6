"""What at least two examples need around their training loop."""
