"""Saving beside training: a snapshot in memory that a process of its own writes out."""
