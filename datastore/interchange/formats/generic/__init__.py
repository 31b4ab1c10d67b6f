"""Tables of one row a step in files that know no episodes: CSV, JSON lines, Parquet, Arrow."""
