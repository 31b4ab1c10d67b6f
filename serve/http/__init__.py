"""HTTP: every request from its first byte to its answer."""
