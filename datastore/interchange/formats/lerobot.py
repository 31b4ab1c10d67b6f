"""LeRobot datasets, v2.0 to v3.0: Parquet rows, a meta folder, and videos kept as references."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader
from replaylake.datastore.interchange.formats.generic.parquet import ParquetTables
from replaylake.datastore.interchange.formats.images import decode_images
from replaylake.datastore.interchange.formats.tabular.fields import column_name
from replaylake.datastore.interchange.formats.tabular.reader import Declaration, TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import Chunk, ChunkSchema, TableSource
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_errors import unreadable_error
from replaylake.datastore.storage.arrow_values import combine_chunks, is_list, is_numeric

_EPISODE, _FRAME, _TASK = "episode_index", "frame_index", "task_index"
_DONE, _REWARDS = "next.done", ("next.reward", "reward")
_OBSERVATION, _ACTION = "observation", "action"
_TRUNCATED: Final = "next.truncated"
# One value a step, as a list of one in some files.
_SCALARS: Final = (_EPISODE, _FRAME, _TASK, _DONE, _TRUNCATED, "timestamp", "index", *_REWARDS)
# Seconds since the episode's start, where our `timestamp` is a time of day.
_SECONDS: Final = "timestamp"
_NO_PIXELS: Final = (
    "{}: video features are kept as references (path in the dataset, and the frame's time in s); "
    "their pixels are not in the lake and nothing trains on them"
)
_MIN_CHUNK_ROWS: Final = 16
_CHUNK_BYTES: Final = 16 << 20
_INFO: Final = "meta/info.json"
# Fields of a path template, as in videos/{video_key}/chunk-{chunk_index:03d}; no other is filled
# in, as str.format would also follow attributes and pad to any width.
_FIELD: Final = re.compile(r"\{([a-z_]+)(?::0(\d)d)?\}")
_VIDEO: Final = "video"
_MALFORMED_ERRORS: Final = (
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
    OverflowError,
    pa.ArrowException,
)


class LeRobotTables(TableSource):
    """Chunks of the data files, with what the meta folder knows joined to each row."""

    def __init__(self, meta: LeRobotMeta, mapping: Mapping[str, str] | None = None) -> None:
        self._meta = meta
        # What `--map` names of them, it names by a feature's own name.
        self._vectors = [one for one in (_OBSERVATION, _ACTION) if one not in (mapping or {})]
        self._parquet = ParquetTables(meta.data)
        self._images = [n for n, (dtype, _) in meta.features.items() if dtype == "image"]
        # Decoding images again costs more than keeping them.
        self.reread_cheaply = not self._images
        self.lengths = self._count()
        # Episodes whose length in meta is not their number of rows: both of these.
        self._differing = {
            number: (one.length, self.lengths[number])
            for number, one in meta.episodes.items()
            if self.lengths.get(number, one.length) != one.length
        }

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        for chunk in self._parquet.chunks([_EPISODE] if columns == [_EPISODE] else None):
            for start in range(0, chunk.table.num_rows, self._chunk_rows()):
                rows = chunk.table.slice(start, self._chunk_rows())
                first = chunk.first_row + start
                if columns == [_EPISODE]:
                    yield Chunk(chunk.file, first, rows)
                else:
                    yield Chunk(
                        chunk.file, first, self._table(rows, chunk.file), self._damage(rows)
                    )

    def schemas(self) -> Iterator[ChunkSchema]:
        for part in self._parquet.schemas():
            schema = self._table(part.schema.empty_table(), part.file).schema
            yield ChunkSchema(part.file, part.first_row, part.num_rows, schema)

    def _count(self) -> dict[int, int]:
        lengths: dict[int, int] = {}
        for chunk in self._parquet.chunks([_EPISODE]):
            numbers = _integers(chunk.table, _EPISODE, chunk.file)
            for number, count in zip(*np.unique(numbers, return_counts=True), strict=True):
                lengths[int(number)] = lengths.get(int(number), 0) + int(count)
        return lengths

    def _chunk_rows(self) -> int:
        num_bytes = sum(int(np.prod(self._meta.features[name][1])) for name in self._images)
        return max(_CHUNK_BYTES // num_bytes, _MIN_CHUNK_ROWS) if num_bytes else 1 << 30

    def _table(self, rows: pa.Table, file: SourceFile) -> pa.Table:
        rows = _unwrap_singletons(rows)
        columns = {name: rows.column(name) for name in rows.schema.names}
        for name in self._images:
            if name in columns:
                shape = self._meta.features[name][1]
                columns[name] = _decode_images(columns[name], shape, f"{file.name} {name}")
        numbers = _integers(rows, _EPISODE, file)
        frames = _integers(rows, _FRAME, file)
        if not {"truncated", _DONE} & columns.keys():
            columns["truncated"] = pa.array(self._recording_ends(numbers, frames))
        if _TASK in columns and "task" not in columns:
            tasks = _integers(rows, _TASK, file)
            columns["task"] = _look_up(tasks, self._meta.tasks, pa.string())
        seconds = columns.pop(_SECONDS, pa.nulls(rows.num_rows, pa.float64()))
        columns[f"{_SECONDS}_s"] = seconds
        for name in self._meta.videos():
            columns[name] = self._references(name, numbers, seconds)
        for ours in self._vectors:
            _gather(columns, ours, self._meta)
        return pa.table(columns)

    def _recording_ends(self, numbers: Array, frames: Array) -> Array:
        """Say where a recording stopped: on the last row of an episode of a known length."""
        known, codes = np.unique(numbers, return_inverse=True)
        episodes = self._meta.episodes
        lengths = [episodes[n].length if n in episodes else -1 for n in known.tolist()]
        return np.asarray(frames == np.asarray(lengths, np.int64)[codes] - 1)

    def _references(self, name: str, numbers: Array, seconds: Any) -> pa.Array:
        parts = {
            n: one.videos[name] for n, one in self._meta.episodes.items() if name in one.videos
        }
        paths = _look_up(numbers, {n: part.path for n, part in parts.items()}, pa.string())
        starts = _look_up(numbers, {n: part.start_s for n, part in parts.items()}, pa.float64())
        is_number = pa.types.is_floating(seconds.type) or pa.types.is_integer(seconds.type)
        since = (
            combine_chunks(seconds).cast(pa.float64(), safe=False)
            if is_number
            else pa.nulls(len(seconds), starts.type)
        )
        times = pc.add(starts, since)
        return pa.StructArray.from_arrays([paths, times], names=["path", "time_s"])

    def _damage(self, rows: pa.Table) -> dict[int, str]:
        if not (differing := self._differing):
            return {}
        numbers = np.asarray(rows.column(_EPISODE)).tolist()
        return {
            row: f"episode {n}: found {differing[n][1]} rows, expected {differing[n][0]} as the "
            "meta folder says"
            for row, n in enumerate(numbers)
            if n in differing
        }


class LeRobotFormat:
    """A dataset folder of LeRobot's."""

    name = "lerobot"
    about = "LeRobot datasets v2.0, v2.1 and v3.0; videos as references"
    is_folder = True

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        return any(b"codebase_version" in file.head(1 << 16) for file in info_files(files))

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        meta = read_meta(files)
        tables = LeRobotTables(meta, options.mapping)
        rewards = [name for name in _REWARDS if name in meta.features]
        # Said, so that no feature that is called like an alias of theirs is asked.
        fields = {"episode_id": _EPISODE, "step": _FRAME}
        fields |= {name: name for name in (_OBSERVATION, _ACTION)}
        if rewards:
            fields["reward"] = rewards[0]
        if _TRUNCATED in meta.features:
            fields["truncated"] = _TRUNCATED
        notes = _notes(meta, tables, bool(rewards))
        declared = Declaration(fields, rewards_optional=not rewards, notes=notes)
        return TabularReader(tables, options, meta.data[0].name, declared)


