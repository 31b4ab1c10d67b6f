"""Scoring: values of functions, reward models and judges, written to the steps that they rate."""
