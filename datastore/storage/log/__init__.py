"""The commit log: commits, what they add up to, and checkpoints of it."""
