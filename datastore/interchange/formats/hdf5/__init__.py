"""HDF5: files that others wrote, opened without trust; the home of h5py."""
