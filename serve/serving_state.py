"""What a worker holds while it serves: the policies, how they explore, its limits and its log."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field

from replaylake.datastore.errors import ReplayLakeError
from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.feedback.journal import Journal
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.datastore.lake.policies.registry import Registry
from replaylake.serve.messages import RETRY_AFTER_S, RETRY_LATER, RequestRefusedError
from replaylake.serve.recording.decision_log import DecisionLog
from replaylake.serve.recording.feedback_join_process import FeedbackJoinProcess
from replaylake.serve.recording.received_log import ReceivedLog
from replaylake.serve.safety.access_log import AccessLog
from replaylake.serve.safety.hosts import AllowedHosts
from replaylake.serve.safety.limits import Limits
from replaylake.serve.safety.tokens import Tokens
from replaylake.serve.versions.alias_follower import AliasFollower
from replaylake.serve.versions.router import Router, ServedPolicy
from replaylake.serve.versions.state_tokens import StateSigner

_logger = logging.getLogger(__name__)


@dataclass
class ServingState:
    """What a worker holds while it runs.

    log is None where nothing is logged, follower where no alias is followed. states signs what
    clients carry for policies that remember; takes_options: requests may say how to explore.
    registry is that of the lake, None without one.
    """

    router: Router[ServedPolicy]
    signer: DecisionSigner
    log: DecisionLog | None = None
    exploration: Exploration = field(default_factory=Exploration)
    limits: Limits = field(default_factory=Limits)
    tokens: Tokens = field(default_factory=Tokens)
    hosts: AllowedHosts = field(default_factory=AllowedHosts)
    access_log: AccessLog | None = None
    follower: AliasFollower[ServedPolicy] | None = None
    feedback_join: FeedbackJoinProcess | None = None
    received: ReceivedLog | None = None  # opened with the first episode that was acted elsewhere
    states: StateSigner = field(default_factory=lambda: StateSigner(os.urandom(32)))
    takes_options: bool = True
    registry: Registry | None = None
    _opening: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _is_closed: bool = False

    @property
    def worker(self) -> str:
        """The name of this worker, which no other has."""
        return self.signer.worker

    @property
    def spaces_hint(self) -> str:
        """A sentence on where a client finds the spaces of the dataset."""
        return "GET /policy has the spaces."

    def find_dataset(self) -> Dataset:
        """Return the dataset that is logged to. Raises: RequestRefusedError if there is none."""
        if self.log is None:
            message = "this server logs no decisions; start it with `log_to`, a dataset to log to"
            raise RequestRefusedError(404, "path", message)
        return self.log.dataset

    def open_received(self) -> ReceivedLog:
        """Return the journal of received steps, opened with the first of them.

        Raises: RequestRefusedError if nothing is logged, or no longer.
        """
        dataset = self.find_dataset()
        with self._opening:
            if self.received is None:
                if self._is_closed:
                    message = f"stopping; retry in {RETRY_AFTER_S} s"
                    raise RequestRefusedError(503, "server", message, headers=RETRY_LATER)
                config = None if self.log is None else self.log.decisions.config
                self.received = ReceivedLog(dataset, self.worker, config)
            return self.received

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
        with self._opening:
            self._is_closed = True
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
