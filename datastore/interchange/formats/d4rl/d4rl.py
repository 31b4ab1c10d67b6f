"""D4RL: HDF5 of one row a step in order, with flags where episodes end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.interchange.formats.d4rl.export import LOG_PROBS, write_d4rl
from replaylake.datastore.interchange.formats.format import Reading, ReadOptions, Written
from replaylake.datastore.interchange.formats.hdf5.files import (
    NUMBERS,
    TEXT,
    Hdf5File,
    is_hdf5,
)
from replaylake.datastore.interchange.formats.hdf5.own_columns import with_own_names
from replaylake.datastore.interchange.formats.hdf5.row_tables import (
    METADATA,
    REQUIRED,
    TIMEOUTS,
    RowTables,
    contents_of,
    required_of,
)
from replaylake.datastore.interchange.formats.tabular.episode_rows import EPISODE_ID
from replaylake.datastore.interchange.formats.tabular.infos import (
    declared_fields,
)
from replaylake.datastore.interchange.formats.tabular.reading import Declared, TabularReading
from replaylake.datastore.interchange.sources.source import SourceFile


class D4rlFormat:
    """What D4RL's datasets are distributed as."""

    name = "d4rl"
    about = "D4RL's HDF5: observations, actions, rewards, terminals, timeouts"
    is_folder = False
    suffix = ".hdf5"

    def recognises(self, files: Sequence[SourceFile]) -> bool:
        if not is_hdf5(files[0]):
            return False
        with Hdf5File(files[0]) as opened:
            names = opened.names()
        # d3rlpy 1 has the same names and marks the ends of episodes in one more.
        return set(REQUIRED) <= {*names} and "episode_terminals" not in names

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> Reading:
        notes: list[str] = []
        columns: set[str] = set()
        required = required_of(options.mapping)
        for file in files:
            with Hdf5File(file) as opened:
                contents = contents_of(opened, file, required)
                columns |= contents.columns.keys()
                notes += [note for note in contents.notes if note not in notes]
                notes += _metadata_notes(opened)
        with Hdf5File(files[0]) as opened:
            options = with_own_names(opened, columns, options)
        fields = declared_fields(columns)
        if LOG_PROBS in columns:
            fields["behavior_log_prob"] = LOG_PROBS
        if options.mapping.get("truncated", TIMEOUTS) not in columns:
            notes.append(
                "no timeouts: episodes end at terminals alone, so one that was cut off goes on "
                "into the next"
            )
        is_told = EPISODE_ID in columns or EPISODE_ID in options.mapping or options.episode_by
        by_file = len(files) > 1 and not is_told
        return TabularReading(
            RowTables(files, by_file=by_file, mapping=options.mapping),
            options,
            files[0].name,
            Declared(fields=fields, notes=notes),
        )

    def write(self, episodes: Iterator[Episode], spec: DatasetSpec, path: Path) -> Written:
        return write_d4rl(episodes, spec, path)


def _metadata_notes(opened: Hdf5File) -> list[str]:
    """Say what the file tells of its making: its few short texts and numbers, not its weights."""
    if not opened.holds(METADATA):
        return []
    told, others = [], 0
    for path in opened.arrays(METADATA):
        array = opened.array(path)
        if array.shape or array.kind not in (NUMBERS, TEXT):
            others += 1
        else:
            told.append(f"{path.removeprefix(METADATA + '/')} = {str(array.value())[:80]}")
    if others:
        told.append(f"{others} arrays, which are not read")
    return [f"metadata: {'; '.join(told[:20])}"]
