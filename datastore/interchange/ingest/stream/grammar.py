"""Grammar: how a stream's lines are read as steps: their columns, episode, agent and step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.episodes.episode import MAX_STEP
from replaylake.datastore.episodes.schema import SOURCE_EPISODE_ID, STEP
from replaylake.datastore.errors import ConfigInvalidError, SourceInvalidError
from replaylake.datastore.interchange.formats.checks import Finding
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.formats.tabular.fields import (
    ColumnLayout,
    lay_out,
    without_fields,
)
from replaylake.datastore.interchange.formats.tabular.reader import Declaration
from replaylake.datastore.interchange.ingest.source_validator import KEY_CHECK
from replaylake.datastore.interchange.ingest.stream.line_kinds import (
    LineKind,
    make_key_id,
    recognize_line,
)
from replaylake.datastore.interchange.ingest.stream.lines import Line

# A column of no log: which of the groups that are decoded a row belongs to.
GROUP: Final = "\0group"


@dataclass(eq=False, slots=True)
class StreamRow:
    """A step as it came, and when, in seconds of a clock that only goes forward.

    Which step of what it is, is filled in once the columns are known.
    """

    line: int
    num_bytes: int
    arrived_s: float
    values: Mapping[str, Any]
    episode: str = ""
    agent: str = ""
    step: int = 0
    source: str = ""
    """The episode's id in the log, if the stored id is made from the key."""


