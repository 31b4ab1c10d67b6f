"""Broadcaster: with which version of the policy workers collect, and when they get a newer one."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Final

import numpy as np

from replaylake.online.collecting.acting import num_bytes_sent
from replaylake.online.training.config import OnlineConfig
from replaylake.online.training.parts import Parts

# A broadcast takes a millisecond or two of the learner's time; what is replayed was collected by
# older policies anyway.
_INTERVAL_S: Final = 0.1
_KEPT: Final = 100


class Broadcaster:
    """Counts versions, and keeps workers from falling further behind than allowed."""

    def __init__(self, parts: Parts, config: OnlineConfig) -> None:
        self._parts, self._config = parts, config
        self._is_local = config.env_runner == "local"
        self._version = 0
        self._at, self._update = -math.inf, -1
        # By worker: the version that it collects with. Then how far behind those of the last
        # shipments were when they came.
        self._asked_with: dict[int, int] = {}
        self._staleness: deque[int] = deque(maxlen=_KEPT)

    @property
    def version(self) -> int:
        """Of the newest policy that was handed out."""
        return self._version

    @property
    def staleness(self) -> float:
        """Versions that the workers' policies were behind when their last steps came, on average.

        Where steps are taken once, the supply says it of those that were learned from.
        """
        return float(np.mean(self._staleness)) if self._staleness else 0.0

    def begin_at(self, version: int) -> None:
        """Go on with a version that nobody has acted with."""
        self._version = self._parts.supply.version = version

    def offer(self, update: int, num_steps: int) -> None:
        """Hand the policy as it is now to whoever is asked next, if it is time to."""
        parts, now = self._parts, time.perf_counter()
        if self._update >= 0 and not self._is_due(update, num_steps, now):
            return
        if update > self._update >= 0:
            self._version += 1
        acting = parts.behavior.acting(self._version, num_steps)
        parts.pool.broadcast(acting)
        self._at, self._update = now, update
        parts.supply.version = self._version
        seconds = time.perf_counter() - now
        parts.timings.add("broadcast", seconds, 1, num_bytes_sent(acting))

    def asked(self, worker: int) -> None:
        """Note that a worker collects with the newest version from now on."""
        self._asked_with[worker] = self._version

    def answered(self, worker: int) -> None:
        """Note that a worker's steps came."""
        self._staleness.append(self._version - self._asked_with.pop(worker, self._version))

    def lost(self, worker: int) -> None:
        """Note that nothing comes of what a worker was asked for."""
        self._asked_with.pop(worker, None)

    def _is_due(self, update: int, num_steps: int, now: float) -> bool:
        is_old = update - self._update >= self._config.broadcast_updates
        is_time = self._parts.supply.takes_once or now - self._at >= _INTERVAL_S
        # One more round, in which the policy takes over.
        random_until = self._parts.behavior.random_steps + self._config.round_steps
        explores_anew = num_steps < random_until
        if not (is_old and (is_time or self._is_local)) and not explores_anew:
            return False
        return not self._would_be_too_stale(update)

    def _would_be_too_stale(self, update: int) -> bool:
        """Whether a new version would leave a worker that is at it further behind than allowed."""
        most = self._config.max_staleness
        if most is None or self._parts.supply.takes_once or update == self._update:
            return False
        return any(self._version + 1 - version > most for version in self._asked_with.values())
