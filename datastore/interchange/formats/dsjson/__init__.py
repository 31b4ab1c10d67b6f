"""Vowpal Wabbit's dsjson: events of contextual bandits whose candidate actions have features."""
