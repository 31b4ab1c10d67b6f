"""Packed values: pickles and msgpack that RLlib writes, read without executing anything."""
