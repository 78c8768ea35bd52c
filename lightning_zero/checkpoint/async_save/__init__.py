"""Save concurrently with training: a snapshot in shared memory, written by a separate process."""
