"""The cycle of a training step, forward, backward and the optimizer's step, and what steps optimizers over shards."""
