"""Ingest: foreign files into a dataset, checked at the door."""
