"""What DistributedDataParallel does, by hand: rings, buckets, shared memory."""
