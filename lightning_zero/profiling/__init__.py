"""Costs of graphs and devices: nodes, links, device memory and timers."""
