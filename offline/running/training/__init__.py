"""A training run: its request, its data, the loop, what it keeps, which policy it chooses."""
