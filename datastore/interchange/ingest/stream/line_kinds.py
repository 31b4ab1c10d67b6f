"""Line kinds: a line of a stream is a step, a decision or an episode, by the format of its log.

Only formats of JSON lines can be followed, because each line of them is a complete record.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa

from replaylake.datastore.errors import (
    ConfigInvalidError,
    EpisodeInvalidError,
    SourceInvalidError,
)
from replaylake.datastore.interchange.formats import nemorl, verifiers, verl
from replaylake.datastore.interchange.formats.bandit import (
    SLATE_COLUMNS,
    declare_decisions,
    is_open_bandit,
)
from replaylake.datastore.interchange.formats.dsjson.dsjson import declare_events
from replaylake.datastore.interchange.formats.dsjson.events import (
    ROW_SCHEMA,
    is_event,
    parse_event,
)
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.formats.generations.json_values import load_json
from replaylake.datastore.interchange.formats.generations.rows import (
    COMPLETION_MESSAGES,
    FINAL_MESSAGES,
    GENERATION_SCHEMA,
    PROMPT_MESSAGES,
    MappedPaths,
    Row,
    declare_generations,
)
from replaylake.datastore.interchange.formats.tabular.fields import ALIASES
from replaylake.datastore.interchange.formats.tabular.reader import Declaration
from replaylake.datastore.interchange.formats.transcripts.dialogues import (
    is_transcript,
    parse_dialogues,
)
from replaylake.datastore.interchange.formats.transcripts.transcripts import iter_rows

AUTO: Final = "auto"
_DIGITS: Final = 32
# Equal samples are counted among so many others: those of the last training steps, 20 MB.
_MAX_COUNTS: Final = 1 << 17
_JSON_COLUMNS: Final = (
    PROMPT_MESSAGES,
    COMPLETION_MESSAGES,
    FINAL_MESSAGES,
    "tool_calls",
    "metadata",
)


class LineKind(Protocol):
    """The kind of the lines of a stream.

    format: the format of such logs. is_decision: whether each line is a terminated episode.
    is_event: whether each line is a whole episode, which the dataset's key, if it has one,
    identifies. json_columns: the columns of steps whose texts are JSON, equal in any order of keys.
    types: types of columns, where the values alone do not decide them. has_numbered_ids: whether
    lines were read that have no id but their content and their number among equal ones.
    """

    format: str
    is_decision: bool
    is_event: bool
    json_columns: tuple[str, ...]
    types: Mapping[str, pa.DataType]

    @property
    def has_numbered_ids(self) -> bool: ...

    def recognizes(self, value: Any) -> bool:
        """Whether a line's value is of this kind."""

    def load(self, text: bytes) -> Any:
        """Return a line's value. Raises: ValueError, RecursionError."""

    def rows(self, value: Any) -> list[dict[str, Any]]:
        """Return the steps of a line, each by column. Raises: SourceInvalidError."""

    def declare(
        self, names: Sequence[str], options: ReadOptions, key: Sequence[str]
    ) -> Declaration:
        """Return the declaration of the columns `names`; key: the dataset's unique key, if any.

        Raises: SourceInvalidError for columns that a stream of this kind cannot have.
        """


class _Steps:
    """One JSON object per line, which is a step."""

    format = "jsonl"
    is_decision = False
    is_event = False
    has_numbered_ids = False
    json_columns: tuple[str, ...] = ()
    types: Mapping[str, pa.DataType] = MappingProxyType({})

    def __init__(self, options: ReadOptions) -> None: ...

    def recognizes(self, value: Any) -> bool:
        return True

    def load(self, text: bytes) -> Any:
        values = json.loads(text)
        if b"\\ud" in text.lower():
            # JSON can have half of a surrogate pair, but text cannot.
            json.dumps(values, ensure_ascii=False).encode()
        return values

    def rows(self, value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, dict) or not value:
            raise SourceInvalidError("expected one JSON object with a step's values")
        return [value]

    def declare(
        self, names: Sequence[str], options: ReadOptions, key: Sequence[str]
    ) -> Declaration:
        return Declaration()


class _Decisions(_Steps):
    """One JSON object per line, which is a decision: an episode of one step."""

    format = "bandit"
    is_decision = True
    is_event = True

    def recognizes(self, value: Any) -> bool:
        return isinstance(value, dict) and is_open_bandit([*value])

    def declare(
        self, names: Sequence[str], options: ReadOptions, key: Sequence[str]
    ) -> Declaration:
        named = {*options.mapping.values(), *key}
        if (
            slate := next((n for n in SLATE_COLUMNS if n in names and n not in named), None)
        ) is not None:
            raise SourceInvalidError(
                f"column {slate!r}: is not supported in a stream of decisions, because lines that "
                "share its value would be a slate, which a stream cannot recognize. "
                f"If each decision has its own value, use it as the id with `mapping` "
                f"episode_id={slate}, or name it in `unique`; if decisions that share it were made "
                f"one by one, store it with `mapping` {slate}_={slate}."
            )
        return declare_decisions(names)


