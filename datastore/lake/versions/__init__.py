"""Versions of datasets: named, listed and compared."""
