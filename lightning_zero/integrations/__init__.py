"""What Lightning asks for: each way to train has a room."""
