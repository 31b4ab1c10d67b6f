"""Maintenance: what keeps a lake small, fast and whole while it is written to and read."""
