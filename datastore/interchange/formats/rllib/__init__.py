"""RLlib: columns, sample batches and episodes of its offline data."""
