"""Processes: the supervisor, its workers, and how they start."""
