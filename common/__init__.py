"""Code that at least two examples share."""
