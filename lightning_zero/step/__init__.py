"""The cycle of a training step, and optimizer steps over shards."""
