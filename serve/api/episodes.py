"""POST /episodes: whole episodes, or pieces of them, that were acted elsewhere.

In a dataset of texts an episode may be a dialogue, in any shape of the format `transcripts`; in one
of events, whose candidates have features, an event of Vowpal Wabbit's dsjson.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol

import numpy as np
from starlette.concurrency import run_in_threadpool

from replaylake.datastore.episodes.episode import (
    LOG_PROB_TOLERANCE,
    MAX_STEP,
    Episode,
    is_countable,
)
from replaylake.datastore.episodes.schema import ACTION_FEATURES, DatasetSpec
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.episodes.tokens import (
    ACTION_LOG_PROBS,
    ACTION_TOKENS,
    IS_CONTINUATION,
    IS_TRAINABLE,
    OBSERVATION_TOKENS,
    PARENT_AGENT_ID,
    PARENT_STEP,
)
from replaylake.datastore.errors import (
    EpisodeInvalidError,
    SchemaMismatchError,
    SourceInvalidError,
)
from replaylake.datastore.feedback.received_table import ReceivedPiece, make_received_piece
from replaylake.datastore.feedback.reports import MAX_REWARD
from replaylake.datastore.interchange.formats.dsjson import events
from replaylake.datastore.interchange.formats.generations.rows import EXTRAS, Row
from replaylake.datastore.interchange.formats.transcripts.dialogues import (
    is_transcript,
    parse_dialogues,
)
from replaylake.datastore.interchange.formats.transcripts.transcripts import iter_rows
from replaylake.datastore.lake.dataset import Dataset
from replaylake.serve.api.bodies import check_fields, check_name, read_fields
from replaylake.serve.api.values import (
    encode_observations,
    invalid_value_error,
    read_values,
    shorten,
)
from replaylake.serve.messages import JSON, Request, RequestRefusedError, Response, json_response
from replaylake.serve.monitoring.metrics import Metrics
from replaylake.serve.recording.decision_log import Clock
from replaylake.serve.recording.received_log import ContradictionError, ReceivedLog
from replaylake.serve.safety.limits import Limits

EPISODE_FIELDS: Final = (
    "episode_id",
    "agent_id",
    "first_step",
    "observations",
    "actions",
    "rewards",
    "terminated",
    "truncated",
    "final_observation",
    "log_probs",
    "policy",
    "policy_version",
    "timestamps",
    "action_masks",
)
# Lists with a value for each step, of a dataset that has these columns.
TOKEN_FIELDS: Final[tuple[str, ...]] = (
    OBSERVATION_TOKENS,
    ACTION_TOKENS,
    ACTION_LOG_PROBS,
    PARENT_AGENT_ID,
    PARENT_STEP,
    IS_CONTINUATION,
    IS_TRAINABLE,
)
_REQUIRED: Final = ("episode_id", "observations", "actions", "rewards")
# The years 1 and 9999: what others than Arrow hold.
_TIMESTAMPS: Final = (-62_135_596_800_000_000, 253_402_300_799_999_999)


def list_episode_fields(spec: DatasetSpec) -> tuple[str, ...]:
    """Return the fields that an episode with steps may have."""
    return (*EPISODE_FIELDS, *list_token_fields(spec))


def list_token_fields(spec: DatasetSpec) -> tuple[str, ...]:
    """Return the fields of tokens that an episode, or a dialogue, may have."""
    return tuple(name for name in TOKEN_FIELDS if name in spec.extras)


def takes_dialogues(spec: DatasetSpec) -> bool:
    """Whether an episode may be a dialogue."""
    return EXTRAS.keys() <= spec.extras.keys()


def takes_events(spec: DatasetSpec) -> bool:
    """Whether an episode may be an event of dsjson."""
    spaces = (spec.observation_space, spec.action_space)
    return ACTION_FEATURES in spec.extras and spaces == events.SPACES


class EpisodeReceiver(Protocol):
    """What takes episodes in."""

    limits: Limits

    @property
    def spaces_hint(self) -> str:
        """A sentence on where a client finds the spaces of the dataset."""

    def find_dataset(self) -> Dataset:
        """Return the dataset that takes them. Raises: RequestRefusedError if there is none."""

    def open_received(self) -> ReceivedLog:
        """Return the journal of received steps, opened with the first of them.

        Raises: RequestRefusedError as `find_dataset`, or if the server stops.
        """


class EpisodesEndpoint:
    """Writes the steps down; they are moved into the dataset later, each once."""

    def __init__(
        self, receiver: Callable[[], EpisodeReceiver], metrics: Metrics, clock: Clock
    ) -> None:
        self._receiver, self._metrics = receiver, metrics
        self._clock = clock

    async def __call__(self, request: Request) -> Response:
        """Answer one request. Raises: RequestRefusedError, StorageError."""
        # Thousands of steps take long, and one tells nothing of how many there are.
        return await run_in_threadpool(self._answer, self._receiver(), request)

    def _answer(self, receiver: EpisodeReceiver, request: Request) -> Response:
        spec = receiver.find_dataset().spec
        fields = read_fields(request)
        check_fields(fields, ("episodes",))
        items = fields.get("episodes")
        if type(items) is not list or not items:
            raise invalid_value_error(
                "episodes", items, "a list of at least one episode or piece of one"
            )
        body = request.body if request.content_type == JSON else None
        reader = _Reader(spec, receiver.limits.steps, receiver.spaces_hint, body)
        pieces = reader.read_pieces(items, self._clock.now())
        log = receiver.open_received()
        try:
            log.write(pieces)
        except ContradictionError as error:
            place = f"episodes[{error.piece}]"
            raise RequestRefusedError(409, place, str(error)) from None
        self._metrics.set_pending("received", log.journal.num_pending)
        num_steps = sum(piece.num_steps for piece in pieces)
        return json_response({"episodes": len(pieces), "steps": num_steps}, 202)


class _Reader:
    """Reads the episodes of one request into rows of a dataset.

    body: the request's body where it is JSON; features of events are stored as it has them.
    """

    def __init__(
        self, spec: DatasetSpec, max_steps: int, spaces_hint: str, body: bytes | None
    ) -> None:
        self._spec, self._num_left, self._max_steps = spec, max_steps, max_steps
        self._body, self._texts = body, list[str]()
        self._spaces_hint = spaces_hint
        self._tokens, self._fields = list_token_fields(spec), list_episode_fields(spec)
        self._takes_dialogues, self._takes_events = takes_dialogues(spec), takes_events(spec)

    def read_pieces(self, items: list[Any], received_at: int) -> list[ReceivedPiece]:
        """Return what each is as rows.

        Raises: RequestRefusedError with the place of the first fault.
        """
        pieces_read = []
        for number, fields in enumerate(items):
            place = f"episodes[{number}]"
            if type(fields) is not dict:
                raise invalid_value_error(place, fields, "an object")
            try:
                episodes = self._read_episodes(fields, number, place)
            except RequestRefusedError as error:
                if not error.field.startswith(place):
                    error.field = shorten(f"{place}.{error.field}")
                raise
            try:
                pieces_read += [
                    make_received_piece(one, self._spec, received_at) for one in episodes
                ]
            except (EpisodeInvalidError, SchemaMismatchError) as error:
                message = f"{shorten(str(error))} {self._spaces_hint}"
                raise RequestRefusedError(422, place, message) from None
        return pieces_read

    def _read_episodes(self, fields: Mapping[str, Any], number: int, place: str) -> list[Episode]:
        is_dialogue = "observations" not in fields and is_transcript(fields)
        if is_dialogue and self._takes_dialogues:
            return self._read_dialogues(fields, place)
        if is_dialogue:
            message = "a dialogue, but the dataset's steps are not those of dialogues"
            raise RequestRefusedError(422, place, message)
        if "observations" not in fields and self._takes_events and events.is_event(fields):
            return [self._read_event(fields, number, place)]
        return [self._read_episode(fields, place)]

    def _read_event(self, fields: Mapping[str, Any], number: int, place: str) -> Episode:
        """Return an event: a step, or one for each of its slots."""
        if fields.get(events.EVENT_ID) is None:
            message = "required field is missing; by it, an event that is sent again is known"
            raise RequestRefusedError(422, events.EVENT_ID, message)
        check_name(fields[events.EVENT_ID], events.EVENT_ID)
        try:
            name, rows = events.parse_event(self._find_text(fields, number).encode())
        except (SourceInvalidError, RecursionError, TypeError, ValueError) as error:
            raise RequestRefusedError(422, place, shorten(str(error))) from None
        self._count(len(rows), events.OUTCOMES)
        columns = _drop_empty_columns(
            {one: [row.get(one) for row in rows] for one in events.EXTRAS}
        )
        if missing := [one for one in columns if one not in self._spec.extras]:
            message = (
                f"the dataset has no column for {', '.join(missing)}; ingest one event with "
                "such members first"
            )
            raise RequestRefusedError(422, place, message)
        spec, time = self._spec, rows[0]["timestamp"]
        texts = [row["observation"] for row in rows]
        probs = [row["behavior_prob"] for row in rows]
        log_probs = [math.nan if one is None else min(math.log(one), 0.0) for one in probs]
        return Episode(
            episode_id=str(name),
            observations=read_values(spec.observation_space, texts, place, True),
            actions=read_values(spec.action_space, [row["action"] for row in rows], place, True),
            rewards=_read_rewards(
                [row["reward"] for row in rows], len(rows), spec.rewards_optional
            ),
            terminated=True,
            behavior_log_probs=None if set(probs) == {None} else np.array(log_probs),
            timestamps=None if time is None else _to_microseconds(time, len(rows)),
            extras=columns,
        )

    def _find_text(self, fields: Mapping[str, Any], number: int) -> str:
        """Return the text of an event, as it was sent if that was JSON. Raises: ValueError."""
        if self._body is None:
            return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
        if not self._texts:
            self._texts = events.list_elements(self._body.decode(), "episodes")
        return self._texts[number]

    def _read_dialogues(self, fields: Mapping[str, Any], place: str) -> list[Episode]:
        """Return the agents of a dialogue, or of one for each completion of a prompt."""
        if fields.get("episode_id") is None:
            message = "required field is missing; by it, a dialogue that is sent again is known"
            raise RequestRefusedError(422, "episode_id", message)
        check_name(fields["episode_id"], "episode_id")
        try:
            tokens = {name: fields[name] for name in self._tokens if name in fields}
            record = {name: value for name, value in fields.items() if name not in tokens}
            dialogues = [[*iter_rows(one, str(one.episode_id))] for one in parse_dialogues(record)]
        except (SourceInvalidError, RecursionError, ValueError) as error:
            raise RequestRefusedError(422, place, shorten(str(error))) from None
        self._count(sum(map(len, dialogues)), "messages")
        agents: dict[tuple[str, str], list[tuple[int, Row]]] = {}
        for rows in dialogues:
            if not rows:
                message = "no message of an assistant, and so no step; send one with an answer"
                raise RequestRefusedError(422, "messages", message)
            for number, row in enumerate(rows):
                agents.setdefault((row["episode_id"], row["agent_id"]), []).append((number, row))
        if tokens and len(dialogues) > 1:
            message = "tokens of several completions; send each as an episode of its own"
            raise RequestRefusedError(422, next(iter(tokens)), message)
        columns = self._read_token_columns(tokens, len(dialogues[0])) if dialogues else {}
        return [self._read_agent(numbered, columns, place) for numbered in agents.values()]

    def _read_agent(
        self, numbered: Sequence[tuple[int, Row]], tokens: Mapping[str, list[Any]], place: str
    ) -> Episode:
        """Return the turns of one agent of a dialogue; they have numbers in the dialogue."""
        rows = [row for _, row in numbered]
        columns = {name: [row.get(name) for row in rows] for name in EXTRAS}
        columns |= {name: [values[i] for i, _ in numbered] for name, values in tokens.items()}
        spec, first, last = self._spec, rows[0], rows[-1]
        texts = {name: [row[name] for row in rows] for name in ("prompt_text", "completion_text")}
        policy = first["policy"]
        return Episode(
            episode_id=first["episode_id"],
            observations=read_values(spec.observation_space, texts["prompt_text"], place, True),
            actions=read_values(spec.action_space, texts["completion_text"], place, True),
            rewards=_read_rewards(
                [row["reward"] for row in rows], len(rows), spec.rewards_optional
            ),
            terminated=last["terminated"],
            truncated=last["truncated"],
            final_observation=last.get("final_text"),
            agent_id=first["agent_id"],
            env_steps=np.array([row["env_step"] for row in rows], np.int32),
            policies=None if policy is None else np.array([policy] * len(rows), dtype=object),
            extras=_drop_empty_columns(columns),
        )

    def _read_token_columns(self, fields: Mapping[str, Any], num: int) -> dict[str, list[Any]]:
        given = {name: fields[name] for name in self._tokens if name in fields}
        for name, raw in given.items():
            if type(raw) is not list or len(raw) != num:
                raise invalid_value_error(name, raw, f"a list of {num}, one for each step")
        return _drop_empty_columns(given)

    def _read_episode(self, fields: Mapping[str, Any], place: str) -> Episode:
        check_fields(fields, self._fields)
        for name in _REQUIRED:
            if fields.get(name) is None:
                raise RequestRefusedError(422, name, "required field is missing")
        check_name(fields["episode_id"], "episode_id")
        num = self._count_steps(fields)
        spec = self._spec
        columns = {
            name: self._read_column(fields, name, num, place)
            for name in ("observations", "actions")
        }
        final = fields.get("final_observation")
        if final is not None:
            (final,) = encode_observations(
                spec.encoding, [final], f"{place}.final_observation", False
            )
            read = read_values(spec.observation_space, [final], f"{place}.final_observation", False)
            final = _take_first(read)
        return Episode(
            episode_id=fields["episode_id"],
            observations=columns["observations"],
            actions=columns["actions"],
            rewards=_read_rewards(fields["rewards"], num, spec.rewards_optional),
            terminated=_read_flag(fields, "terminated"),
            truncated=_read_flag(fields, "truncated"),
            final_observation=final,
            agent_id=_read_agent_id(fields),
            first_step=_read_whole(fields, "first_step", MAX_STEP) or 0,
            behavior_log_probs=self._read_log_probs(fields, num),
            policies=_read_policies(fields, num),
            policy_versions=_read_versions(fields, num),
            action_masks=self._read_masks(fields, num),
            timestamps=_read_timestamps(fields, num),
            extras=self._read_token_columns(fields, num),
        )

    def _count_steps(self, fields: Mapping[str, Any]) -> int:
        rewards = fields["rewards"]
        if not _is_list(rewards) or not len(rewards):
            raise invalid_value_error("rewards", rewards, "a list of one reward or more")
        self._count(len(rewards), "rewards")
        return len(rewards)

    def _count(self, num: int, name: str) -> None:
        self._num_left -= num
        if self._num_left < 0:
            message = f"request has more than {self._max_steps} steps; send several requests"
            raise RequestRefusedError(413, name, message)

    def _read_column(self, fields: Mapping[str, Any], name: str, num: int, place: str) -> Any:
        raw = fields[name]
        if not _is_list(raw) or len(raw) != num:
            raise invalid_value_error(name, raw, f"a list of {num}, one for each reward")
        spec, field = self._spec, f"{place}.{name}"
        if name == "actions":
            return read_values(spec.action_space, raw, field, True)
        if type(raw) is list:
            raw = encode_observations(spec.encoding, raw, field, True)
        return read_values(spec.observation_space, raw, field, True)

    def _read_log_probs(self, fields: Mapping[str, Any], num: int) -> Array | None:
        raw = fields.get("log_probs")
        if raw is None:
            return None
        log_probs = _read_numbers(raw, "log_probs", num, True)
        above = log_probs > LOG_PROB_TOLERANCE
        if above.any() and is_countable(self._spec.action_space):
            i = int(np.argmax(above))
            expected = "at most 0, the natural logarithm of a probability"
            raise RequestRefusedError(
                422, f"log_probs[{i}]", found=f"{log_probs[i]:g}", expected=expected
            )
        return log_probs

    def _read_masks(self, fields: Mapping[str, Any], num: int) -> Array | None:
        raw = fields.get("action_masks")
        if raw is None:
            return None
        width = self._spec.mask_size
        if width is None:
            message = "the dataset stores no action masks; leave action_masks out"
            raise RequestRefusedError(422, "action_masks", message)
        if not _is_list(raw) or len(raw) != num:
            raise invalid_value_error("action_masks", raw, f"a list of {num}, one for each reward")
        if isinstance(raw, np.ndarray):
            if raw.dtype != np.bool_ or raw.shape != (num, width):
                raise invalid_value_error("action_masks", raw, f"booleans [{num}, {width}]")
            return raw
        for i, row in enumerate(raw):
            if type(row) is not list or len(row) != width or set(map(type, row)) != {bool}:
                raise invalid_value_error(f"action_masks[{i}]", row, f"{width} booleans")
        return np.array(raw, dtype=bool)


def _is_list(raw: Any) -> bool:
    return type(raw) is list or (isinstance(raw, np.ndarray) and raw.ndim > 0)


def _drop_empty_columns(columns: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the columns that have a value."""
    return {
        name: values
        for name, values in columns.items()
        if any(value is not None for value in values)
    }


