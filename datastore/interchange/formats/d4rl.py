"""D4RL: HDF5 of one row a step in order, with flags where episodes end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Dict, Text, Tuple, describe
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader, WriteResult
from replaylake.datastore.interchange.formats.hdf5.column_names import label_columns, restore_names
from replaylake.datastore.interchange.formats.hdf5.files import (
    NUMBERS,
    TEXT,
    Hdf5File,
    is_hdf5,
)
from replaylake.datastore.interchange.formats.hdf5.row_tables import (
    METADATA,
    NEXT,
    REQUIRED,
    TIMEOUTS,
    RowTables,
    open_contents,
    required_datasets,
)
from replaylake.datastore.interchange.formats.hdf5.writer import Hdf5Writer
from replaylake.datastore.interchange.formats.tabular.episode_rows import EPISODE_ID
from replaylake.datastore.interchange.formats.tabular.infos import (
    collect_infos,
    find_declared_fields,
    require_rewards,
)
from replaylake.datastore.interchange.formats.tabular.reader import Declaration, TabularReader
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_errors import format_names

LOG_PROBS: Final = "infos/action_log_probs"


class D4rlFormat:
    """What D4RL's datasets are distributed as."""

    name = "d4rl"
    about = "D4RL's HDF5: observations, actions, rewards, terminals, timeouts"
    is_folder = False
    suffix = ".hdf5"

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        if not is_hdf5(files[0]):
            return False
        with Hdf5File(files[0]) as hdf5:
            names = hdf5.names()
        # d3rlpy 1 has the same names and marks the ends of episodes in one more.
        return set(REQUIRED) <= {*names} and "episode_terminals" not in names

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        notes: list[str] = []
        columns: set[str] = set()
        required = required_datasets(options.mapping)
        for file in files:
            with Hdf5File(file) as hdf5:
                contents = open_contents(hdf5, file, required)
                columns |= contents.columns.keys()
                notes += [note for note in contents.notes if note not in notes]
                notes += _metadata_notes(hdf5)
        with Hdf5File(files[0]) as hdf5:
            options = restore_names(hdf5, columns, options)
        fields = find_declared_fields(columns)
        if LOG_PROBS in columns:
            fields["behavior_log_prob"] = LOG_PROBS
        if options.mapping.get("truncated", TIMEOUTS) not in columns:
            notes.append(
                "no timeouts: episodes end at terminals alone, so one that was cut off goes on "
                "into the next"
            )
        is_told = EPISODE_ID in columns or EPISODE_ID in options.mapping or options.episode_by
        by_file = len(files) > 1 and not is_told
        return TabularReader(
            RowTables(files, by_file=by_file, mapping=options.mapping),
            options,
            files[0].name,
            Declaration(fields=fields, notes=notes),
        )

    def write(self, episodes: Iterator[Episode], spec: DatasetSpec, path: Path) -> WriteResult:
        return write_d4rl(episodes, spec, path)


def _metadata_notes(hdf5: Hdf5File) -> list[str]:
    """Say what the file tells of its making: its few short texts and numbers, not its weights."""
    if not hdf5.has_path(METADATA):
        return []
    notes, others = [], 0
    for path in hdf5.arrays(METADATA):
        array = hdf5.array(path)
        if array.shape or array.kind not in (NUMBERS, TEXT):
            others += 1
        else:
            notes.append(f"{path.removeprefix(METADATA + '/')} = {str(array.value())[:80]}")
    if others:
        notes.append(f"{others} arrays, which are not read")
    return [f"metadata: {'; '.join(notes[:20])}"]


def write_d4rl(episodes: Iterator[Episode], spec: DatasetSpec, path: Path) -> WriteResult:
    """Write one file.

    Raises: SpaceUnsupportedError for what its arrays cannot hold; StorageError.
    """
    _refuse_nested(spec)
    with Hdf5Writer(path) as writer:
        label_columns(writer, spec.extras)
        return _D4rlWriter(writer).write(episodes)


class _D4rlWriter:
    """Appends episodes; what some of them lack is taken out in the end, and said."""

    def __init__(self, writer: Hdf5Writer) -> None:
        self._writer = writer
        self._gaps: set[str] = set()
        self._num_episodes = 0
        self._num_steps = 0
        self._num_without_final = 0
        self._open: str | None = None

    def write(self, episodes: Iterator[Episode]) -> WriteResult:
        for episode in episodes:
            self._refuse_open_before(episode)
            self._append(episode)
        partial = [path for path, n in self._writer.num_rows.items() if n != self._num_steps]
        for path in partial:
            self._writer.drop(path)
        return WriteResult(self._num_episodes, self._num_steps, self._notes(partial))

    def _append(self, episode: Episode) -> None:
        num = len(episode)
        flags = np.zeros((2, num), bool)
        flags[:, -1] = episode.terminated, episode.truncated
        observations = np.asarray(episode.observations)
        infos, lost = collect_infos(episode)
        self._gaps |= lost
        log_probs = infos.pop("infos/behavior_log_prob", None)
        rows = {
            "observations": observations,
            "actions": np.asarray(episode.actions),
            "rewards": require_rewards(episode, "D4RL"),
            "terminals": flags[0],
            TIMEOUTS: flags[1],
            **infos,
        }
        if log_probs is not None or LOG_PROBS in self._writer.num_rows:
            self._fill_log_probs()
            rows[LOG_PROBS] = np.full(num, np.nan, np.float32) if log_probs is None else log_probs
        if episode.final_observation is None:
            self._num_without_final += 1
        else:
            final = np.asarray(episode.final_observation, observations.dtype)[None]
            rows[NEXT] = np.concatenate([observations[1:], final])
        for path, array in rows.items():
            self._writer.append(path, array)
        self._num_episodes += 1
        self._num_steps += num

    def _fill_log_probs(self) -> None:
        """Give the steps before the first known log-probability NaN, which is unknown to us."""
        if (num := self._num_steps - self._writer.num_rows.get(LOG_PROBS, 0)) > 0:
            self._writer.append(LOG_PROBS, np.full(num, np.nan, np.float32))

    def _refuse_open_before(self, episode: Episode) -> None:
        if self._open is not None:
            raise SpaceUnsupportedError(
                f"D4RL: episode {self._open} has no end and is not the last one, expected one "
                "terminated or truncated: readers would join it with the next episode. "
                "Leave open ones out with `where`, or export to minari."
            )
        if not (episode.terminated or episode.truncated):
            self._open = episode.episode_id

    def _notes(self, partial: list[str]) -> tuple[str, ...]:
        notes = ["D4RL has no episode ids, agents or step numbers: episodes are told by their ends"]
        if NEXT in partial or self._num_without_final == self._num_episodes:
            notes.append(
                f"next_observations left out: {self._num_without_final} episodes have no final "
                "observation"
            )
        lost = sorted(self._gaps | {path for path in partial if path != NEXT})
        if lost:
            notes.append(f"left out, as some step has none or D4RL no place: {format_names(lost)}")
        return tuple(notes)


def _refuse_nested(spec: DatasetSpec) -> None:
    for what, space in (("observation", spec.observation_space), ("action", spec.action_space)):
        if isinstance(space, Dict | Tuple | Text):
            raise SpaceUnsupportedError(
                f"D4RL: the {what} space is {describe(space)}, expected one array of numbers. "
                "Export to minari, which can store it."
            )
