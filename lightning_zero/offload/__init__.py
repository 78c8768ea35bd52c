"""Store optimizer state, master weights and activations in host memory, and copy them concurrently with compute."""
