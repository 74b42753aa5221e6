"""The production script: a folder of JPEGs, several nodes, interruptions and resuming."""
