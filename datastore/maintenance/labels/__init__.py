"""Labels: what became known after the fact, joined to the steps it is about."""
