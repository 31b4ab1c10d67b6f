"""Assembly: contiguous rows of a stream as pieces of episodes that fit the dataset."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

from replaylake.datastore.episodes.encoding import NOTHING
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import (
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    describe,
    take,
)
from replaylake.datastore.errors import EpisodeInvalid
from replaylake.datastore.interchange.formats.checks import Finding
from replaylake.datastore.interchange.ingest.door import Door
from replaylake.datastore.interchange.ingest.stream.grammar import Grammar
from replaylake.datastore.interchange.ingest.stream.stored_steps import (
    Key,
    Reached,
    follows,
    vars_of,
)
from replaylake.datastore.interchange.ingest.stream.window import Window
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.validation import partition_valid

_PLACE: Final = re.compile(r"^\S+ row \d+")

# Rows, by their index in a window, and why each is refused.
Refusals = list[tuple[int, Finding]]


class Assembly:
    """Decodes runs of rows, and holds them against the spaces of a dataset that may not exist.

    `is_strict` tries each piece on the table itself, too.
    """

    def __init__(
        self, handle: Dataset, grammar: Grammar, spaces: tuple[Space, Space] | None
    ) -> None:
        self._handle = handle
        self._grammar = grammar
        self._spaces = spaces
        self._door: Door | None = None
        self.is_strict = False
        self.notes: list[str] = []

    def forget(self) -> None:
        """Look at the dataset again: it has just been made."""
        self._door = None

    def assembled(
        self, window: Window, runs: Sequence[list[int]], reached: Mapping[Key, Reached | None]
    ) -> tuple[list[tuple[list[int], Episode]], Refusals]:
        """Return of each run the longest start that is a piece, and the row that ended it."""
        pieces: list[tuple[list[int], Episode]] = []
        refused: Refusals = []
        broken = []
        for run, found in zip(runs, self.checked(window, runs), strict=True):
            if isinstance(found, Finding):
                broken.append(run)
            else:
                pieces.append((run, found))
        # Rows that are wrong on their own, all at once; then what only neighbours can tell.
        alone = iter(self.checked(window, [[i] for run in broken for i in run]))
        for run in broken:
            each = enumerate(islice(alone, len(run)))
            wrong = [(n, one) for n, one in each if isinstance(one, Finding)]
            good = run[: wrong[0][0]] if wrong else run
            part, finding = self._longest(window, good)
            num = 0 if part is None else len(part)
            if finding is None and wrong:
                finding = wrong[0][1]
            if part is not None:
                pieces.append((good[:num], part))
            if finding is not None:
                refused.append((run[num], self.at(window, run[num], finding)))
        joined = []
        for run, episode in pieces:
            row = window.rows[run[0]]
            key = (row.episode, row.agent)
            before = reached[key]
            if before is None or follows(before.final, take(episode.observations, 0)):
                joined.append((run, episode))
                continue
            # What else was wrong with its episode comes after this.
            refused = [one for one in refused if window.key(one[0]) != key]
            refused.append((run[0], self._apart(window, run[0])))
        return joined, refused

    def at(self, window: Window, i: int, finding: Finding) -> Finding:
        """Say which line it is: decoding has numbered the rows as it had them."""
        place = f"{self._grammar.name} line {window.rows[i].line}"
        message, num = _PLACE.subn(place, finding.message, count=1)
        return Finding(finding.check, message if num else f"{place}: {finding.message}")

    def _longest(self, window: Window, run: list[int]) -> tuple[Episode | None, Finding | None]:
        """Return the longest start of a run that is a piece, and what the next row lacks."""
        best: Episode | None = None
        finding: Finding | None = None
        low, high = 0, len(run)
        while low < high:
            # The whole run first: mostly the row that was wrong is not in it any more.
            middle = high if finding is None else (low + high + 1) // 2
            (found,) = self.checked(window, [run[:middle]])
            if isinstance(found, Finding):
                finding, high = found, middle - 1
            else:
                best, low = found, middle
        return best, finding

    def checked(self, window: Window, groups: Sequence[Sequence[int]]) -> list[Episode | Finding]:
        """Decode groups of rows and hold them against the dataset's spaces."""
        self.open_door()
        found = window.decode(groups)
        episodes = []
        for n, (one, group) in enumerate(zip(found, groups, strict=True)):
            if not isinstance(one, Finding):
                own = {"episode_id": str(n), "source_episode_id": window.rows[group[0]].episode}
                episodes.append(Episode(**{**vars_of(one), **own}))
                found[n] = Finding("space", f"{self._grammar.name}: found a step that does not fit")
        if not episodes:
            return found
        accepted, refused = self._through_door(episodes)
        for episode in accepted:
            found[int(episode.episode_id)] = episode
        for number, finding in refused:
            found[number] = finding
        return found

    def _through_door(self, episodes: Sequence[Episode]) -> tuple[list[Episode], Refusals]:
        door = self.open_door()
        try:
            accepted, refusals = door.check(episodes)
        except EpisodeInvalid as error:
            # Said of all of them: they differ among themselves.
            if len(episodes) == 1:
                return [], [(int(episodes[0].episode_id), Finding("space", str(error)))]
            parts = [self._through_door([one]) for one in episodes]
            return [e for part, _ in parts for e in part], [r for _, part in parts for r in part]
        refused = [(int(one.episode_id), told.findings[0]) for told, one in refusals]
        if self.is_strict and accepted:
            accepted, more = partition_valid(self._handle, accepted)
            refused += [(int(one.episode_id), Finding("dtype", str(why))) for one, why in more]
        return accepted, refused

    def open_door(self) -> Door:
        """Look at the dataset, and tell the grammar what it says of columns."""
        if self._door is None:
            spec = self._handle.spec if self._handle.exists() else None
            if spec is not None:
                options = replace(self._grammar.options, encoding=spec.encoding or NOTHING)
                self._grammar.options = options
            spaces = self._spaces if spec is None else (spec.observation_space, spec.action_space)
            whole = Discrete | MultiDiscrete | MultiBinary
            self._grammar.are_actions_whole = spaces is not None and isinstance(spaces[1], whole)
            self._door = Door(spec, self._spaces, rewards_optional=self._rewards_optional)
        return self._door

    @property
    def _rewards_optional(self) -> bool:
        return self._grammar.options.reward_unknown

    def new_spec(self) -> DatasetSpec:
        """Return what a new dataset has to hold, once rows have been checked."""
        grammar = self._grammar
        spec = self.open_door().spec(grammar.num_actions)
        if self._spaces is None:
            observation, action = describe(spec.observation_space), describe(spec.action_space)
            self.notes.append(
                f"the dataset was made from the first lines: observations {observation}, actions "
                f"{action}. Steps that do not fit are rejected; --env states the spaces beforehand"
            )
        encoding = grammar.options.encoding
        return spec if encoding in (None, NOTHING) else replace(spec, encoding=encoding)

    def _apart(self, window: Window, i: int) -> Finding:
        row = window.rows[i]
        return Finding(
            "next_observation",
            f"{self._grammar.name} line {row.line}: found an observation at step {row.step} of "
            f"episode {row.episode} that is not the next observation of the step before",
        )
