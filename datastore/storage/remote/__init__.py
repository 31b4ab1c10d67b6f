"""Lakes on object stores: their storage, and this machine's copies of their files."""
