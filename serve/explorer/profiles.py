"""Profiles of versions, computed beside the requests that wait for them, and remembered."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.profile.profile import Profile, compute_profile
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.storage.log.purges import Purge

_MAX_REMEMBERED: Final = 16
_REMEMBERED_S: Final = 600.0
# A page waits so long for a profile before it shows how far it is.
_WAIT_S: Final = 1.5
# Pages ask every few seconds, in a window that is not seen once a minute. What nobody has asked for
# in this time is not counted further.
_UNWANTED_S: Final = 90.0


@dataclass(frozen=True)
class FoundProfile:
    """What there is for a version.

    profile: the version's own, or that of an earlier version in its stead, or None; version: whose
    it is. progress: (steps counted, steps) of the version's own, None where `profile` is that.
    """

    profile: Profile | None
    version: int | None
    progress: tuple[int, int] | None


@dataclass
class _Job:
    dataset: Dataset
    snapshot: Snapshot
    asked_at: float = 0.0
    num: int = 0
    profile: Profile | None = None
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def key(self) -> tuple[str, int]:
        return self.snapshot.dataset, self.snapshot.version


class _UnwantedError(Exception):
    """Ends the count of a profile for which nobody asks."""


class ProfileMemory:
    """Profiles by dataset and version. Safe from several threads.

    One is computed at a time; of each dataset one more may wait, the version that was asked for
    last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: _Job | None = None
        self._waiting: OrderedDict[str, _Job] = OrderedDict()
        self._finished: OrderedDict[tuple[str, int], tuple[float, Profile]] = OrderedDict()

    def find(self, lake: Lake, snapshot: Snapshot) -> FoundProfile:
        """Return a version's profile, or what there is while it is computed.

        Raises: what computing it raised; the next call begins again.
        """
        name, version = snapshot.dataset, snapshot.version
        purges = lake.purges.list(name)
        with self._lock:
            self._forget_old(name, purges)
            known = self._finished.get((name, version))
            if known is not None:
                self._finished.move_to_end((name, version))
                return FoundProfile(known[1], version, None)
            job = self._ask(lake.dataset(name), snapshot)
        job.done.wait(_WAIT_S)
        if job.error is not None:
            raise job.error
        if job.profile is not None:
            return FoundProfile(job.profile, version, None)
        with self._lock:
            earlier = [v for n, v in self._finished if n == name and v < version]
            progress = (job.num, snapshot.num_steps)
            if not earlier:
                return FoundProfile(None, None, progress)
            newest = max(earlier)
            return FoundProfile(self._finished[name, newest][1], newest, progress)

    def _ask(self, dataset: Dataset, snapshot: Snapshot) -> _Job:
        """Return the job of a version, which takes the place of another that waits."""
        now = time.monotonic()
        name = snapshot.dataset
        running = self._running
        if running is not None and running.snapshot.dataset == name:
            # Also of another version: its profile is shown until that one's is there.
            running.asked_at = now
            if running.key == (name, snapshot.version):
                return running
        job = self._waiting.get(name)
        if job is None or job.key != (name, snapshot.version):
            if job is not None:
                job.done.set()
            job = self._waiting[name] = _Job(dataset, snapshot)
        job.asked_at = now
        if running is None:
            self._start_next()
        return job

    def _start_next(self) -> None:
        self._running = None
        now = time.monotonic()
        while self._waiting:
            _, job = self._waiting.popitem(last=False)
            if now - job.asked_at <= _UNWANTED_S:
                self._running = job
                threading.Thread(target=self._compute, args=(job,), daemon=True).start()
                return
            job.done.set()

    def _compute(self, job: _Job) -> None:
        def note(num: int, total: int) -> None:
            job.num = num
            if time.monotonic() - job.asked_at > _UNWANTED_S:
                raise _UnwantedError

        try:
            job.profile = compute_profile(job.snapshot, job.dataset.history(), note)
        except _UnwantedError:
            pass
        except Exception as error:  # for the request that waits
            job.error = error
        with self._lock:
            if job.profile is not None:
                self._finished[job.key] = (time.monotonic(), job.profile)
                while len(self._finished) > _MAX_REMEMBERED:
                    self._finished.popitem(last=False)
            self._start_next()
        job.done.set()

    def _forget_old(self, name: str, purges: Sequence[Purge]) -> None:
        now = time.monotonic()
        for key, (at, _) in list(self._finished.items()):
            is_purged = key[0] == name and any(purge.has_broken(key[1]) for purge in purges)
            if is_purged or now - at > _REMEMBERED_S:
                del self._finished[key]
