"""Recording: what is served, into the lake."""
