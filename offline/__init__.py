"""Learning from the store: algorithms, learners, the training loop, evaluation and export."""
