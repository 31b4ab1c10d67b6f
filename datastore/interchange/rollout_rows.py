"""Rollout rows: rollouts of language agents as a recorder gets them, checked, as rows of steps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, TypedDict

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes import tokens
from replaylake.datastore.episodes.schema import (
    ACTION,
    BEHAVIOR_LOG_PROB,
    FINAL_OBSERVATION,
    OBSERVATION,
    POLICY,
    POLICY_VERSION,
    REWARD,
    TERMINATED,
    TRUNCATED,
)
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.episodes.token_sequences import (
    NO_VERSION,
    TokenSequence,
    split_sequence,
)
from replaylake.datastore.episodes.tokenizer import Tokenizer
from replaylake.datastore.errors import EpisodeInvalidError
from replaylake.datastore.interchange.formats.generations.json_values import dump_metadata
from replaylake.datastore.interchange.formats.generations.messages import (
    GIVEN,
    NONE,
    Message,
    clean_text,
    derive_group,
    shorten,
)
from replaylake.datastore.interchange.formats.generations.rows import (
    COMPLETION_MESSAGES,
    EXTRAS,
    FINAL_MESSAGES,
    GENERATION_SCHEMA,
    PROMPT_MESSAGES,
    REWARD_COMPONENTS,
    describe_generation,
)

RECORD_HASH: Final = "record_hash"
ATTEMPT: Final = "attempt"
STATUS_REASON: Final = "status_reason"
# Columns of a recorder's steps beside those of recorded calls.
RECORDER_COLUMNS: Final[Mapping[str, pa.DataType]] = {
    **EXTRAS,
    **{
        name: GENERATION_SCHEMA.field(name).type
        for name in (
            tokens.FINAL_OBSERVATION_TOKENS,
            tokens.ACTION_LOSS_MASK,
            tokens.ACTION_VERSIONS,
            REWARD_COMPONENTS,
            "split",
        )
    },
    STATUS_REASON: pa.string(),
    ATTEMPT: pa.int64(),
    RECORD_HASH: pa.int64(),
}
COMPLETED, FAILED, FILTERED = "completed", "failed", "filtered"
# What is compared when a sequence is recorded again: what was sampled and scored, as it was given.
# Not labels, as a resumed job may have others, nor what is derived, as later versions may derive it
# otherwise. Where these change, so does the version: hashes of other versions are not comparable.
_HASH_VERSION: Final = 1
_HASHED: Final = (
    PROMPT_MESSAGES,
    COMPLETION_MESSAGES,
    FINAL_MESSAGES,
    tokens.OBSERVATION_TOKENS,
    tokens.ACTION_TOKENS,
    tokens.FINAL_OBSERVATION_TOKENS,
    tokens.ACTION_LOG_PROBS,
    tokens.ACTION_LOSS_MASK,
    tokens.ACTION_VERSIONS,
    tokens.IS_CONTINUATION,
    tokens.PARENT_AGENT_ID,
    tokens.PARENT_STEP,
    REWARD,
    REWARD_COMPONENTS,
    TERMINATED,
    TRUNCATED,
)
_EMPTY: Final[Message] = {"role": "assistant", "content": ""}

Text = str | Message | Sequence[Message]
"""A text, a message, or messages."""


@dataclass(frozen=True)
class Generation:
    """What a model generated for some messages.

    message: that of the assistant, as OpenAI's API has it. prompt_ids and completion_ids: token ids
    int [P] and [N], None where the engine returns none. log_probs: [N], ln of the probability that
    each id was sampled with. num_prompt_tokens and num_completion_tokens: None if unknown.
    """

    message: Message
    finish_reason: str | None = None
    prompt_ids: Sequence[int] | None = None
    completion_ids: Sequence[int] | None = None
    log_probs: Sequence[float] | None = None
    completion_id: str | None = None
    policy: str | None = None
    policy_version: int | None = None
    num_prompt_tokens: int | None = None
    num_completion_tokens: int | None = None


class RolloutFacts(TypedDict, total=False):
    """What all steps of a rollout have in common; see docs/RECORDING.md."""

    run_id: str | None
    train_step: int | None
    split: str | None
    group_id: str | None
    policy: str | None
    policy_version: int | None
    source_framework: str | None
    user_id: str | None
    status: str | None
    status_reason: str | None
    sampling: Mapping[str, Any] | None
    tools: Sequence[Any] | None
    metadata: Mapping[str, Any] | None


_TEXTS: Final = frozenset(
    ["run_id", "split", "group_id", POLICY, "source_framework", "user_id", "status", STATUS_REASON]
)
_NUMBERS: Final = frozenset(["train_step", POLICY_VERSION])
_JSON: Final = frozenset(["sampling", "tools", "metadata"])


@dataclass(frozen=True)
class Outcome:
    """What a generation or a rollout brought: reward None if it is unknown yet."""

    reward: float | None = None
    components: Mapping[str, Any] | None = None
    terminated: bool = False
    truncated: bool = False


def make_facts(*several: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that some facts set; later ones take the place of earlier ones.

    Raises: EpisodeInvalidError for an unknown fact, or a value of another type than its column's.
    """
    merged = {name: value for facts in several for name, value in facts.items()}
    columns: dict[str, Any] = {}
    for name, value in merged.items():
        if value is None:
            continue
        is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if name in _TEXTS and isinstance(value, str):
            columns[name] = clean_text(value)
        elif name in _NUMBERS and is_number and -(2**63) <= value < 2**63:
            columns[name] = int(value)
        elif name in _JSON:
            columns[name] = _dump(name, value)
        elif name in _TEXTS | _NUMBERS:
            expected = "text" if name in _TEXTS else "a whole number in 64 bits"
            raise EpisodeInvalidError(f"{name}: found {shorten(value)}, expected {expected}.")
        else:
            known = ", ".join(sorted(_TEXTS | _NUMBERS | _JSON))
            raise EpisodeInvalidError(f"{name}: found a fact of this name, expected {known}.")
    if (status := columns.get("status", COMPLETED)) not in (COMPLETED, FAILED, FILTERED):
        raise EpisodeInvalidError(
            f"status: found {status!r}, expected {COMPLETED}, {FAILED} or {FILTERED}."
        )
    return columns


