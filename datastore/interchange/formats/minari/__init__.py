"""Minari: folders of episodes in HDF5, Arrow or Parquet, with their spaces."""
