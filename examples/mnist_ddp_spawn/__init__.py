"""DistributedDataParallel on digits; every distributed step is in train.py."""
