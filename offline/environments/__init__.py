"""Environments: what an id names, spaces, games of several agents, recording, pictures."""
