"""Kernels: replay's hot loops, compiled by numba where there is numba, else in numpy."""
