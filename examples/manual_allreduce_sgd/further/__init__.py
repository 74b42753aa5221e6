"""Programs that go beyond train.py; each runs alone."""
