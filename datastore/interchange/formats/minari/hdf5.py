"""Minari's HDF5 storage: main_data.hdf5, a group an episode."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from replaylake.datastore.episodes.spaces import Space, Values
from replaylake.datastore.interchange.formats.hdf5.files import BYTES, NUMBERS, TEXT, Hdf5File
from replaylake.datastore.interchange.formats.minari.storage import (
    FLAGS,
    Spaces,
    episode_rows,
    images,
    is_packed_image,
    members,
    reshape_rows,
)
from replaylake.datastore.interchange.formats.tabular.episode_rows import (
    EpisodeRows,
    describe_lengths,
    iter_chunks,
)
from replaylake.datastore.interchange.formats.tabular.infos import with_times
from replaylake.datastore.interchange.formats.tabular.tables import Chunk, TableSource
from replaylake.datastore.interchange.sources.source import SourceFile

_EPISODE_GROUP: Final = re.compile(r"episode_(\d+)")


class Hdf5Tables(TableSource):
    """Chunks of main_data.hdf5, in the order of the episodes' numbers."""

    def __init__(self, file: SourceFile, spaces: Spaces) -> None:
        self._file = file
        self._spaces = spaces
        self.notes: dict[str, None] = {}

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        with Hdf5File(self._file) as hdf5:
            found = (
                self._episode(hdf5, group, number, columns) for number, group in list_groups(hdf5)
            )
            for chunk in iter_chunks(self._file, (one for one in found if one is not None)):
                yield with_times(chunk)

    def _episode(
        self, hdf5: Hdf5File, group: str, number: int, only: Sequence[str] | None
    ) -> EpisodeRows | None:
        names = ["rewards", *FLAGS]
        names += [n for n in ("observations", "actions") if only is None or n in only]
        lengths = {
            path.removeprefix(f"{group}/"): len(hdf5.array(path))
            for name in names
            for path in hdf5.arrays(f"{group}/{name}")
        }
        # A few bytes can declare any length: arrays far longer than others are not read whole.
        num_rows = 2 * min(lengths.values(), default=0) + 1000

        def values(name: str) -> Values:
            space = None if self._spaces is None else self._spaces[name == "actions"]
            needs_space = name in ("observations", "actions")
            return self._values(hdf5, f"{group}/{name}", space if needs_space else None, num_rows)

        columns = {name: values(name) for name in names}
        infos = self._others(hdf5, group, only, num_rows)
        rows = episode_rows(
            self._file, number, columns, infos, hdf5.label(group, "seed"), self.notes
        )
        if rows is None or max(lengths.values()) <= num_rows:
            return rows
        return replace(rows, damage=describe_lengths(self._file, str(number), lengths))

    def _values(self, hdf5: Hdf5File, path: str, space: Space | None, num_rows: int) -> Values:
        if not hdf5.is_group(path):
            return self._leaf(hdf5, path, space, num_rows)
        parts = members(hdf5.names(path), space, f"{self._file.name}: {path}")
        return {
            key: self._values(hdf5, f"{path}/{name}", sub, num_rows)
            for key, (name, sub) in parts.items()
        }

    def _leaf(self, hdf5: Hdf5File, path: str, space: Space | None, num_rows: int) -> Values:
        array = hdf5.array(path)
        rows = array.read(0, num_rows)
        if array.kind == BYTES or is_packed_image(rows, space):
            return images([bytes(row) for row in rows], space, f"{self._file.name}: {path}")
        return reshape_rows(rows, space)

    def _others(
        self, hdf5: Hdf5File, group: str, names: Sequence[str] | None, num_rows: int
    ) -> dict[str, Values]:
        """Return the infos, and what else somebody has put beside them."""
        columns: dict[str, Values] = {}
        for path in hdf5.arrays(group):
            name = path.removeprefix(f"{group}/")
            is_known = name.split("/")[0] in ("observations", "actions", "rewards", *FLAGS)
            if is_known or (names is not None and name not in names):
                continue
            array = hdf5.array(path)
            is_numbers = array.kind == NUMBERS and array.shape and 0 not in array.shape[1:]
            if is_numbers or (array.kind == TEXT and len(array.shape) == 1):
                columns[name] = array.read(0, num_rows)
            else:
                self.notes[f"{name} is left out: {array.kind}{list(array.shape)}"] = None
        return columns


def list_groups(hdf5: Hdf5File) -> list[tuple[int, str]]:
    """Return the episodes' numbers and groups, in order."""
    matches = ((_EPISODE_GROUP.fullmatch(name), name) for name in hdf5.names())
    return sorted((int(match[1]), name) for match, name in matches if match)
