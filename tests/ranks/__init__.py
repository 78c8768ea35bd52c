"""Worker processes, one per rank, that live as long as the pytest session."""
