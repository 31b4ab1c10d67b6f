"""Infos: what an episode has beside observation, action, reward and ends, as plain arrays.

HDF5 formats keep these below `infos/`, under the names here, and read them back as what they were.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import TIMESTAMP_TYPE
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.datastore.interchange.formats.tabular.tables import Chunk

INFOS: Final = "infos"
# Microseconds since 1970: an `infos/timestamp` of a stranger is in units of its own.
TIMESTAMP_INFO: Final = "infos/timestamp_us"
_FIELDS: Final = {
    "behavior_log_prob": "infos/behavior_log_prob",
    "policy": "infos/policy",
    "policy_version": "infos/policy_version",
    "action_mask": "infos/action_mask",
    "timestamp": TIMESTAMP_INFO,
}


def find_declared_fields(columns: Iterable[str]) -> dict[str, str]:
    """Return ours=theirs for those columns that an export of ours made of fields."""
    present = set(columns)
    return {ours: theirs for ours, theirs in _FIELDS.items() if theirs in present}


def collect_infos(episode: Episode) -> tuple[dict[str, Array], set[str]]:
    """Return arrays [T, ...] by path, and the names of columns that no array can hold.

    Strings are object arrays. A column with nulls, of structs, or of lists of several lengths has
    no array: nothing is filled.
    """
    columns = {
        "behavior_log_prob": episode.behavior_log_probs,
        "policy": episode.policies,
        "policy_version": episode.policy_versions,
        "action_mask": episode.action_masks,
        "timestamp": episode.timestamps,
    }
    fields = {_FIELDS[name]: np.asarray(v) for name, v in columns.items() if v is not None}
    lost: set[str] = set()
    if "infos/policy" in fields and not all(isinstance(p, str) for p in fields["infos/policy"]):
        lost.add("policy")
        del fields["infos/policy"]
    for name, column in episode.extras.items():
        array = _plain(column)
        if array is None:
            lost.add(name)
        else:
            fields[f"{INFOS}/{name}"] = array
    return fields, lost


def require_rewards(episode: Episode, format_name: str) -> Array:
    """Return the rewards, float64 [T]. Raises: SpaceUnsupportedError if one is not known."""
    rewards = np.asarray(episode.rewards, np.float64)
    if np.isnan(rewards).any():
        raise SpaceUnsupportedError(
            f"{format_name}: episode {episode.episode_id} has steps whose reward is not known, "
            "expected one per step. Leave them out with `where`."
        )
    return rewards


def with_times(chunk: Chunk) -> Chunk:
    """Return the chunk with the times that an export of ours wrote as microseconds."""
    at = chunk.table.schema.get_field_index(TIMESTAMP_INFO)
    if at < 0 or chunk.table.schema.field(at).type != pa.int64():
        return chunk
    times = chunk.table.column(at).cast(TIMESTAMP_TYPE)
    table = chunk.table.set_column(at, TIMESTAMP_INFO, times)
    return Chunk(chunk.file, chunk.first_row, table, chunk.damage)


def _plain(column: Any) -> Array | None:
    if isinstance(column, np.ndarray):
        return column if column.dtype.kind in "fiub" else None
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    elif not isinstance(column, pa.Array):
        column = pa.array(column)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if column.null_count:
        return None
    if pa.types.is_fixed_size_list(column.type):
        inner = _plain(column.flatten())
        return None if inner is None else inner.reshape(len(column), -1, *inner.shape[1:])
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.asarray(column.to_numpy(zero_copy_only=False), object)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    return None
