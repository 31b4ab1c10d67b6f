"""RLDS: episodes in TFDS dataset folders of TFRecord files, read without TensorFlow.

A row of RLDS holds o_t, a_t and the reward that a_t caused. The row that is_last marks holds the
final observation, and of its action, reward and discount RLDS says that they mean nothing
(Ramos et al. 2021; github.com/google-research/rlds, "Step": SAR alignment).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Dict,
    Discrete,
    MultiDiscrete,
    Space,
    Text,
)
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader
from replaylake.datastore.interchange.formats.rlds.features import (
    EpisodeSpec,
    Leaf,
    Record,
    Spec,
    column,
    drop_unread,
    episode_spec,
    has_images,
    list_unread,
)
from replaylake.datastore.interchange.formats.rlds.tfrecord import Feature, parse_example, records
from replaylake.datastore.interchange.formats.tabular.reader import Declaration, TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import Chunk, ChunkSchema, TableSource
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_errors import unreadable_error

_CHUNK_BYTES: Final = 16 << 20
_OBSERVATION: Final = "observation"
_NEEDED: Final[tuple[str, ...]] = (_OBSERVATION, "action")
_FLAGS: Final = ("is_first", "is_last", "is_terminal")
# What becomes of the flags, under names that no feature has.
_EPISODE, _STEP, _TERMINATED, _TRUNCATED = "episode_id", "step", "terminated", "truncated"
_FINAL, _SPLIT = "final_observation", "split"
_OURS: Final = {_EPISODE, _STEP, _TERMINATED, _TRUNCATED, _FINAL, _SPLIT}
# Counts of episodes that become notes.
_NOTES: Final = {
    "part": "episodes do not begin with is_first: they are parts of longer ones",
    "empty": "episodes hold one row, the final observation, and no step: left out",
    "reward": (
        "episodes have a reward other than 0 on the row that is_last marks, which was left out: if "
        "it is real, the rewards are aligned otherwise than in RLDS and the returns here are wrong"
    ),
}
FEATURES: Final = "features.json"
_INFO: Final = "dataset_info.json"
# NAME-SPLIT.tfrecord-00000-of-00002; other file formats of TFDS have another word in the middle.
SHARD: Final = re.compile(
    r"(?P<name>.+)-(?P<split>[^-/]+)\.(?P<kind>tfrecord|array_record|riegeli|parquet)"
    r"-(?P<shard>\d+)-of-(?P<num>\d+)"
)
_MAX_JSON_BYTES: Final = 64 << 20


class RldsTables(TableSource):
    """Chunks of whole episodes, a row a step; the final observation is on the last row.

    `notes` are complete after the first whole reading. Memory: a chunk, or an episode that is more.
    """

    def __init__(self, shards: Sequence[Shard], spec: EpisodeSpec, notes: list[str]) -> None:
        self._shards = shards
        # Flat name in the record, column, feature.
        self._steps = [
            (f"steps/{name}", f"steps_{name}" if name in _OURS else name, one)
            for name, one in drop_unread(spec.steps).items()
            if name not in _FLAGS
        ]
        reserved = {*_OURS, *(name for _, name, _ in self._steps)}
        self._metadata = [
            (name, f"metadata_{name}" if name in reserved else name, one)
            for name, one in drop_unread(spec.metadata).items()
        ]
        # Decoded images take many times the room of the files: they are rather decoded again.
        self.reread_cheaply = any(has_images(one) for _, _, one in self._steps)
        self._notes = notes
        self._counts = dict.fromkeys(_NOTES, 0)

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        self._counts = dict.fromkeys(_NOTES, 0)
        for shard in self._shards:
            buffer: list[pa.Table] = []
            row, num_bytes, number = 0, 0, -1
            for number, data in enumerate(records(shard.file)):
                table = self._episode(shard, number, data, columns)
                if buffer and table.schema != buffer[0].schema:
                    raise _schema_mismatch_error(shard.file, number, buffer[0].schema, table.schema)
                buffer.append(table)
                num_bytes += table.nbytes
                if num_bytes >= _CHUNK_BYTES:
                    yield (chunk := Chunk(shard.file, row, pa.concat_tables(buffer)))
                    row, buffer, num_bytes = row + chunk.table.num_rows, [], 0
            if buffer:
                yield Chunk(shard.file, row, pa.concat_tables(buffer))
            check_count(shard, number + 1)
        notes = [f"{count} {_NOTES[what]}" for what, count in self._counts.items() if count]
        self._notes += [note for note in notes if note not in self._notes]

    def schemas(self) -> Iterator[ChunkSchema]:
        schema = None
        for shard in self._shards:
            num_rows = 0
            for number, data in enumerate(records(shard.file)):
                # The first tells the types; of the others only the rows are counted.
                table = self._episode(shard, number, data, None if schema is None else [_STEP])
                schema = schema or table.schema
                num_rows += table.num_rows
            if schema is not None:
                yield ChunkSchema(shard.file, 0, num_rows, schema)

    def _episode(
        self, shard: Shard, number: int, data: bytes, names: Sequence[str] | None
    ) -> pa.Table:
        """Return an episode's steps, or some columns of them."""
        features = parse_example(data, shard.file, number)
        where = f"{shard.file.name} record {number}"
        num_rows = _num_rows(features, where)
        record = Record(features, num_rows, where)
        first, last, terminal = (_flag(name, record) for name in _FLAGS)
        inner = (last | terminal)[:-1] | first[1:]
        # With an end inside, all rows stay, and the check for that rejects the episode.
        has_final = bool(last[-1] or terminal[-1]) and not inner.any()
        num = num_rows - 1 if has_final else num_rows
        columns = {
            _EPISODE: pa.array([f"{shard.split}-{shard.number:05d}-{number}"]),
            _SPLIT: pa.array([shard.split]),
        }
        for key, name, spec in self._metadata:
            if names is not None and name not in names:
                continue
            columns[name] = column(_readable_spec(spec), key, record, 1)
        columns = {name: _repeat(values, num) for name, values in columns.items()}
        columns[_STEP] = pa.array(np.arange(num))
        for key, name, spec in self._steps:
            is_wanted = names is None or name in names
            if not (is_wanted or (name == _OBSERVATION and _FINAL in (names or ()))):
                continue
            values = column(_readable_spec(spec), key, record, num_rows)
            columns[name] = values.slice(0, num)
            if name == _OBSERVATION:
                columns[_FINAL] = _final(values, num)
        ends = np.append(inner, False)[:num]
        is_end = (np.arange(num) == num - 1) & has_final
        columns[_TERMINATED] = pa.array(is_end & terminal[-1])
        columns[_TRUNCATED] = pa.array(ends | (is_end & ~terminal[-1]))
        self._counts["part"] += not first[0]
        self._counts["empty"] += not num
        self._counts["reward"] += has_final and _has_last_reward(record)
        table = pa.table(columns)
        return table if names is None else table.select(names)


