"""Events: one line of dsjson, a decision or several slots, as rows of one step each, and back.

The members of `c` are stored as the text that the log has: namespaces and features may be repeated,
and a number may have more digits than float64.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import pyarrow as pa

from replaylake.datastore.episodes.schema import ACTION_FEATURES, PDROP
from replaylake.datastore.episodes.spaces import Discrete, Text
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.tabular.tables import is_encodable

Row = dict[str, Any]

ACTION_PROBS: Final = "action_probs"
SLOT_FEATURES: Final = "slot_features"
SLOT_REWARD: Final = "slot_reward"
SKIP_LEARN: Final = "skip_learn"
ORIGINAL_LABEL_COST: Final = "original_label_cost"
OUTCOME: Final = "outcome"
DSJSON: Final = "dsjson"
# Further columns of a dataset of events.
EXTRAS: Final[Mapping[str, pa.DataType]] = {
    ACTION_FEATURES: pa.list_(pa.field("element", pa.string())),
    ACTION_PROBS: pa.list_(pa.field("element", pa.float64())),
    SLOT_FEATURES: pa.string(),
    SLOT_REWARD: pa.float64(),
    PDROP: pa.float64(),
    SKIP_LEARN: pa.bool_(),
    ORIGINAL_LABEL_COST: pa.float64(),
    OUTCOME: pa.string(),
    DSJSON: pa.string(),
}
ROW_SCHEMA: Final = pa.schema(
    {
        "episode_id": pa.string(),
        "step": pa.int64(),
        "observation": pa.string(),
        "action": pa.int64(),
        "reward": pa.float64(),
        "terminated": pa.bool_(),
        "behavior_prob": pa.float64(),
        "timestamp": pa.timestamp("us", "UTC"),
        **EXTRAS,
    }
)
# The number of candidates differs from event to event: an action is the number of one in its own
# event's list. A line is at most 64 MiB, and no real event comes near this bound.
ACTION_SPACE: Final = Discrete(1 << 16)
SPACES: Final = (Text(), ACTION_SPACE)

COST: Final = "_label_cost"
PROBABILITY: Final = "_label_probability"
ACTION: Final = "_label_Action"
INDEX: Final = "_labelIndex"
OUTCOMES: Final = "_outcomes"
MULTI: Final = "_multi"
SLOTS: Final = "_slots"
SLOT_ID: Final = "_slot_id"
EVENT_ID: Final = "EventId"
TIMESTAMP: Final = "Timestamp"
SKIPPED: Final = "_skipLearn"
ORIGINAL: Final = "_original_label_cost"
OBSERVED: Final = "o"
# Members that have columns of their own, exact to the last digit. The others are in DSJSON.
COLUMN_MEMBERS: Final = frozenset(
    ("c", COST, ACTION, INDEX, EVENT_ID, PDROP, SKIPPED, ORIGINAL, OBSERVED)
)
_DANGLING: Final = "RewardValue"
_CONTINUOUS: Final = ("_label_ca", "pdf")
# Probabilities are logged as float32, or with six digits.
_SLACK: Final = 1e-3
_SHOWN: Final = 60
_WHITE: Final = frozenset(" \t\r\n")
_WHITE_RUN: Final = re.compile(r"[ \t\r\n]*")
# .NET writes seven digits of a second.
_TIME: Final = re.compile(
    r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:\.(\d{1,6})\d*)?(Z|[+-]\d\d:\d\d)?"
)


class Member(NamedTuple):
    """A member of an object: its text, from the key on, that of its value, and the value.

    The value of `c` is a tuple of its names and members, which may be repeated; that of candidates
    and slots the text and value of each.
    """

    text: str
    value_text: str
    value: Any


def parse_event(line: bytes) -> tuple[str | None, list[Row]]:
    """Return the event's id, if it has one, and a row of ROW_SCHEMA for each of its decisions.

    Raises: SourceInvalidError with what was found, for a line that is no labeled or unlabeled
    decision; RecursionError.
    """
    try:
        text = line.decode("utf-8-sig").strip()
        pairs, end = _read_members(text, 0, {"c": _read_context_members})
        if end != len(text):
            raise ValueError(f"text after the event: {_shorten(text[end:])}")
        members = _index(pairs)
    except ValueError as error:
        raise SourceInvalidError(f"found {error}, expected one JSON object") from error
    context = _read_context(members)
    event_id = _read_event_id(members)
    common = {
        "observation": context.shared,
        "timestamp": _read_time(members),
        PDROP: _read_pdrop(members),
        SKIP_LEARN: _read_flag(members, SKIPPED),
        ORIGINAL_LABEL_COST: _read_number(members, ORIGINAL),
        OUTCOME: members[OBSERVED].value_text if OBSERVED in members else None,
    }
    rows = _read_slots(members, context) if context.slots else [_read_decision(members, context)]
    if common[SKIP_LEARN]:
        # The action was not taken: the logged cost is not the cost of this action.
        rows[-1]["reward"] = None
        for row in rows:
            row[SLOT_REWARD] = None
    # A reward that is not stored as one, NaN or that of an action not taken, is not lost.
    own = COLUMN_MEMBERS if rows[-1]["reward"] is not None else COLUMN_MEMBERS - {COST}
    rows[0][DSJSON] = _join([member for name, member in members.items() if name not in own])
    last = len(rows) - 1
    return event_id, [
        {"step": step, "terminated": step == last, **common, **row} for step, row in enumerate(rows)
    ]


def is_event(value: Any) -> bool:
    """Return whether a value is an event: it has candidates, and a label or a ranking."""
    if not isinstance(value, dict):
        return False
    context = value.get("c")
    if not isinstance(context, dict) or not isinstance(context.get(MULTI), list):
        return False
    return any(name in value for name in ("a", COST, INDEX, ACTION, OUTCOMES, EVENT_ID))


def read_members(text: str) -> dict[str, Member]:
    """Return the members of an object, each of which is there once.

    Raises: ValueError, RecursionError.
    """
    return _index(list_members(text))


def list_members(text: str) -> Sequence[tuple[str, Member]]:
    """Return names and members of an object of features, in which a name may be repeated.

    Raises: ValueError, RecursionError.
    """
    pairs, end = _read_members(text, _skip(text, 0))
    if _skip(text, end) != len(text):
        raise ValueError(f"text after the object: {_shorten(text[end:])}")
    return pairs


def list_elements(text: str, name: str) -> list[str]:
    """Return the text of each element of the list `name` of an object, to the letter.

    Raises: ValueError, RecursionError.
    """
    pairs, _ = _read_members(text, _skip(text, 0), {name: _read_elements})
    return [element for element, _ in _index(pairs)[name].value]


def parse_time(text: str) -> datetime | None:
    """Return a time in UTC, digits beyond the microsecond cut off; None for what is no time."""
    if (match := _TIME.fullmatch(text)) is None:
        return None
    seconds, fraction, zone = match.groups()
    try:
        time = datetime.fromisoformat(f"{seconds}.{(fraction or '0').ljust(6, '0')}{zone or 'Z'}")
        return time.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


@dataclass(frozen=True)
class _Context:
    """The parts of `c`: shared features, candidates, slots; each the text of an object."""

    shared: str
    candidates: Sequence[str]
    slots: Sequence[str]
    slot_ids: Sequence[int | None]
    """The slot of each candidate in an event of slates; None in other events."""


_Pairs = tuple[tuple[str, Member], ...]
_Elements = list[tuple[str, Any]]
# A reader of the value that begins at a place of a text; returns it, and where it ends.
_Reader = Callable[[str, int], tuple[Any, int]]


def _read_members(
    text: str, start: int, readers: Mapping[str, _Reader] = MappingProxyType({})
) -> tuple[_Pairs, int]:
    """Return the members of the object that begins at `start`, and where it ends."""
    if text[start : start + 1] != "{":
        raise ValueError(_describe_rest(text, start))
    pairs: list[tuple[str, Member]] = []
    at = _skip(text, start + 1)
    if text[at : at + 1] == "}":
        return (), at + 1
    while True:
        begin = at
        if text[at : at + 1] != '"':
            raise ValueError(f"{_describe_rest(text, at)} in place of a name")
        name, at = DECODER.raw_decode(text, at)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise ValueError(f"{_describe_rest(text, at)} after the name {name!r}")
        value_start = _skip(text, at + 1)
        value, at = readers.get(name, DECODER.raw_decode)(text, value_start)
        pairs.append((name, Member(text[begin:at], text[value_start:at], value)))
        at = _skip(text, at)
        if (mark := text[at : at + 1]) not in (",", "}"):
            raise ValueError(f"{_describe_rest(text, at)} after the member {name!r}")
        if mark == "}":
            return tuple(pairs), at + 1
        at = _skip(text, at + 1)


def _index(pairs: Sequence[tuple[str, Member]]) -> dict[str, Member]:
    """Return members by name. Raises: ValueError for one that is there twice."""
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"the member {repeated!r} twice")
    return members


def _read_context_members(text: str, start: int) -> tuple[Any, int]:
    """Return the members of `c`; any other value where it is no object."""
    if text[start : start + 1] != "{":
        return DECODER.raw_decode(text, start)
    return _read_members(text, start, {MULTI: _read_elements, SLOTS: _read_elements})


def _read_elements(text: str, start: int) -> tuple[Any, int]:
    """Return the text and the value of each element of a list; any other value where it is none."""
    if text[start : start + 1] != "[":
        return DECODER.raw_decode(text, start)
    elements: _Elements = []
    at = _skip(text, start + 1)
    if text[at : at + 1] == "]":
        return elements, at + 1
    while True:
        value, end = DECODER.raw_decode(text, at)
        elements.append((text[at:end], value))
        at = _skip(text, end)
        if (mark := text[at : at + 1]) not in (",", "]"):
            raise ValueError(f"{_describe_rest(text, at)} after an element of a list")
        if mark == "]":
            return elements, at + 1
        at = _skip(text, at + 1)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name}, which is not JSON")


# json.loads would make one for each value, and take NaN.
DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)


def _skip(text: str, at: int) -> int:
    if text[at : at + 1] not in _WHITE:
        return at
    match = _WHITE_RUN.match(text, at)
    assert match is not None, "the pattern matches nothing, too"
    return match.end()


def _read_context(members: Mapping[str, Member]) -> _Context:
    if (continuous := next((name for name in _CONTINUOUS if name in members), None)) is not None:
        raise SourceInvalidError(
            f"found {continuous}, a continuous action (CATS), expected candidates with features: "
            "continuous actions are not read from dsjson"
        )
    if "c" not in members:
        if _DANGLING in members:
            name = members[EVENT_ID].value if EVENT_ID in members else None
            raise SourceInvalidError(
                f"found the reward {_shorten(members[_DANGLING].value_text)} of the event {name!r} "
                "without its decision, expected the event: join rewards to their events first, or "
                "add them to stored events by a label"
            )
        raise SourceInvalidError(f"found the members {[*members][:8]}, expected the context c")
    pairs = members["c"].value
    if not isinstance(pairs, tuple):
        raise SourceInvalidError(
            f"c: found {_shorten(members['c'].value_text)}, expected an object of features"
        )
    # VW takes a repeated namespace, so only the lists of candidates and slots are there once.
    lists = [(name, member) for name, member in pairs if name in (MULTI, SLOTS)]
    try:
        parts = _index(lists)
    except ValueError as error:
        raise SourceInvalidError(f"c: found {error}, expected it once") from error
    if MULTI not in parts:
        raise SourceInvalidError(
            f"c: found the members {[name for name, _ in pairs][:8]}, expected {MULTI}, a list of "
            "candidates with their features (ADF)"
        )
    candidates = _read_objects(parts[MULTI], f"c.{MULTI}")
    if len(candidates) > ACTION_SPACE.n:
        raise SourceInvalidError(
            f"c.{MULTI}: found {len(candidates):,} candidates, expected at most {ACTION_SPACE.n:,}"
        )
    slots = _read_objects(parts[SLOTS], f"c.{SLOTS}") if SLOTS in parts else []
    shared = [member for name, member in pairs if name not in (MULTI, SLOTS)]
    ids = [value.get(SLOT_ID) for _, value in candidates]
    return _Context(_join(shared), [t for t, _ in candidates], [t for t, _ in slots], ids)


def _read_objects(member: Member, name: str) -> _Elements:
    if not isinstance(member.value, list) or not member.value:
        raise SourceInvalidError(
            f"{name}: found {_shorten(member.value_text)}, expected a list of one object or more"
        )
    for i, (text, value) in enumerate(member.value):
        if not isinstance(value, dict):
            raise SourceInvalidError(
                f"{name}[{i}]: found {_shorten(text)}, expected an object of features"
            )
    return member.value


def _read_decision(members: Mapping[str, Member], context: _Context) -> Row:
    """Return the row of an event of one decision, without what all rows of an event share."""
    num = len(context.candidates)
    ranking = _read_list(members, "a", whole=True)
    probs = _read_list(members, "_p" if "_p" in members else "p")
    number, index = (_read_whole(members, name) for name in (ACTION, INDEX))
    if number is not None and index is not None and number != index + 1:
        raise SourceInvalidError(
            f"{INDEX}: found {index} beside {ACTION} {number}, expected {number - 1}: the one "
            "counts from 0, the other from 1"
        )
    chosen = number - 1 if index is None and number is not None else index
    base = _find_base(ranking, num, chosen)
    ranked = None if ranking is None or base is None else [action - base for action in ranking]
    if chosen is None:
        if ranking and not ranked:
            raise SourceInvalidError(
                f"a: found {_shorten(members['a'].value_text)}, expected the numbers of some of "
                f"the {num} candidates, from 1"
            )
        if not ranked:
            raise SourceInvalidError(
                f"found neither {ACTION} nor a ranking a of the {num} candidates, expected the "
                "action that was taken"
            )
        chosen = ranked[0]
    if not 0 <= chosen < num:
        raise SourceInvalidError(f"{ACTION}: found {chosen + 1}, expected 1 to {num} candidates")
    prob = _read_number(members, PROBABILITY)
    if prob is None and ranked and probs and ranked[0] == chosen:
        prob = probs[0]
    _check_prob(prob, PROBABILITY)
    cost = _read_cost(members)
    return {
        "action": chosen,
        "reward": None if cost is None else 0.0 - cost,
        "behavior_prob": prob,
        ACTION_FEATURES: context.candidates,
        ACTION_PROBS: _spread(ranked, probs, num, chosen, prob),
    }


def _read_slots(members: Mapping[str, Member], context: _Context) -> list[Row]:
    """Return a row for each slot of an event, without what all rows of an event share.

    The candidates of a slot are all of the event's (CCB), or its own (slates).
    """
    outcomes = members[OUTCOMES].value if OUTCOMES in members else None
    if not isinstance(outcomes, list) or len(outcomes) != len(context.slots):
        found = "no list" if not isinstance(outcomes, list) else f"{len(outcomes)} outcomes"
        raise SourceInvalidError(
            f"{OUTCOMES}: found {found}, expected one outcome for each of the "
            f"{len(context.slots)} slots, with the action that was taken (_a)"
        )
    is_slates = any(number is not None for number in context.slot_ids)
    own = [context.candidates] * len(context.slots)
    if is_slates:
        own = _part_by_slot(context)
    rows = [
        _read_slot(outcome, f"{OUTCOMES}[{i}]", own[i], context.slots[i])
        for i, outcome in enumerate(outcomes)
    ]
    if is_slates:
        cost = _read_cost(members)
        reward = None if cost is None else 0.0 - cost
    else:
        rewards = [row[SLOT_REWARD] for row in rows]
        reward = None if None in rewards else math.fsum(rewards)
    # What the event brought is known once all of its slots are filled.
    for row in rows:
        row["reward"] = 0.0
    rows[-1]["reward"] = reward
    return rows


def _part_by_slot(context: _Context) -> list[Sequence[str]]:
    own: list[list[str]] = [[] for _ in context.slots]
    for i, (text, number) in enumerate(zip(context.candidates, context.slot_ids, strict=True)):
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(own):
            raise SourceInvalidError(
                f"c.{MULTI}[{i}].{SLOT_ID}: found {number!r}, expected the number of one of the "
                f"{len(own)} slots, from 0"
            )
        own[number].append(text)
    return [*own]


def _read_slot(outcome: Any, name: str, candidates: Sequence[str], features: str) -> Row:
    if not isinstance(outcome, dict):
        raise SourceInvalidError(
            f"{name}: found {_shorten(json.dumps(outcome))}, expected an object"
        )
    values = {key: Member("", json.dumps(value), value) for key, value in outcome.items()}
    try:
        for key in ("_a", "_p"):
            if key in values and not isinstance(values[key].value, list):
                values[key] = Member("", values[key].value_text, [values[key].value])
        ranked, probs = _read_list(values, "_a", whole=True), _read_list(values, "_p")
        cost = _read_cost(values)
        if not ranked:
            raise SourceInvalidError("_a: found no action, expected the one that was taken")
        num = len(candidates)
        if outside := [action for action in ranked if not 0 <= action < num]:
            raise SourceInvalidError(f"_a: found {outside[0]}, expected 0 to {num - 1}")
        prob = probs[0] if probs else None
        _check_prob(prob, "_p")
    except SourceInvalidError as error:
        raise SourceInvalidError(f"{name}.{error}") from error
    return {
        "action": ranked[0],
        "behavior_prob": prob,
        ACTION_FEATURES: candidates,
        ACTION_PROBS: _spread(ranked, probs, num, ranked[0], prob),
        SLOT_FEATURES: features,
        SLOT_REWARD: None if cost is None else 0.0 - cost,
    }


def _find_base(ranking: Sequence[int] | None, num: int, chosen: int | None) -> int | None:
    """Return from which number a ranking counts: 1, or 0 if it has a 0 or the label shows it.

    None if the label contradicts both, or the ranking names what is no candidate.
    """
    if not ranking:
        return None
    possible = [b for b in (1, 0) if min(ranking) >= b and max(ranking) < num + b]
    if len(possible) == 2 and chosen is not None:
        possible = [b for b in possible if ranking[0] - b == chosen]
    return possible[0] if possible else None


def _spread(
    ranked: Sequence[int] | None,
    probs: Sequence[float] | None,
    num: int,
    chosen: int,
    prob: float | None,
) -> list[float] | None:
    """Return the probability of each candidate; None where the ranking does not say them all."""
    if not ranked or not probs or len(ranked) != len(probs) or len({*ranked}) < len(ranked):
        return None
    every = [0.0] * num
    for action, one in zip(ranked, probs, strict=True):
        if not 0 <= one <= 1 + _SLACK:
            return None
        every[action] = float(one)
    is_whole = abs(math.fsum(every) - 1) <= _SLACK
    is_same = prob is None or abs(every[chosen] - prob) <= _SLACK
    return every if is_whole and is_same else None


def _read_event_id(members: Mapping[str, Member]) -> str | None:
    if EVENT_ID not in members or (value := members[EVENT_ID].value) in (None, ""):
        return None
    if not isinstance(value, str) or not is_encodable(value) or "\0" in value:
        raise SourceInvalidError(
            f"{EVENT_ID}: found {_shorten(members[EVENT_ID].value_text)}, expected text"
        )
    return value


def _read_time(members: Mapping[str, Member]) -> datetime | None:
    if TIMESTAMP not in members or (value := members[TIMESTAMP].value) is None:
        return None
    time = parse_time(value) if isinstance(value, str) else None
    if time is None:
        raise SourceInvalidError(
            f"{TIMESTAMP}: found {_shorten(members[TIMESTAMP].value_text)}, expected a time such "
            "as 2026-01-31T12:00:00.1234567Z"
        )
    return time


def _read_pdrop(members: Mapping[str, Member]) -> float | None:
    value = _read_number(members, PDROP)
    if value is not None and not 0 <= value < 1:
        raise SourceInvalidError(
            f"{PDROP}: found {value:g}, expected 0 or more and below 1: the probability with which "
            "the event was dropped from the log"
        )
    return value


def _read_cost(members: Mapping[str, Member]) -> float | None:
    """Return the cost; None where there is none, or NaN, which VW writes for one."""
    if COST in members and str(members[COST].value).lower() == "nan":
        return None
    return _read_number(members, COST)


def _read_number(members: Mapping[str, Member], name: str) -> float | None:
    value = members[name].value if name in members else None
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (OverflowError, TypeError):
        number = math.nan
    if not math.isfinite(number):
        raise SourceInvalidError(
            f"{name}: found {_shorten(members[name].value_text)}, expected a finite number"
        )
    return number


def _read_whole(members: Mapping[str, Member], name: str) -> int | None:
    value = _read_number(members, name)
    if value is not None and not value.is_integer():
        raise SourceInvalidError(f"{name}: found {value:g}, expected a whole number")
    return None if value is None else int(value)


def _read_flag(members: Mapping[str, Member], name: str) -> bool | None:
    value = members[name].value if name in members else None
    if value is not None and not isinstance(value, bool):
        raise SourceInvalidError(
            f"{name}: found {_shorten(members[name].value_text)}, expected true or false"
        )
    return value


def _read_list(members: Mapping[str, Member], name: str, *, whole: bool = False) -> Any:
    """Return a list of numbers; None where there is none."""
    values = members[name].value if name in members else None
    if values is None:
        return None
    kinds = int if whole else int | float
    if not isinstance(values, list) or not all(
        isinstance(one, kinds) and not isinstance(one, bool) for one in values
    ):
        raise SourceInvalidError(
            f"{name}: found {_shorten(members[name].value_text)}, expected a list of "
            f"{'whole numbers' if whole else 'numbers'}"
        )
    return values


def _check_prob(prob: float | None, name: str) -> None:
    if prob is not None and not 0 < prob <= 1 + _SLACK:
        raise SourceInvalidError(
            f"{name}: found {prob:g}, expected the probability of the action that was taken, above "
            "0 and at most 1"
        )


def _join(members: Sequence[Member]) -> str:
    return "{" + ",".join(member.text for member in members) + "}"


def _describe_rest(text: str, at: int) -> str:
    return _shorten(text[at:]) if at < len(text) else "the end of the line"


def _shorten(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