def make_rollout_rows(
    *,
    prompt: Text | None,
    completion: Text | None,
    prompt_ids: Any,
    completion_ids: Any,
    log_probs: Any,
    loss_mask: Any,
    versions: Any,
    outcome: Outcome,
    facts: Mapping[str, Any],
    tokenizer: Tokenizer | None,
) -> list[dict[str, Any]]:
    """Return the steps of a whole rollout, one for each run of ids that the policy sampled.

    Raises: EpisodeInvalidError, SchemaMismatchError for values that no step can have.
    """
    first, said = to_messages(prompt, "user"), to_messages(completion, "assistant")
    turns, final = _split_turns(first, said)
    columns: dict[str, pa.Array] = {}
    num = len(turns)
    if completion_ids is not None:
        if prompt_ids is None:
            raise EpisodeInvalidError(
                "prompt_ids: found None beside completion_ids, expected the ids of the prompt."
            )
        columns = _split_ids(prompt_ids, completion_ids, log_probs, loss_mask, versions)
        num = len(columns[tokens.ACTION_TOKENS])
    elif any(one is not None for one in (prompt_ids, log_probs, loss_mask, versions)):
        raise EpisodeInvalidError(
            "completion_ids: found None beside other values for each token, expected the ids."
        )
    if num != len(turns):
        # Which of the texts belong to which generation is not known.
        turns = [(first, None), *[([], None) for _ in range(num - 1)]]
        if said:
            facts = {**facts, "metadata": _add_metadata(facts, {"completion": said})}
        final = []
    rows = _make_rows(turns, final, columns, facts, tokenizer)
    _set_outcome(rows, outcome)
    return rows


