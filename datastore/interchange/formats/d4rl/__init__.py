"""D4RL: datasets of HDF5 arrays with a row a step."""
