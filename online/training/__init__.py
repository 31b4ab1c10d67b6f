"""An online run: made ready, the loop between collecting and learning, and what it makes."""
