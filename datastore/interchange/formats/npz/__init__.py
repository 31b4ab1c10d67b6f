"""npz: archives of numpy arrays, read without unpickling."""