class _Events:
    """One event of Vowpal Wabbit's dsjson per line: a decision, or several slots, a step each."""

    format = "dsjson"
    is_decision = False
    is_event = True
    has_numbered_ids = False
    json_columns: tuple[str, ...] = ()
    types: Mapping[str, pa.DataType] = MappingProxyType(
        dict(zip(ROW_SCHEMA.names, ROW_SCHEMA.types, strict=True))
    )

    def __init__(self, options: ReadOptions) -> None: ...

    def recognizes(self, value: Any) -> bool:
        return is_event(value)

    def load(self, text: bytes) -> Any:
        return text

    def rows(self, value: Any) -> list[dict[str, Any]]:
        event_id, rows = parse_event(value)
        if event_id is None:
            raise SourceInvalidError(
                "expected an EventId to follow a stream: without it, repeated lines cannot be "
                "distinguished from new ones"
            )
        return [{**row, "episode_id": event_id} for row in rows]

    def declare(
        self, names: Sequence[str], options: ReadOptions, key: Sequence[str]
    ) -> Declaration:
        return declare_events(options)


class _Dialogues:
    """One record of chat or tool use per line: each turn that a model generated is a step."""

    format = "transcripts"
    is_decision = False
    is_event = False
    has_numbered_ids = False
    json_columns: tuple[str, ...] = _JSON_COLUMNS
    types: Mapping[str, pa.DataType] = MappingProxyType({})

    def __init__(self, options: ReadOptions) -> None: ...

    def recognizes(self, value: Any) -> bool:
        return is_transcript(value)

    def load(self, text: bytes) -> Any:
        return load_json(text)

    def rows(self, value: Any) -> list[dict[str, Any]]:
        dialogues = parse_dialogues(value)
        digest = None
        found: list[dict[str, Any]] = []
        for number, dialogue in enumerate(dialogues):
            name = dialogue.episode_id
            if name is None:
                # Without an id, what is stored of the whole record identifies it.
                digest = digest or self._digest([[*iter_rows(one, "")] for one in dialogues])
                name = digest if len(dialogues) == 1 else f"{digest}/{number}"
            found += iter_rows(dialogue, name)
        return found

    def _digest(self, dialogues: Sequence[Sequence[dict[str, Any]]]) -> str:
        content = [
            [row | {name: normalize_json(row[name]) for name in self.json_columns} for row in rows]
            for rows in dialogues
        ]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]

    def declare(
        self, names: Sequence[str], options: ReadOptions, key: Sequence[str]
    ) -> Declaration:
        return declare_generations(options)


class _Generations(ABC):
    """One episode of generations per line, of a framework's rollouts."""

    format = ""
    is_decision = False
    is_event = False
    json_columns: tuple[str, ...] = _JSON_COLUMNS

    def __init__(self, options: ReadOptions) -> None:
        self._paths = MappedPaths(options)
        known = dict(zip(GENERATION_SCHEMA.names, GENERATION_SCHEMA.types, strict=True))
        paths = {name: kind for name, kind in self._paths.kinds.items() if kind is not None}
        self.types: Mapping[str, pa.DataType] = {**known, **paths}

    @abstractmethod
    def recognizes(self, value: Any) -> bool:
        """Whether a line's value is one of this format."""

    def load(self, text: bytes) -> Any:
        return text

    def rows(self, value: Any) -> list[dict[str, Any]]:
        rows, own = self._read(value)
        self._paths.set_group_source(rows)
        name = self._identify(rows) if own is None else own
        return [
            {
                "agent_id": "",
                **{k: v for k, v in row.items() if k not in self._paths.replaced},
                "episode_id": name,
            }
            for row in rows
        ]

    def declare(
        self, names: Sequence[str], options: ReadOptions, key: Sequence[str]
    ) -> Declaration:
        return declare_generations(options)

    @abstractmethod
    def _read(self, text: bytes) -> tuple[list[Row], str | None]:
        """Return the rows of a line, and the id that it states. Raises: SourceInvalidError."""

    @property
    def has_numbered_ids(self) -> bool:
        return False

    def _identify(self, rows: Sequence[Row]) -> str:
        """Return an id for an episode that states none: the hash of its content."""
        return _hash_content(rows)


