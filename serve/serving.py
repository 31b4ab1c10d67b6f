"""What a worker holds while it serves: the policies, how they explore, its limits and its log."""

from __future__ import annotations

from dataclasses import dataclass, field

from replaylake.datastore.policies.exploration import Exploration
from replaylake.datastore.sessions.decision_id import DecisionSigner
from replaylake.serve.decision_log import DecisionLog
from replaylake.serve.router import Router


@dataclass(frozen=True)
class Limits:
    """What one request may ask for. body_bytes: 8 MiB holds 256 Atari frames written as JSON."""

    body_bytes: int = 8 << 20
    batch: int = 4096


@dataclass
class Serving:
    """What a worker holds while it runs. log is None where nothing is logged."""

    router: Router
    signer: DecisionSigner
    log: DecisionLog | None = None
    exploration: Exploration = field(default_factory=Exploration)
    limits: Limits = Limits()

    def close(self) -> None:
        """Commit what was logged."""
        if self.log is not None:
            self.log.close()
