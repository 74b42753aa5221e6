"""Programs beside the subject; each runs alone."""
