"""Calls into the lake: written before the answer's last byte is sent, committed soon after."""

from __future__ import annotations

import json
import logging
import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson

from replaylake.datastore.episodes.schema import (
    ACTION,
    AGENT_ID,
    BEHAVIOR_LOG_PROB,
    ENV_STEP,
    EPISODE_ID,
    OBSERVATION,
    POLICY,
    POLICY_VERSION,
    REWARD,
    SOURCE_EPISODE_ID,
    STEP,
    TERMINATED,
    TIMESTAMP,
    TRUNCATED,
)
from replaylake.datastore.episodes.tokens import (
    ACTION_LOG_PROBS,
    ACTION_TOKENS,
    IS_CONTINUATION,
    IS_TRAINABLE,
    OBSERVATION_TOKENS,
    PARENT_AGENT_ID,
    PARENT_STEP,
    TOKEN_LOG_PROB_TOLERANCE,
)
from replaylake.datastore.errors import StorageError
from replaylake.datastore.feedback.journal import Journal, JournalConfig
from replaylake.datastore.feedback.recorded_calls import (
    SAMPLE_INDEX,
    calls_encoder,
    ensure_calls_dataset,
    fit_call,
    make_fits,
    read_recent_calls,
    recover_calls,
)
from replaylake.datastore.interchange.formats.generations.json_values import dump_metadata
from replaylake.datastore.interchange.formats.generations.messages import (
    GIVEN,
    derive_group,
    find_calls,
    format_message,
    format_messages,
    parse_call,
)
from replaylake.datastore.interchange.formats.generations.rows import (
    COMPLETION_MESSAGES,
    EXTRAS,
    PROMPT_MESSAGES,
)
from replaylake.datastore.lake.dataset import Dataset, new_episode_id
from replaylake.serve.gateway.calls import COMPLETED, CallAnswer, CallRequest, Message, Sample
from replaylake.serve.gateway.conversations import (
    PRODUCER,
    REDACTED,
    CallIdentity,
    Conversations,
    Generation,
    Placement,
    hash_answer,
    hash_contexts,
    hash_group,
    hash_tokens,
)
from replaylake.serve.gateway.retained_answers import (
    RETAINED_S,
    RetainedAnswer,
    RetainedAnswers,
)
from replaylake.serve.gateway.routes import CallVersion
from replaylake.serve.recording.decision_log import Clock

REFUSE: Final = "refuse"
PASS: Final = "pass"
ON_RECORD_FAILURE: Final = (REFUSE, PASS)
_logger = logging.getLogger(__name__)

Redact = Callable[[dict[str, Any]], dict[str, Any] | None]
"""Takes the part of a call that would be written, and returns the part to write, or None."""


class RecordFailedError(Exception):
    """A call could not be recorded; the text says why."""


@dataclass(slots=True)
class PassedCall:
    """A call that was passed on, complete or not.

    begun_s, first_byte_s and ended_s: time.monotonic(). status: completed, aborted or failed.
    retained: the complete answer as the client gets it, of a request with an idempotency key.
    version: the policy version that is known to have answered, whatever the answer says.
    make_episode_id: names an episode that begins with the call.
    """

    api: str
    identity: CallIdentity
    request: CallRequest
    answer: CallAnswer
    status: str
    begun_s: float
    first_byte_s: float | None
    ended_s: float
    idempotency_key: str | None = None
    retained: RetainedAnswer | None = None
    version: CallVersion | None = None
    make_episode_id: Callable[[], str] = lambda: new_episode_id(PRODUCER)