def _notes(meta: LeRobotMeta, tables: LeRobotTables, has_rewards: bool) -> list[str]:
    notes = []
    if meta.videos():
        notes.append(_NO_PIXELS.format(", ".join(meta.videos())))
    if not has_rewards:
        notes.append("the dataset has no rewards: they are unknown")
    if _DONE not in meta.features:
        notes.append(
            "the dataset has no flags for an end: each episode was truncated where its recording "
            "stops, as its length in meta says"
        )
    if absent := len(meta.episodes.keys() - tables.lengths.keys()):
        notes.append(f"{absent} episodes that meta lists have no rows: their data is not there")
    if unlisted := len(tables.lengths.keys() - meta.episodes.keys()):
        notes.append(f"{unlisted} episodes are not listed in meta: their ends are unknown")
    return notes


def _gather(columns: dict[str, Any], ours: str, meta: LeRobotMeta) -> None:
    """Make one column of the features `ours.*`: a vector of one, a struct of several."""
    if ours in columns:
        return
    theirs = [
        name for name in columns if name.startswith(f"{ours}.") and is_numeric(columns[name].type)
    ]
    members = {column_name(n.removeprefix(f"{ours}."), i): n for i, n in enumerate(theirs)}
    if len(members) < len(theirs):
        raise SourceInvalidError(
            f"{meta.data[0].name}: found the columns {', '.join(theirs)}, expected names that "
            "remain distinct after characters outside [A-Za-z0-9_] are replaced. Rename one."
        )
    if not members:
        raise SourceInvalidError(
            f"{meta.data[0].name}: found the columns {', '.join(columns)}, expected {ours} or "
            f"{ours}.* with numbers. Videos are not read: write the dataset with such a "
            "feature."
        )
    arrays = {key: combine_chunks(columns.pop(name)) for key, name in members.items()}
    if len(arrays) == 1:
        columns[ours] = next(iter(arrays.values()))
        return
    for key, array in arrays.items():
        # LeRobot writes vectors of one as plain numbers.
        if pa.types.is_floating(array.type):
            arrays[key] = pa.FixedSizeListArray.from_arrays(array.fill_null(np.nan), 1)
    columns[ours] = pa.StructArray.from_arrays(list(arrays.values()), names=list(arrays))


