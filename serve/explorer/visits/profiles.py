"""What pages need of whole versions, made beside the requests that wait for it, and remembered.

These are the summary of a version's episodes, without which a query of them reads all steps, and
its profile. Both are made of its shards, and kept in the lake where it may be written to.
"""

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
from replaylake.datastore.query.summaries import needs_refresh, refresh
from replaylake.datastore.storage.log.purges import Purge

_MAX_REMEMBERED: Final = 16
_MAX_SUMMARIZED: Final = 1000
_REMEMBERED_S: Final = 600.0
# A page waits so long for a profile before it shows how far it is.
_WAIT_S: Final = 0.7
# Pages ask every few seconds, in a window that is not seen once a minute. What nobody has asked for
# in this time is not counted further.
_UNWANTED_S: Final = 90.0


@dataclass(frozen=True)
class FoundProfile:
    """What there is for a version.

    profile: the version's own, or that of an earlier version in its stead, or None; version: whose
    it is. progress: (steps counted, steps) of the version's own, None where `profile` is that.
    is_summarized: whether the version's episodes may be queried meanwhile.
    """

    profile: Profile | None
    version: int | None
    progress: tuple[int, int] | None
    is_summarized: bool = True


@dataclass
class _Job:
    dataset: Dataset
    snapshot: Snapshot
    # Whether the profile is wanted, too: it may be, of a job that has begun.
    with_profile: bool = False
    asked_at: float = 0.0
    num: int = 0
    profile: Profile | None = None
    error: Exception | None = None
    is_summarized: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def key(self) -> tuple[str, int]:
        return self.snapshot.dataset, self.snapshot.version

    def end(self) -> None:
        self.is_summarized.set()
        self.done.set()


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
        # Versions whose episodes are summarized as far as they are worth it.
        self._summarized: OrderedDict[tuple[str, int], None] = OrderedDict()

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
            job = self._ask(lake.dataset(name), snapshot, with_profile=True)
        job.done.wait(_WAIT_S)
        if job.error is not None:
            raise job.error
        if job.profile is not None:
            return FoundProfile(job.profile, version, None)
        is_summarized = not needs_refresh(snapshot.table)
        with self._lock:
            is_summarized |= (name, version) in self._summarized
            earlier = [v for n, v in self._finished if n == name and v < version]
            progress = (job.num, snapshot.num_steps)
            if not earlier:
                return FoundProfile(None, None, progress, is_summarized)
            newest = max(earlier)
            return FoundProfile(self._finished[name, newest][1], newest, progress, is_summarized)

    def find_unsummarized(
        self, lake: Lake, snapshot: Snapshot, *, wait_s: float = _WAIT_S
    ) -> tuple[int, int] | None:
        """Return None if a version's episodes may be queried, else (steps summarized, steps).

        Where they are not summarized, this begins, and is waited for so long. Raises: what it
        raised.
        """
        key = snapshot.dataset, snapshot.version
        with self._lock:
            if key in self._summarized:
                return None
        is_summarized = not needs_refresh(snapshot.table)
        with self._lock:
            if is_summarized:
                self._note_summarized(key)
                return None
            job = self._ask(lake.dataset(snapshot.dataset), snapshot)
        job.is_summarized.wait(wait_s)
        if job.error is not None:
            raise job.error
        with self._lock:
            is_running = key not in self._summarized
        return (job.num, snapshot.num_steps) if is_running else None

    def _ask(self, dataset: Dataset, snapshot: Snapshot, *, with_profile: bool = False) -> _Job:
        """Return the job of a version, which takes the place of another that waits."""
        now = time.monotonic()
        name = snapshot.dataset
        running = self._running
        if running is not None and running.snapshot.dataset == name:
            # Also of another version: its profile is shown until that one's is there.
            running.asked_at = now
            if running.key == (name, snapshot.version):
                if not with_profile or running.with_profile:
                    return running
                if not running.is_summarized.is_set():
                    running.with_profile = True
                    return running
        job = self._waiting.get(name)
        if job is None or job.key != (name, snapshot.version):
            if job is not None:
                job.end()
            job = self._waiting[name] = _Job(dataset, snapshot)
        job.with_profile = job.with_profile or with_profile
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
            job.end()

    def _compute(self, job: _Job) -> None:
        def note(num: int, total: int) -> None:
            job.num = num
            if time.monotonic() - job.asked_at > _UNWANTED_S:
                raise _UnwantedError

        try:
            if needs_refresh(job.snapshot.table):
                refresh(job.snapshot.table, note)
            with self._lock:
                self._note_summarized(job.key)
                # After this, who wants the profile begins another job.
                job.is_summarized.set()
                with_profile = job.with_profile
            if with_profile:
                job.num = 0
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
        job.end()

    def _note_summarized(self, key: tuple[str, int]) -> None:
        self._summarized[key] = None
        while len(self._summarized) > _MAX_SUMMARIZED:
            self._summarized.popitem(last=False)

    def _forget_old(self, name: str, purges: Sequence[Purge]) -> None:
        now = time.monotonic()
        for key, (at, _) in list(self._finished.items()):
            is_purged = key[0] == name and any(purge.has_broken(key[1]) for purge in purges)
            if is_purged or now - at > _REMEMBERED_S:
                del self._finished[key]
