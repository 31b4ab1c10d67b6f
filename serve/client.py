"""Clients of a policy server, with only the standard library and numpy.

    with PolicyClient("http://127.0.0.1:3000") as client:
        chosen = client.act([0, 0, 0.02, 0], episode_id="visit-1", step=0)
        client.feedback(1.0, decision_id=chosen.decision_id, terminated=True)

Any number of threads may use one client: each has a connection of its own, which is kept alive. A
request that is lost on the way (the server was killed, the connection cut) or answered with 503 is
sent again, after what Retry-After says: everything here means the same when it comes twice. A
decision carries a request_id, so that a repeated request gives one step. With a fallback
(fallback.py), a policy package on this machine acts while no server answers; its decisions are
logged when one does.
"""

from __future__ import annotations

import asyncio
import io
import ssl
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar
from urllib.parse import urlencode

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.errors import ReplayLakeError
from replaylake.serve.transport import RequestFailedError as RequestFailedError
from replaylake.serve.transport import ServerUnreachableError as ServerUnreachableError
from replaylake.serve.transport import Transport, to_json

if TYPE_CHECKING:
    from replaylake.serve.fallback import FallbackPolicy, SpoolSender

_Result = TypeVar("_Result")
_SERVER_ERROR: Final = 500
_NPY: Final = "application/x-npy"
# Above so many numbers an array is sent as its bytes.
_SMALL: Final = 64
# Then what else there is stands in the query, which proxies cut at 8 KiB: a state of a few frames,
# 75 kB of 3 x 84 x 84, goes into a body of JSON and the array with it.
_MAX_QUERY_CHARS: Final = 4096


class ClientClosedError(ReplayLakeError):
    """A request of an AsyncPolicyClient that was closed before."""


@dataclass(frozen=True, slots=True)
class Action:
    """What one observation was answered with.

    action: a value of the action space, as JSON has it. log_prob: the natural logarithm of the
    probability (density) of `action`, exploration included; None where the policy has none. state:
    for the next act() of the episode, of policies that remember. q_values and action_name: where
    asked for, or where actions have names. unknown_categories: the fields of `observation` whose
    text the policy does not know.
    """

    action: Any
    log_prob: float | None
    decision_id: str
    request_id: str
    policy: str
    version: int
    state: str | None = None
    q_values: list[float] | None = None
    action_name: str | None = None
    unknown_categories: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Actions:
    """What B observations were answered with, one element each.

    actions: [B, *act], or a list of values where the space is no array. log_probs: float64 [B], NaN
    where the policy has none. q_values: float64 [B, A].
    """

    actions: Any
    log_probs: NDArray[np.float64]
    decision_ids: list[str]
    request_ids: list[str]
    policies: list[str]
    versions: list[int]
    states: list[str] | None = None
    q_values: NDArray[np.float64] | None = None
    action_names: list[str] | None = None
    unknown_categories: list[list[str]] | None = None

    def __len__(self) -> int:
        return len(self.decision_ids)


