"""Weighted selection: each candidate's chance is what an SQL expression says of its step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.errors import ConfigInvalidError, SchemaMismatchError
from replaylake.datastore.query.expressions import evaluate_weights
from replaylake.datastore.replay.layout import KEY
from replaylake.datastore.replay.packing.row_keys import keys_of_steps, pair_digests
from replaylake.datastore.replay.protocols import Assembler, Candidates, Output, SelectedItems
from replaylake.datastore.replay.randomness import random_stream
from replaylake.datastore.replay.records import Packed
from replaylake.datastore.replay.sampler import Sampler
from replaylake.datastore.replay.saved_state import restore_generator
from replaylake.datastore.replay.selection import Origin
from replaylake.datastore.replay.selectors.key_index import find_keys
from replaylake.datastore.storage.table.presence import check_shards_present


class WeightedSelector:
    """Draws candidate i with P(i) = w_i / sum_k w_k, with replacement.

    This changes the distribution that is trained on, on purpose, so each row's weight is 1. With
    `correct` it is 1 / (N P(i)), divided by the largest one of its batch: the updates are then
    those of uniform sampling on average, up to that scale (importance sampling).
    """

    can_prefetch = True

    def __init__(
        self,
        weights: NDArray[np.float64],
        expression: str,
        *,
        seed: int,
        correct: bool = False,
    ) -> None:
        """Take the weights float64 [N], at least 0 and finite, some above 0.

        Raises: ConfigInvalidError for a seed below 0.
        """
        self._table = AliasTable(weights)
        # By these 1 / (N P(i)) is multiplied to get the weight: the largest of a batch cancels out.
        self._weights = weights if correct else None
        self._expression = expression
        self._rng = random_stream(seed, "weighted sampler")
        # Rows of one batch, where several are drawn at once; None: all that are drawn.
        self.rows_a_batch: int | None = None

    def select(self, candidates: Candidates, num: int) -> SelectedItems:
        """Draw `num` with replacement."""
        numbers = self._table.draw(self._rng, num)
        if self._weights is None:
            return SelectedItems(numbers)
        drawn = self._weights.take(numbers)
        size = self.rows_a_batch or num
        smallest = np.minimum.reduceat(drawn, np.arange(0, num, size))
        smallest = np.repeat(smallest, size)[:num]
        return SelectedItems(numbers, (smallest / drawn).astype(np.float32))

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rng = restore_generator(state["rng"])

    def describe(self) -> dict[str, Any]:
        """Return what was asked for, JSON-able; the expression in DuckDB's own spelling."""
        return {
            "selector": "weighted",
            "weight": self._expression,
            "correct": self._weights is not None,
        }


class WeightedSampler(Sampler):
    """Draws by weights; in a block of several batches each is corrected by itself."""

    def __init__(
        self,
        candidates: Candidates,
        selector: WeightedSelector,
        assembler: Assembler,
        batch_size: int,
    ) -> None:
        """Take what a Sampler does. Raises: ConfigInvalidError."""
        super().__init__(candidates, selector, assembler, batch_size)
        self._weighted = selector

    def block(self, out: Output | None = None) -> Output:
        """Draw the rows of `num_ahead` batches at once; see Sampler."""
        self._weighted.rows_a_batch = self.batch_size
        try:
            return super().block(out)
        finally:
            # What is drawn for a mixture is a batch whatever this sampler's own size is.
            self._weighted.rows_a_batch = None


class AliasTable:
    """Draws i with probability weights[i] / sum, in O(1): Walker's alias method (1977).

    Each of N equally likely columns holds a share of its own item and, above that, its alias.
    Vose's construction (1991) hands what the light columns lack to the heavy ones in turn. In
    order, that is a merge of two cumulative sums, the lack of the lights and the excess of the
    heavies, so numpy builds a million columns in 40 ms (2 cores, 2026-11-21). An item of weight 0
    has no share and is nobody's alias: it is never drawn. Memory: 16 bytes an item.
    """

    def __init__(self, weights: NDArray[np.float64]) -> None:
        # Divided by the largest first: a sum of numbers near the largest float would overflow.
        scaled = weights / weights.max()
        scaled *= len(scaled) / scaled.sum()
        self.shares = scaled
        self.aliases = np.arange(len(scaled))
        # One at least, also where the sum was rounded up.
        is_heavy = scaled >= min(1.0, scaled.max())
        lights, heavies = np.flatnonzero(~is_heavy), np.flatnonzero(is_heavy)
        excess = np.cumsum(scaled[heavies] - 1.0)
        # What the lights before each one took, and all of them together.
        cumulative = np.concatenate(([0.0], np.cumsum(1.0 - scaled[lights])))
        # A light is filled up by the first heavy whose excess reaches further than that; at the end
        # the two sums may differ by rounding.
        filler = np.searchsorted(excess, cumulative[:-1], side="right")
        self.aliases[lights] = heavies[np.minimum(filler, len(heavies) - 1)]
        # What a heavy gave to its last light beyond its own excess, the next heavy gives back to
        # it. The last heavy of all keeps its column.
        end = np.searchsorted(cumulative, excess[:-1])
        over = cumulative[np.minimum(end, len(lights))] - excess[:-1]
        scaled[heavies[:-1]] = 1.0 - np.maximum(over, 0.0)
        self.aliases[heavies[:-1]] = heavies[1:]
        scaled[heavies[-1]] = 1.0

    def draw(self, rng: np.random.Generator, num: int) -> NDArray[np.int64]:
        """Return `num` items, int64 [num]."""
        columns = (rng.random(num) * len(self.shares)).astype(np.int64)
        own = rng.random(num) < self.shares.take(columns)
        return np.where(own, columns, self.aliases.take(columns))


