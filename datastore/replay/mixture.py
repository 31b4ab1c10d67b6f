"""Mixture: batches with rows of several samplers by ratio, such as offline and online data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.compatibility import find_spec_mismatch
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError, SchemaMismatchError
from replaylake.datastore.replay.arguments import check_batch_size
from replaylake.datastore.replay.randomness import random_stream
from replaylake.datastore.replay.sampler import Sampler
from replaylake.datastore.replay.saved_state import KIND, read_state, restore_generator
from replaylake.datastore.replay.selectors.priorities import to_priority_arrays
from replaylake.datastore.replay.selectors.prioritized import PrioritizedSampler

_NAME: Final = "mixture"
# Fields that an item gives only where it is asked to.
_REQUESTED_FIELDS: Final = frozenset({"returns", "next_actions"})


def mixture(
    samplers: Sequence[Sampler], ratios: Sequence[float], *, batch_size: int, seed: int
) -> MixtureSampler:
    """Return a sampler whose batches contain rows of each sampler in fixed shares.

    ratios: at least 0 each, with any sum. The samplers' own batch sizes are ignored; do not sample
    from them directly. Raises: ConfigInvalidError; SchemaMismatchError if their rows cannot be
    combined.
    """
    return MixtureSampler(samplers, ratios, batch_size=batch_size, seed=seed)


class MixtureSampler:
    """Draws from each sampler as many rows as its ratio says, one sampler's after another's.

    Of B rows, sampler i gives ratio_i B, rounded up or down at random so that it is so on average
    (systematic sampling): no batch is ever more than a row off, where drawing each row's sampler by
    itself would leave a batch without its tenth of online data now and then. Where one has action
    masks, those of others are all true. `indices` tell the samplers apart: update_priorities gives
    each its own. Importance weights are those of each sampler by itself.

    A sampler that ends an epoch goes on with the next one. One that consumes in order gives what
    it has left, and then `sample` raises EmptyReplayError; name such a one first: what the samplers
    before it have drawn for that batch is lost.
    """

    def __init__(
        self, samplers: Sequence[Sampler], ratios: Sequence[float], *, batch_size: int, seed: int
    ) -> None:
        """Take what to mix. Raises: ConfigInvalidError, SchemaMismatchError."""
        _check_samplers(samplers)
        shares = _numbers(ratios)
        if not len(samplers) or shares.shape != (len(samplers),):
            raise ConfigInvalidError(
                f"mixture: found {len(samplers)} samplers and {shares.size} ratios, expected at "
                "least one sampler and a ratio for each. Give as many of both."
            )
        if not (np.isfinite(shares).all() and (shares >= 0).all() and shares.any()):
            raise ConfigInvalidError(
                f"mixture: found ratios {shares.tolist()}, expected numbers of at least 0, one of "
                "them above. Give each sampler's share, as in [0.75, 0.25]."
            )
        batch_size = check_batch_size(_NAME, batch_size)
        for sampler in samplers[1:]:
            _check_joinable(samplers[0], sampler)
        self.batch_size = batch_size
        self.samplers = tuple(samplers)
        totals = np.cumsum(shares / shares.max())
        # The last one is exactly 1, as is that before a last ratio of 0.
        ends = totals / totals[-1] * batch_size
        self._ends = np.concatenate(([0.0], ends))
        self._rng = random_stream(seed, _NAME)
        # The next batch's, kept until it is drawn: an EmptyReplayError leaves everything as it was.
        self._counts: list[int] | None = None

    def sample(self) -> Batch[Array]:
        """Draw one batch.

        Raises: EmptyReplayError; SchemaMismatchError where items differ in shape.

        Cost: that of drawing each sampler's rows, and of copying them once more.
        """
        if self._counts is None:
            # Rounded up, the last end may be a row beyond the batch.
            ends = np.minimum(np.floor(self._ends + self._rng.random()), self.batch_size)
            self._counts = np.diff(ends).astype(int).tolist()
        parts = [
            (place, batch)
            for place, (sampler, num) in enumerate(zip(self.samplers, self._counts, strict=True))
            for batch in _draw_rows(sampler, num)
        ]
        self._counts = None
        return _join_batches(parts, len(self.samplers))

    def update_priorities(self, indices: ArrayLike, priorities: ArrayLike) -> None:
        """Give each sampler that draws by priorities those of its own rows; others need none.

        indices int64 [B], of a batch; priorities [B]. Raises: ConfigInvalidError if no sampler
        draws by priorities, or for a priority that it refuses.
        """
        if not any(isinstance(sampler, PrioritizedSampler) for sampler in self.samplers):
            raise ConfigInvalidError(
                "mixture: found no sampler that draws by priorities, expected one. Make one with "
                "view.prioritized, or leave update_priorities out."
            )
        own_indices, values = to_priority_arrays(indices, priorities)
        numbers, places = np.divmod(own_indices, len(self.samplers))
        parts = [
            (sampler, numbers[own], values[own])
            for place, sampler in enumerate(self.samplers)
            if isinstance(sampler, PrioritizedSampler) and (own := places == place).any()
        ]
        # All of them first, so that nothing is changed where one refuses.
        for sampler, rows, _ in parts:
            sampler.check_indices(rows)
        for sampler, rows, part in parts:
            sampler.update_priorities(rows, part)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and that of each sampler."""
        return {
            KIND: _NAME,
            "rng": self._rng.bit_generator.state,
            "counts": self._counts,
            "samplers": [sampler.state_dict() for sampler in self.samplers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position.

        Raises, changing nothing: ConfigInvalidError for another number of samplers, or of other
        ones.
        """
        with read_state(_NAME, state):
            self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        rng, counts, saved = (
            restore_generator(state["rng"]),
            state["counts"],
            list(state["samplers"]),
        )
        if len(saved) != len(self.samplers):
            raise ConfigInvalidError(
                f"mixture: found a state of {len(saved)} samplers, expected of "
                f"{len(self.samplers)}. Make the mixture as it was made."
            )
        counts = None if counts is None else [int(num) for num in counts]
        if counts is not None and (len(counts) != len(saved) or min(counts) < 0):
            raise ValueError(f"counts are {counts}")
        loaded: list[tuple[Sampler, dict[str, Any]]] = []
        try:
            for sampler, own in zip(self.samplers, saved, strict=True):
                before = sampler.state_dict()
                sampler.load_state_dict(own)
                loaded.append((sampler, before))
        except BaseException:
            for sampler, before in loaded:
                sampler.load_state_dict(before)
            raise
        self._rng, self._counts = rng, counts

    def __iter__(self) -> Iterator[Batch[Array]]:
        while True:
            yield self.sample()


def _check_samplers(samplers: object) -> None:
    all_given: Sequence[object] = samplers if isinstance(samplers, Sequence) else ()
    wrong = [each for each in all_given if not isinstance(each, Sampler)]
    if wrong or not isinstance(samplers, Sequence):
        found = type(wrong[0] if wrong else samplers).__name__
        raise ConfigInvalidError(
            f"mixture: found a {found}, expected a list of views' own samplers. Mix those; make "
            "tensors of, or draw ahead from, the mixture."
        )


def _numbers(ratios: object) -> NDArray[np.float64]:
    try:
        return np.asarray(ratios, np.float64)
    except (TypeError, ValueError):
        raise ConfigInvalidError(
            f"mixture: found ratios {ratios!r}, expected numbers. Give each sampler's share, as in "
            "[0.75, 0.25]."
        ) from None


def _draw_rows(sampler: Sampler, num: int) -> list[Batch[Array]]:
    """Return batches of `num` rows in all; fewer if the sampler's rows run out after some."""
    batches: list[Batch[Array]] = []
    while num > 0:
        try:
            batches.append(sampler.draw(num).batch)
        except EmptyReplayError:
            if not batches:
                raise
            break
        num -= len(batches[-1])
    return batches


def _check_joinable(first: Sampler, other: Sampler) -> None:
    differs = find_spec_mismatch(first.spec, other.spec)
    one, two = first.layout, other.layout
    if differs is None and one.frame_stack != two.frame_stack:
        differs = f"frame_stack is {one.frame_stack} and {two.frame_stack}"
    fields = [_fields(sampler) for sampler in (first, other)]
    for name in sorted(fields[0] | fields[1]) if differs is None else ():
        kinds = [own.get(name, "not there") for own in fields]
        if kinds[0] != kinds[1]:
            differs = f"{name} is {kinds[0]} and {kinds[1]}"
            break
    if differs is not None:
        raise SchemaMismatchError(
            f"mixture: {differs}, expected one. Make the views with the same columns, float64 and "
            "frame_stack, of datasets with the same spaces."
        )


def _fields(sampler: Sampler) -> dict[str, str]:
    """Return the dtypes of a step's observations, actions and further columns, by field."""
    fields: Mapping[str, Any] = sampler.layout.dtype.fields or {}
    return {
        name: f"{dtype.base}{list(dtype.shape)}"
        for name, (dtype, *_) in fields.items()
        if name != schema.ACTION_MASK
    }


def _join_batches(parts: list[tuple[int, Batch[Array]]], num_samplers: int) -> Batch[Array]:
    batches = [batch for _, batch in parts]
    fields = {
        name: _concatenate_field(name, [getattr(batch, name) for batch in batches], batches)
        for name in vars(batches[0])
        if name != "indices"
    }
    indices = [_indices(batch) * num_samplers + place for place, batch in parts]
    return Batch(**fields, indices=np.concatenate(indices))


def _indices(batch: Batch[Array]) -> NDArray[np.int64]:
    if batch.indices is None:
        raise SchemaMismatchError(
            "mixture: found a batch without indices, expected int64 [B]. Fill them in where the "
            "item assembles its rows, as WindowOutput.number does."
        )
    return batch.indices


def _concatenate_field(name: str, values: list[Any], batches: list[Batch[Array]]) -> Any:
    """Join one field of some batches; where only some have it, the others' is all true."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    if len(known) < len(values) and name in _REQUESTED_FIELDS:
        raise SchemaMismatchError(
            f"mixture: found {name} in batches of {len(known)} of {len(values)} samplers, expected "
            "all or none. Give all samplers the same kind of item, Transitions(..., "
            f"{name}=True)."
        )
    if isinstance(known[0], Mapping):
        return {
            key: _concatenate_field(f"{name}.{key}", [value[key] for value in known], batches)
            for key in known[0]
        }
    if len(known) < len(values):
        # Action masks and flags: what has none allows all.
        values = [
            np.ones((*batch.rewards.shape, *known[0].shape[batch.rewards.ndim :]), np.bool_)
            if value is None
            else value
            for value, batch in zip(values, batches, strict=True)
        ]
    shapes = {value.shape[1:] for value in values}
    if len(shapes) > 1:
        raise SchemaMismatchError(
            f"mixture: {name} of a row has shapes {' and '.join(map(str, sorted(shapes)))}, "
            "expected one. Give all samplers the same kind of item, of the same length; whole "
            "episodes, which differ in length, do not mix."
        )
    return np.concatenate(values)
