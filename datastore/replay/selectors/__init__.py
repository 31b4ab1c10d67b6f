"""Selectors: which items a batch takes, uniformly, by priority, by weight or in order."""
