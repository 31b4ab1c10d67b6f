"""From what workers hand over to what can be sampled: commits, and what keeps them in order."""
