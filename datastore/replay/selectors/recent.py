"""Recent selection: only steps whose policy is at most so many versions behind the learner's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.errors import EmptyReplayError
from replaylake.datastore.replay.arguments import check_int
from replaylake.datastore.replay.protocols import Assembler, Candidates, SelectedItems
from replaylake.datastore.replay.randomness import random_stream
from replaylake.datastore.replay.records import Records
from replaylake.datastore.replay.sampler import Sampler
from replaylake.datastore.replay.saved_state import restore_generator
from replaylake.datastore.replay.selectors.candidate_values import read_values

PolicyVersion = int | Callable[[], int]
# Candidates that are gone are kept until they are this share of those drawn or of the index.
_LOST: Final = 8


class RecentSelector:
    """Draws uniformly, with replacement, the candidates with policy_version >= current - k.

    k is `max_staleness`; `current` is the learner's version, by default the newest that was seen.
    Steps of an unknown version are never drawn; those of a newer one than the learner's are.
    """

    # Batches drawn ahead would be too old by the time the version rose.
    can_prefetch = False

    def __init__(
        self,
        records: Records,
        *,
        max_staleness: int,
        seed: int,
        policy_version: PolicyVersion | None = None,
    ) -> None:
        """Raises: ConfigInvalidError for an option out of range, or no policy_version."""
        self._field = records.layout.column_field(schema.POLICY_VERSION)
        self._records = records
        self._max_staleness = check_int(
            "recent sampler: max_staleness",
            max_staleness,
            advice="0 is the learner's own version alone.",
        )
        self.set_policy_version(policy_version)
        self._rng = random_stream(seed, "recent sampler")
        self._index = VersionIndex()
        self._newest: int | None = None
        self._followed = 0
        self._num_lost = 0

    def select(self, candidates: Candidates, num: int) -> SelectedItems:
        """Draw `num` with replacement. Raises: EmptyReplayError if all are too old or unknown."""
        self._follow(candidates)
        oldest = self._oldest()
        numbers = self._index.draw(self._rng, num, oldest)
        if not candidates.is_fixed:
            self._replace_gone(candidates, numbers, oldest)
        if not len(numbers):
            raise self._empty_error()
        return SelectedItems(numbers)

    def consolidate(self, candidates: Candidates) -> None:
        """Let go of candidates that are gone, and order the others as if all had come at once.

        Two selectors over the same candidates then draw the same. Cost: a sort of all of them,
        but in a fixed view none.
        """
        self._follow(candidates)
        if candidates.is_fixed:
            return
        self._index.keep(candidates.positions(self._index.numbers) >= 0)
        self._num_lost = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state, and the version that was set if it is a number."""
        version = self._policy_version
        return {
            "rng": self._rng.bit_generator.state,
            "policy_version": None if callable(version) or version is None else int(version),
            "newest": self._newest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from it; where a callable tells the version, that goes on to."""
        rng, newest = restore_generator(state["rng"]), int(state["newest"] or 0)
        if not callable(self._policy_version):
            self.set_policy_version(state["policy_version"])
        self._rng = rng
        if state["newest"] is not None:
            self._newest = max(newest, self._newest or 0)

    def describe(self) -> dict[str, Any]:
        """Return what was asked for, JSON-able."""
        return {"selector": "recent", "max_staleness": self._max_staleness}

    def set_policy_version(self, version: PolicyVersion | None) -> None:
        """Take the learner's version, or a function that returns it. Raises: ConfigInvalidError."""
        self._policy_version = (
            version if version is None or callable(version) else _version(version)
        )

    def _follow(self, candidates: Candidates) -> None:
        low, high = candidates.bounds()
        if high == self._followed:
            return
        new = np.arange(max(self._followed, low), high)
        numbers, versions = read_values(candidates, self._records, new, self._field)
        known = versions >= 0
        self._index.add(numbers[known], versions[known])
        if known.any():
            self._newest = max(int(versions.max()), self._newest or 0)
        self._followed = high
        if len(self._index) > 2 * candidates.capacity:
            self.consolidate(candidates)

    def _current(self) -> int | None:
        own = self._policy_version
        return self._newest if own is None else _version(own()) if callable(own) else own

    def _oldest(self) -> int:
        """Return the oldest version that may be drawn; an unknown one is -1."""
        return max(0, (self._current() or 0) - self._max_staleness)

    def _replace_gone(
        self, candidates: Candidates, numbers: NDArray[np.int64], oldest: int
    ) -> None:
        """Draw again those of `numbers` that are gone, until none is."""
        rows = np.flatnonzero(candidates.positions(numbers) < 0)
        while len(rows):
            self._num_lost += len(rows)
            if self._num_lost > max(len(numbers), len(self._index) // _LOST):
                self.consolidate(candidates)
            drawn = self._index.draw(self._rng, len(rows), oldest)
            if not len(drawn):
                raise self._empty_error()
            numbers[rows] = drawn
            rows = rows[candidates.positions(drawn) < 0]

    def _empty_error(self) -> EmptyReplayError:
        newest = self._index.newest()
        found = "no step of a known version" if newest is None else f"version {newest} at most"
        return EmptyReplayError(
            f"recent sampler: found {found}, expected {self._oldest()} or more: at most "
            f"{self._max_staleness} behind the learner's {self._current()}. Wait for newer steps, "
            "or allow a larger max_staleness."
        )


class RecentSampler(Sampler):
    """Draws steps of recent policies, given the learner's version."""

    def __init__(
        self,
        candidates: Candidates,
        selector: RecentSelector,
        assembler: Assembler,
        batch_size: int,
    ) -> None:
        """Take what a Sampler does. Raises: ConfigInvalidError."""
        super().__init__(candidates, selector, assembler, batch_size)
        self._recent = selector

    def set_policy_version(self, version: PolicyVersion) -> None:
        """Say the learner's version from the next batch on, or a function that returns it."""
        self._recent.set_policy_version(version)

    def state_dict(self) -> dict[str, Any]:
        """Return the position. Cost: a sort of the candidates, where they came at several times."""
        self._recent.consolidate(self._candidates)
        return super().state_dict()

    def _load(self, state: Mapping[str, Any]) -> None:
        # Then it goes on bit for bit, where the candidates are the same.
        self._recent.consolidate(self._candidates)
        super()._load(state)


def _version(value: object) -> int:
    return check_int(
        "recent sampler: policy_version", value, advice="Pass the learner's own version."
    )


class VersionIndex:
    """Candidates' numbers in parts, each of them sorted by version and then by number.

    Those of at least some version are the ends of the parts, so one of them is drawn by an offset.
    A part is merged with the one before it once it is half as large, so there are about log2(N)
    parts, and each candidate is moved about as often. Memory: 16 to 32 bytes a candidate.
    """

    def __init__(self) -> None:
        self._numbers = np.empty(0, np.int64)
        self._versions = np.empty(0, np.int64)
        # Where parts end; the first begins at 0.
        self._ends: list[int] = []
        self._oldest: int | None = None
        self._totals = np.zeros(0, np.int64)
        self._shifts = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The numbers of all candidates, int64 [N]."""
        return self._numbers[: len(self)]

    def add(self, numbers: NDArray[np.int64], versions: NDArray[np.int64]) -> None:
        """Take in candidates [M], whose numbers are above all others, with their versions [M]."""
        if not len(numbers):
            return
        start, end = len(self), len(self) + len(numbers)
        if end > len(self._numbers):
            # Twice as much each time, so that a candidate is copied about once.
            room = np.empty(max(end, 2 * len(self._numbers) if start else 0), np.int64)
            room[:start] = self._numbers[:start]
            self._numbers = room
            room = np.empty_like(room)
            room[:start] = self._versions[:start]
            self._versions = room
        self._numbers[start:end] = numbers
        self._versions[start:end] = versions
        self._ends.append(end)
        starts = [0, *self._ends][:-1]
        while len(starts) > 1 and starts[-1] - starts[-2] <= 2 * (end - starts[-1]):
            starts.pop()
            self._ends.pop(-2)
        # Stable, so numbers of one version stay in order; of parts that are sorted, it is a merge.
        order = np.argsort(self._versions[starts[-1] : end], kind="stable")
        for values in (self._numbers, self._versions):
            values[starts[-1] : end] = values[starts[-1] : end][order]
        self._oldest = None

    def keep(self, mask: NDArray[np.bool_]) -> None:
        """Let go of the `numbers` where kept [N] is false, and make one part of the others."""
        numbers, versions = self.numbers[mask], self._versions[: len(self)][mask]
        # The parts came one after another, so those of one version are in order already.
        order = np.argsort(versions, kind="stable")
        self._numbers, self._versions = numbers[order], versions[order]
        self._ends = [len(numbers)] if len(numbers) else []
        self._oldest = None

    def newest(self) -> int | None:
        """Return the highest version of a candidate, None without any."""
        return max((int(self._versions[end - 1]) for end in self._ends), default=None)

    def draw(self, rng: np.random.Generator, num: int, oldest: int) -> NDArray[np.int64]:
        """Return `num` numbers of candidates of at least a version, uniformly; none without any."""
        if oldest != self._oldest:
            self._find(oldest)
        total = int(self._totals[-1]) if len(self._totals) else 0
        if not total:
            return np.empty(0, np.int64)
        ranks = (rng.random(num) * total).astype(np.int64)
        if len(self._shifts) == 1:
            ranks += self._shifts[0]
        else:
            ranks += self._shifts[np.searchsorted(self._totals, ranks, side="right")]
        return self._numbers.take(ranks)

    def _find(self, oldest: int) -> None:
        """Note how many of the parts up to each are recent, and where the k-th of all lies."""
        starts = [0, *self._ends][:-1]
        firsts = [
            start + int(np.searchsorted(self._versions[start:end], oldest))
            for start, end in zip(starts, self._ends, strict=True)
        ]
        self._totals = np.cumsum(np.array(self._ends, np.int64) - np.array(firsts, np.int64))
        self._shifts = np.array(self._ends, np.int64) - self._totals
        self._oldest = oldest
