"""What a transcript's record says of its dialogue: id, group, rewards and end."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from replaylake.datastore.errors import SourceInvalid
from replaylake.datastore.interchange.formats.tabular.tables import is_encodable
from replaylake.datastore.interchange.formats.transcripts.json_values import dumped

GIVEN, DERIVED, NONE = "given", "derived", "none"

IDS: Final = (
    "episode_id",
    "conversation_id",
    "dialogue_id",
    "session_id",
    "trajectory_id",
    "id",
    "uuid",
)
_GROUPS: Final = ("group_id", "prompt_id", "task_id")
SAMPLES: Final = ("sample_id", "completion_id", "trial")
_REWARDS: Final = ("reward", "score")
_ENDED: Final = frozenset(
    ("complete", "completed", "done", "end_turn", "eos", "finished", "stop", "success")
)
_CUT_OFF: Final = frozenset(
    (
        "aborted",
        "cancelled",
        "error",
        "length",
        "max_steps",
        "max_tokens",
        "max_turns",
        "timeout",
        "truncated",
    )
)
# What becomes a column where it is of this type, as in what we export.
_COLUMNS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "reward": (int, float, type(None)),
    "rewards": (list, type(None)),
    "episode_id": (str, int),
    "group_id": (str, int),
    "group_id_source": str,
    "sample_id": (str, int),
    "source_framework": str,
    "status": str,
    "model": str,
    "terminated": bool,
    "truncated": bool,
}
_DIGITS: Final = 16


def end_of_task(record: Mapping[str, Any]) -> tuple[str | None, bool, bool]:
    """Return status, terminated and truncated of a tau-bench result.

    Its environment puts `reward_info` into `info` when the task is over. It stays null where the
    agent ran out of steps; a run that failed has `error`.
    """
    info = record.get("info")
    if isinstance(info, dict) and info.get("error") is not None:
        return "error", False, True
    if isinstance(info, dict) and "reward_info" in info and info["reward_info"] is None:
        return "truncated", False, True
    return "completed", True, False


def end_of(record: Mapping[str, Any]) -> tuple[str | None, bool, bool]:
    """Return status, terminated and truncated where the record says so; open where it does not."""
    names = ("status", "finish_reason", "stop_reason")
    status = next((found for name in names if (found := text_of(record, name))), None)
    terminated, truncated = record.get("terminated"), record.get("truncated")
    if isinstance(terminated, bool) or isinstance(truncated, bool):
        return status, terminated is True, truncated is True
    word = (status or "").lower()
    return status, word in _ENDED, word in _CUT_OFF


def group_of(
    record: Mapping[str, Any], prompt: Sequence[Mapping[str, Any]]
) -> tuple[str | None, str]:
    """Return the id of a record's group and where it is from: given, derived of the prompt, none.

    `prompt` are the messages before the first turn.
    """
    if record.get("group_id_source") in (DERIVED, NONE):  # as we export it
        return first_id(record, ("group_id",)), record["group_id_source"]
    if (given := first_id(record, _GROUPS)) is not None:
        return given, GIVEN
    if not prompt:
        return None, NONE
    said = [[message["role"], message.get("content")] for message in prompt]
    return hashlib.sha256(dumped(said).encode()).hexdigest()[:_DIGITS], DERIVED


def rewards_of(record: Mapping[str, Any], num_turns: int) -> list[float | None]:
    """Return a reward for each generated turn.

    One of the whole dialogue is what its last turn got, after 0 for those before it: so the return
    is what the record says.
    """
    if (several := record.get("rewards")) is not None:
        if not isinstance(several, list) or len(several) != num_turns:
            raise SourceInvalid(
                f"rewards: found {short(several)}, expected a list of {num_turns}, one for each "
                "generated turn"
            )
        return [_number(value, "rewards") for value in several]
    name = next((name for name in _REWARDS if record.get(name) is not None), None)
    if name is None or not num_turns:
        return [None] * num_turns
    return [*[0.0] * (num_turns - 1), _number(record[name], name)]


def _number(value: Any, name: str) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, int | float):
            return float(value)
    except OverflowError:
        pass
    raise SourceInvalid(f"{name}: found {short(value)}, expected a number or null")


def metadata_of(record: Mapping[str, Any], used: Sequence[str]) -> dict[str, Any]:
    """Return all of a record that becomes no column of its own; `used` holds its messages."""
    return {
        name: value
        for name, value in record.items()
        if name not in used and not isinstance(value, _COLUMNS.get(name, ()))
    }


def first_id(record: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the first of these that the record has. Raises: SourceInvalid if it is no id."""
    for name in names:
        if (value := record.get(name)) is not None:
            return _id(value, name)
    return None


def _id(value: Any, name: str) -> str:
    if isinstance(value, str | int) and not isinstance(value, bool) and is_encodable(str(value)):
        return str(value)
    raise SourceInvalid(f"{name}: found {short(value)}, expected text or a whole number")


def text_of(record: Mapping[str, Any], name: str) -> str | None:
    """Return a text, or None where there is none, or one that UTF-8 cannot hold."""
    value = record.get(name)
    return value if isinstance(value, str) and is_encodable(value) else None


def short(value: Any) -> str:
    """Return a value for a message."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
