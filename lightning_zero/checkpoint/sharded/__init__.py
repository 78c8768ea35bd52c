"""Sharded checkpoints: folders in the format of torch's distributed checkpoints, written by all ranks at once."""