def _decode_images(column: Any, shape: tuple[int, ...], where: str) -> Any:
    """Decode an image feature; what is no embedded image of the declared shape is left as it is."""
    kind = column.type
    if len(shape) != 3 or not pa.types.is_struct(kind) or kind.get_field_index("bytes") < 0:
        return column
    encoded = pc.struct_field(combine_chunks(column), "bytes")
    if encoded.null_count:
        # Only paths are kept: the images lie elsewhere.
        return column
    images = decode_images([bytes(one) for one in encoded.to_pylist()], where)
    if images.shape[1:] not in (shape, (*shape[1:], shape[0])) and len(images):
        raise SourceInvalidError(
            f"{where}: found images of {list(images.shape[1:])}, expected {list(shape)} as in "
            "info.json. The files do not match: leave the file out."
        )
    flat: pa.Array = pa.array(images.reshape(-1))
    # LeRobot declares channels first or last; Pillow gives them last.
    last = shape if shape[-1] in (1, 3, 4) else (*shape[1:], shape[0])
    for size in reversed(last):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat


def _unwrap_singletons(rows: pa.Table) -> pa.Table:
    """Make plain values of lists of one: LeRobot writes those so, some converters do not."""
    for at, entry in enumerate(rows.schema):
        if entry.name not in _SCALARS or not is_list(entry.type):
            continue
        column = combine_chunks(rows.column(at))
        if not column.null_count and pc.all(pc.equal(pc.list_value_length(column), 1)).as_py():
            rows = rows.set_column(at, entry.name, column.flatten())
    return rows