def make_step_row(
    *,
    prompt: Text | None,
    completion: Text | None,
    prompt_ids: Array | None,
    completion_ids: Any,
    log_probs: Any,
    loss_mask: Any,
    versions: Any,
    outcome: Outcome,
    facts: Mapping[str, Any],
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """Return one generation as a step; prompt and prompt_ids are what came since the last one.

    Raises: as make_rollout_rows.
    """
    columns: dict[str, pa.Array] = {}
    if completion_ids is not None:
        if prompt_ids is None:
            raise EpisodeInvalidError(
                "prompt_ids: found None beside completion_ids, expected the ids of the prompt."
            )
        num = len(ids := to_ids(completion_ids, "completion_ids"))
        columns = {
            tokens.OBSERVATION_TOKENS: _to_list(tokens.OBSERVATION_TOKENS, prompt_ids),
            tokens.ACTION_TOKENS: _to_list(tokens.ACTION_TOKENS, ids),
        }
        if log_probs is not None:
            array = _to_floats(log_probs, "log_probs", num)
            columns[tokens.ACTION_LOG_PROBS] = _to_list(tokens.ACTION_LOG_PROBS, array)
        if loss_mask is not None:
            flags = _to_flags(loss_mask, num)
            columns[tokens.ACTION_LOSS_MASK] = _to_list(tokens.ACTION_LOSS_MASK, flags)
        if versions is not None:
            runs = _find_runs(_to_versions(versions, num))
            columns[tokens.ACTION_VERSIONS] = _to_list(tokens.ACTION_VERSIONS, runs)
    elif any(one is not None for one in (prompt_ids, log_probs, loss_mask, versions)):
        raise EpisodeInvalidError(
            "completion_ids: found None beside other values for each token, expected the ids."
        )
    said = to_messages(completion, "assistant")
    if len(said) > 1:
        raise EpisodeInvalidError(
            f"completion: found {len(said)} messages, expected the one that was generated."
        )
    turn = (to_messages(prompt, "user"), said[0] if said else None)
    (row,) = _make_rows([turn], [], columns, facts, tokenizer)
    _set_outcome([row], outcome)
    return row


def hash_row(row: Mapping[str, Any]) -> int:
    """Return 64 bits of a step's content: the hash's version, then 56 bits of BLAKE2b (RFC 7693).

    The content is what was sampled and scored: messages, ids, log-probs, masks, versions, rewards,
    and its place in the dialogue. Labels such as run_id or policy, and metadata, are not of it.
    """
    compared = {name: row[name] for name in _HASHED if name in row}
    text = json.dumps(compared, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=7).digest()
    return _HASH_VERSION << 56 | int.from_bytes(digest, "big")


def check_reward(value: Any, name: str) -> float:
    """Return a reward as a number. Raises: EpisodeInvalidError with its name for what is none."""
    try:
        number = float(value)
    except (OverflowError, TypeError, ValueError) as error:
        raise EpisodeInvalidError(f"{name}: found {shorten(value)}, expected a number.") from error
    if not math.isfinite(number):
        raise EpisodeInvalidError(
            f"{name}: found {number:g}, expected a finite number, or None if it is unknown."
        )
    return number


def check_name(value: Any, name: str) -> str:
    """Return a text that identifies something, as it is. Raises: EpisodeInvalidError."""
    if not isinstance(value, str) or clean_text(value) != value:
        raise EpisodeInvalidError(
            f"{name}: found {shorten(value)}, expected a text without NUL and halves of surrogates."
        )
    return value


def check_text(value: Any, name: str) -> str | None:
    """Return a text as every engine can show it, or None. Raises: EpisodeInvalidError."""
    if value is not None and not isinstance(value, str):
        raise EpisodeInvalidError(f"{name}: found {shorten(value)}, expected text.")
    return None if value is None else clean_text(value)


def check_flag(value: Any, name: str) -> bool | None:
    """Return a flag or None. Raises: EpisodeInvalidError for what is neither."""
    if value is None:
        return None
    if not isinstance(value, bool | np.bool_):
        raise EpisodeInvalidError(f"{name}: found {shorten(value)}, expected true or false.")
    return bool(value)


def to_messages(text: Text | None, role: str) -> list[Message]:
    """Return messages; a text is one of a role. Raises: EpisodeInvalidError."""
    if text is None:
        return []
    if isinstance(text, str):
        return [{"role": role, "content": text}]
    messages = [text] if isinstance(text, Mapping) else list(text)
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise EpisodeInvalidError(
                f"message: found {shorten(message)}, expected an object with role and content."
            )
    return [dict(message) for message in messages]


def to_ids(values: Any, name: str) -> Array:
    """Return token ids, int32 [N]. Raises: EpisodeInvalidError."""
    array = _to_array(values, name, "iu")
    wrong = (array < 0) | (array >= 2**31)
    if wrong.any():
        raise EpisodeInvalidError(
            f"{name}: found {array[wrong][0]}, expected ids of 0 or more, in 32 bits."
        )
    return array.astype(np.int32)


def _split_turns(
    prompt: list[Message], said: Sequence[Message]
) -> tuple[list[tuple[list[Message], Message | None]], list[Message]]:
    """Return each generated message with those before it, and those after the last one."""
    turns: list[tuple[list[Message], Message | None]] = []
    before = list(prompt)
    for message in said:
        if message["role"] == "assistant":
            turns.append((before, message))
            before = []
        else:
            before.append(message)
    return (turns, before) if turns else ([(before, None)], [])


def _split_ids(
    prompt_ids: Any, completion_ids: Any, log_probs: Any, loss_mask: Any, versions: Any
) -> dict[str, pa.Array]:
    before = to_ids(prompt_ids, "prompt_ids")
    after = to_ids(completion_ids, "completion_ids")
    start, num = len(before), len(after)
    if not num:
        kinds = tokens.TOKEN_TYPES
        return {
            tokens.OBSERVATION_TOKENS: pa.array([before], kinds[tokens.OBSERVATION_TOKENS]),
            tokens.ACTION_TOKENS: pa.array([[]], kinds[tokens.ACTION_TOKENS]),
            tokens.IS_TRAINABLE: pa.array([False]),
        }

    def widen(values: Array, outside: Any) -> Array:
        return np.concatenate([np.full(start, outside, values.dtype), values])

    mask = np.ones(num, np.bool_) if loss_mask is None else _to_flags(loss_mask, num)
    floats = None if log_probs is None else _to_floats(log_probs, "log_probs", num)
    numbers = None if versions is None else _to_versions(versions, num)
    sampled = mask if floats is None else mask | (floats != 0)
    sequence = TokenSequence(
        np.concatenate([before, after]),
        widen(mask, False),
        None if floats is None else widen(floats, 0.0),
        None if numbers is None else widen(np.where(sampled, numbers, NO_VERSION), NO_VERSION),
    )
    return split_sequence(sequence)


def _make_rows(
    turns: Sequence[tuple[list[Message], Message | None]],
    final: list[Message],
    columns: Mapping[str, pa.Array],
    facts: Mapping[str, Any],
    tokenizer: Tokenizer | None,
) -> list[dict[str, Any]]:
    lists: dict[str, list[Any]] = {}
    if columns:
        checked = tokens.validate_tokens(columns, None, tokenizer)
        arrays = dict(checked.arrays)
        if (log_probs := arrays.get(tokens.ACTION_LOG_PROBS)) is not None:
            arrays[tokens.ACTION_LOG_PROBS] = tokens.clip_log_probs(log_probs)
        lists = {name: array.to_pylist() for name, array in arrays.items()}
        if checked.behavior_log_probs is not None:
            lists[BEHAVIOR_LOG_PROB] = [
                None if math.isnan(value) else float(value) for value in checked.behavior_log_probs
            ]
    versions = lists.get(tokens.ACTION_VERSIONS)
    rows = []
    for place, (before, message) in enumerate(turns):
        try:
            texts = describe_generation(before, message, final if place == len(turns) - 1 else ())
        except (RecursionError, TypeError, ValueError) as error:
            raise EpisodeInvalidError(f"messages: {error}, expected what JSON can hold.") from error
        row: dict[str, Any] = {
            **{name: value for name, value in facts.items() if name not in ("metadata", "tools")},
            OBSERVATION: texts.pop("prompt_text"),
            ACTION: texts.pop("completion_text"),
            FINAL_OBSERVATION: texts.pop("final_text"),
            **texts,
            **{name: values[place] for name, values in lists.items()},
        }
        if versions is not None and versions[place] and POLICY_VERSION not in facts:
            row[POLICY_VERSION] = min(run["version"] for run in versions[place])
        if facts.get("status", COMPLETED) != COMPLETED:
            row[tokens.IS_TRAINABLE] = False
        rows.append({name: value for name, value in row.items() if value is not None})
    group, source = facts.get("group_id"), GIVEN
    if group is None:
        prompt = [message for message in turns[0][0] if message["role"] != "assistant"]
        group, source = derive_group(prompt) if prompt else (None, NONE)
    for row in rows:
        row["group_id_source"] = source
        if group is not None:
            row["group_id"] = group
    rows[0] |= {name: facts[name] for name in ("metadata", "tools") if name in facts}
    return rows


def _set_outcome(rows: Sequence[dict[str, Any]], outcome: Outcome) -> None:
    reward = None if outcome.reward is None else check_reward(outcome.reward, "reward")
    for row in rows:
        row |= {TERMINATED: False, TRUNCATED: False}
        if reward is not None:
            row[REWARD] = 0.0
    last = rows[-1]
    last |= {TERMINATED: bool(outcome.terminated), TRUNCATED: bool(outcome.truncated)}
    if reward is not None:
        last[REWARD] = reward
    if outcome.components:
        if not isinstance(outcome.components, Mapping):
            raise EpisodeInvalidError(
                f"reward_components: found {shorten(outcome.components)}, expected scores by name."
            )
        last[REWARD_COMPONENTS] = [
            _to_component(name, value) for name, value in outcome.components.items()
        ]


def _to_component(name: str, value: Any) -> dict[str, Any]:
    score, weight = value if isinstance(value, tuple) else (value, None)
    where = f"reward_components[{name!r}]"
    return {
        "name": check_text(name, "reward_components"),
        "score": None if score is None else check_reward(score, where),
        "weight": None if weight is None else check_reward(weight, where),
    }


def _to_list(name: str, values: Any) -> pa.Array:
    return pa.array([values], tokens.TOKEN_TYPES[name])


def _to_array(values: Any, name: str, kinds: str) -> Array:
    # Tensors of any device and library have it, and arrays too.
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    try:
        array = np.asarray(values) if values else np.zeros(0, np.int64)
    except ValueError as error:
        raise EpisodeInvalidError(f"{name}: {error}, expected a list of numbers.") from error
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise EpisodeInvalidError(f"{name}: found {shorten(values)}, expected a list of numbers.")
    return array


def _to_floats(values: Any, name: str, num: int) -> Array:
    with np.errstate(over="ignore"):
        array = _to_array(values, name, "iuf").astype(np.float32)
    _check_length(name, len(array), num)
    if not np.isfinite(array).all():
        at = int(np.argmin(np.isfinite(array)))
        raise EpisodeInvalidError(
            f"{name}: found {array[at]:g} for token {at}, expected a finite number. Leave all of "
            "them out where one is not known."
        )
    return array


def _to_flags(values: Any, num: int) -> Array:
    array = _to_array(values, "loss_mask", "biuf")
    _check_length("loss_mask", len(array), num)
    if not np.isin(array, (0, 1)).all():
        raise EpisodeInvalidError(f"loss_mask: found {shorten(values)}, expected flags.")
    return array.astype(np.bool_)


def _to_versions(values: Any, num: int) -> Array:
    array = _to_array(values, "versions", "iu")
    _check_length("versions", len(array), num)
    return array.astype(np.int64)


def _find_runs(versions: Array) -> list[dict[str, int]]:
    starts = [at for at in range(len(versions)) if not at or versions[at] != versions[at - 1]]
    return [{"start": start, "version": int(versions[start])} for start in starts]


def _check_length(name: str, found: int, num: int) -> None:
    if found != num:
        raise EpisodeInvalidError(
            f"{name}: found {found} values, expected {num}, one for each of completion_ids."
        )


def _dump(name: str, value: Any) -> str:
    try:
        return dump_metadata(value)
    except (RecursionError, TypeError, ValueError) as error:
        raise EpisodeInvalidError(f"{name}: {error}, expected what JSON can hold.") from error


def _add_metadata(facts: Mapping[str, Any], more: Mapping[str, Any]) -> str:
    return _dump("metadata", {**json.loads(facts.get("metadata", "{}")), **more})
