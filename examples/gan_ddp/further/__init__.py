"""Programs beside the main one; each runs alone."""
