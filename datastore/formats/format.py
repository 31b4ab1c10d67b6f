"""What a foreign format is: a name, a test of content, and a reading that yields episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from replaylake.datastore.episode import Episode
from replaylake.datastore.formats.source import SourceFile


@dataclass(frozen=True)
class Finding:
    """One thing wrong with an episode: the door check's name, and what was found where."""

    check: str
    message: str


@dataclass(frozen=True)
class Rejected:
    """An episode that did not pass the door."""

    source_episode_id: str
    num_steps: int
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class ReadOptions:
    """How to read a source.

    `mapping` is ours=theirs: one of our fields, or a new name for a further column, to their
    column, or to several (`x,y,z`) that make up one vector. `time_limit` (steps): an episode of
    exactly this length that the log calls terminated was truncated.
    """

    mapping: Mapping[str, str] = field(default_factory=dict)
    time_limit: int | None = None


class Reading(Protocol):
    """The episodes of one source, in an order that depends on its content alone.

    Can be iterated more than once. Episode ids are the source's own; `ingest` prefixes them.
    """

    @property
    def notes(self) -> Sequence[str]:
        """What a person should know; complete after the first whole iteration."""

    @property
    def renames(self) -> Mapping[str, str]:
        """Further columns that needed another name: theirs to ours."""

    @property
    def extras(self) -> Mapping[str, pa.DataType]:
        """Further columns, as they will be stored."""

    @property
    def num_actions(self) -> int | None:
        """Width of the logged policy's head where the log has one; known after an iteration."""

    def __iter__(self) -> Iterator[Episode | Rejected]:
        """Read from the start. Raises: SourceInvalid for what no episode can be blamed for."""


class Format(Protocol):
    """A foreign format; the instances are listed in `detect.FORMATS`."""

    @property
    def name(self) -> str:
        """What `--format` calls it."""

    def recognises(self, files: Sequence[SourceFile]) -> bool:
        """Whether the content of the first file is of this format."""

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> Reading:
        """Open the source. Raises: SourceInvalid."""