class CallLog:
    """Records the calls of one gateway in a dataset; for one thread."""

    def __init__(
        self,
        dataset: Dataset,
        worker: str,
        key: bytes,
        *,
        idle_s: float,
        config: JournalConfig | None = None,
        redact: Redact | None = None,
    ) -> None:
        """Create the dataset if it is absent, commit calls of killed gateways, open a journal.

        worker: a new name of this process. key: of the hashes of contexts, the same after a
        restart. idle_s: after how long without a call an episode is closed to further ones.
        Raises: SchemaMismatchError if the dataset does not hold calls, StorageError.
        """
        ensure_calls_dataset(dataset, EXTRAS)
        encoder = calls_encoder(dataset, EXTRAS)
        self.recovered = recover_calls(dataset, encoder)
        self.dataset = dataset
        self.conversations = Conversations(idle_s, key, worker[:8])
        now_s = time.time()
        since_s = now_s - max(idle_s, RETAINED_S)
        recent = read_recent_calls(dataset, int(since_s * 1e6))
        self.conversations.restore(recent, now_s)
        self.answers = RetainedAnswers(
            dataset.table.storage.state_folder(f"{dataset.table.root}/_answers"),
            worker,
            key,
            # What `redact` takes out of a call is not to be in a file either.
            None
            if redact is not None
            else {
                (call.idempotency_key, call.completion_id)
                for call in recent
                if call.idempotency_key is not None
            },
        )
        self.journal = Journal(dataset.table, encoder, worker=worker, config=config)
        self._redact, self.clock, self._key = redact, Clock(), key
        self._fits = make_fits(encoder)

    def write(self, call: PassedCall) -> int:
        """Write a call as one step for each sample, all or none; return their number.

        Once this returns, they survive a kill of the process. Raises: RecordFailedError.
        """
        (result,) = self.write_all([call])
        if isinstance(result, RecordFailedError):
            raise result
        return result

    def write_all(self, calls: Sequence[PassedCall]) -> list[int | RecordFailedError]:
        """Write calls as `write` does, with one write(2); return the number of steps of each.

        A call that cannot be a record does not hold up the others, and has its error in the place
        of a number. If the journal cannot be written, none of the calls is in it.
        """
        retained = [
            ((call.idempotency_key, _to_text(call.answer.completion_id)), call.retained)
            for call in calls
            if call.retained is not None and call.idempotency_key is not None
        ]
        if retained:
            self.answers.write(retained)
        results: list[int | RecordFailedError] = []
        records: list[bytes] = []
        added: list[Generation] = []
        for call in calls:
            own: list[Generation] = []
            try:
                lines = self._make_records(call, own)
            except Exception as error:
                self._undo(own)
                # The cause is a value from the client or the engine, or `redact`.
                _logger.exception("call not recorded")
                results.append(_record_error(f"{type(error).__name__}: {error}", error))
            else:
                results.append(len(lines))
                records += lines
                added += own
        try:
            if records:
                self.journal.append(records)
        except Exception as error:
            self._undo(added)
            is_expected = isinstance(error, StorageError)
            if not is_expected:
                _logger.exception("calls not recorded")
            text = str(error) if is_expected else f"{type(error).__name__}: {error}"
            return [
                _record_error(text, error) if isinstance(result, int) else result
                for result in results
            ]
        return results

    def _undo(self, added: Sequence[Generation]) -> None:
        for generation in reversed(added):
            self.conversations.undo(generation)

    def find_episode(self, identity: CallIdentity, request: CallRequest) -> str | None:
        """Return a name of the episode that a call belongs to; None if it begins one."""
        if identity.episode is not None:
            return identity.source_episode_id
        try:
            hashes, _ = hash_contexts(request.messages, self._key)
        except (AttributeError, RecursionError, TypeError, ValueError):
            return None  # such messages are recorded, if at all, as an episode of their own
        found = self.conversations.find(identity, hashes, request.previous)
        return None if found is None else found.episode.episode_id

    def close_reported(self, report: Mapping[str, Any]) -> str | None:
        """Return the id of the episode that a report is of, None if it is not known here.

        An episode that ends by the report gets no further steps.
        """
        if (name := report.get("completion_id")) is not None:
            found = self.conversations.find_completion(name)
            episode = None if found is None else found.episode
        else:
            episode = self.conversations.find_episode(report["episode_id"])
        if episode is not None and (report.get("terminated") or report.get("truncated")):
            self.conversations.close_episode(episode)
        return None if episode is None else episode.episode_id

    def close(self) -> None:
        """Commit everything. Raises: ReplayLakeError; the next start then commits the rest."""
        self.answers.close()
        self.journal.close()

    def _make_records(self, call: PassedCall, added: list[Generation]) -> list[bytes]:
        """Index a call and return its records; `added` gets the steps that were indexed."""
        dialogues = [call.request.messages, *call.request.other_prompts]
        prompts = [_Prompt(one, *hash_contexts(one, self._key)) for one in dialogues]
        answer, records = _clean_answer(call.answer), []
        for index, sample in enumerate(answer.samples):
            prompt = prompts[min(sample.prompt, len(prompts) - 1)]
            row, place, context, ids = self._make_row(call, answer, sample, prompt)
            prompt.is_answered = True
            has_changed = False
            if self._redact is not None:
                redacted = _apply_redact(self._redact, row)
                if redacted is None:
                    continue
                row, has_changed = redacted
            parent = None if place.is_rewritten else place.parent
            if has_changed or (parent is not None and parent.tokens_hash == REDACTED):
                # Ids spell the text that was redacted, and those of later prompts spell it again.
                row |= dict.fromkeys(_OF_TEXT)
                row[IS_CONTINUATION] = False if place.is_rewritten else None
                ids = (-1, REDACTED)
            if place.is_next:
                row["tools"] = None  # they are long, and an agent has the same in all of its calls
            row[SAMPLE_INDEX] = index
            row["context"] = f"{place.episode.scope}:{context}:{ids[0]}:{ids[1]}"
            if (group := place.episode.group) is None:
                new = prompt.messages[place.num_known :]
                group = place.episode.group = self._find_group(call.identity, new, row)
            row["group_id"], row["group_id_source"] = group
            records.append(orjson.dumps(fit_call(row, self._fits)))
            generation = self.conversations.add(
                place,
                context,
                time.time(),
                num_tokens=ids[0],
                tokens_hash=ids[1],
                completion_id=answer.completion_id,
            )
            added.append(generation)
        return records

    def _find_group(
        self, identity: CallIdentity, messages: Sequence[Message], row: Mapping[str, Any]
    ) -> tuple[str | None, str]:
        """Return the group of an episode that begins with a row, and where its id is from.

        messages: the new ones of the row, before `redact`.
        """
        if (given := identity.group_id) is not None:
            return given, GIVEN
        if self._redact is not None:
            messages = json.loads(row[PROMPT_MESSAGES])
        roles = (i for i, message in enumerate(messages) if message["role"] == "assistant")
        prompt = messages[: next(roles, None)]
        try:
            derived, source = derive_group(prompt)
        except ValueError:  # NaN, which is text in the row
            derived, source = derive_group(json.loads(row[PROMPT_MESSAGES])[: len(prompt)])
        return (None if derived is None else hash_group(derived, self._key)), source

    def _make_row(
        self, call: PassedCall, answer: CallAnswer, sample: Sample, prompt: _Prompt
    ) -> tuple[dict[str, Any], Placement, str, tuple[int, str]]:
        """Return a step, its place, the hash of its context, and number and hash of its ids."""
        identity, request = call.identity, call.request
        place = self.conversations.place(
            identity,
            prompt.hashes,
            time.time(),
            previous=request.previous,
            is_sample=prompt.is_answered,
            make_episode_id=call.make_episode_id,
        )
        tree = place.episode
        empty = {"role": "assistant", "content": None}
        context = hash_answer(prompt.hasher, sample.message or empty)
        texts = _describe(prompt.messages[place.num_known :], sample.message)
        tokens, num_tokens, tokens_hash = _make_token_columns(sample, prompt, place, self._key)
        metadata = {"usage": answer.usage, "requested_model": request.model}
        if answer.model == request.model:
            del metadata["requested_model"]
        metadata |= request.metadata
        if (known := call.version) is not None:
            metadata["served"] = known.to_json()
        metadata = {name: value for name, value in metadata.items() if value is not None}
        if tokens.get(ACTION_TOKENS) is None and not _has_all_log_probs(answer):
            tokens[BEHAVIOR_LOG_PROB] = None
        version = answer.policy_version
        if version is None:
            version = identity.policy_version
        has_tools = not place.is_next or self._redact is not None
        first_byte = None if call.first_byte_s is None else call.first_byte_s - call.begun_s
        row = {
            EPISODE_ID: tree.episode_id,
            STEP: place.step,
            ENV_STEP: tree.num_env_steps,
            AGENT_ID: place.agent,
            REWARD: None,
            TERMINATED: False,
            TRUNCATED: False,
            POLICY: (answer.model or request.model) if known is None else known.policy,
            POLICY_VERSION: version if known is None else known.version,
            TIMESTAMP: self.clock.now(),
            SOURCE_EPISODE_ID: tree.source_episode_id,
            **texts,
            "source_framework": call.api,
            "metadata": _dump(metadata),
            "completion_id": answer.completion_id,
            "idempotency_key": call.idempotency_key,
            "run_id": identity.run,
            "train_step": identity.iteration,
            "user_id": identity.user,
            "call_status": call.status,
            "finish_reason": sample.finish_reason,
            "sampling": _dump(request.sampling),
            "tools": _dump(request.tools) if has_tools else None,
            "first_byte_s": first_byte,
            "duration_s": call.ended_s - call.begun_s,
            PARENT_AGENT_ID: None if place.is_next or not place.parent else place.parent.agent,
            PARENT_STEP: None if place.is_next or not place.parent else place.parent.step,
            IS_TRAINABLE: None if call.status == COMPLETED else False,
            **tokens,
        }
        return row, place, context, (num_tokens, tokens_hash)


