"""What a worker holds while it serves: the policy, how it explores, its limits and its log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from replaylake.datastore.policies.exploration import Exploration
from replaylake.datastore.policies.policy import Policy
from replaylake.datastore.sessions.decision_id import DecisionSigner
from replaylake.serve.feedback import DecisionLog


@dataclass(frozen=True)
class Limits:
    """What one request may ask for. body_bytes: 8 MiB holds 256 Atari frames written as JSON."""

    body_bytes: int = 8 << 20
    batch: int = 4096


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


@dataclass
class Serving:
    """What a worker holds while it runs. log is None where nothing is logged."""

    served: Served
    signer: DecisionSigner
    log: DecisionLog | None = None
    exploration: Exploration = field(default_factory=Exploration)
    limits: Limits = Limits()

    def close(self) -> None:
        """Commit what was logged."""
        if self.log is not None:
            self.log.close()
