"""d3rlpy: what ReplayBuffer.dump writes, HDF5 with numbered datasets for each episode.

This reads and writes the file alone: the library itself is not imported here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Box, Discrete, Tuple, Values, as_batch
from replaylake.datastore.episodes.spaces import describe as describe_space
from replaylake.datastore.errors import SourceInvalidError, SpaceUnsupportedError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader, WriteResult
from replaylake.datastore.interchange.formats.hdf5.column_names import label_columns, restore_names
from replaylake.datastore.interchange.formats.hdf5.files import Hdf5File, is_hdf5
from replaylake.datastore.interchange.formats.hdf5.row_tables import TIMEOUTS, RowTables
from replaylake.datastore.interchange.formats.hdf5.writer import Hdf5Writer
from replaylake.datastore.interchange.formats.tabular.episode_rows import (
    EpisodeRows,
    iter_chunks,
    leaf_lengths,
    truncate_to_shortest,
)
from replaylake.datastore.interchange.formats.tabular.infos import (
    INFOS,
    collect_infos,
    find_declared_fields,
    require_rewards,
    with_times,
)
from replaylake.datastore.interchange.formats.tabular.reader import Declaration, TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import Chunk, ChunkSchema, TableSource
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_errors import format_names

_VERSION: Final = "2.1"
_COLUMNS: Final = ("observations", "actions", "rewards", "terminated")
_MARKS: Final = {"columns", "num_episodes", "version"}
_DATASETS: Final = re.compile(
    r"(observations|final_observation)_\d+(_\d+)?"
    r"|(actions|rewards|terminated|truncated|infos)_\d+"
)
# Version 1 had flat datasets, as D4RL has, and marked the last row of every episode.
_ENDS: Final = "episode_terminals"


class D3rlpyEpisodeTables(TableSource):
    """Chunks of files with datasets per episode (`observations_0`, `actions_0`, ...)."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        num_before = 0
        for file in self._files:
            with Hdf5File(file) as hdf5:
                names = {*hdf5.names()}
                num = _num_episodes(hdf5, file, names)
                found = (
                    _EpisodeReader(hdf5, file, names, columns).episode(i, str(num_before + i))
                    for i in range(num)
                )
                chunks = iter_chunks(file, (one for one in found if one is not None))
                yield from map(with_times, chunks)
                num_before += num


class D3rlpyV1Tables(RowTables):
    """Chunks of d3rlpy 1's files; where an episode ended without a terminal, it was cut off."""

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        # Ends are made of two datasets, whichever columns are asked for.
        for chunk in super().chunks():
            yield Chunk(chunk.file, chunk.first_row, self._with_ends(chunk.table, chunk.file))

    def schemas(self) -> Iterator[ChunkSchema]:
        for part in super().schemas():
            empty = self._with_ends(part.schema.empty_table(), part.file)
            yield ChunkSchema(part.file, part.first_row, part.num_rows, empty.schema)

    def _with_ends(self, table: pa.Table, file: SourceFile) -> pa.Table:
        at = table.schema.get_field_index(_ENDS)
        if at < 0 or not _is_number(table.schema.field(at).type):
            raise SourceInvalidError(
                f"{file.name}: found no dataset {_ENDS!r} of one flag a row, expected it, as "
                "d3rlpy 1 writes it. The file may be truncated: write it again."
            )
        ended, terminals = (_flags(table.column(name)) for name in (_ENDS, "terminals"))
        cut_off = pc.and_(ended, pc.invert(terminals))
        return table.drop_columns([_ENDS]).append_column(TIMEOUTS, cut_off)


