"""Collecting: a server without a policy, which takes in what was acted elsewhere."""
