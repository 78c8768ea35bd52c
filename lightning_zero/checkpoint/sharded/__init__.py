"""Sharded checkpoints: folders in DCP's format, written by all ranks concurrently."""
