"""Runs: their list, a run or two side by side, and sweeps."""
