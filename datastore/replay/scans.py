"""Scans: what only a look at all records tells. They take a piece at a time, and so little memory.

A view may be larger than memory and mapped from disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.errors import SchemaMismatchError
from replaylake.datastore.replay.layout import KEY
from replaylake.datastore.replay.records import Packed, Records

_PIECE: Final = 1 << 16
# Keys sorted at once, each of which takes 40 bytes meanwhile.
_SORTED_AT_ONCE: Final = 1 << 22


def has_masked_actions(packed: Packed) -> bool:
    """Whether some step that may be sampled has an action that its mask forbids."""
    if packed.records.layout.spec.mask_size is None:
        return False
    masks = packed.records.rows[schema.ACTION_MASK]
    return not all(masks[positions].all() for positions in _pieces(packed.steps))


def num_unknown_rewards(packed: Packed) -> int:
    """Return how many of the steps that may be sampled have no reward."""
    if not packed.records.layout.spec.rewards_optional:
        return 0
    rewards = packed.records.rows[schema.REWARD]
    return sum(int(np.isnan(rewards[positions]).sum()) for positions in _pieces(packed.steps))


def num_unknown_log_probs(packed: Packed) -> int:
    """Return of how many steps that may be sampled no behavior log-probability is known."""
    log_probs = packed.records.rows[schema.BEHAVIOR_LOG_PROB]
    return sum(
        int((~np.isfinite(log_probs[positions])).sum()) for positions in _pieces(packed.steps)
    )


def num_not_terminated(packed: Packed) -> int:
    """Return how many of the steps that may be sampled did not end their episode by the task."""
    terminated = packed.records.rows[schema.TERMINATED]
    return sum(int((~terminated[positions]).sum()) for positions in _pieces(packed.steps))


def check_finite(packed: Packed, expression: str) -> None:
    """Refuse NULL, NaN and infinities that a reward expression gave.

    Raises: SchemaMismatchError.
    """
    rewards = packed.records.rows[schema.REWARD]
    num, is_infinite = 0, False
    for start in range(0, len(rewards), _PIECE):
        # Records that are no steps have zeros.
        piece = rewards[start : start + _PIECE]
        if not np.isfinite(piece).all():
            num += int((~np.isfinite(piece)).sum())
            is_infinite |= bool(np.isinf(piece).any())
    if num:
        found = "infinity" if is_infinite else "NULL or NaN"
        raise SchemaMismatchError(
            f"reward {expression}: found {found} in {num} of {packed.num_steps} selected steps, "
            "expected finite numbers. Say what they count as, as in coalesce(x / nullif(y, 0), 0), "
            "or leave their episodes out with `where`."
        )


def content_hash(
    shard_hashes: Sequence[str],
    where: str | None,
    reward: str | None,
    where_steps: str | None,
    records: Records,
    positions: NDArray[np.int64],
) -> str:
    """Return sha256 over the sorted shard hashes, the canonical SQL and the sorted row keys.

    The keys are those of the steps at which a sample may start: the same, in whatever order and
    shards they lie.
    """
    digest = hashlib.sha256()
    for sha256 in sorted(shard_hashes):
        digest.update(sha256.encode())
    # Selections that were made before there was a where_steps keep their hash.
    steps = f"{where_steps}\0" if where_steps else ""
    digest.update(f"\0{where or ''}\0{reward or ''}\0{steps}".encode())
    for keys in _iter_sorted_keys(records.rows[KEY], positions):
        digest.update(keys.tobytes())
    return digest.hexdigest()


def _iter_sorted_keys(
    keys: NDArray[np.uint64], positions: NDArray[np.int64]
) -> Iterator[NDArray[np.uint64]]:
    """Yield the keys [.., 2] in ascending order of their first halves, a range of them at a time.

    Two keys that share a first half are the same key. Cost: a pass over the keys for every 4M.
    """
    num_bits = max(0, (len(positions) - 1).bit_length() - _SORTED_AT_ONCE.bit_length() + 1)
    for part in range(1 << num_bits):
        parts = []
        for piece in _pieces(positions):
            part_keys = keys[piece]
            if num_bits:
                part_keys = part_keys[part_keys[:, 0] >> np.uint64(64 - num_bits) == part]
            parts.append(part_keys)
        array = np.concatenate(parts) if parts else np.empty((0, 2), np.uint64)
        yield array[np.argsort(array[:, 0])]


def _pieces(positions: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(positions), _PIECE):
        yield positions[start : start + _PIECE]
