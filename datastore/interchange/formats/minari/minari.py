"""Minari datasets: a folder of episodes in HDF5, Arrow or Parquet, with their spaces as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.score_reference import ScoreReference
from replaylake.datastore.errors import ConfigInvalidError, SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader, WriteResult
from replaylake.datastore.interchange.formats.hdf5.column_names import restore_names
from replaylake.datastore.interchange.formats.hdf5.files import Hdf5File, is_hdf5
from replaylake.datastore.interchange.formats.minari.arrow import ArrowEpisode, EpisodeFolders
from replaylake.datastore.interchange.formats.minari.export import (
    MAIN_FILE,
    METADATA,
    SCORE_SOURCE,
    write_minari,
)
from replaylake.datastore.interchange.formats.minari.hdf5 import Hdf5Tables, list_groups
from replaylake.datastore.interchange.formats.minari.spaces import parse_space
from replaylake.datastore.interchange.formats.minari.storage import Spaces
from replaylake.datastore.interchange.formats.tabular.infos import INFOS, find_declared_fields
from replaylake.datastore.interchange.formats.tabular.reader import Declaration, TabularReader
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_errors import format_names

_LARGEST_METADATA: Final = 64 << 20
# Gymnasium's are of about a thousand characters.
_MAX_ENV_SPEC: Final = 1 << 16
# What main_data.hdf5 said of itself before 0.5, when there was no metadata.json.
_LABELS: Final = ("observation_space", "action_space", "dataset_id", "env_spec")


@dataclass(frozen=True)
class MinariFiles:
    """One dataset's files among those of a source: `main` for HDF5, `episodes` for the others."""

    metadata: SourceFile | None
    main: SourceFile | None
    episodes: tuple[ArrowEpisode, ...]


class MinariFormat:
    """What Minari keeps, and what minari.load_dataset opens."""

    name = "minari"
    about = "a Minari dataset's folder: HDF5, Arrow or Parquet, with metadata.json"
    is_folder = True
    suffix = ""

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        return bool(_folders(files)) or _is_lone_main(files)

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        layout = _find(files)
        metadata = _metadata(layout)
        spaces = _spaces(metadata, layout)
        tables: Hdf5Tables | EpisodeFolders
        infos: list[str] = []
        if layout.main is None:
            where, num_episodes = layout.episodes[0].parts[0].name, len(layout.episodes)
            tables = EpisodeFolders(layout.episodes, spaces)
        else:
            where = layout.main.name
            tables = Hdf5Tables(layout.main, spaces)
            num_episodes, infos = _survey(layout.main)
            with Hdf5File(layout.main) as hdf5:
                options = restore_names(hdf5, infos, options)
        fields = find_declared_fields(infos)
        notes = [*_metadata_notes(metadata, layout, num_episodes)]
        is_other = bool({"observation", "action"} & options.mapping.keys())
        declared = Declaration(
            fields=fields,
            spaces=None if is_other else spaces,
            notes=notes,
            observed="observations",
            score_reference=_score_reference(metadata, where, notes),
            env_spec=_env_spec(metadata, notes),
        )
        reading = TabularReader(tables, options, where, declared)
        notes += tables.notes
        return reading

    def write(self, episodes: Iterator[Episode], spec: DatasetSpec, path: Path) -> WriteResult:
        return write_minari(episodes, spec, path)


def _env_spec(metadata: Mapping[str, Any], notes: list[str]) -> str | None:
    """Return Minari's JSON of the environment; a note if it is none. Nothing of it is executed."""
    text = metadata.get("env_spec")
    if not text:
        return None
    if isinstance(text, str) and len(text) <= _MAX_ENV_SPEC:
        with suppress(ValueError, RecursionError):
            if isinstance(json.loads(text), dict):
                return text
    notes.append(
        f"env_spec is left out: expected a JSON object of at most {_MAX_ENV_SPEC:,} characters"
    )
    return None


def _score_reference(
    metadata: Mapping[str, Any], where: str, notes: list[str]
) -> ScoreReference | None:
    """Return Minari's ref_min_score and ref_max_score; a note if they are no such pair."""
    low, high = metadata.get("ref_min_score"), metadata.get("ref_max_score")
    if low is None and high is None:
        return None
    source = metadata.get(SCORE_SOURCE)
    if not isinstance(source, str) or not source.strip():
        source = f"Minari {metadata.get('dataset_id') or where}"
    try:
        return ScoreReference(low, high, source)  # type: ignore[arg-type]
    except ConfigInvalidError:
        notes.append(
            f"ref_min_score {low!r} and ref_max_score {high!r} are left out: expected two numbers, "
            "the second above the first"
        )
        return None


def _folders(files: Sequence[SourceFile]) -> dict[str, list[SourceFile]]:
    """Return the folders that hold a metadata.json beside data of Minari's names, and that data."""
    described = {_folder_of(file) for file in files if file.base_name == METADATA}
    folders: dict[str, list[SourceFile]] = {}
    for file in files:
        folder = _folder_of(file)
        if file.base_name != MAIN_FILE:
            # An episode's folder is called by its number.
            folder, _, number = folder.rpartition("/")
            if not (number.isdecimal() and file.relative.endswith((".arrow", ".parquet"))):
                continue
        if folder in described:
            folders.setdefault(folder, []).append(file)
    return folders


