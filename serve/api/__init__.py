"""The API: one file an endpoint, and what they read and write."""
