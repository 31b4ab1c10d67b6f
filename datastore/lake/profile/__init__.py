"""Profile: what a snapshot holds, in numbers that pictures are drawn from."""