def _integers(table: pa.Table, name: str, file: SourceFile) -> Array:
    if name not in table.schema.names:
        raise SourceInvalidError(
            f"{file.name}: found the columns {', '.join(table.schema.names)}, expected {name} as "
            "LeRobot writes it. Leave the file out."
        )
    column = _unwrap_singletons(table.select([name])).column(0)
    if not pa.types.is_integer(column.type) or column.null_count:
        raise SourceInvalidError(
            f"{file.name}: column {name!r} is {column.type} with {column.null_count} nulls, "
            "expected whole numbers in each row. Leave the file out."
        )
    return np.asarray(column).astype(np.int64)


def _look_up(keys: Array, values: Mapping[int, Any], kind: pa.DataType) -> pa.Array:
    """Return the value of each key; null where there is none."""
    known, codes = np.unique(keys, return_inverse=True)
    array = pa.array([values.get(key) for key in known.tolist()], kind)
    return array.take(pa.array(codes))


_V2, _V3 = ("v2.0", "v2.1"), ("v3.0",)


@dataclass(frozen=True)
class VideoPart:
    """Where an episode's frames lie: the video's path in the dataset, its start in it in s."""

    path: str
    start_s: float = 0.0


@dataclass(frozen=True)
class ListedEpisode:
    """An episode as meta lists it; `videos` by feature."""

    length: int
    videos: Mapping[str, VideoPart] = field(default_factory=dict)


@dataclass(frozen=True)
class LeRobotMeta:
    """The meta folder; `features` are name to dtype and shape, as info.json declares them."""

    version: str
    features: Mapping[str, tuple[str, tuple[int, ...]]]
    tasks: Mapping[int, str]
    episodes: Mapping[int, ListedEpisode]
    data: tuple[SourceFile, ...]
    """The Parquet files of rows."""

    def videos(self) -> list[str]:
        """Return the features that are videos."""
        return [name for name, (dtype, _) in self.features.items() if dtype == _VIDEO]


def info_files(files: Sequence[SourceFile]) -> list[SourceFile]:
    """Return the info.json of every LeRobot dataset among the files."""
    return [f for f in files if f"/{f.relative}".endswith(f"/{_INFO}")]


def read_meta(files: Sequence[SourceFile]) -> LeRobotMeta:
    """Read the one dataset's meta folder.

    Raises: SourceInvalidError if there are several datasets, the version is another than v2.0, v2.1
    or v3.0, or a file is torn or not as LeRobot writes it.
    """
    paths = info_files(files)
    if len(paths) != 1:
        raise SourceInvalidError(
            f"{files[0].name}: found {len(paths)} {_INFO} in the source, expected one LeRobot "
            "dataset. Pass its folder, with meta and data; ingest several datasets one by one."
        )
    root = paths[0].relative.removesuffix(_INFO)
    inside = {f.relative.removeprefix(root): f for f in files if f.relative.startswith(root)}
    info = _read_json(paths[0])
    version = str(info.get("codebase_version"))
    if version not in (*_V2, *_V3):
        raise SourceInvalidError(
            f"{paths[0].name}: found codebase_version {version}, expected "
            f"{', '.join((*_V2, *_V3))}. Convert it with LeRobot's script first."
        )
    read = _read_v2 if version in _V2 else _read_v3
    try:
        features = {
            str(name): (str(one["dtype"]), tuple(int(size) for size in one.get("shape") or ()))
            for name, one in info["features"].items()
        }
        videos = [name for name, (dtype, _) in features.items() if dtype == _VIDEO]
        tasks, episodes = read(inside, info, videos)
    except _MALFORMED_ERRORS as error:
        raise SourceInvalidError(
            f"{paths[0].name}: the meta folder is not as LeRobot {version} writes it "
            f"({type(error).__name__}: {error}), expected its features, tasks and episodes. Copy "
            "the dataset again."
        ) from error
    data = [f for name, f in inside.items() if re.fullmatch(r"data/.+\.parquet", name)]
    if not data:
        raise SourceInvalidError(
            f"{paths[0].name}: found no data/*.parquet beside it, expected the dataset's rows. "
            "Pass the dataset's whole folder."
        )
    return LeRobotMeta(version, features, tasks, episodes, tuple(data))


