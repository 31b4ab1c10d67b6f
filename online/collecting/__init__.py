"""Collecting: what a rollout worker is made of."""
