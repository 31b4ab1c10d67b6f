"""What a worker holds while it serves: the policy, how it explores, its limits and its log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from replaylake.datastore.policies.policy import Policy
from replaylake.datastore.sessions.decision_id import DecisionSigner
from replaylake.serve.feedback import DecisionLog


@dataclass(frozen=True)
class Exploration:
    """How a server acts where a request does not ask for the mode; all zero or None: it does not.

    epsilon: the mode, but with this probability an allowed action at random. temperature: drawn
    from the head at this temperature.
    """

    epsilon: float = 0.0
    temperature: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether anything is explored."""
        return self.epsilon > 0 or self.temperature is not None


@dataclass(frozen=True)
class Limits:
    """What one request may ask for. body_bytes: 8 MiB holds 256 Atari frames written as JSON."""

    body_bytes: int = 8 << 20
    batch: int = 4096


@dataclass(frozen=True)
class Served:
    """A policy as it is served: under which name and version, and what /policy says of it."""

    name: str
    version: int
    policy: Policy
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Serving:
    """What a worker holds while it runs. log is None where nothing is logged."""

    served: Served
    signer: DecisionSigner
    log: DecisionLog | None = None
    exploration: Exploration = Exploration()
    limits: Limits = Limits()

    def close(self) -> None:
        """Commit what was logged."""
        if self.log is not None:
            self.log.close()