class RldsFormat:
    """A TFDS dataset folder, or several versions' or splits' files of one."""

    name = "rlds"
    about = "RLDS episodes in a TFDS dataset folder (TFRecord), as in Open X-Embodiment"
    is_folder = True

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        return any(SHARD.fullmatch(file.base_name) for file in files)

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        features = [file for file in files if file.base_name == FEATURES]
        if len(features) != 1:
            raise SourceInvalidError(
                f"{files[0].name}: found {len(features)} {FEATURES} in the source, expected one "
                "dataset's: without it the shapes of the values in its records are unknown. Pass "
                "the whole folder of one version of one dataset."
            )
        spec = episode_spec(read_json(features[0]), features[0].name)
        _refuse_unread(spec, features[0])
        shards, notes = find_shards(files)
        omitted = list_unread({"steps": spec.steps, **spec.metadata})
        if omitted:
            text = "; ".join(f"{name}: {reason}" for name, reason in omitted)
            notes.append(f"features that are not read: {text}")
        notes.append(
            "of the row that is_last marks, the observation became the final observation; its "
            "action, reward and discount mean nothing by RLDS and were left out"
        )
        tables = RldsTables(shards, spec, notes)
        # Said, so that no feature that is called like an alias of theirs is asked.
        ours = [_EPISODE, _STEP, _TERMINATED, _TRUNCATED]
        ours += [name for name in (*_NEEDED, "reward") if name in spec.steps]
        spaces = None if {*_NEEDED} & options.mapping.keys() else infer_spaces(spec)
        fields = {name: name for name in ours}
        declared = Declaration(fields, spaces, notes=notes, observed=_OBSERVATION)
        return TabularReader(tables, options, shards[0].file.name, declared)


