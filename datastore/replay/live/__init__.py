"""A view that follows a dataset while others append to it."""
