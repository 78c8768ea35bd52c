"""Checkpoints that DeepSpeed has written, read without it."""
