"""The Trainer: its strategy, and what of Lightning has to know about shards."""
