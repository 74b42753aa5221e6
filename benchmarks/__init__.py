"""Speed measurements, each side by side with a peer; results/ contains the raw samples."""