class D3rlpyFormat:
    """d3rlpy's own datasets, of its versions 2 and 1."""

    name = "d3rlpy"
    about = "d3rlpy's ReplayBuffer.dump (HDF5), and MDPDataset.dump of version 1"
    is_folder = False
    suffix = ".h5"

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        if not is_hdf5(files[0]):
            return False
        with Hdf5File(files[0]) as hdf5:
            names = {*hdf5.names()}
        return names >= _MARKS or names >= {"observations", "actions", "rewards", _ENDS}

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        with Hdf5File(files[0]) as hdf5:
            is_earlier = hdf5.has_path(_ENDS)
            available = hdf5.names()
        if not is_earlier and not {*available} >= _MARKS:
            raise SourceInvalidError(
                f"{files[0].name}: found {format_names(available)}, expected "
                f"{', '.join(sorted(_MARKS))} "
                f"of d3rlpy 2, or {_ENDS} of version 1. Name another format with `format`."
            )
        if is_earlier:
            note = "d3rlpy 1: episodes that ended without a terminal count as truncated"
            return TabularReader(
                D3rlpyV1Tables(files), options, files[0].name, Declaration(notes=[note])
            )
        notes = ["d3rlpy marks terminals alone: an episode without one was cut off, so truncated"]
        infos: set[str] = set()
        others: dict[str, None] = {}
        has_finals = False
        for file in files:
            with Hdf5File(file) as hdf5:
                names = hdf5.names()
                has_finals = has_finals or any(n.startswith("final_observation_") for n in names)
                infos |= {n for name in names for n in _info_names(hdf5, name)}
                others |= dict.fromkeys(n for n in names if not _DATASETS.fullmatch(n))
        if omitted := [name for name in others if name not in _MARKS]:
            notes.append(f"datasets of no name that d3rlpy has, left out: {format_names(omitted)}")
        paths = [f"{INFOS}/{name}" for name in infos]
        with Hdf5File(files[0]) as hdf5:
            options = restore_names(hdf5, paths, options)
        if not has_finals:
            notes.append(
                "d3rlpy keeps no observation after the last step: truncated ends cannot be "
                "bootstrapped"
            )
        fields = find_declared_fields(paths)
        declared = Declaration(fields=fields, notes=notes, observed="observations")
        return TabularReader(D3rlpyEpisodeTables(files), options, files[0].name, declared)

    def write(self, episodes: Iterator[Episode], spec: DatasetSpec, path: Path) -> WriteResult:
        _refuse_spaces(spec)
        lost: set[str] = set()
        num_episodes = num_steps = num_open = 0
        with Hdf5Writer(path) as writer:
            for i, episode in enumerate(episodes):
                lost |= _write_episode(writer, i, episode)
                num_episodes, num_steps = i + 1, num_steps + len(episode)
                num_open += not (episode.terminated or episode.truncated)
            label_columns(writer, spec.extras)
            writer.write("columns", np.asarray(_COLUMNS, object))
            writer.write("num_episodes", num_episodes)
            writer.write("version", np.asarray(_VERSION, object))
        notes = [
            "d3rlpy reads observations, actions, rewards and terminals; final observations and "
            "further columns are beside them for import alone",
            "d3rlpy has no agents or step numbers: episodes are numbered",
        ]
        if num_open:
            notes.append(f"{num_open} episodes without an end: d3rlpy takes them for cut off")
        if lost:
            notes.append(f"left out, not one number or text a step: {format_names(sorted(lost))}")
        return WriteResult(num_episodes, num_steps, tuple(notes))


