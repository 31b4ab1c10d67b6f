"""Checkpoints: what a training run can be continued from, whole or absent.

Under `_lake/runs/<run_id>/checkpoints/` a checkpoint is two blobs: `<ulid>.safetensors` with the
arrays, and then `<update>.json`, which names it with its sha256 and holds the rest, and has a
checksum of its own. So a crash in between leaves the checkpoint before as the newest, and a name
that nothing refers to.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import FormatTooNewError, NotFoundError, PackageInvalidError
from replaylake.datastore.names import LAKE_ROOT, new_ulid
from replaylake.datastore.storage.seals import BrokenSealError, read_json, seal_json
from replaylake.datastore.storage.storage import Storage
from replaylake.datastore.version import VERSION

_FORMAT: Final = 1
_NAME: Final = re.compile(r"(\d{12})\.json")
_PATH: Final = re.compile(rf"{LAKE_ROOT}/runs/([^/]+)/checkpoints/(\d{{12}})\.json")
_ARRAYS_NAME: Final = re.compile(r"[0-9A-Za-z]+\.safetensors")
# Arrays inside of `state`, by where they stand, beside the caller's own.
_IN_STATE: Final = "state:"
_ARRAY: Final = "__array__"


@dataclass(frozen=True)
class Checkpoint:
    """What `save` was given: arrays by name, and a tree that JSON has but for numpy arrays."""

    update: int
    arrays: Mapping[str, Array]
    state: Mapping[str, Any]


class Checkpoints:
    """Those of one run; one process writes them at a time (see lease.py)."""

    def __init__(self, storage: Storage, run_id: str) -> None:
        self._storage = storage
        self._run_id = run_id
        self._folder = f"{LAKE_ROOT}/runs/{run_id}/checkpoints"

    def save(self, update: int, arrays: Mapping[str, Array], state: Mapping[str, Any]) -> None:
        """Write the checkpoint of an update, durably; it replaces one of the same update.

        Args:
            update: how many updates were made.
            arrays: by name, of any shape and of numbers or flags.
            state: dicts with text keys, lists, texts, numbers, None, and numpy arrays.

        Raises: StorageError; the checkpoints before are then as they were.
        """
        inside: dict[str, Array] = {}
        about = {
            "format": _FORMAT,
            "replaylake": VERSION,
            "run_id": self._run_id,
            "update": update,
            "state": _extract_arrays(state, _IN_STATE, inside),
        }
        data = safetensors.numpy.save(
            {name: np.array(array, order="C") for name, array in {**arrays, **inside}.items()}
        )
        name = f"{new_ulid()}.safetensors"
        self._storage.put(f"{self._folder}/{name}", data)
        about |= {"arrays": name, "sha256": hashlib.sha256(data).hexdigest()}
        # Python's own floats and whole numbers come back from this text as they were.
        self._storage.put(self._path(update), seal_json(about))

    def updates(self) -> list[int]:
        """Return the updates of which there are checkpoints, ascending."""
        names = map(_NAME.fullmatch, self._storage.names(self._folder))
        return [int(match.group(1)) for match in names if match]

    def load(self, update: int | None = None) -> Checkpoint:
        """Return the checkpoint of an update, by default the newest that is whole.

        Raises: NotFoundError if there is none, FormatTooNewError; PackageInvalidError if the one
        that was asked for is damaged, or all of them are.
        """
        updates = self.updates()
        if not updates or (update is not None and update not in updates):
            which = "any" if update is None else f"one of update {update}"
            raise NotFoundError(
                f"run {self._run_id}: found checkpoints of updates {updates}, expected {which}. "
                "Train again from the beginning."
            )
        for number in [update] if update is not None else reversed(updates):
            try:
                return self._read(number)
            except PackageInvalidError:
                if number == update or number == updates[0]:
                    raise
        raise AssertionError("the loop above returns or raises")

    def retain(self, updates: Collection[int]) -> None:
        """Remove the checkpoints of all other updates, and arrays that no checkpoint names."""
        names = self._storage.names(self._folder)
        doomed = [self._path(n) for n in self.updates() if n not in updates]
        # What describes a checkpoint goes first: without it, its arrays are nothing.
        self._storage.delete(doomed)
        in_use = set()
        for update in self.updates():
            # One that is damaged names none, and is passed over when it is read.
            with suppress(PackageInvalidError):
                in_use.add(self._read_body(update).get("arrays"))
        doomed = [name for name in names if name.endswith(".safetensors") and name not in in_use]
        self._storage.delete(f"{self._folder}/{name}" for name in doomed)

    def remove(self) -> None:
        """Remove all of them."""
        self.retain(())

    def _path(self, update: int) -> str:
        return f"{self._folder}/{update:012d}.json"

    def _read_body(self, update: int) -> dict[str, Any]:
        path = self._path(update)
        data = self._storage.get(path)
        try:
            about: dict[str, Any] = read_json(data or b"")
            number = int(about["format"])
        except BrokenSealError as error:
            raise self._damaged_error(path, str(error)) from error
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise self._damaged_error(
                path, f"it does not parse ({type(error).__name__})"
            ) from error
        if number > _FORMAT:
            raise FormatTooNewError(
                f"{path}: found checkpoint format {number}, expected at most {_FORMAT}. It was "
                f"written by ReplayLake {about.get('replaylake')}: continue the run with that."
            )
        return about

    def _read(self, update: int) -> Checkpoint:
        about = self._read_body(update)
        name, expected = str(about.get("arrays")), str(about.get("sha256"))
        if not _ARRAYS_NAME.fullmatch(name):
            raise self._damaged_error(self._path(update), f"it names {name[:60]!r} as its arrays")
        path = f"{self._folder}/{name}"
        data = self._storage.get(path)
        if data is None:
            raise self._damaged_error(path, "it is not there")
        if (digest := hashlib.sha256(data).hexdigest()) != expected:
            raise self._damaged_error(path, f"its sha256 is {digest[:12]}, not {expected[:12]}")
        try:
            arrays = safetensors.numpy.load(data)
            state = _restore_arrays(about["state"], arrays)
            if not isinstance(state, dict):
                raise TypeError(f"state is {type(state).__name__}")
        except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise self._damaged_error(path, f"{type(error).__name__}: {error}") from error
        own = {name: a for name, a in arrays.items() if not name.startswith(_IN_STATE)}
        return Checkpoint(update, own, state)

    def _damaged_error(self, path: str, found: str) -> PackageInvalidError:
        return PackageInvalidError(
            f"run {self._run_id}: checkpoint {path}: found that {found}, expected what was saved. "
            "Remove it to continue from the one before."
        )


def find_damaged_checkpoints(storage: Storage) -> Iterator[tuple[str, str]]:
    """Yield (folder, what is wrong) for each checkpoint of any run that cannot be loaded.

    Those that a newer release wrote are left alone. Raises: StorageError.
    """
    runs = f"{LAKE_ROOT}/runs/"
    matches = (_PATH.fullmatch(file.path) for file in storage.files(runs.rstrip("/")))
    for run_id, update in sorted((m.group(1), int(m.group(2))) for m in matches if m):
        try:
            Checkpoints(storage, run_id).load(update)
        except PackageInvalidError as error:
            yield f"{runs}{run_id}/checkpoints", str(error)
        except (FormatTooNewError, NotFoundError):
            continue  # a newer release's, or the run has removed it meanwhile


def _extract_arrays(tree: Any, path: str, arrays: dict[str, Array]) -> Any:
    """Return the tree with the place of each numpy array in `arrays` instead of it."""
    if isinstance(tree, np.ndarray):
        arrays[path] = tree
        return {_ARRAY: path}
    if isinstance(tree, np.generic):
        return tree.item()
    if isinstance(tree, Mapping):
        return {key: _extract_arrays(sub, f"{path}/{key}", arrays) for key, sub in tree.items()}
    if isinstance(tree, list | tuple):
        return [_extract_arrays(sub, f"{path}/{i}", arrays) for i, sub in enumerate(tree)]
    return tree


def _restore_arrays(tree: Any, arrays: Mapping[str, Array]) -> Any:
    if isinstance(tree, dict):
        if tree.keys() == {_ARRAY}:
            return arrays[tree[_ARRAY]]
        return {key: _restore_arrays(sub, arrays) for key, sub in tree.items()}
    if isinstance(tree, list):
        return [_restore_arrays(sub, arrays) for sub in tree]
    return tree
