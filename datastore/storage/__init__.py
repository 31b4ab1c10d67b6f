"""Durable storage: blobs in a directory or object store, the commit log, and tables over it."""