class _EpisodeReader:
    def __init__(
        self, hdf5: Hdf5File, file: SourceFile, names: set[str], columns: Sequence[str] | None
    ) -> None:
        self._opened = hdf5
        self._file = file
        self._names = names
        self._columns = columns

    def episode(self, i: int, name: str) -> EpisodeRows | None:
        """Read one episode; None if it has no steps."""
        rewards = self._rows(f"rewards_{i}")
        if rewards.ndim == 2 and rewards.shape[1] == 1:
            rewards = rewards[:, 0]
        columns: dict[str, Values] = {"rewards": rewards}
        if self._is_wanted("observations"):
            columns["observations"] = self._values(f"observations_{i}")
        if self._is_wanted("actions"):
            actions = self._rows(f"actions_{i}")
            # One integer a step is Discrete; d3rlpy gives it a dim of 1.
            is_column = actions.ndim == 2 and actions.shape[1] == 1 and actions.dtype.kind in "iub"
            columns["actions"] = actions[:, 0] if is_column else actions
        for info in _info_names(self._opened, f"{INFOS}_{i}"):
            if self._is_wanted(f"{INFOS}/{info}"):
                columns[f"{INFOS}/{info}"] = self._rows(f"{INFOS}_{i}/{info}")
        columns, num, damage = truncate_to_shortest(self._file, name, columns)
        if num == 0:
            return None
        flags = np.zeros((2, num), bool)
        flags[:, -1] = self._ends(i)
        columns |= {"terminated": flags[0], "truncated": flags[1]}
        finals = {}
        if self._is_wanted("observations"):
            finals["final_observation"] = self._final(i)
        return EpisodeRows(name, num, columns, finals, damage)

    def _is_wanted(self, column: str) -> bool:
        return self._columns is None or column in self._columns

    def _ends(self, i: int) -> tuple[bool, bool]:
        terminated = bool(self._opened.array(f"terminated_{i}").value())
        if f"truncated_{i}" in self._names:
            return terminated, bool(self._opened.array(f"truncated_{i}").value())
        return terminated, not terminated

    def _final(self, i: int) -> Values | None:
        path = f"final_observation_{i}"
        if path not in self._names and f"{path}_0" not in self._names:
            return None
        final = self._values(path)
        if {*leaf_lengths(final).values()} != {1}:
            raise SourceInvalidError(
                f"{self._file.name}: {path} has {leaf_lengths(final)} rows, expected one. The file "
                "may be damaged: write it again."
            )
        return final

    def _values(self, path: str) -> Values:
        if path in self._names:
            values: Values = self._rows(path)
            return values
        parts: dict[str, Any] = {}
        while f"{path}_{len(parts)}" in self._names:
            parts[f"_{len(parts)}"] = self._rows(f"{path}_{len(parts)}")
        if not parts:
            raise SourceInvalidError(
                f"{self._file.name}: found no dataset {path!r}, expected it, as num_episodes "
                "counts it. The file may be truncated: write it again."
            )
        return parts

    def _rows(self, path: str) -> Any:
        return self._opened.array(path).read()


def _num_episodes(hdf5: Hdf5File, file: SourceFile, names: set[str]) -> int:
    num = hdf5.array("num_episodes").value()
    if not isinstance(num, int) or f"rewards_{num}" in names or not _has_all(num, names):
        there = sum(name.startswith("rewards_") for name in names)
        raise SourceInvalidError(
            f"{file.name}: num_episodes is {num!r} and there are rewards of {there} episodes, "
            "expected the same number. The file may be truncated: write it again."
        )
    return num


def _has_all(num: int, names: set[str]) -> bool:
    return 0 <= num <= len(names) and all(f"rewards_{i}" in names for i in range(num))


def _info_names(hdf5: Hdf5File, group: str) -> list[str]:
    if not group.startswith(f"{INFOS}_") or not hdf5.has_path(group) or not hdf5.is_group(group):
        return []
    return hdf5.names(group)


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind))


def _flags(column: pa.ChunkedArray) -> Any:
    return pc.not_equal(column.cast(pa.float64()), 0.0)


def _refuse_spaces(spec: DatasetSpec) -> None:
    observation, action = spec.observation_space, spec.action_space
    parts = observation.spaces if isinstance(observation, Tuple) else (observation,)
    if not all(isinstance(part, Box) for part in parts):
        raise SpaceUnsupportedError(
            f"d3rlpy: the observation space is {describe_space(observation)}, expected a Box or a "
            "Tuple of them. Export to minari, which can store it."
        )
    if not isinstance(action, Discrete | Box):
        raise SpaceUnsupportedError(
            f"d3rlpy: the action space is {describe_space(action)}, expected Discrete or a Box. "
            "Export to minari, which can store it."
        )


def _write_episode(writer: Hdf5Writer, i: int, episode: Episode) -> set[str]:
    actions = np.asarray(episode.actions)
    _write_values(writer, f"observations_{i}", episode.observations)
    writer.write(f"actions_{i}", actions[:, None] if actions.ndim == 1 else actions)
    writer.write(f"rewards_{i}", require_rewards(episode, "d3rlpy")[:, None])
    writer.write(f"terminated_{i}", np.bool_(episode.terminated))
    writer.write(f"truncated_{i}", np.bool_(episode.truncated))
    if episode.final_observation is not None:
        _write_values(writer, f"final_observation_{i}", as_batch(episode.final_observation))
    infos, lost = collect_infos(episode)
    for path, array in infos.items():
        writer.write(path.replace(INFOS, f"{INFOS}_{i}", 1), array)
    return lost


def _write_values(writer: Hdf5Writer, path: str, values: Any) -> None:
    if isinstance(values, Mapping):
        for j, part in enumerate(values.values()):
            writer.write(f"{path}_{j}", part)
    else:
        writer.write(path, values)
