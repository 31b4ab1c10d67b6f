"""What a sweep consists of: its configuration, its trials, and what came of them."""
