"""Ingest and export: sources, foreign formats, and the conversions between them and episodes."""
