"""Visits: one request for a page, what it returns, its turn, and what the process remembers."""
