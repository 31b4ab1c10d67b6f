"""Fallback: a policy package that decides in the client while no server answers.

Each decision is written to a spool before it is returned, with its propensity, version and time,
and sent to POST /decisions once a server answers again; rewards are sent after the decisions. Both
carry ids by which repetitions are ignored, so a crash at any point loses and duplicates nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
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
from replaylake.datastore.lake.policies.exploration import parse_exploration
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
# Decision ids of the server that are retained for later reports: about 15 MB.
_MAX_IDS: Final = 65_536
# Refusals of one item, which are permanent. Others are due to the server's configuration.
_FINAL_STATUSES: Final = (400, 409, 410, 413, 422)
_WITHOUT_DENSITY: Final = ("deterministic", "sampled")
_ALWAYS_DRAWN: Final = ("uniform", "sampled")
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
            policy: policy name that decisions are logged with; by default the package's.
            version: policy version that decisions are logged with; by default the package's.
            explore: `epsilon=E` or `temperature=T`, as for a server; by default, the mode is taken.
            after_s: timeout of an attempt of `act`; two attempts are made.
            probe_s: interval at which a server that does not answer is probed.
            manifest_sha256: expected sha256 of the package's manifest; None: any.

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
        mode, heat, share = self._resolve_mode(deterministic, temperature, epsilon)
        with self._lock:
            rng = self._rng if seed is None else np.random.default_rng(seed)
            act = self._policy.act(
                values,
                rng=rng,
                deterministic=mode,
                temperature=heat,
                epsilon=share,
                action_mask=mask,
            )
        log_prob = None if act.log_probs is None else float(act.log_probs[0])
        action = act.actions[0].tolist()
        is_certain = mode or heat == 0 or spec.head == "deterministic"
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
                "deterministic": is_certain and not share and spec.head not in _ALWAYS_DRAWN,
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
    ) -> tuple[bool, float, float]:
        """Return (take the mode, temperature, epsilon), as the server does for such a request."""
        spec, exploration = self._policy.spec, self._exploration
        if (epsilon and isinstance(spec.action_space, Box)) or (
            temperature and spec.head in _WITHOUT_DENSITY
        ):
            raise SpaceUnsupportedError(
                f"act: found epsilon {epsilon} and temperature {temperature}, which do not apply "
                f"to the head {spec.head} and its action space. Leave them out."
            )
        mode = deterministic
        if temperature is None and epsilon is None:
            if mode is None:
                mode = not exploration.is_on
            if not mode:
                epsilon = exploration.epsilon
                mode = epsilon > 0
        elif mode is None:
            mode = not temperature
        if temperature is None:
            temperature = 1.0 if exploration.temperature is None else exploration.temperature
        return mode, temperature, epsilon or 0.0


class SpoolSender:
    """Sends what a fallback spooled whenever the server answers, in its own thread."""

    def __init__(self, fallback: FallbackPolicy, transport: Transport) -> None:
        self._fallback, self._spool, self._transport = fallback, fallback.spool, transport
        self._wake, self._is_stopping = threading.Event(), False
        self._ids: OrderedDict[str, str] = OrderedDict()  # the server's, by request_id
        # What an earlier process left is sent before any other request.
        self.is_down = self._spool.num_pending > 0
        self._thread = threading.Thread(target=self._run, name="replaylake-spool", daemon=True)
        self._thread.start()
        if self.is_down:
            self._wake.set()

    @property
    def holds_back(self) -> bool:
        """Whether reports have to be spooled, because earlier items are not sent yet."""
        return self.is_down or self._spool.num_pending > 0

    def report_failure(self) -> None:
        """Use the fallback from now on, until the server has accepted everything spooled."""
        self.is_down = True
        self._wake.set()

    def add_report(self, report: Mapping[str, Any]) -> None:
        """Spool a report of POST /feedback. Raises: StorageError."""
        self._spool.append({"kind": REPORT, **report})
        self._wake.set()

    def name_decision(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Return a report that refers to a local decision as the server knows it.

        That is by the server's decision id if it is known: the decision then becomes the step, even
        if the server logs its own answer to the same request later. Else by request_id.
        """
        decision_id = report.get("decision_id")
        if not isinstance(decision_id, str) or not decision_id.startswith(LOCAL):
            return dict(report)
        request_id = decision_id.removeprefix(LOCAL)
        if (known := self._ids.get(request_id)) is not None:
            return {**report, "decision_id": known}
        return {**_without(report, "decision_id"), "request_id": request_id}

    def close(self) -> None:
        """Try to send once more; the next process sends the rest."""
        self._is_stopping = True
        self._wake.set()
        self._thread.join()
        if self._spool.num_pending:
            self._try_to_send()
        self._spool.close()
        self._transport.close()

    def _run(self) -> None:
        while not self._is_stopping:
            self._wake.wait()
            self._wake.clear()
            while self.holds_back and not self._try_to_send() and not self._is_stopping:
                self._wake.wait(self._fallback.probe_s)
                self._wake.clear()

    def _try_to_send(self) -> bool:
        """Send all spooled items; return whether the server has accepted them."""
        if self._transport.status("/readyz") != 200:
            return False
        try:
            while items := self._spool.peek(_MAX_SENT):
                for kind, group in groupby(items, key=lambda item: item["kind"]):
                    self._send(kind, list(group))
        except (RequestFailedError, ServerUnreachableError, StorageError) as error:
            _logger.warning(
                "%d decisions and rewards are not sent yet, will retry: %s",
                self._spool.num_pending,
                error,
            )
            return False
        except Exception:  # an unexpected error must not end the thread unnoticed
            _logger.exception("decisions and rewards are not sent yet, will retry")
            return False
        self.is_down = False
        return True

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
        for item, decision_id in zip(items, ids, strict=True):
            self._ids[item["request_id"]] = decision_id
        while len(self._ids) > _MAX_IDS:
            self._ids.popitem(last=False)


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
