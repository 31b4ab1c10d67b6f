"""Training and tuning runs, in one process or several."""
