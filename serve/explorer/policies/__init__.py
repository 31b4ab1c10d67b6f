"""Policies: versions, lineage, evaluations, trials and promotions."""
