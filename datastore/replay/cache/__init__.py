"""Decoded replay views, kept on this machine so that the next opening only maps them."""
