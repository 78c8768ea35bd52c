"""torch.compile integration, from capture to CUDA graphs."""
