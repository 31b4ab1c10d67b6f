"""Explorer: pages of a lake for people, in a browser."""
