"""Evaluation of policies: in an environment, and off-policy from logged episodes."""
