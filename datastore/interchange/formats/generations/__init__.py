"""Generations: values, messages and rows that the formats of language agents' logs share."""
