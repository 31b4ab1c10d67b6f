"""Losses: pure functions of tensors, by what they are about: likelihood, values, returns."""
