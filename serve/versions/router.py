"""Router: which of the policies that a worker holds answers a request.

What is asked for by name is an arm: the main one, and canaries that take a share of the episodes.
Which arm an episode has is a hash of its id: the same in every worker, and after a restart.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Any, Final, Generic, Protocol, TypeVar

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.policies.policy import Policy

# Versions that an arm answered with before: a client's state goes on with the one that made it.
_NUM_HELD: Final = 2
_HASH_BYTES: Final = 8
_HASHES: Final = float(1 << 8 * _HASH_BYTES)


@dataclass(frozen=True)
class ServedPolicy:
    """A policy as it is served: under which name and version, and what /policy says of it.

    reference: what was asked for, such as `clone@champion`, of which the version is what it meant.
    since_ms: when this worker began to serve it, in ms since 1970, UTC; 0 where nobody asked.
    promotion: the last move of an alias to it, and what the comparison before that said.
    sha256: of the manifest of its package, which is logged with each decision.
    """

    name: str
    version: int
    policy: Policy
    reference: str
    about: Mapping[str, Any] = field(default_factory=dict)
    since_ms: int = 0
    promotion: Mapping[str, Any] | None = None
    sha256: str | None = None


class Served(Protocol):
    """A policy version that answers: a ServedPolicy, or an engine that runs a language model."""

    @property
    def name(self) -> str:
        """Name of the policy."""

    @property
    def version(self) -> int:
        """Its version."""

    @property
    def reference(self) -> str:
        """What was asked for, such as `clone@champion`, of which the version is what it meant."""


ServedT = TypeVar("ServedT", bound=Served)


@dataclass(frozen=True)
class Arm(Generic[ServedT]):
    """What answers a share `weight` of the episodes, in (0, 1]."""

    served: ServedT
    weight: float


@dataclass(frozen=True)
class Canary:
    """A policy that is to take a share of the episodes: `clone@challenger=0.1`."""

    reference: str
    weight: float


class Router(Generic[ServedT]):
    """Holds what is served now, and what was until lately.

    Any thread may replace an arm; whoever has been handed a policy goes on with it.
    """

    def __init__(self, one: ServedT, canaries: Sequence[tuple[ServedT, float]] = ()) -> None:
        """Serve `one`, but the canaries (policy, weight) to their share of the episodes."""
        self.one = one
        self.on_change: Callable[[], None] = lambda: None
        main = 1.0 - fsum(weight for _, weight in canaries)
        self.arms = (Arm(one, main), *(Arm(served, weight) for served, weight in canaries))
        self._before: list[tuple[ServedT, ...]] = [()] * len(self.arms)
        self._key = hashlib.blake2b(one.name.encode(), digest_size=32).digest()
        self._known: dict[tuple[str, int], ServedT] = {}
        self._index()

    @property
    def held(self) -> tuple[ServedT, ...]:
        """What `find_version` finds."""
        return tuple(self._known.values())

    def assign_rows(
        self, episode_ids: Sequence[str | None], seed: int | None = None
    ) -> list[tuple[ServedT, Sequence[int]]]:
        """Return which policy acts for which rows of a request; a row without an id is drawn.

        seed: where there is one, the same rows are drawn the same way again.
        Cost: nothing without canaries, else 1 us a row.
        """
        arms = self.arms
        if len(arms) == 1:
            return [(self.one, range(len(episode_ids)))]
        # Seeded only where it is asked for, as that takes 10 us; not numpy's generator, from which
        # the actions are drawn: which arm it is must say nothing of them.
        draw = random.random if seed is None else random.Random(seed).random
        if len(episode_ids) == 1:
            return [(arms[self._arm_of(episode_ids[0], arms, draw)].served, (0,))]
        rows: dict[int, list[int]] = {}
        for row, episode_id in enumerate(episode_ids):
            rows.setdefault(self._arm_of(episode_id, arms, draw), []).append(row)
        return [(arms[number].served, row_numbers) for number, row_numbers in rows.items()]

    def find_arm(self, episode_id: str | None) -> int:
        """Return the number of the arm that an episode has; without an id it is drawn."""
        return self._arm_of(episode_id, self.arms, random.random)

    def find_version(self, policy: str, version: int) -> ServedT | None:
        """Return a policy that is still held, or None."""
        return self._known.get((policy, version))

    def replace(self, number: int, served: ServedT) -> None:
        """Serve another policy in an arm, 0 being the main one; the one before is held a while."""
        arm = self.arms[number]
        # Back and forth between two versions does not push out what was there before them.
        known = {_version(served), _version(arm.served)}
        others = (one for one in self._before[number] if _version(one) not in known)
        self._before[number] = (arm.served, *others)[:_NUM_HELD]
        changed = Arm(served, arm.weight)
        self.arms = (*self.arms[:number], changed, *self.arms[number + 1 :])
        self.one = self.arms[0].served
        self._index()
        self.on_change()

    def _arm_of(
        self, episode_id: str | None, arms: tuple[Arm[ServedT], ...], draw: Callable[[], float]
    ) -> int:
        place = draw() if episode_id is None else self._hash_position(episode_id)
        # Canaries from 0 upwards, the main arm above them all: of a canary that is given more
        # weight all its episodes stay its own.
        end = 0.0
        for number in range(1, len(arms)):
            end += arms[number].weight
            if place < end:
                return number
        return 0

    def _hash_position(self, episode_id: str) -> float:
        """Return where in [0, 1) an episode lies: keyed BLAKE2b (RFC 7693) of its id."""
        text = episode_id.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(text, digest_size=_HASH_BYTES, key=self._key).digest()
        return int.from_bytes(digest, "big") / _HASHES

    def _index(self) -> None:
        before = [served for group in self._before for served in reversed(group)]
        # Later ones win: what is served now over what was.
        served = [*before, *(arm.served for arm in reversed(self.arms))]
        self._known = {_version(one): one for one in served}


def _version(served: Served) -> tuple[str, int]:
    return served.name, served.version


def parse_canaries(texts: Sequence[str]) -> tuple[Canary, ...]:
    """Read `clone@challenger=0.1`. Raises: ConfigInvalidError, also where nothing is left of 1."""
    canaries = tuple(map(_parse_canary, texts))
    total = fsum(canary.weight for canary in canaries)
    names = [canary.reference for canary in canaries]
    if total >= 1 or len(set(names)) < len(names):
        raise ConfigInvalidError(
            f"canary: found {', '.join(texts)} with a total weight of {total:g}, expected "
            "different policies with a total weight below 1: the main policy serves the rest.",
            parameter="canary",
        )
    return canaries


def _parse_canary(text: str) -> Canary:
    reference, _, number = text.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        weight = 0.0
    if not reference or "," in text or not 0 < weight < 1:
        raise ConfigInvalidError(
            f"canary: found {text!r}, expected POLICY=WEIGHT with a weight above 0 and below 1, "
            "such as clone@challenger=0.1.",
            parameter="canary",
        )
    return Canary(reference, weight)
