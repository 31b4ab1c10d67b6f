"""Monitoring: what a server counts."""
