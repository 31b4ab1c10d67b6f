"""Scorer: what rates episodes, and the form in which its values are checked.

A scorer makes of some episodes the content that it looks at, and of contents their outcomes. Equal
contents have equal outcomes, so that an outcome is stored by the hash of its content.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, runtime_checkable

import numpy as np

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import ReplayLakeError, SpaceUnsupportedError
from replaylake.datastore.interchange.export.trainers.samples import Sample, make_sample
from replaylake.datastore.interchange.formats.generations.messages import clean_text, format_message
from replaylake.datastore.interchange.formats.generations.rows import (
    COMPLETION_MESSAGES,
    FINAL_MESSAGES,
    PROMPT_MESSAGES,
)
from replaylake.datastore.interchange.formats.transcripts.dialogues import is_generated

# A number or a text of the whole, or a number for each step (None where it has none).
Value = float | str | Sequence[float | None] | None
Unit = Literal["episode", "dialogue"]

# The component whose column has the scorer's own name.
SCORE: Final = "score"
# What columns beside the components are called, after the scorer's name.
RESERVED: Final = ("error", "scorer", "prompt", "answer")
_COMPONENT: Final = re.compile(r"[A-Za-z0-9_]+")
_MAX_ERROR_CHARS: Final = 500
_MESSAGES: Final = (PROMPT_MESSAGES, COMPLETION_MESSAGES, FINAL_MESSAGES)


class NotScorableError(ValueError):
    """An episode, or an answer about it, that gives no score; the message is the reason."""


@dataclass(frozen=True)
class Task:
    """Content to be scored. num_steps: of the episodes that it was made of."""

    key: str
    content: Any
    num_steps: int


@dataclass(frozen=True)
class Outcome:
    """What a content was scored with, or the reason why it was not.

    values: by component, as check_values returns them. record: texts that belong to it, such as
    `prompt` and `answer` of a judge. answered_by: the model that the judge's endpoint names.
    refusal: what to raise if every content was refused in this way, whose scores are then left as
    they are.
    """

    values: Mapping[str, Value] = field(default_factory=dict)
    error: str | None = None
    record: Mapping[str, str] = field(default_factory=dict)
    answered_by: str | None = None
    refusal: ReplayLakeError | None = None


@runtime_checkable
class Scorer(Protocol):
    """What rates episodes: a function, a reward model or a judge."""

    @property
    def name(self) -> str:
        """The column of its scores, unless another is asked for."""
        ...

    @property
    def unit(self) -> Unit:
        """Whether each agent's episode is scored alone, or the episodes of all agents together."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return who it is and its version, JSON-able: what differs in it scores anew."""
        ...

    def make_content(self, dataset: str, episodes: Sequence[Episode]) -> Any:
        """Return what it looks at of an episode, or of the episodes of a dialogue's agents.

        Raises: NotScorableError for these episodes; SpaceUnsupportedError for a dataset.
        """
        ...

    def run(self, tasks: Iterator[Task]) -> Iterator[tuple[str, Outcome]]:
        """Yield the outcome of each task, by its key, in any order."""
        ...


