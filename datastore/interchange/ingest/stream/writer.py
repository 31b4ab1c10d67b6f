"""Pieces: parts of episodes that a stream delivered, compared with what is there, and committed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final

from replaylake.datastore.episodes.encoding import NO_ENCODING
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec, UniqueKeys
from replaylake.datastore.episodes.spaces import (
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    describe,
    take,
)
from replaylake.datastore.errors import (
    EpisodeInvalidError,
    NotFoundError,
    SchemaMismatchError,
    StorageError,
)
from replaylake.datastore.interchange.formats.checks import Finding
from replaylake.datastore.interchange.formats.format import RejectedEpisode
from replaylake.datastore.interchange.ingest.source_validator import SourceValidator
from replaylake.datastore.interchange.ingest.stream.grammar import Grammar, StreamRow
from replaylake.datastore.interchange.ingest.stream.stored_steps import (
    Key,
    StoredSteps,
    StreamPosition,
    episode_fields,
    is_successor,
)
from replaylake.datastore.interchange.ingest.stream.window import Window
from replaylake.datastore.lake.commit import Commit, DropCounts, KeyCounts
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.unique_keys import OnConflict
from replaylake.datastore.lake.validation import partition_valid
from replaylake.datastore.names import new_ulid

# In each commit's info: which process made it. Two of one stream may take one sequence.
_WRITER: Final = "writer"
# And the format of the lines, which a stream keeps.
_FORMAT: Final = "format"
_ATTEMPTS: Final = 4
_FIRST_PAUSE_S: Final = 0.5
_PLACE: Final = re.compile(r"^\S+ row \d+")


def find_written_format(dataset: Dataset, stream: str) -> str | None:
    """Return the format of the lines that a stream committed last; None where it is not known."""
    if not dataset.exists():
        return None
    producer = _make_producer(stream)
    version = dataset.find_commit(producer, dataset.next_sequence(producer) - 1)
    try:
        return None if version is None else dataset.commit_info(version).get(_FORMAT)
    except NotFoundError:
        return None  # dropped from the log


def _make_producer(stream: str) -> str:
    return f"stream/{stream}"


class StreamWriter:
    """The writing end of a stream: one producer, whose commits go on where its last one ended."""

    def __init__(
        self,
        lake: Lake,
        dataset: str,
        name: str,
        grammar: Grammar,
        spaces: tuple[Space, Space] | None,
        readmit: bool,
        unique: UniqueKeys | None = None,
        on_conflict: OnConflict = "set_aside",
    ) -> None:
        self._on_conflict: OnConflict = on_conflict
        self.keys = KeyCounts()
        self._lake = lake
        self._handle = lake.dataset(dataset)
        self._prefix = f"{name}/"
        self._producer = _make_producer(name)
        self._id = new_ulid()
        self._readmit = readmit
        self._grammar = grammar
        self._assembly = PieceAssembler(self._handle, grammar, spaces, unique)
        self._sequence: int | None = None
        self._reported_drops = DropCounts()
        self._quarantines = 0
        self.present = StoredSteps(self._handle, self._prefix, grammar)
        self.dataset = dataset
        self.version: int | None = None
        self.num_commits = self.num_steps = self.num_present = self.num_rejected = 0
        self.num_deleted_before = 0

    @property
    def notes(self) -> list[str]:
        """What a person should know."""
        return self._assembly.notes

    @property
    def exists(self) -> bool:
        return self._handle.exists()

    def window(self, rows: Sequence[StreamRow]) -> Window:
        """Return rows as the dataset, if there is one, has their columns."""
        self._assembly.open_validator()
        return Window(rows, self._grammar)

    def compare(self, window: Window, rows: Sequence[int]) -> list[tuple[int, Finding | None]]:
        """Tell of rows whose steps are there already whether they say the same; None if so."""
        results: list[tuple[int, Finding | None]] = []
        pieces: list[tuple[list[int], Episode]] = []
        runs = _runs(window, rows)
        outcomes = self._assembly.validate(window, runs)
        broken = [run for run, one in zip(runs, outcomes, strict=True) if isinstance(one, Finding)]
        singles = [[i] for run in broken for i in run]
        pieces += [
            (run, one)
            for run, one in zip(runs, outcomes, strict=True)
            if not isinstance(one, Finding)
        ]
        for single, one in zip(singles, self._assembly.validate(window, singles), strict=True):
            if isinstance(one, Finding):
                results.append((single[0], self._assembly.locate_finding(window, single[0], one)))
            else:
                pieces.append((single, one))
        same = self._are_same([(window.key(run[0]), one) for run, one in pieces])
        for i, is_same in zip((i for run, _ in pieces for i in run), same, strict=True):
            self.num_present += is_same
            results.append((i, None if is_same else self._duplicate_finding(window, i)))
        return results

    def commit(
        self,
        window: Window,
        runs: Sequence[list[int]],
        reached: Mapping[Key, StreamPosition | None],
    ) -> tuple[list[int], Rejections]:
        """Commit what can be of each run, from its start on; return those rows, and those refused.

        Of each run at most one row is refused, and what comes after it is neither: it may have to
        wait. Raises: StorageError.
        """
        pieces, rejections = self._assembly.assemble(window, runs, reached)
        if not pieces:
            return [], rejections
        episodes = [self._with_own_id(window, run, episode) for run, episode in pieces]
        try:
            commit = self._append(episodes)
        except (EpisodeInvalidError, SchemaMismatchError):
            if self._assembly.is_strict:
                raise
            # Something that only the table itself knows: each piece is tried on it.
            self._assembly.is_strict = True
            try:
                return self.commit(window, runs, reached)
            finally:
                self._assembly.is_strict = False
        if commit is None:
            return [], []  # another writer was there: all is looked up again
        self.version = commit.version
        self.num_commits += 1
        self.num_steps += commit.num_steps
        self.num_deleted_before += commit.num_deleted_before_steps
        self.keys += commit.keys
        for run, episode in pieces:
            self.present.add(episode, window.key(run[0]))
        return [i for run, _ in pieces for i in run], rejections

    def account(self) -> None:
        """Tell the dataset's history what was left out since the last commit."""
        while self._drop_counts != self._reported_drops and self.exists:
            drops = self._drop_counts
            commit = self._handle.account(
                producer=self._producer,
                sequence=self._next(),
                drops=drops - self._reported_drops,
                info=self._info,
            )
            if self._is_own(commit):
                self._reported_drops = drops

    def quarantine_rejected(
        self, rejected: Sequence[RejectedEpisode], keep: Callable[..., Any]
    ) -> None:
        """Put refused lines into the dataset's quarantine."""
        if rejected:
            self._quarantines += 1
            keep(
                self._handle,
                rejected,
                producer=f"{self._producer}/{self._id}",
                sequence=self._quarantines,
                prefix=self._prefix,
                readmit=self._readmit,
            )

    @property
    def _info(self) -> dict[str, Any]:
        kind = self._grammar.kind
        return {_WRITER: self._id, **({} if kind is None else {_FORMAT: kind.format})}

    @property
    def _drop_counts(self) -> DropCounts:
        # Of a stream each line that is left out is a piece of its own.
        rejected, present = self.num_rejected, self.num_present
        return DropCounts(rejected, rejected, present, present)

    def _are_same(self, steps: Sequence[tuple[Key, Episode]]) -> list[bool]:
        if not steps:
            return []
        try:
            return self.present.are_same(steps)
        except (EpisodeInvalidError, SchemaMismatchError):
            # A further column of another type: then it is not the same.
            if len(steps) == 1:
                return [False] * len(steps[0][1])
        return [same for step in steps for same in self._are_same([step])]

    def _with_own_id(self, window: Window, run: Sequence[int], episode: Episode) -> Episode:
        row = window.rows[run[0]]
        return replace(
            episode,
            episode_id=f"{self._prefix}{row.episode}",
            source_episode_id=row.source or row.episode,
        )

    def _append(self, episodes: list[Episode]) -> Commit | None:
        """Commit; None if another writer of this stream has committed meanwhile."""
        spec = None
        if not self.exists:
            self._lake.registry.create()
            spec = self._assembly.new_spec()
        drops = self._drop_counts
        for attempt in range(_ATTEMPTS):
            try:
                commit = self._handle.append(
                    episodes,
                    producer=self._producer,
                    sequence=self._next(),
                    info=self._info,
                    spec=spec,
                    drops=drops - self._reported_drops,
                    readmit=self._readmit,
                    on_conflict=self._on_conflict,
                )
                break
            except StorageError:
                # Nobody can deliver these lines again: the same commit is tried a few times.
                if attempt + 1 == _ATTEMPTS:
                    raise
                time.sleep(_FIRST_PAUSE_S * 2**attempt)
        if spec is not None:
            self._assembly.reset()  # from now on what holds is what the dataset was made with
        if not self._is_own(commit):
            self.present.reset()
            return None
        self._reported_drops = drops
        if commit.already_present:  # committed, but the answer was lost
            commit = replace(commit, num_steps=sum(map(len, episodes)), num_episodes=len(episodes))
        return commit

    def _next(self) -> int:
        if self._sequence is None:
            self._sequence = self._handle.next_sequence(self._producer) if self.exists else 0
        return self._sequence

    def _is_own(self, commit: Commit) -> bool:
        """Whether a commit is this process's, and count it; else the sequence is looked up."""
        if commit.already_present:
            info = self._handle.commit_info(commit.version)
            if info.get(_WRITER) != self._id:
                self._sequence = None
                return False
        self._sequence = self._next() + 1
        return True

    def _duplicate_finding(self, window: Window, i: int) -> Finding:
        row = window.rows[i]
        return Finding(
            "step_twice",
            f"{self._grammar.name} line {row.line}: found step {row.step} of episode {row.episode} "
            "with other values than it has in the dataset, expected each step once",
        )


