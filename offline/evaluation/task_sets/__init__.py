"""Task sets: how well policies solve tasks, from stored samples of each task."""
