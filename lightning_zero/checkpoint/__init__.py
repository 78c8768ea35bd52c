"""Whole values out of shards and back."""
