"""Episodes: lists and groups of them, one or several, their tokens, conversations and labels."""
