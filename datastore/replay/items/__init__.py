"""Items: what is made of each selected step, a transition, a sequence or a whole episode."""
