"""What runs keep in the lake while they go on: their metrics and their checkpoints."""
