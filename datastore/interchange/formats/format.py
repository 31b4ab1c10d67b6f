"""What a foreign format is: a name, a test of content, a reading into episodes, and a writing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import pyarrow as pa

from replaylake.datastore.episodes.encoding import Encoding
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Space
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.interchange.formats.checks import Check, RowLocations
from replaylake.datastore.interchange.formats.checks import Finding as Finding
from replaylake.datastore.interchange.sources.source import OnRows, SourceFile

# What becomes of an episode whose steps have a gap, and of one without an end.
GAPS: Final = ("reject", "split")
OPEN_ENDS: Final = ("open", "truncated")


@dataclass(frozen=True)
class LoggedEpisode(Episode):
    """An episode that knows where its rows lie in the source, for the door to name them."""

    places: RowLocations | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class RejectedEpisode:
    """An episode that did not pass the door.

    `rows` are its steps as the log has them, if known, and `mapping` says which of their columns is
    which field of ours, by our names.
    """

    source_episode_id: str
    num_steps: int
    findings: tuple[Finding, ...]
    agent_id: str = ""
    rows: pa.Table | None = field(default=None, compare=False, repr=False)
    places: RowLocations | None = field(default=None, compare=False, repr=False)
    mapping: Mapping[str, str] | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """What a person reads: the id, and the agent's where there are several."""
        agent = f" agent {self.agent_id}" if self.agent_id else ""
        return f"{self.source_episode_id}{agent}"


@dataclass(frozen=True)
class ReadOptions:
    """How to read a source.

    mapping: ours=theirs: one of our fields, or a new name for a further column, to their column,
        or to several (`x,y,user_*`) that make up one vector.
    fill: their column to the value that stands where it has none.
    episode_by: their columns that together tell episodes apart; wins over aliases.
    order_by: their columns, first to last, by which an episode's rows are put in order.
    time_limit: an episode of exactly this many steps that the log calls terminated was truncated.
    gaps: `reject` an episode whose steps have a gap, or `split` it into its contiguous runs.
    open_ends: an episode without an end stays `open`, or was `truncated`; never terminated.
    action_scale: what logged actions are multiplied by.
    action_range: (low, high) of the units that logged actions in [-1, 1] are brought to.
    timezone: of times without a zone, as in `Europe/Berlin`; hours and weekdays of encoded times
        are told in it too, else in UTC.
    max_categories: distinct texts that an encoded column may hold, at most.
    encoding: the dataset's, which then holds; an empty one if it has none, None if it is new.
    reward_unknown: rewards that the log lacks are unknown, instead of an error.
    on_rows: called as a file is read, with the file, how many of its rows that far, and how many of
        its bytes, 0 where that is not known.
    """

    mapping: Mapping[str, str] = field(default_factory=dict)
    fill: Mapping[str, str] = field(default_factory=dict)
    episode_by: tuple[str, ...] = ()
    order_by: tuple[str, ...] = ()
    time_limit: int | None = None
    gaps: str = "reject"
    open_ends: str = "open"
    action_scale: float | None = None
    action_range: tuple[float, float] | None = None
    timezone: str | None = None
    max_categories: int = 1000
    encoding: Encoding | None = None
    reward_unknown: bool = False
    on_rows: OnRows | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, known in (("gaps", GAPS), ("open_ends", OPEN_ENDS)):
            if getattr(self, name) not in known:
                raise ConfigInvalidError(
                    f"{name}: found {getattr(self, name)!r}, expected {' or '.join(known)}. "
                    "Correct it."
                )


class SourceReader(Protocol):
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
    def num_rows(self) -> int | None:
        """How many rows the source has, if that is known before they are read."""

    @property
    def num_actions(self) -> int | None:
        """Width of the logged policy's head where the log has one; known after an iteration."""

    @property
    def spaces(self) -> tuple[Space, Space] | None:
        """The observation and the action space where the files state them."""

    @property
    def checks(self) -> Sequence[Check]:
        """What was corrected or noted on the way; complete after the first whole iteration."""

    @property
    def rewards_optional(self) -> bool:
        """Whether a reward may be unknown, NaN; so it may then be in a dataset made from this."""

    def __iter__(self) -> Iterator[Episode | RejectedEpisode]:
        """Read from the start. Raises: SourceInvalidError for what no episode can be blamed for."""


@runtime_checkable
class EncodingReader(SourceReader, Protocol):
    """A reading that encodes named columns."""

    @property
    def encoding(self) -> Encoding | None:
        """What it made of them; None if nothing was encoded."""


class Format(Protocol):
    """A foreign format; the instances are listed in `catalog.FORMATS`."""

    @property
    def name(self) -> str:
        """What `--format` calls it."""

    @property
    def about(self) -> str:
        """What it is, in a line, for a person who looks for theirs."""

    @property
    def is_folder(self) -> bool:
        """Whether a source is a folder of files of several kinds, and not files of one kind."""

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        """Whether the content (of the first file, or of the folder) is of this format."""

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        """Open the source. Raises: SourceInvalidError."""


@dataclass(frozen=True)
class WriteResult:
    """What a writing left on the disk; `notes` say what the format has no place for."""

    num_episodes: int
    num_steps: int
    notes: tuple[str, ...] = ()


@runtime_checkable
class WritableFormat(Format, Protocol):
    """A format that episodes can be exported to."""

    @property
    def suffix(self) -> str:
        """The ending of its file's name, such as `.hdf5`; empty where it is a folder."""

    def write(self, episodes: Iterator[Episode], spec: DatasetSpec, path: Path) -> WriteResult:
        """Write a file or folder at `path`, where nothing is yet.

        Episodes come whole and one after the other; memory holds a few of them. Whoever calls gives
        a temporary path and renames it. Raises: SpaceUnsupportedError, StorageError.
        """
