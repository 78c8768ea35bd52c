"""Costs of graphs and devices: seconds and memory of nodes, bandwidth of links, device memory and timers."""
