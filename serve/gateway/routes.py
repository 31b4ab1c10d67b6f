"""Routes: which engine answers a call, and which policy version it is known to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from replaylake.datastore.lake.dataset import new_episode_id
from replaylake.serve.gateway.conversations import PRODUCER
from replaylake.serve.gateway.upstream import Upstream


@dataclass(frozen=True)
class CallVersion:
    """The policy version that answers a call, as it is recorded.

    reference: what the server was asked for. share: the probability with which a new conversation
    gets it.
    """

    policy: str
    version: int
    reference: str
    share: float

    def to_json(self) -> dict[str, Any]:
        """Return what the column metadata has of it."""
        return {"reference": self.reference, "share": self.share}


@dataclass(frozen=True)
class Route:
    """An engine for one call.

    version: None if only the engine's answer says what it runs. make_episode_id: names an episode
    that begins with the call, so that the episode's further calls get the same route. end: called
    once, when the call has ended.
    """

    upstream: Upstream
    url: str
    version: CallVersion | None = None
    make_episode_id: Callable[[], str] = lambda: new_episode_id(PRODUCER)
    end: Callable[[], None] = lambda: None


class Routes(Protocol):
    """The engines of a gateway; for its event loop."""

    @property
    def is_split(self) -> bool:
        """Whether the route of a call depends on its episode."""

    @property
    def failure(self) -> str | None:
        """Why calls cannot be answered now, if an engine is known to be down."""

    def begin(self, episode: str | None) -> Route:
        """Return the route of a call of an episode; without one, it begins a new one."""

    def begin_other(self) -> Route:
        """Return the route of a request that is no call."""

    def close(self) -> None:
        """Close every connection."""


class SingleRoute:
    """One engine, which is not known but by its answers."""

    is_split = False
    failure = None

    def __init__(self, url: str, silence_s: float) -> None:
        """Connect with the first call. Raises: ConfigInvalidError for a wrong URL."""
        self._route = Route(Upstream(url, silence_s=silence_s), url)

    def begin(self, episode: str | None) -> Route:
        return self._route

    def begin_other(self) -> Route:
        return self._route

    def close(self) -> None:
        self._route.upstream.close()
