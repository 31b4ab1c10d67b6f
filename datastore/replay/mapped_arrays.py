"""Arrays in files: mapped into memory, so that they cost no RAM beyond the page cache."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray


def map_array(
    path: Path, dtype: Any, shape: tuple[int, ...], *, read_ahead: bool = True
) -> NDArray[Any]:
    """Map a whole file for reading; it stays readable if its name goes.

    read_ahead: whether the kernel reads on around a page that was missing. Raises: OSError;
    ValueError if its size is another.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != num_bytes(dtype, shape):
            raise ValueError(f"{path}: found {os.fstat(file.fileno()).st_size} bytes.")
        return _map_file(file, dtype, shape, mmap.PROT_READ, read_ahead=read_ahead)


def create_array(path: Path, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """Map a new file of zeros for writing. Raises: OSError, also where the disk lacks the room."""
    with path.open("x+b") as file:
        return _reserve(file, dtype, shape)


def scratch_array(folder: Path, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """Map a new file of zeros that has no name: it goes with the array. Raises: OSError."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return _reserve(file, dtype, shape)


def num_bytes(dtype: Any, shape: tuple[int, ...]) -> int:
    """Return the bytes of an array."""
    return math.prod(shape) * int(np.dtype(dtype).itemsize)


def _reserve(file: IO[bytes], dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    if size := num_bytes(dtype, shape):
        # Blocks of its own now: a mapped page without one, on a disk that is full by then, would
        # end the process with SIGBUS.
        os.posix_fallocate(file.fileno(), 0, size)
    return _map_file(file, dtype, shape, mmap.PROT_READ | mmap.PROT_WRITE)


def _map_file(
    file: IO[bytes], dtype: Any, shape: tuple[int, ...], access: int, *, read_ahead: bool = True
) -> NDArray[Any]:
    size = num_bytes(dtype, shape)
    if not size:  # nothing can be mapped
        return np.zeros(shape, dtype)
    mapped = mmap.mmap(file.fileno(), size, prot=access)
    if not read_ahead:
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, dtype).reshape(shape)
