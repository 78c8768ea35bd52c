"""Update rules of optimizers and their kernels over shards, and the norm of gradients that are spread over ranks."""
