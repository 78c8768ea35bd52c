"""Store optimizer state, master weights and activations in host memory."""