def _num_rows(features: dict[str, Feature], where: str) -> int:
    num = len(features.get("steps/is_last", []))
    if not num:
        raise SourceInvalidError(
            f"{where}: found no steps/is_last, expected one per step as in RLDS. The dataset "
            "has no RLDS episodes, or this record is damaged: leave it out."
        )
    return num


def _flag(name: str, record: Record) -> Array:
    """Return a flag a row; one that the dataset does not have is never set, but is_first once."""
    values = np.asarray(record.features.get(f"steps/{name}", []))
    if not len(values):
        return np.asarray(np.arange(record.num_steps) == (0 if name == "is_first" else -1))
    if values.dtype != np.int64 or len(values) != record.num_steps or ((values >> 1) != 0).any():
        raise record.mismatch_error(
            f"{len(values)} values of steps/{name}, expected {record.num_steps} flags"
        )
    return np.asarray(values == 1)


def _has_last_reward(record: Record) -> bool:
    """Whether the last row has a reward other than 0."""
    values = np.asarray(record.features.get("steps/reward", []))
    return len(values) == record.num_steps and values.dtype.kind in "fi" and bool(values[-1] != 0)


def _readable_spec(spec: Spec) -> Leaf | dict[str, Spec]:
    assert isinstance(spec, Leaf | dict), "`readable` took the others out"
    return spec


def _repeat(one: pa.Array, num: int) -> pa.Array:
    return one.take(pa.array(np.zeros(num, np.int64)))


def _final(observations: pa.Array, num: int) -> pa.Array:
    """Return nulls, but on the last of `num` rows the observation after it where there is one."""
    is_known = np.arange(num) == len(observations) - 2
    return observations.take(pa.array(np.full(num, len(observations) - 1), mask=~is_known))


def _refuse_unread(spec: EpisodeSpec, file: SourceFile) -> None:
    for name, reason in list_unread({n: spec.steps[n] for n in _NEEDED if n in spec.steps}):
        raise SourceInvalidError(
            f"{file.name}: found the feature steps/{name} and {reason}, expected one that can be "
            "read: it is part of the observation or the action. Write the dataset without it."
        )


def _schema_mismatch_error(
    file: SourceFile, number: int, first: pa.Schema, other: pa.Schema
) -> SourceInvalidError:
    differs = next(name for name in first.names if first.field(name) != other.field(name))
    return SourceInvalidError(
        f"{file.name} record {number}: {differs!r} has another size than in earlier records, "
        "expected the same size in all records. Resize images to one size where the dataset is "
        "written."
    )


def infer_spaces(spec: EpisodeSpec) -> tuple[Space, Space] | None:
    """Return the observation and the action space; None where features.json leaves one open.

    Integers that are no class labels are open as actions: nothing says how many there are.
    """
    observation, action = spec.steps.get("observation"), spec.steps.get("action")
    if observation is None or action is None:
        return None
    spaces = _space(observation, is_action=False), _space(action, is_action=True)
    observation_space, action_space = (_vector(space) for space in spaces)
    if observation_space is None or action_space is None:
        return None
    return observation_space, action_space


def _space(spec: Spec, *, is_action: bool) -> Space | None:
    if isinstance(spec, dict):
        parts = {name: _space(one, is_action=is_action) for name, one in spec.items()}
        known = {name: one for name, one in parts.items() if one is not None}
        return Dict(known) if len(known) == len(parts) else None
    if (
        not isinstance(spec, Leaf)
        or spec.is_ragged
        or (spec.encoding == "image" and not spec.shape)
    ):
        return None
    if spec.dtype == "string":
        return None if spec.shape else Text()
    if spec.encoding == "image" and spec.dtype == "uint8":
        return Box(spec.shape, "uint8", 0, 255)
    if is_action and not spec.dtype.startswith("float"):
        return _countable(spec)
    return Box(spec.shape, "float32" if spec.dtype == "float16" else spec.dtype)


