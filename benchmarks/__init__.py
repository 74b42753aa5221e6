"""Speed measurements, each next to a baseline; results/ contains the raw samples."""
