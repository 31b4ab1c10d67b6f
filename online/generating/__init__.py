"""Rollouts of language agents: dialogues of a model with an environment."""
