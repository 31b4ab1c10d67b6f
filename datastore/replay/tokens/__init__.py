"""Token sequences of language agents, decoded once, and batches of them."""
