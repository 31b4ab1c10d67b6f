"""Tabular sources: tables of one row a step, decoded and grouped into episodes."""
