"""Minari's HDF5 storage, written so that minari.load_dataset opens it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import (
    Dict,
    Space,
    Tuple,
    Values,
    as_batch,
    children,
    concatenate,
)
from replaylake.datastore.errors import SpaceUnsupportedError, StorageError
from replaylake.datastore.interchange.formats.format import WriteResult
from replaylake.datastore.interchange.formats.hdf5.column_names import label_columns
from replaylake.datastore.interchange.formats.hdf5.writer import Hdf5Writer
from replaylake.datastore.interchange.formats.minari.spaces import to_json_text
from replaylake.datastore.interchange.formats.tabular.infos import collect_infos, require_rewards
from replaylake.datastore.interchange.sources.source_errors import format_names

MAIN_FILE: Final = "main_data.hdf5"
METADATA: Final = "metadata.json"
# Whose files these are like; Minari refuses versions that it does not know.
_MINARI_VERSION: Final = "0.5.4"
_SEED: Final = "seed"
_LOG_PROBS: Final = "infos/behavior_log_prob"
# Ours, beside Minari's ref_min_score and ref_max_score, which do not say where they are from.
SCORE_SOURCE: Final = "replaylake_score_source"
_NAME: Final = re.compile(r"[-\w]+-v\d+")


def write_minari(episodes: Iterator[Episode], spec: DatasetSpec, path: Path) -> WriteResult:
    """Write a dataset's folder at `path`.

    Raises: SpaceUnsupportedError if an episode lacks its final observation or a reward;
    StorageError.
    """
    data = path / "data"
    try:
        data.mkdir(parents=True)
        with Hdf5Writer(data / MAIN_FILE) as writer:
            label_columns(writer, spec.extras)
            writing = _MinariWriter(writer, spec)
            for episode in episodes:
                writing.add(episode)
            partial = writing.finish()
        num_bytes = (data / MAIN_FILE).stat().st_size
        name = path.name if _NAME.fullmatch(path.name) else f"{_make_valid_name(path.name)}-v0"
        metadata = {
            "total_episodes": writing.num_episodes,
            "total_steps": writing.num_steps,
            "data_format": "hdf5",
            "jpeg_encoding": False,
            "observation_space": to_json_text(spec.observation_space),
            "action_space": to_json_text(spec.action_space),
            "dataset_id": name,
            "minari_version": _MINARI_VERSION,
            "dataset_size": round(num_bytes / 1e6, 1),
        }
        if spec.env_spec is not None:
            metadata["env_spec"] = spec.env_spec
        if (reference := spec.score_reference) is not None:
            metadata |= {
                "ref_min_score": reference.random,
                "ref_max_score": reference.expert,
                SCORE_SOURCE: reference.source,
            }
        (data / METADATA).write_text(json.dumps(metadata))
    except OSError as error:
        raise StorageError(
            f"{path}: could not be written ({error}). Check the disk, then export again."
        ) from error
    notes = [
        f"minari.load_dataset({name!r}) opens it with MINARI_DATASETS_PATH set to its parent"
        + ("" if name == path.name else f", once the folder is called {name}"),
        "Minari has no agents or step numbers: episodes are numbered",
    ]
    if lost := sorted(writing.lost | partial):
        notes.append(f"left out, as some step has none or Minari no place: {format_names(lost)}")
    return WriteResult(writing.num_episodes, writing.num_steps, tuple(notes))


class _MinariWriter:
    """Adds episodes; once one lacks its final observation, the others are only counted."""

    def __init__(self, writer: Hdf5Writer, spec: DatasetSpec) -> None:
        self._writer = writer
        self._spec = spec
        self._num_without_final = 0
        self._counts: dict[str, int] = {}
        self._unknown: list[tuple[str, int]] = []
        self.lost: set[str] = set()
        self.num_episodes = 0
        self.num_steps = 0

    def add(self, episode: Episode) -> None:
        """Write an episode's group."""
        if episode.final_observation is None:
            self._num_without_final += 1
        if not self._num_without_final:
            self._write(f"episode_{self.num_episodes}", episode)
        self.num_episodes += 1
        self.num_steps += len(episode)

    def finish(self) -> set[str]:
        """Make the infos of all episodes alike, and return those that some episode lacked."""
        if self._num_without_final:
            raise SpaceUnsupportedError(
                f"Minari: {self._num_without_final} of {self.num_episodes} episodes have no final "
                "observation, expected one in each: Minari stores one more observation than "
                "actions. Leave them out with `where`, or export to d4rl."
            )
        partial = {n for n, count in self._counts.items() if count < self.num_episodes}
        if _LOG_PROBS in partial:
            partial.remove(_LOG_PROBS)
            for group, num in self._unknown:
                self._writer.write(f"{group}/{_LOG_PROBS}", np.full(num, np.nan, np.float32))
        for name in partial:
            for i in range(self.num_episodes):
                self._writer.drop(f"episode_{i}/{name}")
        return partial

    def _write(self, group: str, episode: Episode) -> None:
        num = len(episode)
        flags = np.zeros((2, num), bool)
        flags[:, -1] = episode.terminated, episode.truncated
        final = as_batch(episode.final_observation)
        observations = concatenate([episode.observations, final])
        self._values(f"{group}/observations", self._spec.observation_space, observations)
        self._values(f"{group}/actions", self._spec.action_space, episode.actions)
        self._writer.write(f"{group}/rewards", require_rewards(episode, "Minari"))
        self._writer.write(f"{group}/terminations", flags[0])
        self._writer.write(f"{group}/truncations", flags[1])
        self._writer.require_group(f"{group}/infos")
        infos, lost = collect_infos(episode)
        self.lost |= lost
        labels = {"id": int(group.removeprefix("episode_")), "total_steps": num}
        seeds = infos.get(f"infos/{_SEED}")
        if seeds is not None and seeds.dtype.kind in "iu" and (seeds == seeds[0]).all():
            labels[_SEED] = int(infos.pop(f"infos/{_SEED}")[0])
        self._writer.label(group, labels)
        if _LOG_PROBS not in infos:
            self._unknown.append((group, num))
        for name, array in infos.items():
            self._writer.write(f"{group}/{name}", array)
            self._counts[name] = self._counts.get(name, 0) + 1

    def _values(self, path: str, space: Space, values: Values) -> None:
        if not isinstance(values, Mapping):
            self._writer.write(path, values)
            return
        subs = children(space) if isinstance(space, Dict | Tuple) else {}
        for key, sub in subs.items():
            name = f"_index{key}" if isinstance(space, Tuple) else key
            self._values(f"{path}/{name}", sub, values[key])


def _make_valid_name(name: str) -> str:
    return re.sub(r"[^-\w]+", "_", name) or "dataset"