def _record_error(text: str, cause: Exception) -> RecordFailedError:
    error = RecordFailedError(text)
    error.__cause__ = cause
    return error


def _describe(prompt: Sequence[Message], message: Message | None) -> dict[str, Any]:
    """Return the columns of messages, as generations/rows.py makes them for transcripts.

    With orjson, which takes a tenth of the time.
    """
    try:
        calls = find_calls(message) if message is not None else []
        names = [name for name, _ in map(parse_call, calls) if name]
        return {
            OBSERVATION: format_messages(prompt),
            ACTION: "" if message is None else format_message(message),
            "role": None if message is None else message["role"],
            PROMPT_MESSAGES: _dump(prompt) or "[]",
            COMPLETION_MESSAGES: "[]" if message is None else _dump([message]),
            "tool_name": names[0] if names else None,
            "tool_calls": _dump(calls),
        }
    except ValueError:  # NaN, which Python's reader takes and JSON has not
        prompt, message = json.loads(dump_metadata([prompt, message]))
        return _describe(prompt, message)


def _dump(value: Any) -> str | None:
    """Return a value as JSON, None for an empty one. Raises: RecursionError for many levels."""
    if not value:
        return None
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # half of a surrogate pair, a number above 64 bits
        return dump_metadata(value)


class _Prompt:
    """One prompt of a request, whose samples share what is computed of it.

    is_answered: whether one of its samples has been placed.
    """

    def __init__(self, messages: list[Message], hashes: Sequence[str], hasher: Any) -> None:
        self.messages, self.hashes, self.hasher = messages, hashes, hasher
        self.is_answered = False
        self._values: list[int] | None = None
        self._ids: array[int] | None = None

    def to_ids(self, values: list[int] | None) -> array[int] | None:
        """Return the ids of the prompt as an array, converted once for all samples."""
        if values is not self._values:
            self._values, self._ids = values, _to_ids(values)
        return self._ids


