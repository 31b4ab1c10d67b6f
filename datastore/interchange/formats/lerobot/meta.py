"""What a LeRobot dataset's meta folder says: features, tasks, episodes and where videos lie."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.errors import SourceInvalid
from replaylake.datastore.interchange.formats.generic.parquet import ParquetTables
from replaylake.datastore.interchange.sources.source import SourceFile, unreadable

_INFO: Final = "meta/info.json"
_V2, _V3 = ("v2.0", "v2.1"), ("v3.0",)
# Fields of a path template, as in videos/{video_key}/chunk-{chunk_index:03d}; no other is filled
# in, as str.format would also follow attributes and pad to any width.
_FIELD: Final = re.compile(r"\{([a-z_]+)(?::0(\d)d)?\}")
_VIDEO: Final = "video"
_WRONG: Final = (AttributeError, KeyError, TypeError, ValueError, OverflowError, pa.ArrowException)


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

    Raises: SourceInvalid if there are several datasets, the version is another than v2.0, v2.1 or
    v3.0, or a file is torn or not as LeRobot writes it.
    """
    found = info_files(files)
    if len(found) != 1:
        raise SourceInvalid(
            f"{files[0].name}: found {len(found)} {_INFO} in the source, expected one LeRobot "
            "dataset. Pass its folder, with meta and data; several are ingested one by one."
        )
    root = found[0].relative.removesuffix(_INFO)
    inside = {f.relative.removeprefix(root): f for f in files if f.relative.startswith(root)}
    info = _one_json(found[0])
    version = str(info.get("codebase_version"))
    if version not in (*_V2, *_V3):
        raise SourceInvalid(
            f"{found[0].name}: found codebase_version {version}, expected "
            f"{', '.join((*_V2, *_V3))}. Convert it with LeRobot's own script first."
        )
    read = _read_v2 if version in _V2 else _read_v3
    try:
        features = {
            str(name): (str(one["dtype"]), tuple(int(size) for size in one.get("shape") or ()))
            for name, one in info["features"].items()
        }
        videos = [name for name, (dtype, _) in features.items() if dtype == _VIDEO]
        tasks, episodes = read(inside, info, videos)
    except _WRONG as error:
        raise SourceInvalid(
            f"{found[0].name}: the meta folder is not as LeRobot {version} writes it "
            f"({type(error).__name__}: {error}), expected its features, tasks and episodes. Copy "
            "the dataset again."
        ) from error
    data = [f for name, f in inside.items() if re.fullmatch(r"data/.+\.parquet", name)]
    if not data:
        raise SourceInvalid(
            f"{found[0].name}: found no data/*.parquet beside it, expected the dataset's rows. "
            "Pass the dataset's whole folder."
        )
    return LeRobotMeta(version, features, tasks, episodes, tuple(data))


def _read_v2(
    inside: Mapping[str, SourceFile], info: Mapping[str, Any], videos: Sequence[str]
) -> tuple[dict[int, str], dict[int, ListedEpisode]]:
    tasks = {
        _whole(one["task_index"]): str(one["task"])
        for one in _json_lines(_needed(inside, "meta/tasks.jsonl"))
    }
    chunk_size = max(int(info.get("chunks_size", 1000)), 1)
    episodes = {}
    for one in _json_lines(_needed(inside, "meta/episodes.jsonl")):
        number = _whole(one["episode_index"])
        known = {"episode_index": number, "episode_chunk": number // chunk_size}
        parts = {key: VideoPart(_path(info, {**known, "video_key": key})) for key in videos}
        episodes[number] = ListedEpisode(_whole(one["length"]), parts)
    return tasks, episodes


def _read_v3(
    inside: Mapping[str, SourceFile], info: Mapping[str, Any], videos: Sequence[str]
) -> tuple[dict[int, str], dict[int, ListedEpisode]]:
    tasks = {}
    for row in _rows([_needed(inside, "meta/tasks.parquet")], None):
        # pandas writes the index that holds the texts under this name, if it has none.
        tasks[_whole(row["task_index"])] = str(row.get("task", row.get("__index_level_0__")))
    files = [f for name, f in inside.items() if re.fullmatch(r"meta/episodes/.+\.parquet", name)]
    if not files:
        _needed(inside, "meta/episodes/chunk-000/file-000.parquet")
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
                    "chunk_index": _whole(chunk),
                    "file_index": _whole(file),
                    "video_key": key,
                }
                parts[key] = VideoPart(_path(info, place), float(start or 0.0))
        episodes[_whole(row["episode_index"])] = ListedEpisode(_whole(row["length"]), parts)
    return tasks, episodes


def _needed(inside: Mapping[str, SourceFile], name: str) -> SourceFile:
    if name not in inside:
        raise SourceInvalid(
            f"{inside[_INFO].name}: found no {name} in the dataset, expected it beside info.json. "
            "Pass the dataset's whole folder, or copy it again."
        )
    return inside[name]


def _whole(value: Any) -> int:
    number = int(value)
    if not 0 <= number < 1 << 62 or number != value:
        raise ValueError(f"{value!r} is no whole number of 0 or more")
    return number


def _path(info: Mapping[str, Any], known: Mapping[str, int | str]) -> str:
    def fill(match: re.Match[str]) -> str:
        value = known[match[1]]
        return f"{value:0{match[2]}d}" if match[2] and isinstance(value, int) else str(value)

    return _FIELD.sub(fill, str(info["video_path"]))


def _one_json(file: SourceFile) -> dict[str, Any]:
    file.check_unchanged()
    try:
        with file.open() as stream:
            found = json.loads(stream.read())
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise unreadable(file.name, error) from error
    return found if isinstance(found, dict) else {}


def _json_lines(file: SourceFile) -> Iterator[dict[str, Any]]:
    file.check_unchanged()
    try:
        with file.open() as stream:
            for line in stream:
                if line.strip():
                    yield json.loads(line)
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise unreadable(file.name, error) from error


def _rows(files: Sequence[SourceFile], columns: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    for chunk in ParquetTables(files).chunks(columns):
        yield from chunk.table.to_pylist()
