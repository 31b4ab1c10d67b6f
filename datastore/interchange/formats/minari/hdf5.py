"""Minari's HDF5 storage: main_data.hdf5, a group an episode."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
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
from replaylake.datastore.interchange.formats.tabular.episode_rows import EpisodeRows, iter_chunks
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
        with Hdf5File(self._file) as opened:
            found = (
                self._episode(opened, group, number, columns)
                for number, group in list_groups(opened)
            )
            for chunk in iter_chunks(self._file, (one for one in found if one is not None)):
                yield with_times(chunk)

    def _episode(
        self, opened: Hdf5File, group: str, number: int, wanted: Sequence[str] | None
    ) -> EpisodeRows | None:
        def values(name: str) -> Values:
            space = None if self._spaces is None else self._spaces[name == "actions"]
            needs_space = name in ("observations", "actions")
            return self._values(opened, f"{group}/{name}", space if needs_space else None)

        names = ["rewards", *FLAGS]
        names += [n for n in ("observations", "actions") if wanted is None or n in wanted]
        found = {name: values(name) for name in names}
        infos = self._others(opened, group, wanted)
        return episode_rows(
            self._file, number, found, infos, opened.label(group, "seed"), self.notes
        )

    def _values(self, opened: Hdf5File, path: str, space: Space | None) -> Values:
        if not opened.is_group(path):
            return self._leaf(opened, path, space)
        parts = members(opened.names(path), space, f"{self._file.name}: {path}")
        return {
            key: self._values(opened, f"{path}/{name}", sub) for key, (name, sub) in parts.items()
        }

    def _leaf(self, opened: Hdf5File, path: str, space: Space | None) -> Values:
        array = opened.array(path)
        rows = array.read()
        if array.kind == BYTES or is_packed_image(rows, space):
            return images([bytes(row) for row in rows], space, f"{self._file.name}: {path}")
        return reshape_rows(rows, space)

    def _others(
        self, opened: Hdf5File, group: str, wanted: Sequence[str] | None
    ) -> dict[str, Values]:
        """Return the infos, and what else somebody has put beside them."""
        found: dict[str, Values] = {}
        for path in opened.arrays(group):
            name = path.removeprefix(f"{group}/")
            is_known = name.split("/")[0] in ("observations", "actions", "rewards", *FLAGS)
            if is_known or (wanted is not None and name not in wanted):
                continue
            array = opened.array(path)
            is_numbers = array.kind == NUMBERS and array.shape and 0 not in array.shape[1:]
            if is_numbers or (array.kind == TEXT and len(array.shape) == 1):
                found[name] = array.read()
            else:
                self.notes[f"{name} is left out: {array.kind}{list(array.shape)}"] = None
        return found


def list_groups(opened: Hdf5File) -> list[tuple[int, str]]:
    """Return the episodes' numbers and groups, in order."""
    found = ((_EPISODE_GROUP.fullmatch(name), name) for name in opened.names())
    return sorted((int(match[1]), name) for match, name in found if match)
