"""Serving: logs of decisions, and single decisions."""
