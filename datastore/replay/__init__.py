"""Decoded runs in memory or on disk, and the samplers that draw batches from them."""
