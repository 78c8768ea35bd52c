"""torch.compile integration: capture, layer deduplication, partition, graph passes, subgraphs and CUDA graphs."""
