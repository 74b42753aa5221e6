"""Further programs; each runs alone."""
