"""A model of many hosts: what a step takes, in seconds and in bytes, for each way to shard. Arithmetic only."""
