"""A policy over HTTP, its decisions and rewards back into the lake; never meets training."""
