"""Datasets: the lake, a dataset and its versions, and the SQL console."""