class _EqualSamples:
    """Numbers equal samples, in the order in which they come."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, int] = OrderedDict()

    @property
    def is_empty(self) -> bool:
        """Whether no sample was numbered."""
        return not self._counts

    def number(self, name: str) -> str:
        """Return a name for a sample whose content has a name, another one each time."""
        number = self._counts[name] = self._counts.pop(name, 0) + 1
        if len(self._counts) > _MAX_COUNTS:
            self._counts.popitem(last=False)
        return name if number == 1 else f"{name}#{number}"


class _NemoRl(_Generations):
    """A sample's number in its training step, which not every version writes, is part of its id.

    Without it, equal samples are numbered: equal short answers to one prompt are common.
    """

    format = "nemorl"

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options)
        self._equals = _EqualSamples()

    @property
    def has_numbered_ids(self) -> bool:
        return not self._equals.is_empty

    def recognizes(self, value: Any) -> bool:
        return nemorl.is_sample(value)

    def _read(self, text: bytes) -> tuple[list[Row], str | None]:
        try:
            rows, number = nemorl.read_sample(text)
        except (EpisodeInvalidError, OverflowError) as error:
            raise SourceInvalidError(str(error)) from error
        return rows, None if number is None else _hash_content([number, *rows])

    def _identify(self, rows: Sequence[Row]) -> str:
        return self._equals.number(super()._identify(rows))


class _Verifiers(_Generations):
    format = "verifiers"

    def recognizes(self, value: Any) -> bool:
        return verifiers.is_episode(value)

    def _read(self, text: bytes) -> tuple[list[Row], str | None]:
        return verifiers.read_episode(text, self._paths)


class _Verl(_Generations):
    """A sample states its training step, but no number in it: equal ones are numbered."""

    format = "verl"

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options)
        self._equals = _EqualSamples()

    @property
    def has_numbered_ids(self) -> bool:
        return not self._equals.is_empty

    def recognizes(self, value: Any) -> bool:
        return verl.is_sample(value)

    def _read(self, text: bytes) -> tuple[list[Row], str | None]:
        return [verl.read_sample(text, self._paths)], None

    def _identify(self, rows: Sequence[Row]) -> str:
        return self._equals.number(f"step{rows[0]['train_step']}/{super()._identify(rows)}")


def _hash_content(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_to_list)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _to_list(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else str(value)


# Specific ones before the general one, as in the catalog of formats.
_KINDS: Final[tuple[type[_Steps | _Events | _Dialogues | _Generations], ...]] = (
    _Decisions,
    _Events,
    _NemoRl,
    _Verifiers,
    _Verl,
    _Dialogues,
    _Steps,
)


def find_line_kind(format: str, options: ReadOptions) -> LineKind | None:
    """Return the kind of a format's lines; None for `auto`, where the first line decides.

    Raises: ConfigInvalidError for a format that cannot be followed.
    """
    if format == AUTO:
        return None
    for kind in _KINDS:
        if kind.format == format:
            return kind(options)
    names = ", ".join(sorted([AUTO, *(kind.format for kind in _KINDS)]))
    raise ConfigInvalidError(
        f"format: found {format!r}, which cannot be followed, expected one of {names}, whose lines "
        "are complete records. Ingest the files of other formats when they are complete.",
        parameter="format",
    )


def recognize_line(text: bytes, options: ReadOptions) -> LineKind | None:
    """Return the kind of a line, whose columns the mapping names; None if it is not JSON.

    An object with an episode id, a step and an action is a step, whatever else it has.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if _names_step(value, options.mapping):
        return _Steps(options)
    return next(kind for kind in (one(options) for one in _KINDS) if kind.recognizes(value))


def _names_step(value: Any, mapping: Mapping[str, str]) -> bool:
    if not isinstance(value, dict):
        return False
    # A dialogue may have the number of a training step, but not an action.
    has_action = "action" in mapping or any(name in value for name in ALIASES["action"])
    named = ((mapping[n],) if n in mapping else ALIASES[n] for n in ("episode_id", "step"))
    return has_action and all(any(name in value for name in names) for names in named)


def normalize_json(text: str | None) -> str | None:
    """Return JSON with sorted keys, so that equal values have equal texts."""
    return None if text is None else json.dumps(json.loads(text), sort_keys=True)


def make_key_id(values: Mapping[str, Any]) -> str:
    """Return an episode id made from a key's values, which are texts, numbers or flags."""
    parts = [
        str(int(v)) if isinstance(v, float) and v.is_integer() else str(v) for v in values.values()
    ]
    if len(parts) > 1:
        parts = [part.replace("%", "%25").replace("/", "%2F") for part in parts]
    return "/".join(parts)
