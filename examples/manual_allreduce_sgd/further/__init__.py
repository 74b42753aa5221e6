"""Additional programs that go beyond train.py; each one runs on its own."""
