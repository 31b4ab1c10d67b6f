"""What a worker holds while it serves: the policies, how they explore, its limits and its log."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.serve.recording.decision_log import DecisionLog
from replaylake.serve.recording.feedback_join_process import FeedbackJoinProcess
from replaylake.serve.recording.received_log import ReceivedLog
from replaylake.serve.safety.access_log import AccessLog
from replaylake.serve.safety.hosts import AllowedHosts
from replaylake.serve.safety.limits import Limits
from replaylake.serve.safety.tokens import Tokens
from replaylake.serve.versions.alias_follower import AliasFollower
from replaylake.serve.versions.router import Router
from replaylake.serve.versions.state_tokens import StateSigner


@dataclass
class ServingState:
    """What a worker holds while it runs.

    log is None where nothing is logged, follower where no alias is followed. states signs what
    clients carry for policies that remember; takes_options: requests may say how to explore.
    """

    router: Router
    signer: DecisionSigner
    log: DecisionLog | None = None
    exploration: Exploration = field(default_factory=Exploration)
    limits: Limits = field(default_factory=Limits)
    tokens: Tokens = field(default_factory=Tokens)
    hosts: AllowedHosts = field(default_factory=AllowedHosts)
    access_log: AccessLog | None = None
    follower: AliasFollower | None = None
    feedback_join: FeedbackJoinProcess | None = None
    received: ReceivedLog | None = None  # opened with the first episode that was acted elsewhere
    states: StateSigner = field(default_factory=lambda: StateSigner(os.urandom(32)))
    takes_options: bool = True

    def start(self) -> None:
        """Begin to follow aliases, and to join decisions with their rewards."""
        if self.follower is not None:
            self.follower.start()
        if self.feedback_join is not None:
            self.feedback_join.start()

    def close(self) -> None:
        """Follow no more, and commit what was logged."""
        if self.follower is not None:
            self.follower.stop()
        if self.feedback_join is not None:
            self.feedback_join.stop()
        if self.access_log is not None:
            self.access_log.close()
        try:
            if self.received is not None:
                self.received.close()
        finally:
            if self.log is not None:
                self.log.close()