def _read_v2(
    inside: Mapping[str, SourceFile], info: Mapping[str, Any], videos: Sequence[str]
) -> tuple[dict[int, str], dict[int, ListedEpisode]]:
    tasks = {
        _to_int(one["task_index"]): str(one["task"])
        for one in _json_lines(_require_file(inside, "meta/tasks.jsonl"))
    }
    chunk_size = max(int(info.get("chunks_size", 1000)), 1)
    episodes = {}
    for one in _json_lines(_require_file(inside, "meta/episodes.jsonl")):
        number = _to_int(one["episode_index"])
        known = {"episode_index": number, "episode_chunk": number // chunk_size}
        parts = {key: VideoPart(_path(info, {**known, "video_key": key})) for key in videos}
        episodes[number] = ListedEpisode(_to_int(one["length"]), parts)
    return tasks, episodes


def _read_v3(
    inside: Mapping[str, SourceFile], info: Mapping[str, Any], videos: Sequence[str]
) -> tuple[dict[int, str], dict[int, ListedEpisode]]:
    tasks = {}
    for row in _rows([_require_file(inside, "meta/tasks.parquet")], None):
        # pandas writes the index that holds the texts under this name, if it has none.
        tasks[_to_int(row["task_index"])] = str(row.get("task", row.get("__index_level_0__")))
    files = [f for name, f in inside.items() if re.fullmatch(r"meta/episodes/.+\.parquet", name)]
    if not files:
        _require_file(inside, "meta/episodes/chunk-000/file-000.parquet")
    columns = ["episode_index", "length"]
    of_video = ("chunk_index", "file_index", "from_timestamp")
    columns += [f"videos/{key}/{what}" for key in videos for what in of_video]
    episodes = {}
    for row in _rows(files, columns):
        parts = {}
        for key in videos:
            chunk, file, start = (row.get(f"videos/{key}/{what}") for what in of_video)
            if chunk is not None and file is not None:
                place: dict[str, int | str] = {
                    "chunk_index": _to_int(chunk),
                    "file_index": _to_int(file),
                    "video_key": key,
                }
                parts[key] = VideoPart(_path(info, place), float(start or 0.0))
        episodes[_to_int(row["episode_index"])] = ListedEpisode(_to_int(row["length"]), parts)
    return tasks, episodes


def _require_file(inside: Mapping[str, SourceFile], name: str) -> SourceFile:
    if name not in inside:
        raise SourceInvalidError(
            f"{inside[_INFO].name}: found no {name} in the dataset, expected it beside info.json. "
            "Pass the dataset's whole folder, or copy it again."
        )
    return inside[name]


def _to_int(value: Any) -> int:
    number = int(value)
    if not 0 <= number < 1 << 62 or number != value:
        raise ValueError(f"{value!r} is not a whole number of 0 or more")
    return number


def _path(info: Mapping[str, Any], known: Mapping[str, int | str]) -> str:
    def fill(match: re.Match[str]) -> str:
        value = known[match[1]]
        return f"{value:0{match[2]}d}" if match[2] and isinstance(value, int) else str(value)

    return _FIELD.sub(fill, str(info["video_path"]))


def _read_json(file: SourceFile) -> dict[str, Any]:
    file.check_unchanged()
    try:
        with file.open() as stream:
            body = json.loads(stream.read())
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise unreadable_error(file.name, error) from error
    return body if isinstance(body, dict) else {}


def _json_lines(file: SourceFile) -> Iterator[dict[str, Any]]:
    file.check_unchanged()
    try:
        with file.open() as stream:
            for line in stream:
                if line.strip():
                    yield json.loads(line)
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise unreadable_error(file.name, error) from error


def _rows(files: Sequence[SourceFile], columns: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    for chunk in ParquetTables(files).chunks(columns):
        yield from chunk.table.to_pylist()
