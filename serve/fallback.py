"""Fallback: a policy package that decides in the client while no server answers.

Each decision is written to a spool before it is returned, with its propensity, version and time,
and sent to POST /decisions once a server answers again; rewards are sent after the decisions. Both
carry ids by which repetitions are ignored, so a crash at any point loses and duplicates nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.spaces import Box, as_values, gather
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EpisodeInvalidError,
    SpaceUnsupportedError,
    StorageError,
)
from replaylake.datastore.lake.policies.exploration import (
    WITHOUT_DENSITY,
    ActingMode,
    parse_exploration,
)
from replaylake.datastore.lake.policies.package import load_policy
from replaylake.datastore.names import check_policy_name
from replaylake.serve.spool import Spool
from replaylake.serve.transport import (
    RequestFailedError,
    ServerUnreachableError,
    Transport,
    to_json,
)

LOCAL: Final = "local:"
DECISION: Final = "decision"
REPORT: Final = "report"
_MAX_SENT: Final = 256
_SERVER_ERROR: Final = 500
# A server that refuses what is spooled is asked again after so many pauses between probes.
_REFUSED_PAUSES: Final = 30
# Refusals of one item, which no repeat would change. Others are of the server's configuration.
_FINAL_STATUSES: Final = (400, 409, 410, 413, 422)
_logger = logging.getLogger(__name__)


class FallbackPolicy:
    """A policy package on this machine's disk, for a client whose server does not answer.

    It belongs to one client, whose `close` closes it.
    """

    def __init__(
        self,
        package: str | Path,
        spool: str | Path,
        *,
        policy: str | None = None,
        version: int | None = None,
        explore: str | None = None,
        after_s: float = 0.5,
        probe_s: float = 1.0,
        manifest_sha256: str | None = None,
    ) -> None:
        """Load the package, and open the spool.

        Args:
            package: the directory of a policy package.
            spool: a directory for what is not sent yet; several processes may share it.
            policy: what decisions are logged under; by default the package's own name.
            version: by default the package's own.
            explore: `epsilon=E` or `temperature=T`, as `serve` has it; by default the mode.
            after_s: how long an attempt of `act` waits for the server; two attempts are made.
            probe_s: how often a server that is away is tried again, and what is spooled is sent.
            manifest_sha256: what the package's manifest has to have.

        Raises: PackageInvalidError, NotFoundError, StorageError; SpaceUnsupportedError for a policy
        with a state, which only the server can sign; ConfigInvalidError if neither the package nor
        an argument gives a name and a version.
        """
        self._policy = load_policy(Path(package), manifest_sha256)
        manifest, spec = self._policy.manifest, self._policy.spec
        if spec.state_size:
            raise SpaceUnsupportedError(
                f"package {package}: found a policy with a state, expected one without: only the "
                "server can sign states. Use a policy without a state."
            )
        name = manifest.body.get("name") if policy is None else policy
        number = manifest.body.get("version") if version is None else version
        if name is None or number is None:
            raise ConfigInvalidError(
                f"package {package}: found no name and version in its manifest, expected those "
                "of a registered policy. Give `policy` and `version`.",
                parameter="policy",
            )
        self.name, self.version = check_policy_name(name), int(number)
        self._sha256 = manifest.sha256
        self._exploration = parse_exploration(explore)
        if self._exploration.epsilon and isinstance(spec.action_space, Box):
            raise SpaceUnsupportedError(
                f"explore: found {explore!r} for continuous actions, expected `temperature=T`."
            )
        self.after_s, self.probe_s = after_s, probe_s
        self._rng, self._lock = np.random.default_rng(), threading.Lock()
        self.spool = Spool(Path(spool))

    def act(
        self,
        observation: Any,
        *,
        request_id: str,
        episode_id: str | None = None,
        step: int | None = None,
        deterministic: bool | None = None,
        temperature: float | None = None,
        epsilon: float | None = None,
        seed: int | None = None,
        action_mask: Any = None,
        q_values: bool = False,
    ) -> dict[str, Any]:
        """Decide, spool the decision, and return what the server would answer.

        Raises: EpisodeInvalidError for an observation or a mask of another form; StorageError if
        the decision cannot be spooled: an action without a logged propensity is of no use.
        """
        spec = self._policy.spec
        raw = _to_plain(observation)
        encoding = spec.encoding
        if encoding is not None and encoding.fields and isinstance(raw, dict):
            if (fault := encoding.find_mismatch(raw)) is not None:
                name, found, expected = fault
                raise EpisodeInvalidError(
                    f"observation.{name}: found {found!r}, expected {expected}."
                )
            raw = np.asarray(encoding.encode_one(raw)).tolist()
        space = spec.observation_space
        values = as_values(space, gather(space, [raw]), "observation", 1)
        mask = None if action_mask is None else np.asarray([action_mask], dtype=bool)
        mode = self._resolve_mode(deterministic, temperature, epsilon)
        with self._lock:
            rng = self._rng if seed is None else np.random.default_rng(seed)
            act = self._policy.act(
                values,
                rng=rng,
                deterministic=mode.deterministic,
                temperature=mode.temperature,
                epsilon=mode.epsilon,
                action_mask=mask,
            )
        log_prob = None if act.log_probs is None else float(act.log_probs[0])
        action = act.actions[0].tolist()
        self.spool.append(
            {
                "kind": DECISION,
                "at_s": time.time(),
                "request_id": request_id,
                "episode_id": episode_id,
                "step": step,
                "observation": raw,
                "action": action,
                "log_prob": log_prob,
                "policy": self.name,
                "version": self.version,
                "deterministic": mode.is_mode,
                "action_mask": None if mask is None else mask[0].tolist(),
                "package_sha256": self._sha256,
            }
        )
        answer: dict[str, Any] = {
            "policy": self.name,
            "version": self.version,
            "action": action,
            "log_prob": log_prob,
            "decision_id": f"{LOCAL}{request_id}",
        }
        if q_values and act.q_values is not None:
            answer["q_values"] = act.q_values[0].tolist()
        if encoding is not None and encoding.action_names is not None:
            answer["action_name"] = encoding.action_name(action)
        return answer

    def start_sender(self, transport: Transport) -> SpoolSender:
        """Start the thread that sends spooled items whenever the server answers."""
        return SpoolSender(self, transport)

    def _resolve_mode(
        self, deterministic: bool | None, temperature: float | None, epsilon: float | None
    ) -> ActingMode:
        """Return how to act, as the server does for such a request."""
        spec = self._policy.spec
        if (epsilon and isinstance(spec.action_space, Box)) or (
            temperature and spec.head in WITHOUT_DENSITY
        ):
            raise SpaceUnsupportedError(
                f"act: found epsilon {epsilon} and temperature {temperature}, which do not apply "
                f"to the head {spec.head} and its action space. Leave them out."
            )
        return self._exploration.resolve(spec.head, deterministic, temperature, epsilon)


class SpoolSender:
    """Sends what a fallback spooled whenever the server answers, in its own thread."""

    def __init__(self, fallback: FallbackPolicy, transport: Transport) -> None:
        self._fallback, self._spool, self._transport = fallback, fallback.spool, transport
        self._wake, self._is_stopping = threading.Event(), False
        self._refusal: str | None = None  # why a server that answers takes no decisions or reports
        # What an earlier process left is sent before anything else is requested.
        self.is_down = self._spool.num_pending > 0
        self._thread = threading.Thread(target=self._run, name="replaylake-spool", daemon=True)
        self._thread.start()
        if self.is_down:
            self._wake.set()

    def holds_back(self, report: Mapping[str, Any]) -> bool:
        """Whether a report has to wait behind what is spooled.

        Where the server refuses that, the reports on its own decisions need not.
        """
        self._spool.check_usable()
        if self.is_down or not self._spool.num_pending:
            return self.is_down
        decision_id = report.get("decision_id")
        is_server_s = isinstance(decision_id, str) and not decision_id.startswith(LOCAL)
        return self._refusal is None or not is_server_s

    def report_failure(self) -> None:
        """Act by the fallback from now on, until a server answers again."""
        self.is_down = True
        self._wake.set()

    def add_report(self, report: Mapping[str, Any]) -> None:
        """Spool a report of POST /feedback. Raises: StorageError."""
        self._spool.append({"kind": REPORT, **report})

    def name_decision(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Return a report that refers to a local decision as the server knows it.

        That is its request: an id has a reward window from the decision on, which an outage may
        outlast, and a decision that is sent twice has two.
        """
        decision_id = report.get("decision_id")
        if not isinstance(decision_id, str) or not decision_id.startswith(LOCAL):
            return dict(report)
        request_id = decision_id.removeprefix(LOCAL)
        return {**_without(report, "decision_id"), "request_id": request_id}

    def close(self) -> None:
        """Try once more, then leave the rest to the next process."""
        if not self._spool.is_own:
            return
        self._is_stopping = True
        self._wake.set()
        self._thread.join()
        if self._spool.num_pending:
            self._try_to_send()
        self._spool.close()
        self._transport.close()

    def _run(self) -> None:
        while not self._is_stopping:
            # Not only when it is woken: a decision may be spooled at any moment, as the last one
            # of an outage after all others were sent.
            is_refused = self._refusal is not None and not self.is_down
            self._wake.wait(self._fallback.probe_s * (_REFUSED_PAUSES if is_refused else 1))
            self._wake.clear()
            if not self._is_stopping and (self.is_down or self._spool.num_pending):
                self._try_to_send()

    def _try_to_send(self) -> None:
        """Send all of it, if the server answers."""
        if self._transport.status("/readyz") != 200:
            return
        try:
            while items := self._spool.peek(_MAX_SENT):
                for kind, group in groupby(items, key=lambda item: item["kind"]):
                    self._send(kind, list(group))
        except ServerUnreachableError as error:
            self._log_unsent(str(error))
            return
        except RequestFailedError as error:
            self._log_unsent(str(error))
            if error.status >= _SERVER_ERROR:
                return
            # It answers, so that it can act, but takes no decisions of clients: it logs none, is
            # of an earlier release, or the token lacks the role.
            self._refusal = str(error)
        except StorageError as error:
            self._log_unsent(str(error))
        except Exception:  # a fault must not end what nobody watches
            _logger.exception("decisions and rewards are not sent yet, will retry")
        else:
            self._refusal = None
        self.is_down = False

    def _log_unsent(self, error: str) -> None:
        if error == self._refusal:  # logged when it was refused first
            return
        _logger.warning(
            "%d decisions and rewards are not sent yet, will retry: %s",
            self._spool.num_pending,
            error,
        )

    def _send(self, kind: str, items: Sequence[Mapping[str, Any]]) -> None:
        try:
            self._post(kind, items)
        except RequestFailedError as error:
            if error.status not in _FINAL_STATUSES:
                raise
            if len(items) > 1:
                for item in items:
                    self._send(kind, [item])
                return
            _logger.error("%s %s: refused, stored beside the spool: %s", kind, items[0], error)
            self._spool.refuse(items[0], str(error))
        self._spool.drop(len(items))

    def _post(self, kind: str, items: Sequence[Mapping[str, Any]]) -> None:
        if kind == REPORT:
            reports = [self.name_decision(_without(item, "kind")) for item in items]
            self._transport.request("POST", "/feedback", to_json({"feedback": reports}))
            return
        now_s = time.time()
        decisions = [
            {**_without(item, "kind", "at_s"), "age_s": max(0.0, now_s - item["at_s"])}
            for item in items
        ]
        answer = self._transport.request("POST", "/decisions", to_json({"decisions": decisions}))
        ids = answer.get("decision_ids")
        if not isinstance(ids, list) or len(ids) != len(items):
            message = (
                f"found another number of ids than the {len(items)} decisions sent. Check the URL"
            )
            raise RequestFailedError(502, "answer", message)


def _without(item: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in names and value is not None}


def _to_plain(value: Any) -> Any:
    """Return a value that JSON can encode."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: _to_plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(part) for part in value]
    return value
