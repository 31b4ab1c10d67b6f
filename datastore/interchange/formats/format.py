"""What a foreign format is: a name, a test of content, a reading into episodes, and a writing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, Self, runtime_checkable

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.encoding import Encoding
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.episode_columns import EpisodeColumns
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.score_reference import ScoreReference
from replaylake.datastore.episodes.spaces import Array, Space
from replaylake.datastore.episodes.tokenizer import Tokenizer
from replaylake.datastore.errors import ConfigInvalidError, EpisodeInvalidError
from replaylake.datastore.interchange.formats.checks import Check, Locate, RowLocations
from replaylake.datastore.interchange.formats.checks import Finding as Finding
from replaylake.datastore.interchange.sources.source import OnRows, SourceFile

# What becomes of an episode whose steps have a gap, and of one without an end.
GAPS: Final = ("reject", "split")
OPEN_ENDS: Final = ("open", "truncated", "time-limit")
# Marks before the decimals of a number in CSV.
DECIMALS: Final = (".", ",")


@dataclass(frozen=True)
class LoggedEpisode(Episode):
    """An episode that knows where its rows lie in the source, for the door to name them."""

    places: RowLocations | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class LoggedColumns(EpisodeColumns):
    """Episodes of a source, or runs of some, joined to columns, that know where their rows lie.

    origins int64 [T]: the rows' numbers in the source, for `locate`. continues bool [E]: whether
    one is a further run of the episode before it, None if none is; runs are not parted from one
    another.
    """

    origins: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    locate: Locate | None = None
    continues: Array | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.origins) != len(self.steps):
            raise EpisodeInvalidError(
                f"episodes: found {len(self.origins)} row numbers for {len(self.steps)} steps, "
                "expected one of each."
            )

    @property
    def num_whole(self) -> int:
        """How many episodes they are, where the runs of one are one."""
        return len(self) if self.continues is None else int((~self.continues).sum())

    def _join_fields(self, parts: Sequence[Self]) -> dict[str, Any]:
        continues = None
        if any(part.continues is not None for part in parts):
            known = [
                np.zeros(len(part), np.bool_) if part.continues is None else part.continues
                for part in parts
            ]
            continues = np.concatenate(known)
        origins = np.concatenate([part.origins for part in parts])
        joined = super()._join_fields(parts)
        return {**joined, "origins": origins, "continues": continues}

    def _pick_fields(self, episodes: Any, rows: Any) -> dict[str, Any]:
        continues = None if self.continues is None else self.continues[episodes]
        picked = super()._pick_fields(episodes, rows)
        return {**picked, "origins": self.origins[rows], "continues": continues}

    def _episode(self, number: int) -> LoggedEpisode:
        rows = slice(int(self._starts[number]), int(self._starts[number + 1]))
        places = None if self.locate is None else RowLocations(self.origins[rows], self.locate)
        return LoggedEpisode(**vars(super()._episode(number)), places=places)

    def locate_rows(self, rows: Array) -> Sequence[tuple[str | None, int | None]]:
        """Return the file and its row of each of some steps, by number; None where not known."""
        if self.locate is None:
            return super().locate_rows(rows)
        return list(zip(*self.locate(self.origins[rows]), strict=True))

    def find_cut(self, num_steps: int) -> int:
        """Return how many of the first episodes have so many steps or, if all have fewer, all.

        The number is at least 1, and does not part the runs of an episode.
        """
        ends = np.cumsum(self.lengths)
        cut = min(int(np.searchsorted(ends, num_steps)) + 1, len(self))
        if self.continues is not None and cut < len(self):
            following = np.flatnonzero(~self.continues[cut:])
            cut = cut + int(following[0]) if len(following) else len(self)
        return cut

    def whole_numbers(self) -> Array:
        """Return for each run the number of its episode, int64 [E]."""
        if self.continues is None:
            return np.arange(len(self))
        return np.cumsum(~self.continues) - 1


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
    open_ends: an episode without an end stays `open`, or was `truncated`; or, by `time-limit`, it
        terminated if it is shorter than that, and was truncated if it has that length.
    action_scale: what logged actions are multiplied by.
    reward_scale: what logged rewards are multiplied by; negative where the log has costs.
    action_range: (low, high) of the units that logged actions in [-1, 1] are brought to.
    timezone: of times without a zone, as in `Europe/Berlin`; hours and weekdays of encoded times
        are told in it too, else in UTC.
    max_categories: distinct texts that an encoded column may hold, at most.
    encoding: the dataset's, which then holds; an empty one if it has none, None if it is new.
    reward_unknown: rewards that the log lacks are unknown, instead of an error.
    delimiter: the character between the cells of a CSV file; by default that of `,;|` and tab which
        its header has most of.
    decimal: the mark before the decimals of a CSV file's numbers, `.` or `,`. By default it is a
        point, and columns of numbers with a comma are refused.
    head_rows: read only so many rows of the source, the first; all where it is None.
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
    reward_scale: float | None = None
    action_range: tuple[float, float] | None = None
    timezone: str | None = None
    max_categories: int = 1000
    encoding: Encoding | None = None
    reward_unknown: bool = False
    delimiter: str | None = None
    decimal: str | None = None
    head_rows: int | None = field(default=None, compare=False)
    on_rows: OnRows | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, known in (("gaps", GAPS), ("open_ends", OPEN_ENDS)):
            if getattr(self, name) not in known:
                raise ConfigInvalidError(
                    f"{name}: found {getattr(self, name)!r}, expected {' or '.join(known)}. "
                    "Correct it.",
                    parameter=name,
                )
        if self.open_ends == "time-limit" and self.time_limit is None:
            raise ConfigInvalidError(
                "open_ends: found 'time-limit' without `time_limit`, expected both: it says which "
                "episodes are shorter.",
                parameter="open_ends",
            )
        if self.decimal not in (None, *DECIMALS) or self.decimal == (self.delimiter or ""):
            raise ConfigInvalidError(
                f"decimal: found {self.decimal!r}, expected '.' or ',', and not the delimiter "
                f"{self.delimiter!r}. Correct it.",
                parameter="decimal",
            )
        if (mark := self.delimiter) is not None and not _is_delimiter(mark):
            raise ConfigInvalidError(
                f"delimiter: found {mark!r}, expected one character of ASCII that is no letter, "
                "digit, quote, point or line break. Correct it.",
                parameter="delimiter",
            )
        scale = self.reward_scale
        if scale is not None and (scale == 0 or not math.isfinite(scale)):
            raise ConfigInvalidError(
                f"reward_scale: found {scale}, expected a number other than 0.",
                parameter="reward_scale",
            )


def _is_delimiter(mark: str) -> bool:
    return len(mark) == 1 and mark.isascii() and not mark.isalnum() and mark not in "\"'.\r\n\0"


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

    def iter_columns(self) -> Iterator[LoggedColumns | RejectedEpisode]:
        """Read from the start, as `__iter__` does, many episodes at once."""


@runtime_checkable
class EncodingReader(SourceReader, Protocol):
    """A reading that encodes named columns."""

    @property
    def encoding(self) -> Encoding | None:
        """What it made of them; None if nothing was encoded."""


@runtime_checkable
class RowReader(SourceReader, Protocol):
    """A reading whose rows can be had once more, as the log has them."""

    @property
    def mapping(self) -> Mapping[str, str]:
        """Fields of ours that are one column of the log: ours to theirs."""

    @property
    def known_columns(self) -> Mapping[str, str]:
        """Fields, and new names of columns, as `ReadOptions.mapping` spells them."""

    def read_rows(self, origins: Array) -> pa.Table:
        """Return rows by their numbers in the whole source, int64 [n], in that order.

        Cost: a pass over the source. Raises: SourceInvalidError.
        """


@runtime_checkable
class DescribedReader(SourceReader, Protocol):
    """A reading of files that may state their environment, and what returns are normalized by."""

    @property
    def score_reference(self) -> ScoreReference | None:
        """The reference that the files state; None if they state none."""

    @property
    def env_spec(self) -> str | None:
        """The environment's specification that the files state; see DatasetSpec."""


@runtime_checkable
class TokenizedReader(SourceReader, Protocol):
    """A reading of files that may state the tokenizer of their token columns."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that the files state; None if they state none."""


@runtime_checkable
class EventReader(SourceReader, Protocol):
    """A reading that knows whether each episode is one event, whose slots are its steps."""

    @property
    def has_events(self) -> bool:
        """Whether each episode is one event.

        Then equal lengths do not indicate a time limit, and equal steps are no duplicates.
        """


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
    """What was written to the disk; `notes` list what the format cannot store.

    num_rows: number of records, if a record is not a step; else None.
    """

    num_episodes: int
    num_steps: int
    notes: tuple[str, ...] = ()
    num_rows: int | None = None


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