def _clean_answer(answer: CallAnswer) -> CallAnswer:
    """Return an answer with text where the API has text, at least one sample, and roles."""
    are_texts = _is_text(answer.completion_id) and _is_text(answer.model)
    if are_texts and answer.samples and all(map(_is_clean_sample, answer.samples)):
        return answer
    samples = [
        replace(
            sample,
            message=None if sample.message is None else _clean_message(sample.message),
            finish_reason=_to_text(sample.finish_reason),
            log_probs=sample.log_probs if isinstance(sample.log_probs, list) else None,
        )
        for sample in answer.samples or [Sample(None)]
    ]
    return replace(
        answer,
        samples=samples,
        completion_id=_to_text(answer.completion_id),
        model=_to_text(answer.model),
    )


def _is_clean_sample(sample: Sample) -> bool:
    message, log_probs = sample.message, sample.log_probs
    is_message = isinstance(message, dict) and isinstance(message.get("role"), str)
    is_list = log_probs is None or isinstance(log_probs, list)
    return (is_message or message is None) and _is_text(sample.finish_reason) and is_list


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _has_all_log_probs(answer: CallAnswer) -> bool:
    """Whether there is one for each token that was generated, as far as the engine states that."""
    usage = answer.usage if isinstance(answer.usage, dict) else {}
    num = usage.get("completion_tokens")
    told = sum(len(sample.log_probs or ()) for sample in answer.samples)
    return type(num) is not int or num == told


