"""Reload: a server that was asked for an alias goes where the alias goes.

Each worker looks by itself, in a thread of its own. A version that an alias has moved to is loaded,
warmed up and checked beside the one that answers, and takes its place at once; requests that are
being answered finish as they began. A version that does not pass is refused, and the old one stays.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol

from replaylake.datastore.errors import ReplayLakeError, StorageError
from replaylake.datastore.lake.policies.registry import CHAMPION
from replaylake.serve.versions.router import Router, ServedT

_logger = logging.getLogger(__name__)
_STOP_TIMEOUT_S: Final = 5.0


class AliasReader(Protocol):
    """Where an alias points; a Registry is one."""

    def alias_version(self, name: str, alias: str) -> int | None:
        """Return the version, None if the alias is not set; cheap enough to be polled."""
        ...


@dataclass(frozen=True)
class VersionChange:
    """A version that took another's place. seconds: from its being seen to its answering."""

    from_version: int
    to_version: int
    at_ms: int
    seconds: float


@dataclass(frozen=True)
class VersionRefusal:
    """A version that did not pass, and why."""

    version: int
    at_ms: int
    reason: str


@dataclass
class FollowedAlias:
    """One reference that is followed: which arm of the router it is, and how that went."""

    arm: int
    name: str
    alias: str
    num_moves: int = 0
    num_refusals: int = 0
    last_change: VersionChange | None = None
    last_refusal: VersionRefusal | None = None
    unreachable: str | None = None


Load = Callable[[str, int, str], ServedT]
"""From (name, version, reference) to a policy that has passed every check."""


class AliasFollower(Generic[ServedT]):
    """Keeps a router where the aliases are."""

    def __init__(
        self,
        aliases: AliasReader,
        router: Router[ServedT],
        load: Load[ServedT],
        followed: Sequence[FollowedAlias],
        interval_s: float,
    ) -> None:
        """Follow what `followed` names, once `start` is called."""
        self.followed = tuple(followed)
        self.interval_s = interval_s
        self.on_look: Callable[[FollowedAlias], None] = lambda following: None
        self._aliases, self._router, self._load = aliases, router, load
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follow-aliases", daemon=True)

    def start(self) -> None:
        """Look every interval_s, in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; a version that is being loaded is waited for, but not for long."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)

    def poll(self) -> None:
        """Go where the aliases point now. Raises nothing: what went wrong is kept and logged."""
        for following in self.followed:
            before = (following.num_moves, following.num_refusals, following.unreachable)
            try:
                self._poll_alias(following)
                following.unreachable = None
            except StorageError as error:
                # The next look may find it: a lake far away comes and goes.
                if following.unreachable is None:
                    _logger.warning("%s: %s", _reference(following), error)
                following.unreachable = str(error)
            except Exception as error:
                # Whatever else the log of the lake does, this thread outlives it.
                if following.unreachable is None:
                    _logger.exception("%s: cannot be followed", _reference(following))
                following.unreachable = f"{type(error).__name__}: {error}"
            if before != (following.num_moves, following.num_refusals, following.unreachable):
                self.on_look(following)

    def _run(self) -> None:
        while not self._stopping.wait(self.interval_s):
            self.poll()

    def _poll_alias(self, following: FollowedAlias) -> None:
        served = self._router.arms[following.arm].served
        version = self._aliases.alias_version(following.name, following.alias)
        if version is None:
            return  # taken away, or never set: nothing says where to go
        if (served.name, served.version) == (following.name, version):
            following.last_refusal = None
            return
        if following.last_refusal is not None and following.last_refusal.version == version:
            return
        start = time.monotonic()
        try:
            policy = self._load(following.name, version, served.reference)
        except StorageError:
            raise
        except ReplayLakeError as error:
            self._refuse(following, version, served, str(error))
            return
        except Exception as error:
            _logger.exception("%s: unexpected error", _reference(following))
            self._refuse(following, version, served, f"{type(error).__name__}: {error}")
            return
        self._router.replace(following.arm, policy)
        took_s = time.monotonic() - start
        following.last_change = VersionChange(served.version, version, _now_ms(), took_s)
        following.last_refusal = None
        following.num_moves += 1
        _logger.warning(
            "%s: serving version %d instead of %d, loaded in %.2f s",
            _reference(following),
            version,
            served.version,
            took_s,
        )

    def _refuse(self, following: FollowedAlias, version: int, served: ServedT, reason: str) -> None:
        following.last_refusal = VersionRefusal(version, _now_ms(), reason)
        following.num_refusals += 1
        _logger.error(
            "%s: version %d is refused, version %d goes on: %s",
            _reference(following),
            version,
            served.version,
            reason,
        )


def parse_alias(reference: str | None) -> tuple[str, str] | None:
    """Return the (policy, alias) that a reference names; None if it names one version for good.

    A policy's name alone means its champion.
    """
    if reference is None or ":" in reference:
        return None
    name, _, alias = reference.partition("@")
    return name, alias or CHAMPION


def _reference(following: FollowedAlias) -> str:
    return f"{following.name}@{following.alias}"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
