"""A policy as a Bento: the model, ReplayLake's wheel, a lock of what both need, a Dockerfile."""