def step_weights(
    packed: Packed, origins: Sequence[Origin], starts: NDArray[np.int64], weight: str
) -> NDArray[np.float64]:
    """Return what an SQL expression says of the steps at `starts` [N], ascending: float64 [N].

    `weight` is in DuckDB's own spelling; see expressions.evaluate_weights for what it may name.
    Raises: QueryError; QueryRefusedError if it is not one number a step; SchemaMismatchError for
    weights that are NULL, NaN, negative or infinite, and where all are 0; ConfigInvalidError in
    another process than the view's; ShardCorruptError. Cost: 0.3 s for a million steps of 1,000
    episodes (2 cores, 2026-11-21).
    """
    weights = np.empty(len(starts))
    firsts = packed.steps[[origin.first_start for origin in origins]]
    ends = [*np.searchsorted(starts, firsts)[1:].tolist(), len(starts)]
    start = 0
    for origin, end in zip(origins, ends, strict=True):
        keys = packed.records.take(KEY, starts[start:end])
        weights[start:end] = _evaluate_weights(origin, keys, weight)
        start = end
    if not weights.any():
        raise SchemaMismatchError(
            f"weight {weight}: found 0 for all of {len(weights)} steps, expected some that may be "
            "drawn. Widen the condition in it, or leave those episodes out with `where`."
        )
    return weights


def _evaluate_weights(origin: Origin, keys: NDArray[np.uint64], weight: str) -> NDArray[np.float64]:
    """Return the weights of steps of one snapshot, by their keys [N, 2]."""
    if origin.snapshot is None:
        raise ConfigInvalidError(
            f"weight {weight}: found a view of {origin.name} that another process made, expected "
            "one with its snapshot, which SQL reads. Open it here with snapshot.replay(...): the "
            "cache has it."
        )
    # SQL would only say that it cannot open a file, nor compare one with its sha256; and the view
    # may have come from the cache.
    check_shards_present(origin.snapshot)
    for _ in origin.snapshot.iter_verified():
        pass
    table = evaluate_weights(origin.snapshot, weight, origin.query.canonical().where)
    rows = find_keys(keys, _row_keys(table))
    assert (rows >= 0).all(), "a view's steps are steps of its snapshot"
    values: NDArray[np.float64] = table["weight"].to_numpy()[rows]
    _check(table, rows, values, weight)
    return values


def _row_keys(table: pa.Table) -> NDArray[np.uint64]:
    """Return the row keys [N, 2] of steps. Neighbors of one episode are hashed once."""
    episodes = table[schema.EPISODE_ID].combine_chunks()
    agents = table[schema.AGENT_ID].combine_chunks()
    changes = pc.or_(
        pc.not_equal(episodes[1:], episodes[:-1]), pc.not_equal(agents[1:], agents[:-1])
    )
    heads = np.flatnonzero(np.append(True, changes.to_numpy(zero_copy_only=False))[: len(episodes)])
    digests = pair_digests(episodes.take(pa.array(heads)), agents.take(pa.array(heads)))
    lengths = np.diff(np.append(heads, len(episodes)))
    return keys_of_steps(np.repeat(digests, lengths, axis=0), table[schema.STEP].to_numpy())


def _check(
    table: pa.Table, rows: NDArray[np.int64], values: NDArray[np.float64], weight: str
) -> None:
    """Refuse weights of the candidates at `rows` that are no weights."""
    wrong = ~((values >= 0.0) & (values < np.inf))
    if not wrong.any():
        return
    first = int(wrong.argmax())
    value = table["weight"][int(rows[first])].as_py()
    example = table.slice(int(rows[first]), 1).to_pylist()[0]
    agent = f" agent {example[schema.AGENT_ID]!r}" if example[schema.AGENT_ID] else ""
    raise SchemaMismatchError(
        f"weight {weight}: found {'NULL' if value is None else value} for step "
        f"{example[schema.STEP]} of episode {example[schema.EPISODE_ID]!r}{agent}, the first of "
        f"{int(wrong.sum())} of {len(values)} steps, expected finite numbers of at least 0. Say "
        "what they count as, as in coalesce(greatest(x, 0), 0), or leave those episodes out with "
        "`where`."
    )