def _clean_message(message: Any) -> Message:
    if not isinstance(message, dict):
        return {"role": "assistant", "content": message}
    is_named = isinstance(message.get("role"), str)
    return message if is_named else {**message, "role": "assistant"}


def _to_text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _make_token_columns(
    sample: Sample, shared: _Prompt, place: Placement, key: bytes
) -> tuple[dict[str, Any], int, str]:
    """Return the token columns, and the number and the hash of the ids up to the answer's last.

    Ids and log-probs that do not match are left out: a wrong one is worse than none.
    """
    log_probs = _clean_log_probs(sample.log_probs)
    total = None if log_probs is None else math.fsum(log_probs)
    columns: dict[str, Any] = {BEHAVIOR_LOG_PROB: total}
    is_continuation = False if place.is_rewritten else None
    prompt, ids = shared.to_ids(sample.prompt_token_ids), _to_ids(sample.token_ids)
    if prompt is None or ids is None:
        return {**columns, IS_CONTINUATION: is_continuation}, -1, "-"
    if log_probs is not None and len(log_probs) != len(ids):
        log_probs = columns[BEHAVIOR_LOG_PROB] = None
    parent, new = place.parent, prompt
    if parent is not None and not place.is_rewritten:
        num = parent.num_tokens
        is_continuation = (
            0 <= num <= len(prompt) and hash_tokens(prompt, num, key) == parent.tokens_hash
        )
        new = prompt[num:] if is_continuation else prompt
    columns |= {
        OBSERVATION_TOKENS: new.tolist(),
        ACTION_TOKENS: ids.tolist(),
        ACTION_LOG_PROBS: log_probs,
        IS_CONTINUATION: is_continuation,
    }
    whole = prompt + ids
    return columns, len(whole), hash_tokens(whole, len(whole), key)


def _to_ids(values: list[Any] | None) -> array[int] | None:
    """Return ids as an array, None if a value is no id."""
    if values is None:
        return None
    try:
        ids = array("i", values)
    except (TypeError, OverflowError):
        return None
    return ids if not ids or min(ids) >= 0 else None


def _clean_log_probs(values: list[Any] | None) -> list[float] | None:
    """Return log-probs, those just above 0 as 0; None if a value is no log-prob."""
    if not values:
        return None
    try:
        numbers = array("d", values)
    except (TypeError, OverflowError):
        return None
    highest = max(numbers)
    if not all(map(math.isfinite, numbers)) or highest > TOKEN_LOG_PROB_TOLERANCE:
        return None
    return [min(value, 0.0) for value in numbers] if highest > 0 else numbers.tolist()


_JSON_COLUMNS: Final = (PROMPT_MESSAGES, COMPLETION_MESSAGES, "tools", "sampling", "metadata")
# These parts may be rendered into the prompt.
_SEEN: Final = ("messages", "completion", "tools", "sampling")
_NAMES: Final = ("user_id", "idempotency_key", SOURCE_EPISODE_ID)
_OF_TEXT: Final = (OBSERVATION_TOKENS, ACTION_TOKENS, ACTION_LOG_PROBS)


def _apply_redact(redact: Redact, row: dict[str, Any]) -> tuple[dict[str, Any], bool] | None:
    """Return a row as the user's function leaves it, and whether that changed what a model saw.

    None if it leaves nothing. The function gets `messages` (new ones), `completion` (the answer's),
    `tools`, `sampling`, `metadata` and the names in _NAMES, and returns the same. Texts are derived
    from what it returns.
    """
    columns = {name: json.loads(row[name]) if row[name] else None for name in _JSON_COLUMNS}
    completion = columns[COMPLETION_MESSAGES]
    call = {
        "messages": columns[PROMPT_MESSAGES],
        "completion": completion[0] if completion else None,
        "tools": columns["tools"],
        "sampling": columns["sampling"],
        "metadata": columns["metadata"],
        **{name: row[name] for name in _NAMES},
    }
    before = _dump([call[name] for name in _SEEN])
    left = redact(call)
    if left is None:
        return None
    row = {**row, **_describe(left["messages"], left["completion"])}
    row |= {name: _dump(left[name]) for name in ("tools", "sampling", "metadata")}
    row |= {name: left.get(name) for name in _NAMES}
    return row, _dump([left[name] for name in _SEEN]) != before
