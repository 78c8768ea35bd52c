"""Estimates and measurements of what graphs cost: time per node, memory, transfers, overlap."""
