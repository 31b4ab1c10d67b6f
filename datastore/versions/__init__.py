"""Versions of datasets: named, listed, compared, read by SQL, and told when they are gone."""
