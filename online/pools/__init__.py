"""The workers of a run: in this process or Ray's, on one machine or several."""
