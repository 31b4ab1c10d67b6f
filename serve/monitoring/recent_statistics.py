"""Recent: how a policy has acted of late: how likely, how often not its best, on what.

Sums that are forgotten by and by, with a time constant of five minutes: a mean of them moves as the
traffic does, and one of several workers is that of all. A request is only remembered; what it was
is added up with others, when there are 64 or a second has passed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np

from replaylake.datastore.episodes.spaces import (
    Array,
    Discrete,
    Values,
    concatenate,
    num_values,
    take,
)
from replaylake.serve.monitoring.drift import MAX_ELEMENTS, TrainingMoments, training_moments
from replaylake.serve.monitoring.shared_counters import SharedCounters
from replaylake.serve.versions.router import ServedPolicy

RECENT: Final = "recent"
TIME_CONSTANT_S: Final = 300.0
_MAX_PENDING: Final = 64
_MAX_ROWS: Final = 256  # of one batch: more tell hardly more
_LOG_HALF: Final = math.log(0.5)
# Of a block: when the sums were last made older, then the sums.
_TIME, _NUM, _OTHER, _NUM_LIKELY, _LIKELY, _NUM_SEEN = range(6)
_FIXED: Final = 6


class RecentStatistics:
    """How one version acted on one worker."""

    def __init__(self, cells: SharedCounters, served: ServedPolicy) -> None:
        """Add up in a block of `cells`."""
        spec = served.policy.spec
        self.key = (RECENT, (served.name, str(served.version)))
        self.moments: TrainingMoments | None = training_moments(served.about, spec)
        self.labels = () if self.moments is None else self.moments.labels
        width = len(self.labels)
        begin = cells.block(self.key, _FIXED + width)
        self._sums = cells.array[begin : begin + _FIXED + width]
        space = spec.action_space
        # Of two actions the less likely is the other one; of more, nobody can tell by that.
        self._has_two = isinstance(space, Discrete) and space.n == 2
        # Remembered as they came only where that is little memory.
        self._is_narrow = width < MAX_ELEMENTS
        # log_probs of those that tell by it whether the action was the best, and of the rest.
        self._telling: list[Array] = []
        self._others: list[Array] = []
        self._single: list[Values] = []
        self._shifts: list[Array] = []
        self._num = self._num_other = 0
        # Requests that take long are worked on in threads.
        self._lock = threading.Lock()

    def add(
        self,
        observations: Values,
        log_probs: Array | None,
        num: int,
        is_drawn: bool,
        epsilon: float,
    ) -> bool:
        """Remember one request of `num` observations [num, *obs]; return whether to add up now."""
        moments, shifts = self.moments, None
        if moments is not None and not (num == 1 and self._is_narrow):
            shifts = moments.standardize(_sample_rows(observations))
        # A best action has a probability of at least 1 - epsilon, any other of epsilon / 2.
        tells = is_drawn and (self._has_two or 0 < epsilon <= 0.5)
        with self._lock:
            if log_probs is not None:
                (self._telling if tells else self._others).append(log_probs)
            if is_drawn and not tells:
                self._num_other += num
            if shifts is not None:
                self._shifts.append(shifts)
            elif moments is not None:
                self._single.append(observations)
            self._num += num
            return self._num >= _MAX_PENDING

    def fold(self, now_s: float) -> None:
        """Add what is remembered to the sums; now_s: time.monotonic(), which workers share."""
        with self._lock:
            if self._num:
                self._fold(now_s)

    def _fold(self, now_s: float) -> None:
        sums = self._sums
        sums[1:] *= math.exp((sums[_TIME] - now_s) / TIME_CONSTANT_S)
        sums[_TIME] = now_s
        sums[_NUM] += self._num
        sums[_OTHER] += self._num_other
        for log_probs in (self._telling, self._others):
            if not log_probs:
                continue
            known = np.concatenate(log_probs)
            if log_probs is self._telling:
                sums[_OTHER] += np.count_nonzero(known < _LOG_HALF)
            known = known[np.isfinite(known)]
            sums[_NUM_LIKELY] += len(known)
            sums[_LIKELY] += known.sum(dtype=np.float64)
        if self.moments is not None:
            self._add_shifts(self.moments, sums)
        self._num = self._num_other = 0
        self._telling, self._others = [], []

    def _add_shifts(self, moments: TrainingMoments, sums: Array) -> None:
        if self._single:
            self._shifts.append(moments.standardize(concatenate(self._single)))
        for shifts in self._shifts:
            sums[_NUM_SEEN] += len(shifts)
            sums[_FIXED:] += shifts.sum(axis=0)
        self._single, self._shifts = [], []


def merge_sums(blocks: Sequence[Array], now_s: float) -> Array:
    """Return the sums of several workers together, each grown older until now."""
    total = np.zeros_like(blocks[0])
    for sums in blocks:
        total += sums * math.exp((sums[_TIME] - now_s) / TIME_CONSTANT_S)
    return total


class RecentMeans:
    """What sums of a version say."""

    def __init__(self, sums: Array) -> None:
        num, num_likely, num_seen = (float(sums[i]) for i in (_NUM, _NUM_LIKELY, _NUM_SEEN))
        self.num = num
        self.exploration_rate = float(sums[_OTHER]) / num if num else None
        self.log_prob = float(sums[_LIKELY]) / num_likely if num_likely else None
        self.shifts: Array = sums[_FIXED:] / num_seen if num_seen else np.zeros(0)


def _sample_rows(observations: Values) -> Values:
    num = num_values(observations)
    if num <= _MAX_ROWS:
        return observations
    sample: Values = take(observations, slice(None, None, -(-num // _MAX_ROWS)))
    return sample