def _to_microseconds(time: datetime, num: int) -> Array:
    """Return a time as microseconds since 1970, int64 [num]."""
    return np.full(num, (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1))


def _take_first(values: Any) -> Any:
    """Return the only one of a batch of one."""
    if isinstance(values, Mapping):
        return {key: _take_first(sub) for key, sub in values.items()}
    return values[0]


def _read_numbers(raw: Any, name: str, num: int, is_optional: bool) -> Array:
    """Return float64 [num], NaN for null where that may stand for an unknown one."""
    expected = "a finite number, or null if unknown" if is_optional else "a finite number"
    if isinstance(raw, np.ndarray):
        if raw.shape != (num,) or raw.dtype.kind not in "fiu":
            raise invalid_value_error(name, raw, f"{num} numbers, one for each reward")
        array = raw.astype(np.float64)
        is_fine = np.isfinite(array) | (np.isnan(array) & is_optional)
        if not is_fine.all():
            i = int(np.argmin(is_fine))
            raise RequestRefusedError(422, f"{name}[{i}]", found=str(array[i]), expected=expected)
        return array
    if type(raw) is not list or len(raw) != num:
        raise invalid_value_error(name, raw, f"a list of {num} numbers, one for each reward")
    for i, value in enumerate(raw):
        if value is None and is_optional:
            continue
        if type(value) not in (int, float) or not _is_finite(value):
            raise invalid_value_error(f"{name}[{i}]", value, expected)
    return np.array([math.nan if value is None else float(value) for value in raw])


