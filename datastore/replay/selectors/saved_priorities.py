"""Saved priorities: kept by row key, so that another view of the data finds them again."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.errors import (
    FormatTooNewError,
    InvalidNameError,
    NotFoundError,
    StorageError,
)
from replaylake.datastore.names import check_tag_name
from replaylake.datastore.replay.selectors.key_index import find_keys
from replaylake.datastore.storage.seals import read_bytes, seal_bytes
from replaylake.datastore.storage.storage import Storage

_FORMAT: Final = 1
_SUFFIX: Final = ".npz"
# What numpy and zipfile raise on damaged bytes of a file without a seal; the second line also on
# bits that say that it is encrypted, or packed in a way that they do not know.
_UNREADABLE: Final = (
    *(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, struct.error),
    *(RuntimeError, NotImplementedError, MemoryError),
)


@dataclass(frozen=True)
class SavedPriorities:
    """keys uint64 [N, 2] and their priorities to the power of alpha, float64 [N].

    highest: the highest priority (not to any power) that there was.
    """

    keys: NDArray[np.uint64]
    powered: NDArray[np.float64]
    alpha: float
    highest: float

    def look_up(
        self, keys: NDArray[np.uint64], alpha: float
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return the priorities of those of keys [N, 2] that are known, and which are, bool [N].

        They are to the power of `alpha`; where that is another than the saved one, up to rounding.
        Saved with an alpha of 0, they only say which were 0.
        """
        places = find_keys(keys, self.keys)
        known = places >= 0
        powered = self.powered[places[known]]
        if alpha != self.alpha:
            exponent = alpha / self.alpha if self.alpha else 1.0
            powered = np.where(powered > 0.0, powered**exponent, 0.0)
        return powered, known


@dataclass(frozen=True)
class PriorityFolder:
    """Where a dataset, whose files lie below `root`, keeps saved priorities: one file a name.

    Like all that is derived they are no part of any version, and a purge deletes them.
    """

    storage: Storage
    root: str

    def write(self, name: str, saved: SavedPriorities) -> None:
        """Keep them under a name; a reader sees these or those before, whole.

        Raises: InvalidNameError, StorageError. Cost: the arrays once more in memory.
        """
        data = io.BytesIO()
        np.savez(
            data,
            format=_FORMAT,
            keys=saved.keys,
            powered=saved.powered,
            alpha=saved.alpha,
            highest=saved.highest,
        )
        self.storage.put(self._path(name), seal_bytes(data.getbuffer()))

    def read(self, name: str) -> SavedPriorities:
        """Return what is kept under a name.

        Raises: NotFoundError, InvalidNameError, FormatTooNewError; StorageError if it is damaged.
        """
        path = self._path(name)
        data = self.storage.get(path)
        if data is None:
            names = [found.removesuffix(_SUFFIX) for found in self.storage.names(self._folder)]
            raise NotFoundError(
                f"priorities {name!r}: found {', '.join(names) or 'none'} in "
                f"{self.storage.url}/{self._folder}, expected that name. Call save_priorities on a "
                "sampler first, or leave `restore` out."
            )
        try:
            with np.load(io.BytesIO(read_bytes(data)), allow_pickle=False) as file:
                if (version := int(file["format"])) > _FORMAT:
                    raise FormatTooNewError(
                        f"{path}: found format {version}, expected {_FORMAT} or less. Install a "
                        "newer ReplayLake."
                    )
                saved = SavedPriorities(
                    file["keys"], file["powered"], float(file["alpha"]), float(file["highest"])
                )
                _check_whole(saved)
                return saved
        except _UNREADABLE as error:
            raise StorageError(
                f"{path}: found {error}, expected the priorities that were saved there. Delete the "
                "file and leave `restore` out: they are learned anew."
            ) from error

    def find_damaged(self) -> Iterator[tuple[str, str]]:
        """Yield (path, what is wrong) for each file that cannot be read. Raises: StorageError."""
        for file in self.storage.names(self._folder):
            try:
                self.read(file.removesuffix(_SUFFIX))
            except (InvalidNameError, NotFoundError, FormatTooNewError):
                continue  # not ours, removed meanwhile, or of a newer release
            except StorageError as error:
                yield f"{self._folder}/{file}", str(error)

    @property
    def _folder(self) -> str:
        return f"{self.root}/_derived/priorities"

    def _path(self, name: str) -> str:
        try:
            return f"{self._folder}/{check_tag_name(name)}{_SUFFIX}"
        except (InvalidNameError, TypeError) as error:
            raise InvalidNameError(
                f"priorities: found name {name!r}, expected [a-z][a-z0-9_.-]*, at most 63 "
                "characters, without `..`. Choose another name."
            ) from error


def _check_whole(saved: SavedPriorities) -> None:
    """Raises: ValueError for what save_priorities does not write."""
    num = len(saved.keys)
    if saved.keys.shape != (num, 2) or saved.keys.dtype != np.uint64:
        raise ValueError(f"keys {saved.keys.dtype} {list(saved.keys.shape)}")
    if saved.powered.shape != (num,) or saved.powered.dtype != np.float64:
        raise ValueError(f"priorities {saved.powered.dtype} {list(saved.powered.shape)}")
    in_range = np.isfinite(saved.powered) & (saved.powered >= 0.0)
    if not (in_range.all() and 0.0 <= saved.alpha <= 1.0 and 0.0 < saved.highest < np.inf):
        raise ValueError("priorities that are no finite numbers of at least 0")