def _countable(spec: Leaf) -> Space | None:
    num = 2 if spec.dtype == "bool" else spec.num_classes
    if num is None:
        return None
    return MultiDiscrete((num,) * math.prod(spec.shape)) if spec.shape else Discrete(num)


def _vector(space: Space | None) -> Space | None:
    """Give a lone float a dim of 1, as its values get one."""
    if isinstance(space, Box) and not space.shape and space.dtype.startswith("float"):
        return Box((1,), space.dtype)
    return space


@dataclass(frozen=True)
class Shard:
    """One of a split's record files, and how many records dataset_info.json says it has."""

    file: SourceFile
    split: str
    number: int
    of: int
    num_records: int | None = None


def find_shards(files: Sequence[SourceFile]) -> tuple[list[Shard], list[str]]:
    """Return the record files, split by split, and what is to be said of them.

    Raises: SourceInvalidError if there are none, they are of several datasets, or not TFRecord.
    """
    pairs = [(file, match) for file in files if (match := SHARD.fullmatch(file.base_name))]
    if not pairs:
        raise SourceInvalidError(
            f"{files[0].name}: found no file like NAME-SPLIT.tfrecord-00000-of-00001, expected the "
            "records of a TFDS dataset. Pass its whole folder."
        )
    names = sorted({match["name"] for _, match in pairs})
    if len(names) > 1:
        raise SourceInvalidError(
            f"{pairs[0][0].name}: found the datasets {', '.join(names)}, expected one. Ingest them "
            "one by one."
        )
    kinds = sorted({match["kind"] for _, match in pairs} - {"tfrecord"})
    if kinds:
        raise SourceInvalidError(
            f"{pairs[0][0].name}: found {', '.join(kinds)} files, expected TFRecord. Write the "
            "dataset again with TFDS's file_format='tfrecord'."
        )
    lengths = _lengths(files)
    shards = [
        Shard(file, match["split"], int(match["shard"]), int(match["num"])) for file, match in pairs
    ]
    shards = [
        replace(one, num_records=known[one.number])
        if (known := lengths.get(one.split)) is not None and one.number < len(known) == one.of
        else one
        for one in sorted(shards, key=lambda one: (one.split, one.number))
    ]
    counts = {one.split: one.of for one in shards}
    notes = []
    if len(counts) > 1:
        notes.append(f"all splits were read: {', '.join(counts)}; the column `split` tells them")
    for split, of in counts.items():
        if (num := sum(one.split == split for one in shards)) < of:
            notes.append(f"of the split {split}, {num} of {of} shards are in the source")
    return shards, notes


def _lengths(files: Sequence[SourceFile]) -> dict[str, list[int]]:
    """Return how many records dataset_info.json says that each split's shards have."""
    for file in files:
        if file.base_name != _INFO:
            continue
        try:
            splits = read_json(file).get("splits") or []
            return {one["name"]: [int(n) for n in one.get("shardLengths", [])] for one in splits}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SourceInvalidError(
                f"{file.name}: found splits that cannot be read ({error!r}), expected names and "
                "shardLengths as TFDS writes them. Leave the file out."
            ) from error
    return {}


def check_count(shard: Shard, num: int) -> None:
    """Refuse a shard that holds another number of records than it should.

    Raises: SourceInvalidError.
    """
    # A file that was cut between two records looks whole, so the number is compared too.
    if shard.num_records not in (None, num):
        raise SourceInvalidError(
            f"{shard.file.name}: found {num} records, expected {shard.num_records} as {_INFO} "
            "says. The file was truncated or has another version: copy it again."
        )


def read_json(file: SourceFile) -> Any:
    """Parse a file of JSON. Raises: SourceInvalidError."""
    file.check_unchanged()
    try:
        with file.open() as stream:
            return json.loads(stream.read(_MAX_JSON_BYTES))
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise unreadable_error(file.name, error) from error