def _folder_of(file: SourceFile) -> str:
    return file.relative.rpartition("/")[0]


def _is_lone_main(files: Sequence[SourceFile]) -> bool:
    if len(files) != 1 or not is_hdf5(files[0]):
        return False
    with Hdf5File(files[0]) as hdf5:
        groups = list_groups(hdf5)
        return bool(groups) and hdf5.has_path(f"{groups[0][1]}/terminations")


def _find(files: Sequence[SourceFile]) -> MinariFiles:
    folders = _folders(files)
    if not folders and _is_lone_main(files):
        return MinariFiles(None, files[0], ())
    metadata = [file for file in files if file.base_name == METADATA]
    top = [file for file in metadata if _folder_of(file) in folders]
    if not folders:
        raise SourceInvalidError(
            f"{files[0].name}: found no {MAIN_FILE} and no episode folders beside a {METADATA}, "
            "expected a Minari dataset's folder. Pass the whole folder, or name another format."
        )
    if len(top) != 1:
        names = [folder.removesuffix("/data") or "." for folder in sorted(folders)]
        raise SourceInvalidError(
            f"{files[0].name}: found {len(top)} Minari datasets ({format_names(names)}), "
            f"expected one. "
            "Ingest each folder separately."
        )
    inside = folders[_folder_of(top[0])]
    main = next((file for file in inside if file.base_name == MAIN_FILE), None)
    return MinariFiles(top[0], main, () if main else _arrow_episodes(inside, metadata))


def _arrow_episodes(
    inside: Sequence[SourceFile], metadata: Sequence[SourceFile]
) -> tuple[ArrowEpisode, ...]:
    labels = {_folder_of(file): file for file in metadata}
    parts: dict[str, list[SourceFile]] = {}
    for file in inside:
        parts.setdefault(_folder_of(file), []).append(file)
    episodes = [
        ArrowEpisode(
            int(home.rpartition("/")[2]),
            tuple(files),
            _json_object(labels[home]) if home in labels else {},
        )
        for home, files in parts.items()
    ]
    return tuple(sorted(episodes, key=lambda episode: episode.number))


def _json_object(file: SourceFile) -> Mapping[str, Any]:
    with file.open() as stream:
        text = stream.read(_LARGEST_METADATA + 1)
    try:
        value = json.loads(text) if len(text) <= _LARGEST_METADATA else None
    except (ValueError, RecursionError) as error:
        raise SourceInvalidError(
            f"{file.name}: {error}, expected one JSON object. It may be damaged: write it again."
        ) from error
    if not isinstance(value, dict):
        raise SourceInvalidError(
            f"{file.name}: found {len(text)} bytes that are not a JSON object, expected one of "
            f"at most {_LARGEST_METADATA}. Is it Minari's?"
        )
    return value


def _metadata(layout: MinariFiles) -> Mapping[str, Any]:
    """Return what metadata.json says, or main_data.hdf5 where it does: before 0.5 it did."""
    if layout.metadata is not None and (body := _json_object(layout.metadata)):
        return body
    if layout.main is None:
        return {}
    with Hdf5File(layout.main) as hdf5:
        labels = {name: hdf5.text_label("", name) for name in _LABELS}
    return {name: text for name, text in labels.items() if text is not None}


def _spaces(metadata: Mapping[str, Any], layout: MinariFiles) -> Spaces:
    if not {"observation_space", "action_space"} <= metadata.keys():
        return None
    source = layout.metadata or layout.main
    name = "metadata.json" if source is None else source.name
    return (
        parse_space(metadata["observation_space"], f"{name}: observation_space"),
        parse_space(metadata["action_space"], f"{name}: action_space"),
    )


def _survey(main: SourceFile) -> tuple[int, list[str]]:
    """Return the number of episodes, and the infos of the first one."""
    with Hdf5File(main) as hdf5:
        groups = list_groups(hdf5)
        if not groups:
            raise SourceInvalidError(
                f"{main.name}: found no group episode_N, expected one per episode. "
                "The file may have another format."
            )
        path = f"{groups[0][1]}/{INFOS}"
        names = hdf5.names(path) if hdf5.has_path(path) and hdf5.is_group(path) else []
        return len(groups), [f"{INFOS}/{name}" for name in names]


def _metadata_notes(
    metadata: Mapping[str, Any], layout: MinariFiles, num_episodes: int
) -> Iterator[str]:
    """Say what metadata.json tells beside the spaces."""
    if layout.metadata is None and "observation_space" not in metadata:
        yield "read without its metadata.json: the spaces are those that the values show"
    if name := metadata.get("dataset_id"):
        yield f"Minari dataset {str(name)[:200]}"
    if environment := metadata.get("env_spec"):
        yield f"env_spec: {str(environment)[:1000]}"
    total = metadata.get("total_episodes")
    if isinstance(total, int) and total != num_episodes:
        yield f"metadata.json says {total} episodes, and {num_episodes} are there"