class PolicyClient:
    """A server, by its URL. Close it, or use it as a context manager."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = 10.0,
        retry_s: float = 30.0,
        context: ssl.SSLContext | None = None,
        fallback: FallbackPolicy | None = None,
    ) -> None:
        """Connect with the first request.

        Args:
            url: such as http://127.0.0.1:3000.
            token: what the server asks for, if it asks.
            timeout_s: of one attempt.
            retry_s: how long a request is sent again before it fails; 0 for never.
            context: for https with other than the system's certificates.
            fallback: acts where the server does not answer, or with a status of 500 or above. Then
                act and feedback wait for it no longer than `fallback.after_s`, twice. A process
                that is forked opens its own: in it, this client raises StorageError.

        Raises: ConfigInvalidError if the URL is none of http or https.
        """
        self.url = url.rstrip("/")
        self._transport = Transport(url, token, timeout_s, retry_s, context)
        # Without a fallback, both are the same; with one, act and feedback have a short timeout.
        self._urgent = self._transport
        self._fallback = fallback
        self._sender: SpoolSender | None = None
        if fallback is not None:
            # Without retries: the sender itself retries, and close() must not wait for a server.
            self._sender = fallback.start_sender(Transport(url, token, timeout_s, 0.0, context))
            quick_s = min(timeout_s, fallback.after_s)
            self._urgent = Transport(url, token, quick_s, fallback.after_s, context)

    def __enter__(self) -> PolicyClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections of all threads; another request opens a new one.

        With a fallback: send what it spooled, if the server answers; the next process sends the
        rest. Then this client is at its end, and a StorageError says so.
        """
        if self._sender is not None:
            self._sender.close()
            self._urgent.close()
        self._transport.close()

    @property
    def num_spooled(self) -> int:
        """How many decisions and reports a fallback has still to send."""
        return 0 if self._fallback is None else self._fallback.spool.num_pending

    def act(
        self,
        observation: Any,
        *,
        episode_id: str | None = None,
        request_id: str | None = None,
        step: int | None = None,
        deterministic: bool | None = None,
        temperature: float | None = None,
        epsilon: float | None = None,
        seed: int | None = None,
        action_mask: Sequence[bool] | NDArray[np.bool_] | None = None,
        q_values: bool = False,
        state: str | None = None,
    ) -> Action:
        """Ask for one action.

        Args:
            observation: one value of the observation space, [*obs], or named fields.
            episode_id: the caller's name for the episode that it is a step of.
            request_id: the caller's name for this request; one is made up where it is left out.
            step: the caller's number of the step in its episode, for feedback by it.
            deterministic: the mode instead of a draw, or not, whatever the server does by itself.
            temperature: draw at this temperature.
            epsilon: the probability of a uniform draw instead of the mode.
            seed: makes the draw repeatable.
            action_mask: bool [A], true where allowed.
            q_values: answer those as well.
            state: what the answer before had, of policies that remember.

        Raises: RequestFailedError, ServerUnreachableError.
        """
        request_id = request_id or uuid.uuid4().hex
        fields = {
            "episode_id": episode_id,
            "request_id": request_id,
            "step": step,
            "deterministic": deterministic,
            "temperature": temperature,
            "epsilon": epsilon,
            "seed": seed,
            "q_values": q_values or None,
            "state": state,
        }
        answer = self._act_or_fall_back(observation, fields, action_mask)
        return Action(
            action=answer["action"],
            log_prob=answer["log_prob"],
            decision_id=answer["decision_id"],
            request_id=request_id,
            policy=answer["policy"],
            version=answer["version"],
            state=answer.get("state"),
            q_values=answer.get("q_values"),
            action_name=answer.get("action_name"),
            unknown_categories=answer.get("unknown_categories", ()),
        )

    def act_batch(
        self,
        observations: Sequence[Any] | NDArray[Any],
        *,
        episode_ids: Sequence[str | None] | None = None,
        request_id: str | None = None,
        steps: Sequence[int | None] | None = None,
        deterministic: bool | None = None,
        temperature: float | None = None,
        epsilon: float | None = None,
        seed: int | None = None,
        action_masks: Sequence[Any] | NDArray[np.bool_] | None = None,
        q_values: bool = False,
        states: Sequence[str | None] | None = None,
    ) -> Actions:
        """Ask for B actions at once; the arguments are as those of act, one of each a row.

        observations is [B, *obs]. An array is sent as its bytes, unless a row has an id, a step, a
        state or a mask of its own: then as JSON. Row i is of the request `<request_id>/<i>`.
        Raises: RequestFailedError, ServerUnreachableError.
        """
        request_id = request_id or uuid.uuid4().hex
        fields = {
            "request_id": request_id,
            "deterministic": deterministic,
            "temperature": temperature,
            "epsilon": epsilon,
            "seed": seed,
            "q_values": q_values or None,
        }
        columns = {
            "episode_ids": episode_ids,
            "steps": steps,
            "action_masks": action_masks,
            "states": states,
        }
        answer = self._act_on_batch(observations, fields, columns)
        num = len(answer["decision_ids"])
        return Actions(
            actions=_as_array(answer["actions"]),
            log_probs=np.array(answer["log_probs"], dtype=np.float64),
            decision_ids=answer["decision_ids"],
            request_ids=[f"{request_id}/{row}" for row in range(num)],
            policies=answer.get("policies") or [answer["policy"]] * num,
            versions=answer.get("versions") or [answer["version"]] * num,
            states=answer.get("states"),
            q_values=_q_values(answer.get("q_values")),
            action_names=answer.get("action_names"),
            unknown_categories=answer.get("unknown_categories"),
        )

    def feedback(
        self,
        reward: float,
        *,
        decision_id: str | None = None,
        request_id: str | None = None,
        episode_id: str | None = None,
        step: int | None = None,
        terminated: bool = False,
        truncated: bool = False,
        final_observation: Any = None,
        mode: Literal["last", "sum"] = "last",
        feedback_id: str | None = None,
    ) -> None:
        """Report what a decision led to, named in one way.

        Args:
            reward: what the action caused.
            decision_id: as act answered it.
            request_id: as act was given it, or as its answer has it.
            episode_id: with `step`, as act was given both.
            step: the caller's number of the step.
            terminated: whether the episode ended here by its task.
            truncated: whether it was cut off here.
            final_observation: what was seen after the last action, [*obs].
            mode: "last" replaces what was reported before, "sum" adds to it.
            feedback_id: the caller's name for this report, under which it counts once; one is made
                up for a sum.

        Raises: RequestFailedError (404: unknown decision; 410: past its reward window; 409: the
        feedback_id was used for a different report), ServerUnreachableError.
        """
        if mode == "sum" and feedback_id is None:
            feedback_id = uuid.uuid4().hex
        report = {
            "decision_id": decision_id,
            "request_id": request_id,
            "episode_id": episode_id,
            "step": step,
            "reward": reward,
            "terminated": terminated or None,
            "truncated": truncated or None,
            "final_observation": final_observation,
            "mode": None if mode == "last" else mode,
            "feedback_id": feedback_id,
        }
        self._report([_drop_none(report)])

    def feedback_batch(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Send several reports, each the arguments of feedback as a mapping; all or none is taken.

        A sum needs a feedback_id of its own. Raises: RequestFailedError, ServerUnreachableError.
        """
        self._report([_drop_none(report) for report in reports], is_batch=True)

    def episodes(self, episodes: Sequence[Mapping[str, Any]]) -> int:
        """Send whole episodes, or pieces of them, that were acted elsewhere; return their steps.

        Each has `episode_id`, `observations` [T, *obs], `actions` [T, *act], `rewards` [T] and the
        further fields of POST /episodes (docs/HTTP.md); a log-probability that is not known is
        None or NaN. All or none is taken. Raises:
        RequestFailedError (409: it contradicts what was sent before), ServerUnreachableError.
        """
        items = [
            _drop_none({**one, "log_probs": _nan_to_none(one.get("log_probs"))}) for one in episodes
        ]
        answer = self._post("/episodes", {"episodes": items})
        steps: int = answer["steps"]
        return steps

    def policy(self) -> dict[str, Any]:
        """Return what the server says of its policy.

        Raises: RequestFailedError, ServerUnreachableError.
        """
        return self._transport.request("GET", "/policy")

    def ready(self) -> bool:
        """Whether the server answers and can log; asked once."""
        return self._transport.status("/readyz") == 200

    def _act_or_fall_back(
        self, observation: Any, fields: Mapping[str, Any], action_mask: Any
    ) -> dict[str, Any]:
        if self._fallback is None or self._sender is None:
            return self._act("observation", observation, fields, {"action_mask": action_mask})
        self._fallback.spool.check_usable()
        if not self._sender.is_down:
            try:
                return self._act("observation", observation, fields, {"action_mask": action_mask})
            except (RequestFailedError, ServerUnreachableError) as error:
                if not _is_unavailable(error):
                    raise
                self._sender.report_failure()
        if fields["state"] is not None:
            raise ServerUnreachableError(
                f"{self.url}/act: no server answers, and the fallback cannot read a `state` of the "
                "server. Start a new episode without `state`."
            )
        known = {name: value for name, value in fields.items() if name != "state"}
        known["q_values"] = bool(known["q_values"])
        return self._fallback.act(observation, action_mask=action_mask, **known)

    def _act_on_batch(
        self, observations: Any, fields: Mapping[str, Any], columns: Mapping[str, Any]
    ) -> dict[str, Any]:
        if self._fallback is None or self._sender is None:
            return self._act("observations", observations, fields, columns)
        self._fallback.spool.check_usable()
        if not self._sender.is_down:
            try:
                return self._act("observations", observations, fields, columns)
            except (RequestFailedError, ServerUnreachableError) as error:
                if not _is_unavailable(error):
                    raise
                self._sender.report_failure()
        answers = []
        for row, observation in enumerate(observations):
            own = {
                **fields,
                "request_id": f"{fields['request_id']}/{row}",
                "episode_id": _at(columns["episode_ids"], row),
                "step": _at(columns["steps"], row),
                "state": _at(columns["states"], row),
            }
            mask = _at(columns["action_masks"], row)
            answers.append(self._act_or_fall_back(observation, own, mask))
        names = {"action": "actions", "log_prob": "log_probs", "decision_id": "decision_ids"}
        names |= {"policy": "policies", "version": "versions", "q_values": "q_values"}
        names |= {"action_name": "action_names"}
        return {
            plural: [answer[name] for answer in answers]
            for name, plural in names.items()
            if all(name in answer for answer in answers)
        }

    def _report(self, reports: Sequence[Mapping[str, Any]], *, is_batch: bool = False) -> None:
        """Send reports; spool them if no server answers or earlier ones are still spooled."""
        sender = self._sender
        if sender is not None and any(map(sender.holds_back, reports)):
            for report in reports:
                sender.add_report(report)
            return
        if sender is not None:
            reports = [sender.name_decision(report) for report in reports]
        try:
            self._post("/feedback", {"feedback": reports} if is_batch else reports[0])
        except (RequestFailedError, ServerUnreachableError) as error:
            if sender is None or not _is_unavailable(error):
                raise
            sender.report_failure()
            for report in reports:
                sender.add_report(report)

    def _act(
        self, name: str, raw: Any, fields: Mapping[str, Any], columns: Mapping[str, Any]
    ) -> dict[str, Any]:
        body, rows = _drop_none(fields), _drop_none(columns)
        is_short = len(body.get("state", "")) <= _MAX_QUERY_CHARS
        if isinstance(raw, np.ndarray) and raw.size > _SMALL and not rows and is_short:
            query = {key: _in_query(value) for key, value in body.items()}
            # One more dimension than an observation has makes it many.
            path = f"/act?{urlencode(query)}"
            return self._urgent.request("POST", path, _npy(raw), _NPY)
        return self._urgent.request("POST", "/act", to_json({name: raw, **body, **rows}))

    def _post(self, path: str, content: Any) -> dict[str, Any]:
        transport = self._transport if path == "/episodes" else self._urgent
        return transport.request("POST", path, to_json(content))


class AsyncPolicyClient:
    """A PolicyClient for asyncio, with the same arguments, retries and fallback, and coroutines.

    Each request runs in one of `max_connections` threads with its own connection, so that the event
    loop is never blocked. The request of a cancelled call may still be sent; it takes effect once.
    A call after `close` raises ClientClosedError.
    """

    def __init__(self, url: str, *, max_connections: int = 16, **options: Any) -> None:
        """Connect with the first request.

        max_connections: concurrent requests; others wait. options: arguments of PolicyClient.
        Raises: as PolicyClient.
        """
        self._client = PolicyClient(url, **options)
        self._threads = ThreadPoolExecutor(max_connections, "replaylake-client")
        self._is_closed = False
        self.url = self._client.url

    async def __aenter__(self) -> AsyncPolicyClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def num_spooled(self) -> int:
        """How many decisions and reports a fallback has still to send."""
        return self._client.num_spooled

    async def act(self, observation: Any, **options: Any) -> Action:
        """Request one action, as PolicyClient.act."""
        return await self._run(self._client.act, observation, **options)

    async def act_batch(self, observations: Any, **options: Any) -> Actions:
        """Request B actions at once, as PolicyClient.act_batch."""
        return await self._run(self._client.act_batch, observations, **options)

    async def feedback(self, reward: float, **options: Any) -> None:
        """Report what a decision led to, as PolicyClient.feedback."""
        await self._run(self._client.feedback, reward, **options)

    async def feedback_batch(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Send several reports, as PolicyClient.feedback_batch."""
        await self._run(self._client.feedback_batch, reports)

    async def episodes(self, episodes: Sequence[Mapping[str, Any]]) -> int:
        """Send whole episodes, as PolicyClient.episodes."""
        return await self._run(self._client.episodes, episodes)

    async def policy(self) -> dict[str, Any]:
        """Return the server's description of its policy."""
        return await self._run(self._client.policy)

    async def ready(self) -> bool:
        """Whether the server answers and can log; one request without retries."""
        return await self._run(self._client.ready)

    async def close(self) -> None:
        """Wait for requests in progress, then close, as PolicyClient.close."""
        self._is_closed = True
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._threads.shutdown)
        await loop.run_in_executor(None, self._client.close)

    async def _run(self, call: Callable[..., _Result], *arguments: Any, **options: Any) -> _Result:
        loop = asyncio.get_running_loop()
        try:
            request = loop.run_in_executor(self._threads, partial(call, *arguments, **options))
        except RuntimeError as error:
            if not self._is_closed:
                raise
            raise ClientClosedError(
                f"client of {self.url}: found a request after `close`, expected none. Create "
                "another AsyncPolicyClient."
            ) from error
        return await request


# The name of earlier releases.
Client = PolicyClient


def _is_unavailable(error: RequestFailedError | ServerUnreachableError) -> bool:
    """Whether the server is at fault, not the request."""
    return isinstance(error, ServerUnreachableError) or error.status >= _SERVER_ERROR


def _at(column: Sequence[Any] | NDArray[Any] | None, row: int) -> Any:
    return None if column is None else column[row]


def _drop_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _nan_to_none(log_probs: Any) -> list[float | None] | None:
    """Return log-probabilities with None for those that are NaN."""
    if log_probs is None:
        return None
    values = (None if value is None else float(value) for value in log_probs)
    return [None if value is None or value != value else value for value in values]


def _in_query(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _npy(array: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
    return file.getvalue()


def _as_array(values: list[Any]) -> Any:
    return values if isinstance(values[0], dict | str) else np.asarray(values)


def _q_values(values: Any) -> NDArray[np.float64] | None:
    return None if values is None else np.asarray(values, dtype=np.float64)
