"""Train one model under this strategy and others, each in its own processes, and compare: ``python compare --help``."""
