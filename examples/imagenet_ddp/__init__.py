"""The production script: from a folder of JPEGs to a run on several nodes that can be interrupted and resumed."""
