"""Algorithm and Learner: losses, optimizers and the export of a learned policy."""
