"""SQL over snapshots and the lake."""
