"""What a worker holds while it serves: the policies, how they explore, its limits and its log."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field

from replaylake.datastore.errors import ReplayLakeError
from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.feedback.journal import Journal
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

_logger = logging.getLogger(__name__)


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

    @property
    def journals(self) -> dict[str, Journal]:
        """What is being written to, by the table into which it is committed."""
        journals = {}
        if self.log is not None:
            journals = {"decisions": self.log.decisions, "rewards": self.log.rewards}
        if self.received is not None:
            journals["received"] = self.received.journal
        return journals

    def start(self) -> None:
        """Begin to follow aliases, and to join decisions with their rewards."""
        if self.follower is not None:
            self.follower.start()
        if self.feedback_join is not None:
            self.feedback_join.start()

    def find_degraded(self) -> list[str]:
        """Return what does not work while requests are still answered.

        `feedback-join`: the last round failed; `alias`: the lake cannot be asked for new versions;
        `log`: decisions are served that cannot be logged any more; `episodes`: neither can pieces
        of episodes be; `commit`: what was logged waits on disk, as the lake does not take it.
        """
        followed = () if self.follower is None else self.follower.followed
        parts = {
            "feedback-join": self.feedback_join is not None and self.feedback_join.has_failed,
            "alias": any(one.unreachable for one in followed),
            "log": self.log is not None and self.log.failure is not None,
            "commit": any(journal.commit_failure for journal in self.journals.values()),
            "episodes": self.received is not None and self.received.failure is not None,
        }
        return [name for name, is_degraded in parts.items() if is_degraded]

    def close(self) -> None:
        """Follow no more, and commit what was logged, or log what the next start has to commit."""
        if self.follower is not None:
            self.follower.stop()
        if self.feedback_join is not None:
            self.feedback_join.stop()
        if self.access_log is not None:
            self.access_log.close()
        for table, journal in self.journals.items():
            try:
                journal.close()
            except ReplayLakeError as error:
                _logger.error("%s not committed at the end: %s", table, error)
