"""Measurements of speed, side by side with a peer; results/ has the raw samples."""
