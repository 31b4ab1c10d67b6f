"""Our own algorithms, one file each: a function that returns an Algorithm."""
