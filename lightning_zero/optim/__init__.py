"""Update rules of optimizers, their kernels over shards, and norms of sharded gradients."""
