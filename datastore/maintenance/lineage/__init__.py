"""Lineage: what a decision, policy, dataset or episode came from, and what came of it."""
