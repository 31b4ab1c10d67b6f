"""Purge: episodes out of every version and file, with a proof."""