def hash_scorer(description: Mapping[str, Any]) -> str:
    """Return the id of a scorer's version: 16 hexadecimal digits of a sha256."""
    text = json.dumps(description, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hash_content(content: Any, num_steps: int) -> str:
    """Return the sha256 of what a scorer looks at; the same for equal values, however stored."""
    parts = [f"{num_steps}\n".encode()]
    _add_canonical(parts, content)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _add_canonical(parts: list[bytes], value: Any) -> None:
    if hasattr(value, "to_pylist"):
        # Of Arrow, whose lists and structs have a repr that tells all.
        parts.append(repr(value.to_pylist()).encode(errors="surrogatepass"))
    elif isinstance(value, np.ndarray) and value.dtype != object:
        parts.append(f"array {value.dtype.str} {value.shape}:".encode())
        parts.append(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        parts.append(b"{")
        for key in sorted(value, key=str):
            parts.append(f"{key!r}:".encode(errors="surrogatepass"))
            _add_canonical(parts, value[key])
        parts.append(b"}")
    elif isinstance(value, np.ndarray | list | tuple):
        parts.append(b"[")
        for item in value:
            _add_canonical(parts, item)
        parts.append(b"]")
    elif isinstance(value, Episode):
        _add_canonical(parts, {name: one for name, one in vars(value).items() if one is not None})
    else:
        parts.append(f"{value!r},".encode(errors="surrogatepass"))


def check_values(result: Any, num_steps: int) -> dict[str, Value]:
    """Return a scorer's result as values by component.

    A number, None and a list with one number for each step are the component `score`; a mapping has
    several. Raises: NotScorableError, with what was found and what is expected.
    """
    if not isinstance(result, Mapping):
        return {SCORE: _check_value(SCORE, result, num_steps)}
    values: dict[str, Value] = {}
    for name, value in result.items():
        # Names of columns differ by more than case.
        name = name.lower() if isinstance(name, str) else name
        if not (isinstance(name, str) and _COMPONENT.fullmatch(name)) or name in RESERVED:
            raise NotScorableError(
                f"found a component named {name!r}, expected letters, digits and _, and none of "
                f"{', '.join(RESERVED)}"
            )
        if name.endswith("_scorer"):
            raise NotScorableError(f"found a component named {name}, expected no end in _scorer")
        if name in values:
            raise NotScorableError(f"found two components named {name!r}, in lower case")
        if isinstance(value, str):
            values[name] = clean_text(value)
        else:
            values[name] = _check_value(name, value, num_steps)
    return values


def _check_value(name: str, value: Any, num_steps: int) -> Value:
    if hasattr(value, "tolist"):  # of numpy or torch
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return _check_number(name, value)
    if len(value) != num_steps:
        raise NotScorableError(
            f"{name}: found a list of {len(value)} values, expected {num_steps}, one for each step"
        )
    return [_check_number(f"{name} of step {i}", item) for i, item in enumerate(value)]


def _check_number(name: str, value: Any) -> float | None:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise NotScorableError(
            f"{name}: found {type(value).__name__}, expected a number, or a list with one number "
            "for each step"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise NotScorableError(f"{name}: found {number}, expected a finite number")
    return number


def format_failure(error: Exception) -> str:
    """Return why an episode has no score, as it is stored beside the steps."""
    text = str(error)
    if not isinstance(error, NotScorableError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    text = clean_text(" ".join(text.split()))
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[: _MAX_ERROR_CHARS - 3]}..."


def open_dialogue(episodes: Sequence[Episode]) -> Sample:
    """Return episodes of texts as one dialogue.

    Raises: NotScorableError for a tree of generations; SpaceUnsupportedError for other episodes.
    """
    try:
        sample = make_sample(episodes, with_tokens=False)
    except SpaceUnsupportedError as error:
        raise SpaceUnsupportedError(
            f"scorer: episode {episodes[0].episode_id} has observations and actions that are not "
            "text, expected a dialogue, with a prompt and a completion. Score it with a function "
            "of an episode, or a judge whose prompt has {episode}."
        ) from error
    if sample.is_tree:
        raise NotScorableError(
            "its generations fork or rewrite their history, expected one sequence of messages"
        )
    return sample


def list_turns(episodes: Sequence[Episode]) -> list[tuple[str, int]]:
    """Return the agent and the step of each generation, in the order of environment steps."""
    turns = []
    for number, episode in enumerate(episodes):
        order = np.arange(len(episode)) if episode.env_steps is None else episode.env_steps
        for row in range(len(episode)):
            place = (episode.agent_id, episode.first_step + row)
            turns.append((int(order[row]), number, place))
    return [place for *_, place in sorted(turns)]


def format_prompt(sample: Sample) -> str:
    """Return the messages before the first generation, as text."""
    return "\n".join(format_message(message) for message in sample.prompt)


def format_completion(sample: Sample) -> str:
    """Return what the policy generated, without what it read in between, as text."""
    generated = filter(is_generated, sample.completion)
    return "\n".join(format_message(message) for message in generated)


def list_columns(sample: Sample) -> dict[str, Any]:
    """Return the further columns of a dialogue and the values of its metadata, by name."""
    return {name: value for name, value in sample.values.items() if name not in _MESSAGES}
