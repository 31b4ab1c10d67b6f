"""Minari's episodes, however they are stored: as rows, and as values of their spaces."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Dict,
    Discrete,
    Space,
    Tuple,
    Values,
    children,
    num_values,
    take,
)
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.images import decode_images
from replaylake.datastore.interchange.formats.tabular.episode_rows import (
    EpisodeRows,
    leaf_lengths,
    truncate_to_shortest,
)
from replaylake.datastore.interchange.formats.tabular.fields import column_name
from replaylake.datastore.interchange.sources.source import SourceFile

FLAGS: Final = ("terminations", "truncations")
Spaces = tuple[Space, Space] | None
_TUPLE_MEMBER: Final = re.compile(r"(?:_index_)?(\d+)")
_FIRST_INFO: Final = (
    "infos: row t has what step t returned; what reset returned, before the first step, is left out"
)


def episode_rows(
    file: SourceFile,
    number: int,
    of_name: Mapping[str, Values],
    infos: Mapping[str, Values],
    seed: Any,
    notes: dict[str, None],
) -> EpisodeRows | None:
    """Lay out an episode: T rows, and the observation after them apart."""
    num = num_values(of_name["rewards"])
    if num == 0:
        notes["episodes without steps are left out"] = None
        return None
    columns = dict(of_name)
    finals: dict[str, Values] = {}
    observations = of_name.get("observations")
    if observations is not None and {*leaf_lengths(observations).values()} == {num + 1}:
        columns["observations"] = take(observations, slice(num))
        finals["final_observation"] = take(observations, slice(num, None))
    if isinstance(seed, int) and abs(seed) < 2**63:
        columns["seed"] = np.full(num, seed, np.int64)
    for name, values in infos.items():
        if num_values(values) == num + 1:
            notes[_FIRST_INFO] = None
            values = take(values, slice(1, None))
        if num_values(values) == num:
            columns[name] = values
        else:
            notes[f"{name} is left out where it has not one entry a step"] = None
    columns, num, damage = truncate_to_shortest(file, str(number), columns)
    return EpisodeRows(str(number), num, columns, finals, damage)


def members(
    names: list[str], space: Space | None, where: str
) -> dict[str, tuple[str, Space | None]]:
    """Return, by our name of each part of a Dict or Tuple, its name in the file and its space.

    Raises: SourceInvalidError if these are not the parts that the space has.
    """
    paths = {_member(name, i, space): name for i, name in enumerate(names)}
    subs = children(space) if isinstance(space, Dict | Tuple) else {}
    if len(paths) < len(names) or not paths or (space is not None and paths.keys() != subs.keys()):
        raise SourceInvalidError(
            f"{where} has {names}, expected the members of its space: {[*subs]}. The file and its "
            "metadata.json may not match."
        )
    return {key: (paths[key], subs.get(key)) for key in subs or sorted(paths, key=_natural_key)}


def is_packed_image(rows: Array, space: Space | None) -> bool:
    """Whether rows are JPEG files of one length, which Minari stores as a table of bytes."""
    if not (isinstance(space, Box) and space.is_image):
        return False
    return rows.dtype == np.uint8 and rows.ndim == 2 and rows.shape[1:] != space.shape


def images(encoded: list[bytes], space: Space | None, where: str) -> Values:
    if not isinstance(space, Box):
        raise SourceInvalidError(
            f"{where}: found packed images, and no space with their shape. Pass the folder, "
            "with its metadata.json, and not the file alone."
        )
    return reshape_rows(decode_images(encoded, where), space)


def reshape_rows(rows: Array, space: Space | None) -> Array:
    """Give rows the shape that their space has, where the numbers are as many."""
    if isinstance(space, Discrete) and rows.ndim == 2 and rows.shape[1] == 1:
        return rows[:, 0]
    if not isinstance(space, Box) or math.prod(rows.shape[1:]) != math.prod(space.shape):
        return rows
    return rows.reshape(len(rows), *space.shape)


def _member(name: str, position: int, space: Space | None) -> str:
    """Return our name of a Dict's or Tuple's part."""
    match = _TUPLE_MEMBER.fullmatch(name)
    if match and (isinstance(space, Tuple) or (space is None and name.startswith("_index_"))):
        return f"_{int(match[1])}"
    return column_name(name, position)


def _natural_key(name: str) -> tuple[int, str]:
    """Sort _10 behind _9."""
    return (len(name), name) if name[1:].isdigit() else (0, name)
