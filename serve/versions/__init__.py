"""Versions: which policies a server holds, and how others take their place."""
