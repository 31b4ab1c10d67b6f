"""Recorders of rollouts: the recorder of language agents, and hooks for other frameworks."""