@dataclass
class Grammar:
    """How the lines of a stream are read: what is known of its columns so far.

    kind: the kind of its lines; None until one was read. key: the columns of the dataset's
    unique key, by our names.
    """

    name: str
    options: ReadOptions
    kind: LineKind | None = None
    key: tuple[str, ...] = ()
    declared: Declaration = field(default_factory=Declaration)
    layout: ColumnLayout | None = None
    types: dict[str, pa.DataType] = field(default_factory=dict)
    renames: dict[str, str] = field(default_factory=dict)
    num_actions: int | None = None
    are_actions_whole: bool = False
    """Whether the dataset's actions are whole numbers."""
    clashing: dict[str, str] = field(default_factory=dict)
    """Columns that came later and cannot be told from others, with why."""

    def __post_init__(self) -> None:
        plain = ReadOptions()
        for name in ("episode_by", "order_by", "gaps", "open_ends"):
            if (value := getattr(self.options, name)) != getattr(plain, name):
                raise ConfigInvalidError(
                    f"{name}: found {value!r} for a stream, expected it only for complete "
                    "logs. Name an episode id and a step with `mapping`, or ingest the log when "
                    "it is complete.",
                    parameter=name,
                )

    def parse(self, line: Line, arrived_s: float) -> list[StreamRow] | Finding | None:
        """Return the rows of a line, a finding on what is wrong, or None for an empty line."""
        if line.is_cut:
            return Finding(
                "malformed", f"{self.name} line {line.number}: found a line beyond 64 MiB"
            )
        text = line.text.removeprefix(b"\xef\xbb\xbf").strip()
        if not text:
            return None
        self.kind = self.kind or recognize_line(text, self.options)
        try:
            value = json.loads(text) if self.kind is None else self.kind.load(text)
        except (ValueError, RecursionError) as error:
            return self._report_malformed(line, f"expected one JSON value ({error})")
        assert self.kind is not None, "every JSON value has a kind"
        try:
            rows = self.kind.rows(value)
        except (SourceInvalidError, RecursionError, ValueError) as error:
            return self._report_malformed(line, str(error))
        size = len(line.text) // max(1, len(rows))
        return [StreamRow(line.number, size, arrived_s, values) for values in rows]

    def _report_malformed(self, line: Line, expected: str) -> Finding:
        shown = line.text[:60].decode(errors="replace")
        return Finding("malformed", f"{self.name} line {line.number}: found {shown!r}, {expected}")

    def learn(self, rows: Sequence[StreamRow]) -> None:
        """Find the columns of the rows.

        Raises: SourceInvalidError if one that is needed is not there.

        Columns that come later than the first rows become further columns, or optional fields.
        """
        names = [name for name in dict.fromkeys(n for row in rows for n in row.values)]
        new = [name for name in names if name not in self.types and name not in self.clashing]
        if not new and self.layout is not None:
            return
        assert self.kind is not None, "rows have a kind"
        names = [*self.types, *new]
        try:
            declared = self.kind.declare(names, self.options, self.key)
            layout = lay_out(
                names,
                {**declared.fields, **self.options.mapping},
                self.name,
                rewards_optional=declared.rewards_optional or self.options.reward_unknown,
            )
        except SourceInvalidError as error:
            if self.layout is None:
                raise
            self.clashing |= dict.fromkeys(new, str(error))
            return
        if self.is_decision:
            layout = without_fields(layout, ("terminated", "truncated"))
        self._check_identity(layout)
        self.declared = declared
        self.layout = layout
        self.renames = dict(layout.renames)
        self.types |= {name: pa.null() for name in new}

    @property
    def is_decision(self) -> bool:
        """Whether each line is an episode of one step."""
        return self.kind is not None and self.kind.is_decision

    @property
    def is_keyed(self) -> bool:
        """Whether only the dataset's key distinguishes repeated lines from new ones."""
        return self.kind is not None and self.kind.is_event and bool(self.key)

    @property
    def rewards_optional(self) -> bool:
        """Whether a reward may be unknown."""
        return self.options.reward_unknown or self.declared.rewards_optional

    def _check_identity(self, layout: ColumnLayout) -> None:
        """Refuse columns that cannot identify repeated lines. Raises: SourceInvalidError."""
        if self.is_keyed:
            return
        for ours in ("episode_id",) if self.is_decision else ("episode_id", "step"):
            if layout.one(ours) is None:
                other = "; or name columns in `unique` that no two decisions share"
                other = other if self.is_decision else ""
                raise SourceInvalidError(
                    f"{self.name}: found no column for {ours}, expected one to follow a "
                    "stream: without it, repeated lines cannot be distinguished from new "
                    f"ones. Name it with `mapping` {ours}=COLUMN{other}; or ingest the log when it "
                    "is complete."
                )

    def place(self, row: StreamRow) -> Finding | None:
        """Fill in the row's episode, agent and step, or return what is wrong with those.

        Of a row with a fault, what can be told is filled in: in quarantine it is found by that.
        """
        layout = self._known_layout
        episode = self._place_episode(row)
        row.episode = "" if isinstance(episode, Finding) else episode
        agent: str | Finding = ""
        if (column := layout.one("agent_id")) is not None and self._has_agent(row, column):
            agent = self._id(row, column)
        row.agent = "" if isinstance(agent, Finding) else agent
        if clash := next((name for name in row.values if name in self.clashing), None):
            message = f"{self.name} line {row.line}, column {clash!r}: {self.clashing[clash]}"
            return Finding("dtype", message)
        for fault in (episode, agent):
            if isinstance(fault, Finding):
                return fault
        if (name := layout.one("step")) is None:
            return self._find_slate(row)
        step = row.values.get(name, self.options.fill.get(name))
        if isinstance(step, float) and step.is_integer():
            step = int(step)
        if isinstance(step, bool) or not isinstance(step, int):
            return self.make_finding("missing" if step is None else "not_whole", row, name, step)
        if not 0 <= step <= MAX_STEP:
            return self.make_finding("negative_step" if step < 0 else "step", row, name, step)
        row.step = step
        return self._find_slate(row)

    def _place_episode(self, row: StreamRow) -> str | Finding:
        layout = self._known_layout
        own = layout.one("episode_id")
        if not self.is_keyed:
            return self._id(row, str(own))
        if own is not None and not isinstance(name := self._id(row, own), Finding):
            row.source = name
        values = {}
        # The steps of an event of several have one id.
        columns = [ours for ours in self.key if ours != STEP or self.is_decision] or self.key
        for ours in columns:
            field = "episode_id" if ours == SOURCE_EPISODE_ID else ours
            column = layout.one(field) or next(
                (theirs for theirs, name in layout.extras.items() if name == ours), None
            )
            value = (
                None if column is None else row.values.get(column, self.options.fill.get(column))
            )
            if value is None or value == "":
                return self.make_finding(KEY_CHECK, row, column or ours, value)
            if not isinstance(value, str | int | float) or "\0" in str(value):
                return self.make_finding("name", row, column or ours, value)
            values[ours] = value
        return make_key_id(values)

    def _has_agent(self, row: StreamRow, column: str) -> bool:
        """Whether a row names an agent, which is optional in a dialogue."""
        is_optional = self.declared.spaces is not None
        return not is_optional or bool(row.values.get(column))

    def _find_slate(self, row: StreamRow) -> Finding | None:
        """Return a finding for a decision with several actions."""
        if not self.is_decision:
            return None
        for name in self._known_layout.fields["action"]:
            value = row.values.get(name)
            if isinstance(value, list) and not all(isinstance(one, float) for one in value):
                finding = self.make_finding("dtype", row, name, value)
                message = f"{finding.message}, expected one action: slates are not supported"
                return replace(finding, message=message)
        return None

    def _id(self, row: StreamRow, name: str) -> str | Finding:
        value = row.values.get(name, self.options.fill.get(name))
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None or value == "":
            return self.make_finding("missing", row, name, value)
        if isinstance(value, bool) or not isinstance(value, str | int) or "\0" in str(value):
            return self.make_finding("name", row, name, value)
        return str(value)

    def make_finding(self, check: str, row: StreamRow, column: str, found: Any) -> Finding:
        """Return what is wrong with a row's column."""
        return Finding(check, f"{self.name} line {row.line}, column {column!r}: found {found!r}")

    @property
    def _known_layout(self) -> ColumnLayout:
        assert self.layout is not None
        return self.layout

    @property
    def read_options(self) -> ReadOptions:
        """The options under which groups of rows are decoded as episodes of their own."""
        layout = self._known_layout
        fields = {ours: (layout.one(ours) or "") for ours in ("step", "agent_id")}
        own = {ours: theirs for ours, theirs in fields.items() if theirs}
        return replace(self.options, mapping={**self.options.mapping, **own, "episode_id": GROUP})

    @property
    def fields(self) -> Sequence[str]:
        """The columns that are fields of ours, and not further ones."""
        return self._known_layout.columns()

    @property
    def group_column(self) -> str | None:
        """The column of episode ids, which groups stand for while rows are decoded.

        None if there is none, or if it is also stored under another name.
        """
        name = self._known_layout.one("episode_id")
        return None if name in self._known_layout.extras else name
