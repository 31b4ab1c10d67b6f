"""Decisions and rewards into the lake: written before they are answered, committed soon after."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from replaylake.datastore.episodes.schema import (
    ACTION,
    ACTION_MASK,
    EPISODE_ID,
    OBSERVATION,
    POLICY,
    POLICY_VERSION,
    STEP,
    TIMESTAMP,
)
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import StorageError
from replaylake.datastore.feedback.decision_id import DecisionId
from replaylake.datastore.feedback.decisions import (
    DECIDED_BY_CLIENT,
    DECISION_ID,
    DEFAULT_WINDOW_S,
    DETERMINISTIC,
    LOG_PROB,
    PACKAGE_SHA256,
    REQUEST_ID,
    decisions_encoder,
    ensure_feedback_tables,
    recover_feedback,
    rewards_encoder,
)
from replaylake.datastore.feedback.journal import Journal, JournalConfig
from replaylake.datastore.feedback.segments import Recovered
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.policies.policy import PolicySpec

# What becomes of an observation whose decision cannot be logged: it is refused, or answered.
REFUSE: Final = "refuse"
SERVE: Final = "serve"
ON_LOG_FAILURE: Final = (REFUSE, SERVE)
_LOG_INTERVAL_S: Final = 1.0
_logger = logging.getLogger(__name__)


@dataclass(slots=True)  # not frozen: that would cost 2 us
class DecisionBatch:
    """B decisions of one version as they were taken, ready to be logged: one element a row.

    observations: as JSON has them, or an array [B, *obs]. masks: None where none was given.
    deterministic: nothing was left to chance. package_sha256: of the manifest of the package.
    decided_by_client: a client took them itself, and sent them later.
    """

    ids: Sequence[str]
    request_ids: Sequence[str | None]
    episode_ids: Sequence[str | None]
    steps: Sequence[int | None]
    observations: Sequence[Any] | Array
    actions: Sequence[Any]
    log_probs: Sequence[float | None]
    masks: Sequence[Sequence[bool]] | None
    timestamp: int
    policy: str
    policy_version: int
    deterministic: bool
    package_sha256: str | None
    decided_by_client: bool = False


class DecisionLog:
    """One worker's way into a dataset's decisions and rewards."""

    def __init__(
        self,
        dataset: Dataset,
        spec: PolicySpec,
        worker: str,
        *,
        window_s: float = DEFAULT_WINDOW_S,
        config: JournalConfig | None = None,
        on_failure: str = REFUSE,
    ) -> None:
        """Create what is absent, commit what killed servers left, and open this worker's journals.

        Raises: SchemaMismatchError if the dataset's spaces are not the policy's.
        """
        ensure_feedback_tables(dataset, spec.observation_space, spec.action_space, spec.encoding)
        self.dataset = dataset
        self.window_s = window_s
        self.on_failure = on_failure
        self.num_lost = 0  # decisions that were answered and not logged
        self._logged_s, self._loss_lock = -_LOG_INTERVAL_S, threading.Lock()
        self.takes_masks = dataset.spec.mask_size is not None
        self.recovered: Recovered = recover_feedback(dataset)
        self.decisions = Journal(
            dataset.decisions, decisions_encoder(dataset), worker=worker, config=config
        )
        self.rewards = Journal(
            dataset.rewards, rewards_encoder(dataset), worker=worker, config=config
        )

    @property
    def failure(self) -> str | None:
        """Why nothing more can be logged until the server starts again, or None."""
        return self.decisions.failure or self.rewards.failure

    @property
    def refuses(self) -> bool:
        """Whether no observation is acted on any more, as nothing can be logged."""
        return self.on_failure == REFUSE and self.failure is not None

    def write_decisions(self, decided: Sequence[DecisionBatch]) -> list[bytes] | None:
        """Write decisions; on return a killed process does not lose them.

        Returns their records; None where they were not written. Raises: StorageError, unless
        failures are to be served through.
        """
        records = [record for one in decided for record in encode_records(one)]
        try:
            self.decisions.append(records)
        except StorageError as error:
            if self.on_failure == REFUSE:
                raise
            self._count_lost(sum(len(one.ids) for one in decided), error)
            return None
        return records

    def write_received(self, decided: Sequence[DecisionBatch]) -> None:
        """Write decisions that were taken elsewhere, all or none.

        Raises: StorageError, regardless of `on_failure`: the sender can send them again.
        """
        self.decisions.append([record for one in decided for record in encode_records(one)])

    def _count_lost(self, num: int, error: StorageError) -> None:
        with self._loss_lock:
            self.num_lost += num
            now_s = time.monotonic()
            is_said = now_s - self._logged_s < _LOG_INTERVAL_S
            self._logged_s = self._logged_s if is_said else now_s
        if not is_said:
            _logger.error(
                "answered without logging, %d decisions lost since the start: %s",
                self.num_lost,
                error,
            )

    def write_rewards(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write reports, all or none. Raises: StorageError, whatever `on_failure` says.

        Who reports can send it again; a client that acts cannot wait.
        """
        self.rewards.append(
            [orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY) for record in records]
        )

    def is_too_old(self, decision: DecisionId, timestamp: int) -> bool:
        """Whether the reward window of a decision has closed at `timestamp` (us)."""
        return timestamp - decision.timestamp > self.window_s * 1e6

    def close(self) -> None:
        """Commit everything. Raises: ReplayLakeError; the next start then commits what is left."""
        try:
            self.decisions.close()
        finally:
            self.rewards.close()


class Clock:
    """Clock whose times (microseconds since 1970, UTC) never decrease, so ids sort by issue order.

    All endpoints of a worker share one clock: a report is never earlier than the decision that it
    names, even if the machine's clock was set back in between.
    """

    def __init__(self) -> None:
        self._last = 0
        self._lock = threading.Lock()

    def now(self) -> int:
        with self._lock:
            self._last = max(self._last, time.time_ns() // 1000)
            return self._last


def encode_records(decided: DecisionBatch) -> list[bytes]:
    """Return a JSON object for each decision; what all have in common is written out once.

    Each has every column of the table, null where nothing is known: one that is left out would be
    null in the table without anybody's notice.
    """
    common = orjson.dumps(
        {
            TIMESTAMP: decided.timestamp,
            POLICY: decided.policy,
            POLICY_VERSION: decided.policy_version,
            DETERMINISTIC: decided.deterministic,
            PACKAGE_SHA256: decided.package_sha256,
            DECIDED_BY_CLIENT: decided.decided_by_client,
        }
    )
    tail = b"," + common[1:]
    num = len(decided.ids)
    rows = zip(
        decided.ids,
        decided.request_ids,
        decided.episode_ids,
        decided.steps,
        decided.observations,
        decided.actions,
        decided.log_probs,
        [None] * num if decided.masks is None else decided.masks,
        strict=True,
    )
    # JSON numbers as Python floats come back bit for bit, float32 included.
    return [
        orjson.dumps(
            {
                DECISION_ID: decision_id,
                REQUEST_ID: request_id,
                EPISODE_ID: episode_id,
                STEP: step,
                OBSERVATION: observation,
                ACTION: action,
                LOG_PROB: log_prob,
                ACTION_MASK: mask,
            },
            option=orjson.OPT_SERIALIZE_NUMPY,
        )[:-1]
        + tail
        for decision_id, request_id, episode_id, step, observation, action, log_prob, mask in rows
    ]


def json_log_probs(log_probs: Array | None, num: int) -> list[float | None]:
    """Return one number or None (unknown) for each of `num` actions."""
    if log_probs is None:
        return [None] * num
    return [value if value == value else None for value in log_probs.tolist()]
