"""Row keys: what a step is called wherever its rows lie."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import Array

# As a scalar of Arrow, made from its memory: see arrow_values.py.
_SEPARATOR: Final = pa.Array.from_buffers(
    pa.large_binary(), 1, [None, pa.py_buffer(np.array([0, 1])), pa.py_buffer(b"\0")]
)[0]
# Names hashed at a time: each is a Python object meanwhile.
_HASHED_AT_ONCE: Final = 1 << 16


def row_keys(pairs: Sequence[str], codes: NDArray[np.int64], steps: Array) -> NDArray[np.uint64]:
    """Return the stable 128-bit key [N, 2] of (episode, agent, step): it survives compaction.

    pairs: `pair_name` of each episode and agent, of which `codes` int64 [N] names one a row.
    """
    return keys_of_steps(digests_of(pairs)[codes], steps)


def pair_name(episode_id: str, agent_id: str) -> str:
    """Return what stands for an episode and agent in row keys."""
    return f"{episode_id}\0{agent_id}"


def digests_of(pairs: Sequence[str]) -> NDArray[np.uint64]:
    """Return the first 128 bits of the sha256 of each `pair_name`: uint64 [N, 2]."""
    return _digests([pair.encode() for pair in pairs])


def pair_digests(episode_ids: pa.Array, agent_ids: pa.Array) -> NDArray[np.uint64]:
    """Return `digests_of` the names of pairs, given as columns.

    Cost: 0.5 us each, most of it Python's: for 1M names DuckDB's sha256 took no less with its
    conversion from hex (2 cores, 2026-11).
    """
    digests = np.empty((len(episode_ids), 2), np.uint64)
    for start in range(0, len(episode_ids), _HASHED_AT_ONCE):
        chunk = slice(start, start + _HASHED_AT_ONCE)
        names = pc.binary_join_element_wise(
            episode_ids[chunk].cast(pa.large_binary()),
            agent_ids[chunk].cast(pa.large_binary()),
            _SEPARATOR,
        )
        digests[chunk] = _digests(names.to_pylist())
    return digests


def keys_of_steps(digests: NDArray[np.uint64], steps: Array) -> NDArray[np.uint64]:
    """Return the keys [N, 2] of steps [N], given the digest [N, 2] of each one's pair.

    Each half is mixed with the step by splitmix64's finalizer (Steele et al. 2014), a bijection of
    64 bits: steps of one episode never collide.
    """
    mixed = steps.astype(np.uint64)
    mixed += np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return digests ^ mixed[:, None]


def _digests(names: Sequence[bytes]) -> NDArray[np.uint64]:
    sha256 = hashlib.sha256
    joined = b"".join([sha256(name).digest()[:16] for name in names])
    return np.frombuffer(joined, np.uint64).reshape(-1, 2)
