"""DistributedDataParallel on digits; every step of the training is in train.py."""
