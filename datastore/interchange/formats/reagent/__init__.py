"""ReAgent: logs of sparse features."""
