"""Copy: a snapshot into another dataset or lake, once, however often it is run."""
