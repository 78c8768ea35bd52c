"""Integrate with the Trainer: its strategy, and patches of Lightning that need to know shards."""
