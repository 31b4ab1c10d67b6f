"""Stream: lines that keep arriving, into a dataset while they do, each step once."""
