"""Fsck: what is wrong with a lake, and putting it aside."""
