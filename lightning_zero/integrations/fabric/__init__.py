"""Integrate with Fabric: the strategy for loops that users write."""
