"""Router: which of the policies that a worker holds answers a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from replaylake.datastore.policies.policy import Policy


@dataclass(frozen=True)
class Served:
    """A policy as it is served: under which name and version, and what /policy says of it.

    reference: what was asked for, such as `clone@champion`, of which the version is what it meant.
    """

    name: str
    version: int
    policy: Policy
    reference: str
    about: Mapping[str, Any] = field(default_factory=dict)


class Router:
    """Holds what is served now."""

    def __init__(self, one: Served) -> None:
        self.one = one

    def for_rows(self, episode_ids: Sequence[str | None]) -> list[tuple[Served, Sequence[int]]]:
        """Return which policy acts for which rows of a request."""
        return [(self.one, range(len(episode_ids)))]

    def by_version(self, policy: str, version: int) -> Served | None:
        """Return a policy that is still held, or None."""
        one = self.one
        return one if (one.name, one.version) == (policy, version) else None