def _runs(window: Window, rows: Sequence[int]) -> list[list[int]]:
    """Part rows into those that follow one another."""
    runs: list[list[int]] = []
    for i in rows:
        row = window.rows[i]
        last = window.rows[runs[-1][-1]] if runs else None
        if last is not None and (last.episode, last.agent, last.step + 1) == (
            row.episode,
            row.agent,
            row.step,
        ):
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


# Rows, by their index in a window, and why each is refused.
Rejections = list[tuple[int, Finding]]


class PieceAssembler:
    """Decodes runs of rows, and holds them against the spaces of a dataset that may not exist.

    `is_strict` tries each piece on the table itself, too.
    """

    def __init__(
        self,
        handle: Dataset,
        grammar: Grammar,
        spaces: tuple[Space, Space] | None,
        unique: UniqueKeys | None,
    ) -> None:
        self._unique = unique
        self._handle = handle
        self._grammar = grammar
        self._spaces = spaces
        self._validator: SourceValidator | None = None
        self.is_strict = False
        self.notes: list[str] = []

    def reset(self) -> None:
        """Look at the dataset again: it has just been made."""
        self._validator = None

    def assemble(
        self,
        window: Window,
        runs: Sequence[list[int]],
        reached: Mapping[Key, StreamPosition | None],
    ) -> tuple[list[tuple[list[int], Episode]], Rejections]:
        """Return of each run the longest start that is a piece, and the row that ended it."""
        pieces: list[tuple[list[int], Episode]] = []
        rejections: Rejections = []
        broken = []
        for run, outcome in zip(runs, self.validate(window, runs), strict=True):
            if isinstance(outcome, Finding):
                broken.append(run)
            else:
                pieces.append((run, outcome))
        # Rows that are wrong on their own, all at once; then what only neighbors can tell.
        alone = iter(self.validate(window, [[i] for run in broken for i in run]))
        for run in broken:
            each = enumerate(islice(alone, len(run)))
            wrong = [(n, one) for n, one in each if isinstance(one, Finding)]
            good = run[: wrong[0][0]] if wrong else run
            part, finding = self._find_longest(window, good)
            num = 0 if part is None else len(part)
            if finding is None and wrong:
                finding = wrong[0][1]
            if part is not None:
                pieces.append((good[:num], part))
            if finding is not None:
                rejections.append((run[num], self.locate_finding(window, run[num], finding)))
        joined = []
        for run, episode in pieces:
            row = window.rows[run[0]]
            key = (row.episode, row.agent)
            before = reached[key]
            if before is None or is_successor(before.final, take(episode.observations, 0)):
                joined.append((run, episode))
                continue
            # What else was wrong with its episode comes after this.
            rejections = [one for one in rejections if window.key(one[0]) != key]
            rejections.append((run[0], self._gap_finding(window, run[0])))
        return joined, rejections

    def locate_finding(self, window: Window, i: int, finding: Finding) -> Finding:
        """Say which line it is: decoding has numbered the rows as it had them."""
        place = f"{self._grammar.name} line {window.rows[i].line}"
        message, num = _PLACE.subn(place, finding.message, count=1)
        return Finding(finding.check, message if num else f"{place}: {finding.message}")

    def _find_longest(
        self, window: Window, run: list[int]
    ) -> tuple[Episode | None, Finding | None]:
        """Return the longest start of a run that is a piece, and what the next row lacks."""
        best: Episode | None = None
        finding: Finding | None = None
        low, high = 0, len(run)
        while low < high:
            # The whole run first: mostly the row that was wrong is not in it any more.
            middle = high if finding is None else (low + high + 1) // 2
            (outcome,) = self.validate(window, [run[:middle]])
            if isinstance(outcome, Finding):
                finding, high = outcome, middle - 1
            else:
                best, low = outcome, middle
        return best, finding

    def validate(self, window: Window, groups: Sequence[Sequence[int]]) -> list[Episode | Finding]:
        """Decode groups of rows and hold them against the dataset's spaces."""
        self.open_validator()
        items = window.decode(groups)
        episodes = []
        for n, (one, group) in enumerate(zip(items, groups, strict=True)):
            if not isinstance(one, Finding):
                row = window.rows[group[0]]
                own = {"episode_id": str(n), "source_episode_id": row.source or row.episode}
                episodes.append(Episode(**{**episode_fields(one), **own}))
                items[n] = Finding("space", f"{self._grammar.name}: found a step that does not fit")
        if not episodes:
            return items
        accepted, rejections = self._validate_episodes(episodes)
        for episode in accepted:
            items[int(episode.episode_id)] = episode
        for number, finding in rejections:
            items[number] = finding
        return items

    def _validate_episodes(self, episodes: Sequence[Episode]) -> tuple[list[Episode], Rejections]:
        validator = self.open_validator()
        try:
            accepted, refusals = validator.check(episodes)
        except EpisodeInvalidError as error:
            # Said of all of them: they differ among themselves.
            if len(episodes) == 1:
                return [], [(int(episodes[0].episode_id), Finding("space", str(error)))]
            parts = [self._validate_episodes([one]) for one in episodes]
            return [e for part, _ in parts for e in part], [r for _, part in parts for r in part]
        rejections = [(int(one.episode_id), rejection.findings[0]) for rejection, one in refusals]
        if self.is_strict and accepted:
            accepted, more = partition_valid(self._handle, accepted)
            rejections += [(int(one.episode_id), Finding("dtype", str(why))) for one, why in more]
        return accepted, rejections

    def open_validator(self) -> SourceValidator:
        """Look at the dataset, and tell the grammar what it says of columns."""
        if self._validator is None:
            spec = self._handle.spec if self._handle.exists() else None
            if spec is not None:
                options = replace(self._grammar.options, encoding=spec.encoding or NO_ENCODING)
                self._grammar.options = options
            spaces = self._spaces if spec is None else (spec.observation_space, spec.action_space)
            whole = Discrete | MultiDiscrete | MultiBinary
            self._grammar.are_actions_whole = spaces is not None and isinstance(spaces[1], whole)
            self._validator = SourceValidator(
                spec,
                self._spaces,
                self._grammar.declared.spaces,
                rewards_optional=self._grammar.rewards_optional,
                unique=self._unique,
            )
        return self._validator

    def new_spec(self) -> DatasetSpec:
        """Return what a new dataset has to hold, once rows have been checked."""
        grammar = self._grammar
        spec = self.open_validator().spec(grammar.num_actions)
        if self._spaces is None and grammar.declared.spaces is None:
            observation, action = describe(spec.observation_space), describe(spec.action_space)
            self.notes.append(
                f"the spaces of the new dataset come from the first lines: observations "
                f"{observation}, actions {action}. Steps outside them are rejected; to set the "
                "spaces in advance, use `env`"
            )
        encoding = grammar.options.encoding
        return spec if encoding in (None, NO_ENCODING) else replace(spec, encoding=encoding)

    def _gap_finding(self, window: Window, i: int) -> Finding:
        row = window.rows[i]
        return Finding(
            "next_observation",
            f"{self._grammar.name} line {row.line}: found an observation at step {row.step} of "
            f"episode {row.episode} that is not the next observation of the step before",
        )
