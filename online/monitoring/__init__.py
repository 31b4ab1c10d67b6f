"""Where a run's time and bytes go, and its metrics for others."""
