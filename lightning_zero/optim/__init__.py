"""What optimizers may do to shards, and the norm of gradients that are spread over ranks."""
