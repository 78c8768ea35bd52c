"""Fabric: the strategy for loops that users write, and what of Fabric has to know about shards."""
