"""Packing: shards decoded into one record per step, run by run, ready to be gathered."""