def _read_rewards(raw: Any, num: int, is_optional: bool) -> Array:
    """Return float64 [num] whose sums, returns among them, stay finite; NaN for null."""
    rewards = _read_numbers(raw, "rewards", num, is_optional)
    beyond = np.abs(rewards) > MAX_REWARD
    if beyond.any():
        i = int(np.argmax(beyond))
        expected = f"a number from -{MAX_REWARD:g} to {MAX_REWARD:g}, so that returns stay finite"
        raise RequestRefusedError(422, f"rewards[{i}]", found=f"{rewards[i]:g}", expected=expected)
    return rewards


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


def _read_flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and type(value) is not bool:
        raise invalid_value_error(name, value, "true or false")
    return bool(value)


def _read_agent_id(fields: Mapping[str, Any]) -> str:
    agent = fields.get("agent_id")
    if agent is None or agent == "":
        return ""
    check_name(agent, "agent_id")
    return str(agent)


def _read_whole(fields: Mapping[str, Any], name: str, highest: int) -> int | None:
    value = fields.get(name)
    if value is not None and (type(value) is not int or not 0 <= value <= highest):
        raise invalid_value_error(name, value, f"a whole number from 0 to {highest}")
    return value


def _read_policies(fields: Mapping[str, Any], num: int) -> Any:
    policy = fields.get("policy")
    check_name(policy, "policy")
    return None if policy is None else np.array([policy] * num, dtype=object)


def _read_versions(fields: Mapping[str, Any], num: int) -> Array | None:
    version = _read_whole(fields, "policy_version", 2**63 - 1)
    if version is not None and fields.get("policy") is None:
        message = "policy_version without policy; send both"
        raise RequestRefusedError(422, "policy_version", message)
    return None if version is None else np.full(num, version, np.int64)


def _read_timestamps(fields: Mapping[str, Any], num: int) -> Array | None:
    raw = fields.get("timestamps")
    if raw is None:
        return None
    expected = "microseconds since 1970, UTC, a whole number"
    if isinstance(raw, np.ndarray):
        if raw.shape != (num,) or raw.dtype.kind not in "iu":
            raise invalid_value_error("timestamps", raw, f"{num} times: {expected}")
        raw = raw.tolist()
    if type(raw) is not list or len(raw) != num:
        raise invalid_value_error("timestamps", raw, f"a list of {num}, one for each reward")
    for i, value in enumerate(raw):
        if type(value) is not int or not _TIMESTAMPS[0] <= value <= _TIMESTAMPS[1]:
            raise invalid_value_error(f"timestamps[{i}]", value, expected)
    return np.array(raw, dtype=np.int64)
