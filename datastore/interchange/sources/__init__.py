"""Sources: what a person names, as files to read."""
