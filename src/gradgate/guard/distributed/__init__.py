"""The guard over several ranks: DistributedDataParallel and FSDP2."""
