"""The door: every episode is checked against the dataset's spaces before anything is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.episode import (
    MAX_STEP,
    Episode,
    check_in_spaces,
    validate,
    with_valid_tokens,
)
from replaylake.datastore.episodes.episode_columns import as_text_array
from replaylake.datastore.episodes.inference import infer_spec
from replaylake.datastore.episodes.parents import find_orphans
from replaylake.datastore.episodes.schema import (
    POLICY,
    POLICY_VERSION,
    SOURCE_EPISODE_ID,
    STANDARD_COLUMNS,
    TIMESTAMP,
    DatasetSpec,
    UniqueKeys,
)
from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Dict,
    Discrete,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
    Values,
    as_batch,
    as_values,
    bounds,
    check_bounds,
    children,
    concatenate,
    describe,
    num_values,
    take,
    value_shape,
)
from replaylake.datastore.episodes.tokenizer import Tokenizer
from replaylake.datastore.episodes.tokens import PARENT_STEP, has_tokens
from replaylake.datastore.errors import EpisodeInvalidError, SourceInvalidError
from replaylake.datastore.interchange.formats.checks import Finding
from replaylake.datastore.interchange.formats.format import (
    LoggedColumns,
    LoggedEpisode,
    RejectedEpisode,
)
from replaylake.datastore.interchange.formats.tabular.arrays import Mask
from replaylake.datastore.interchange.ingest.step_trees import AcceptedSteps, join_trees

Rejection = tuple[RejectedEpisode, Episode]
# The check of rows that lack a value of the dataset's unique key.
KEY_CHECK: Final = "key"
# Makes one pseudo-episode of some columns, for a check of all their steps at once.
Join = Callable[[LoggedColumns], Episode]
# Fewer episodes are checked one by one.
_FEW: Final = 4


@dataclass(frozen=True)
class Rejected:
    """The episode, or run, of this number in some columns, and why it was refused."""

    number: int
    why: RejectedEpisode
    episode: Episode


class _ColumnsCheck:
    """Columns, and which of their episodes were refused so far."""

    def __init__(self, columns: LoggedColumns) -> None:
        self.columns = columns
        self.rejected: list[Rejected] = []
        self._is_accepted = np.ones(len(columns), dtype=np.bool_)

    @property
    def num_accepted(self) -> int:
        return int(self._is_accepted.sum())

    @property
    def accepted_numbers(self) -> Array:
        """The numbers of those that were not refused, in order."""
        return np.flatnonzero(self._is_accepted)

    def accepted(self) -> LoggedColumns:
        """Return those that were not refused."""
        is_all = bool(self._is_accepted.all())
        return self.columns if is_all else self.columns.select(self._is_accepted)

    def joined(self) -> Episode:
        """Return the steps of those that were not refused as one long pseudo-episode."""
        return join_columns(self.accepted())

    def mask_sizes(self) -> set[int]:
        """Return the width of the action masks, if an accepted episode has one."""
        masks, absent = self.columns.steps.action_masks, self.columns.absent.get("action_masks")
        having = self._is_accepted if absent is None else self._is_accepted & ~absent
        return set() if masks is None or not having.any() else {masks.shape[1]}

    def refuse(self, numbers: Array, explain: Callable[[Episode], list[Rejection]]) -> int:
        """Refuse those for which there is a reason; return how many these are."""
        num = 0
        for number in numbers.tolist():
            if self._is_accepted[number] and (rejections := explain(self.columns[number])):
                self.rejected.append(Rejected(number, *rejections[0]))
                self._is_accepted[number] = False
                num += 1
        return num

    def find_failing(self, check: Callable[[Episode], Any], join: Join | None = None) -> Array:
        """Return the accepted ones that a check of joined steps refuses, by halves."""
        numbers = np.flatnonzero(self._is_accepted)
        accepted = self.accepted()
        places = _find_failing(accepted, check, join or join_columns) if len(numbers) else []
        return numbers[np.asarray(places, np.int64)]


def _find_failing(columns: LoggedColumns, check: Callable[[Episode], Any], join: Join) -> list[int]:
    try:
        check(join(columns))
    except EpisodeInvalidError:
        num = len(columns)
        if num <= _FEW:
            return [*range(num)]
        first, second = columns.part(0, num // 2), columns.part(num // 2, num)
        behind = _find_failing(second, check, join)
        return [*_find_failing(first, check, join), *(num // 2 + number for number in behind)]
    return []


def join_columns(columns: LoggedColumns) -> Episode:
    """Return one long pseudo-episode, with the final observations as steps of their own.

    Further columns are left out.
    """
    finals = columns.final_observations
    steps = replace(columns.steps, extras={})
    if finals is None:
        return steps
    num = len(columns.having_final)
    behind = Episode(
        episode_id="",
        observations=finals,
        actions=_pick(steps.actions, np.zeros(num, np.int64)),
        rewards=np.zeros(num),
    )
    return concatenate_episodes([steps, behind])


def _steps_of(columns: LoggedColumns) -> Episode:
    return columns.steps


def _find_unstorable(columns: LoggedColumns) -> Array:
    """Return which episodes may have ids or step numbers that the writer would refuse."""
    wrong = columns.first_steps + columns.lengths - 1 > MAX_STEP
    for texts in (columns.episode_ids, columns.agent_ids):
        if texts is not None:
            wrong |= np.asarray(pc.match_substring(as_text_array(texts), "\0"))
    ticks = columns.steps.env_steps
    if ticks is not None and len(ticks):
        outside = (ticks > MAX_STEP) | (ticks < -MAX_STEP)
        if outside.any():
            firsts = np.cumsum(columns.lengths) - columns.lengths
            wrong |= np.logical_or.reduceat(outside, firsts)
    return np.flatnonzero(wrong)


class SourceValidator:
    """Checks episodes and finds the spaces they need.

    `spec` is the dataset's, where it exists; `spaces` an environment's observation and action
    space, whose bounds hold too; `declared` those that the files state, which a new dataset gets.
    With none of them, the narrowest that hold all episodes are found. `unique` is the key of a
    dataset that has none yet, of which each row needs every value. `tokenizer` is what the files
    state of token columns.
    """

    def __init__(
        self,
        spec: DatasetSpec | None,
        spaces: tuple[Space, Space] | None,
        declared: tuple[Space, Space] | None = None,
        *,
        rewards_optional: bool = False,
        unique: UniqueKeys | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._spec = spec
        self._tokenizer = tokenizer if spec is None else spec.tokenizer or tokenizer
        # Why steps were refused for their parents: of one episode and agent, nobody could say it.
        self._orphans: dict[tuple[str, str], str] = {}
        self._last_episode = AcceptedSteps()
        self._unique = unique if spec is None or spec.unique is None else spec.unique
        self._spaces = spaces
        self._declared = declared
        self._inferred_spec: DatasetSpec | None = None
        self._form: Hashable = None
        self._mask_size = None if spec is None else spec.mask_size
        self._rewards_optional = rewards_optional if spec is None else spec.rewards_optional

    def check(self, batch: Sequence[Episode]) -> tuple[list[Episode], list[Rejection]]:
        """Return the episodes that fit, shaped for the spaces, and those that do not.

        Raises: EpisodeInvalidError if their action masks are of several widths.
        """
        episodes = [self.reshape(episode) for episode in batch]
        if not episodes:
            return [], []
        episodes, rejections = _partition_storable(episodes)
        if self._unique is not None:
            episodes, more = _partition_with_key(episodes, self._unique)
            rejections += more
        if episodes and self._known_spaces is None:
            self._check_masks(episodes)
            episodes, more = self._learn_spaces(episodes)
            rejections += more
        if episodes and (spaces := self._known_spaces or self._learned_spaces) is not None:
            try:
                self._check_one(concatenate_episodes(episodes), spaces)
            except EpisodeInvalidError:
                episodes, more = self._partition(episodes, spaces)
                rejections += more
        if episodes:
            self._check_masks(episodes)
            episodes, more = _partition_with_tokens(episodes, self._tokenizer)
            rejections += more
        return episodes, rejections

    def check_columns(
        self, parts: Sequence[LoggedColumns]
    ) -> list[tuple[LoggedColumns, list[Rejected]]]:
        """Check as `check` does; return the columns shaped for the spaces, with those refused.

        Memory: about that of the columns. Raises: as check.
        """
        checked = [_ColumnsCheck(self.reshape_columns(part)) for part in parts]
        for one in checked:
            one.refuse(_find_unstorable(one.columns), lambda e: _partition_storable([e])[1])
            if (unique := self._unique) is not None:
                keyless = _find_keyless(one.columns, unique)
                one.refuse(keyless, partial(_explain_keyless, unique))
        if self._known_spaces is None and any(one.num_accepted for one in checked):
            self._check_mask_sizes({s for one in checked for s in one.mask_sizes()})
            self._learn_column_spaces(checked)
        if (spaces := self._known_spaces or self._learned_spaces) is not None:
            for one in checked:
                one.refuse(
                    one.find_failing(lambda joined: self._check_one(joined, spaces)),
                    lambda e: self._partition([e], spaces)[1],
                )
        self._check_mask_sizes({size for one in checked for size in one.mask_sizes()})
        for one in checked:
            if has_tokens(one.columns.steps.extras):
                one.refuse(
                    one.find_failing(
                        lambda steps: with_valid_tokens(steps, self._tokenizer), _steps_of
                    ),
                    lambda e: _partition_with_tokens([e], self._tokenizer)[1],
                )
        while self._refuse_orphans(checked):
            pass
        self._last_episode.remember(one.accepted() for one in checked)
        return [(one.columns, one.rejected) for one in checked]

    def spec(self, num_actions: int | None) -> DatasetSpec:
        """Return the spaces of the dataset; `num_actions` is the width of the logged policy's head.

        Raises: SourceInvalidError if no episode was seen.
        """
        if self._spec is not None:
            return self._spec
        if (stated := self._spaces or self._declared) is not None:
            return DatasetSpec(
                *stated,
                self._mask_size,
                rewards_optional=self._rewards_optional,
                unique=self._unique,
            )
        inferred = self._inferred_spec
        if inferred is None:
            raise SourceInvalidError("found no valid episode, expected at least one.")
        action = inferred.action_space
        if isinstance(action, Discrete) and self._mask_size is None:
            action = replace(action, n=max(action.n, num_actions or 0))
        return DatasetSpec(
            inferred.observation_space,
            action,
            self._mask_size,
            rewards_optional=self._rewards_optional,
            unique=self._unique,
        )

    def reshape(self, episode: Episode) -> Episode:
        """Give lone numbers the dim of a space of shape [1], where that is what is known."""
        if self._known_spaces is None:
            return episode
        observation_space, action_space = self._known_spaces
        final = episode.final_observation
        if final is not None:
            final = take(_reshape(observation_space, as_batch(final)), 0)
        return replace(
            episode,
            observations=_reshape(observation_space, episode.observations),
            actions=_reshape(action_space, episode.actions),
            final_observation=final,
        )

    def reshape_columns(self, columns: LoggedColumns) -> LoggedColumns:
        """Return them as `reshape` returns each episode."""
        if self._known_spaces is None:
            return columns
        observation_space, action_space = self._known_spaces
        steps, finals = columns.steps, columns.final_observations
        return replace(
            columns,
            steps=replace(
                steps,
                observations=_reshape(observation_space, steps.observations),
                actions=_reshape(action_space, steps.actions),
            ),
            final_observations=None if finals is None else _reshape(observation_space, finals),
        )

    def explain_rejection(self, episode: Episode) -> RejectedEpisode:
        """Say again why an episode was refused, for whoever reads it once more."""
        _, rejections = _partition_storable([episode])
        if not rejections and self._unique is not None:
            _, rejections = _partition_with_key([episode], self._unique)
        if not rejections:
            _, rejections = _partition_with_tokens([episode], self._tokenizer)
        orphan = self._orphans.get((episode.episode_id, episode.agent_id))
        if not rejections and orphan is not None:
            rejections = [_make_rejection(episode, "parent", orphan)]
        if not rejections and (spaces := self._known_spaces or self._learned_spaces) is not None:
            _, rejections = self._partition([self.reshape(episode)], spaces)
        if not rejections:
            rejections = _reject_spaceless([episode])
        if not rejections:
            # Wider spaces have been learned since.
            rejections = [
                _make_rejection(episode, "space", "found values that did not fit those before it")
            ]
        return rejections[0][0]

    @property
    def has_environment(self) -> bool:
        """Whether an environment's spaces were named."""
        return self._spaces is not None

    @property
    def _known_spaces(self) -> tuple[Space, Space] | None:
        if self._spec is not None:
            return self._spec.observation_space, self._spec.action_space
        return self._spaces or self._declared

    @property
    def _learned_spaces(self) -> tuple[Space, Space] | None:
        spec = self._inferred_spec
        return None if spec is None else (spec.observation_space, spec.action_space)

    def _refuse_orphans(self, checked: Sequence[_ColumnsCheck]) -> int:
        """Refuse episodes of steps whose parent was refused or is not there; return how many."""
        holders = [one for one in checked if PARENT_STEP in one.columns.steps.extras]
        holders = [one for one in holders if has_tokens(one.columns.steps.extras)]
        parts = [one.accepted() for one in holders]
        if not any(len(part) for part in parts):
            return 0
        ends = np.cumsum([part.num_steps for part in parts])
        wrong: list[set[int]] = [set() for _ in parts]
        for orphan in find_orphans(join_trees(parts), self._last_episode.find):
            place = int(np.searchsorted(ends, orphan.row, side="right"))
            part = parts[place]
            row = orphan.row - int(ends[place]) + part.num_steps
            number = int(np.searchsorted(np.cumsum(part.lengths), row, side="right"))
            agent_id = "" if part.agent_ids is None else part.agent_ids[number]
            self._orphans.setdefault((part.episode_ids[number], agent_id), orphan.message)
            wrong[place].add(number)
        return sum(
            one.refuse(one.accepted_numbers[sorted(numbers)], self._explain_orphan)
            for one, numbers in zip(holders, wrong, strict=True)
        )

    def _explain_orphan(self, episode: Episode) -> list[Rejection]:
        message = self._orphans.get((episode.episode_id, episode.agent_id))
        return [] if message is None else [_make_rejection(episode, "parent", message)]

    def _check_one(self, episode: Episode, known: tuple[Space, Space]) -> None:
        ready = validate(episode, *known, rewards_optional=self._rewards_optional)
        if self._spaces is not None:
            check_in_spaces(ready, *self._spaces)

    def _partition(
        self, episodes: Sequence[Episode], known: tuple[Space, Space]
    ) -> tuple[list[Episode], list[Rejection]]:
        accepted, rejections = [], []
        for episode in episodes:
            try:
                # The observations speak before the final one, which is no column of most logs.
                self._check_one(replace(episode, final_observation=None), known)
                self._check_one(episode, known)
            except EpisodeInvalidError as error:
                name = episode.source_episode_id or episode.episode_id
                message = str(error).removeprefix(f"episode {name}: ")
                check, num_rows = classify_space_error(episode, self._spaces or known)
                found = self._find_outside_spaces(episode) if check == "space" else []
                if not found:
                    found = [Finding(check, message, num_rows)]
                rejections.append(_reject(episode, found))
            else:
                accepted.append(episode)
        return accepted, rejections

    def _find_outside_spaces(self, episode: Episode) -> list[Finding]:
        """Return what lies outside the environment's spaces, the observation and the action each.

        Their form has to be that of the spaces.
        """
        if self._spaces is None:
            return []
        found = []
        names, values = ("observation", "action"), (episode.observations, episode.actions)
        for name, space, part in zip(names, self._spaces, values, strict=True):
            num_rows = int(_find_outside(space, part).sum())
            try:
                check_bounds(space, part, name)
            except EpisodeInvalidError as error:
                found.append(Finding("space", str(error), max(1, num_rows), column=name))
        return found

    def _check_masks(self, episodes: Sequence[Episode]) -> None:
        self._check_mask_sizes(
            {e.action_masks.shape[1] for e in episodes if e.action_masks is not None}
        )

    def _check_mask_sizes(self, sizes: set[int]) -> None:
        if self._mask_size is None and self._spec is None:
            self._mask_size = min(sizes, default=None)
        if sizes - {self._mask_size}:
            expected = "none" if self._mask_size is None else f"{self._mask_size} actions"
            raise EpisodeInvalidError(
                f"action_mask: found masks of {sorted(sizes)} actions, expected {expected} as in "
                "the rest of the dataset. Ingest into a new dataset."
            )

    def _learn_spaces(self, episodes: list[Episode]) -> tuple[list[Episode], list[Rejection]]:
        """Find spaces that hold what most of these steps are, or what those before were.

        Refuses the episodes that no space holds; those that do not fit are for the caller to find.
        """
        rejections: list[Rejection] = []
        while episodes:
            if self._inferred_spec is None:
                self._form = most_common_form(episodes)
            alike = [episode for episode in episodes if episode_form(episode) == self._form]
            try:
                spec = self._infer_spec(alike) if alike else None
            except EpisodeInvalidError as error:
                rejections += (more := _reject_spaceless(alike))
                if not more:
                    raise error
                dropped_ids = {id(episode) for _, episode in more}
                episodes = [episode for episode in episodes if id(episode) not in dropped_ids]
                continue
            if spec is not None:
                self._widen(spec)
            break
        return episodes, rejections

    def _learn_column_spaces(self, checked: Sequence[_ColumnsCheck]) -> None:
        """Find spaces as `_learn_spaces` does, and refuse the episodes that no space holds."""
        while left := [one for one in checked if one.num_accepted]:
            if self._inferred_spec is None:
                self._form = most_common_form([one.accepted().steps for one in left])
            alike = [one for one in left if episode_form(one.columns.steps) == self._form]
            if not alike:
                return
            try:
                self._widen(infer_spec([concatenate_episodes([o.joined() for o in alike])]))
            except EpisodeInvalidError:
                num_refused = sum(
                    one.refuse(
                        one.find_failing(lambda joined: infer_spec([joined])),
                        lambda e: _reject_spaceless([e]),
                    )
                    for one in alike
                )
                if not num_refused:
                    raise
                continue
            return

    def _infer_spec(self, episodes: Sequence[Episode]) -> DatasetSpec:
        try:
            # One long pseudo-episode: inferring from each costs more than reading it.
            return infer_spec(episodes if self._mask_size else [concatenate_episodes(episodes)])
        except EpisodeInvalidError:
            # It may not join; then the episodes say why.
            return infer_spec(episodes)

    def _widen(self, spec: DatasetSpec) -> None:
        if self._inferred_spec is None:
            self._inferred_spec = spec
            return
        # Of one form, they differ by dtype at most: what came first stands, others have to fit it.
        spec = replace(spec, observation_space=self._inferred_spec.observation_space)
        with suppress(EpisodeInvalidError):
            self._inferred_spec = _wider(self._inferred_spec, spec)


def _partition_storable(episodes: Sequence[Episode]) -> tuple[list[Episode], list[Rejection]]:
    """Refuse what the writer would refuse after the dataset was made: ids and step numbers."""
    accepted, rejections = [], []
    for episode in episodes:
        ticks = episode.env_steps
        greatest = episode.first_step + len(episode) - 1
        if ticks is not None and len(ticks):
            greatest = max(greatest, int(ticks.max()))
        if "\0" in episode.episode_id or "\0" in episode.agent_id:
            found = f"episode_id and agent_id: found {episode.episode_id!r}, expected text without "
            rejections.append(_make_rejection(episode, "name", f"{found}NUL"))
        elif greatest > MAX_STEP or (ticks is not None and int(ticks.min()) < -MAX_STEP):
            found = f"step or env_step: found {greatest}, expected at most {MAX_STEP}"
            rejections.append(_make_rejection(episode, "step", found))
        else:
            accepted.append(episode)
    return accepted, rejections


def _find_keyless(columns: LoggedColumns, unique: UniqueKeys) -> Array:
    """Return which episodes have a step without a value of the key."""
    wrong = np.zeros(len(columns), np.bool_)
    firsts = np.cumsum(columns.lengths) - columns.lengths
    for name in unique.columns:
        if name == SOURCE_EPISODE_ID:
            ids = columns.source_ids
            wrong |= True if ids is None else _is_missing(as_text_array(ids))
            continue
        if (values := _key_values(columns.steps, name)) is True:
            continue
        if values is None:
            wrong[:] = True
            continue
        missing = _is_missing(values)
        absent = columns.lacks(_KEY_FIELDS.get(name, name))
        if absent is not None:
            missing = missing | absent
        if missing.any():
            wrong |= np.logical_or.reduceat(missing, firsts)
    return np.flatnonzero(wrong)


def _explain_keyless(unique: UniqueKeys, episode: Episode) -> list[Rejection]:
    return _partition_with_key([episode], unique)[1]


# Fields of an Episode that hold a column of a key, one value a step.
_KEY_FIELDS: Final = {
    TIMESTAMP: "timestamps",
    POLICY: "policies",
    POLICY_VERSION: "policy_versions",
}


def _partition_with_key(
    episodes: Sequence[Episode], unique: UniqueKeys
) -> tuple[list[Episode], list[Rejection]]:
    """Refuse the episodes of which a row lacks a value of the key."""
    accepted, rejections = [], []
    for episode in episodes:
        for name in unique.columns:
            if num := _count_missing(episode, _key_values(episode, name)):
                found = f"{name}: found no value in {num} rows, expected one in each"
                message = f"{found}: the key is unique"
                rejections.append(_reject(episode, [Finding(KEY_CHECK, message, num)]))
                break
        else:
            accepted.append(episode)
    return accepted, rejections


def _partition_with_tokens(
    episodes: Sequence[Episode], tokenizer: Tokenizer | None
) -> tuple[list[Episode], list[Rejection]]:
    """Refuse the episodes whose token columns do not go together."""
    accepted, rejections = [], []
    for episode in episodes:
        try:
            if has_tokens(episode.extras):
                with_valid_tokens(episode, tokenizer)
        except EpisodeInvalidError as error:
            rejections.append(_make_rejection(episode, "tokens", str(error)))
        else:
            accepted.append(episode)
    return accepted, rejections


def _key_values(episode: Episode, name: str) -> Any:
    """Return a column of the key; True if every step has a value of it."""
    if name in STANDARD_COLUMNS:
        if (field := _KEY_FIELDS.get(name)) is not None:
            return getattr(episode, field)
        # Of the others every step has a value, but for the log's own id.
        has_source = name != SOURCE_EPISODE_ID or episode.source_episode_id is not None
        return True if has_source else None
    return episode.extras.get(name)


def _count_missing(episode: Episode, column: Any) -> int:
    if column is None:
        return len(episode)
    return 0 if column is True else int(_is_missing(column).sum())


def _is_missing(column: Any) -> Mask:
    """Return which values are NULL, as the table would have them."""
    if isinstance(column, np.ndarray) and column.dtype != object:
        return np.isnat(column) if column.dtype.kind == "M" else np.zeros(len(column), np.bool_)
    if not isinstance(column, pa.Array | pa.ChunkedArray):
        return np.fromiter((value is None for value in column), np.bool_, len(column))
    if not column.null_count:
        return np.zeros(len(column), np.bool_)
    return np.asarray(pc.is_null(column), np.bool_)


def _make_rejection(episode: Episode, check: str, message: str) -> Rejection:
    return _reject(episode, [Finding(check, message)])


def _reject(episode: Episode, findings: Sequence[Finding]) -> Rejection:
    """Refuse an episode, and say where its rows are."""
    name = episode.source_episode_id or episode.episode_id
    places = episode.places if isinstance(episode, LoggedEpisode) else None
    if places is not None:
        place = places.text()
        findings = [
            replace(
                one,
                message=f"{one.message.rstrip('.')}. Its rows begin at {place}",
                place=place,
            )
            for one in findings
        ]
    rejected = RejectedEpisode(name, len(episode), tuple(findings), episode.agent_id, places=places)
    return rejected, episode


def _reject_spaceless(episodes: Sequence[Episode]) -> list[Rejection]:
    """Refuse the episodes that no space can be found for."""
    rejections = []
    for episode in episodes:
        try:
            infer_spec([episode])
        except EpisodeInvalidError as error:
            name = episode.source_episode_id or episode.episode_id
            message = str(error).removeprefix(f"episode {name}: ")
            rejections.append(_make_rejection(episode, "space", message))
    return rejections


def _reshape(space: Space, values: Values) -> Values:
    """Reshape [T] to [T, 1] for a Box of shape [1], and back where the space has lone numbers."""
    if isinstance(values, Mapping) or not isinstance(space, Box | Discrete):
        return values
    shape = value_shape(space)
    if shape == (1,) and values.ndim == 1:
        return values[:, None]
    return values[:, 0] if shape == () and values.shape[1:] == (1,) else values


def _wider(first: DatasetSpec, second: DatasetSpec) -> DatasetSpec:
    if first.observation_space != second.observation_space:
        raise _mismatch_error("observation", first.observation_space, second.observation_space)
    one, other = first.action_space, second.action_space
    if isinstance(one, Discrete) and isinstance(other, Discrete):
        one = Discrete(max(one.n, other.n))
    elif (
        isinstance(one, MultiDiscrete)
        and isinstance(other, MultiDiscrete)
        and len(one.nvec) == len(other.nvec)
    ):
        one = MultiDiscrete(tuple(np.maximum(one.nvec, other.nvec).tolist()))
    elif one != other:
        raise _mismatch_error("action", one, other)
    return DatasetSpec(first.observation_space, one)


def _mismatch_error(what: str, first: Space, second: Space) -> EpisodeInvalidError:
    return EpisodeInvalidError(
        f"{what}: found {describe(first)} in some episodes and {describe(second)} in others, "
        "expected one. Ingest them into two datasets."
    )


def concatenate_episodes(episodes: Sequence[Episode]) -> Episode:
    """Return one long pseudo-episode: numpy then checks all of them at once.

    Raises: EpisodeInvalidError if their arrays cannot be joined.
    """
    finals = [as_batch(e.final_observation) for e in episodes if e.final_observation is not None]
    try:
        return Episode(
            episode_id="",
            observations=concatenate([*(e.observations for e in episodes), *finals]),
            actions=concatenate(
                [*(e.actions for e in episodes), *_repeat_first_action(episodes, len(finals))]
            ),
            rewards=np.concatenate([*(e.rewards for e in episodes), np.zeros(len(finals))]),
            behavior_log_probs=_concatenate_log_probs(episodes, len(finals)),
            action_masks=_concatenate_masks(episodes, len(finals)),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise EpisodeInvalidError(f"episodes of different shapes: {error}") from error


def _concatenate_log_probs(episodes: Sequence[Episode], num_finals: int) -> Array | None:
    if all(episode.behavior_log_probs is None for episode in episodes):
        return None
    unknown = [np.full(len(e), np.nan, np.float32) for e in episodes]
    known = [e.behavior_log_probs for e in episodes]
    parts = [u if k is None else k for k, u in zip(known, unknown, strict=True)]
    return np.concatenate([*parts, np.full(num_finals, np.nan, np.float32)])


def _concatenate_masks(episodes: Sequence[Episode], num_finals: int) -> Array | None:
    masks = [episode.action_masks for episode in episodes]
    width = max((mask.shape[1] for mask in masks if mask is not None), default=None)
    if width is None:
        return None
    lengths = [*map(len, episodes), num_finals]
    filled = [np.ones((num, width), dtype=np.bool_) for num in lengths]
    parts = [f if m is None else m for m, f in zip([*masks, None], filled, strict=True)]
    return np.concatenate(parts)


def _repeat_first_action(episodes: Sequence[Episode], num: int) -> list[Values]:
    """Return `num` copies of the first action, to go with the final observations."""
    first = episodes[0].actions
    return [_pick(first, np.zeros(num, np.int64))] if num else []


def _pick(values: Values, rows: Any) -> Values:
    if isinstance(values, Mapping):
        return {key: _pick(sub, rows) for key, sub in values.items()}
    picked: Values = values[rows]
    return picked


def classify_space_error(episode: Episode, spaces: tuple[Space, Space]) -> tuple[str, int]:
    """Return the name of the check that an episode fails which `checked` refused, and its rows."""
    parts = [(spaces[0], episode.observations), (spaces[1], episode.actions)]
    if episode.final_observation is not None:
        parts.append((spaces[0], as_batch(episode.final_observation)))
    for space, values in parts:
        if (check := _check_form(space, values)) is not None:
            return check, min(len(episode), max(1, _num_rows(check, values, len(episode))))
    if not np.isfinite(np.asarray(episode.rewards, np.float64)).all():
        return "not_finite", int((~np.isfinite(episode.rewards)).sum())
    outside = [_find_outside(space, values) for space, values in parts[:2]]
    if num := int((outside[0] | outside[1]).sum()):
        return "space", num
    log_probs = episode.behavior_log_probs
    if log_probs is not None and (num := int((~(log_probs <= 0) & ~np.isnan(log_probs)).sum())):
        return "propensity", num
    return ("space", 1) if episode.action_masks is None else ("action_mask", 1)


def episode_form(episode: Episode) -> Hashable:
    """Return what episodes of one dataset have in common: the shapes and kinds of their values."""
    return _value_form(episode.observations), _value_form(episode.actions)


def most_common_form(episodes: Sequence[Episode]) -> Hashable:
    """Return the form that most of these steps have."""
    counts: Counter[Hashable] = Counter()
    for episode in episodes:
        counts[episode_form(episode)] += len(episode)
    return counts.most_common(1)[0][0]


def _value_form(values: Values) -> Hashable:
    if isinstance(values, Mapping):
        return tuple(sorted((key, _value_form(sub)) for key, sub in values.items()))
    kind = values.dtype.kind
    return values.shape[1:], {"O": "text", "U": "text", "f": "float"}.get(kind, "whole")


def _check_form(space: Space, values: Any) -> str | None:
    if isinstance(space, Dict | Tuple):
        names = children(space)
        if not isinstance(values, Mapping) or set(values) != set(names):
            return "shape"
        checks = (_check_form(sub, values[key]) for key, sub in names.items())
        return next((check for check in checks if check is not None), None)
    if isinstance(values, Mapping):
        return "shape"
    if not isinstance(space, Text) and np.shape(values)[1:] != value_shape(space):
        return "shape"
    if not _finite(values).all():
        return "not_finite"
    try:
        as_values(space, values, "value")
    except EpisodeInvalidError:
        return "dtype"
    return None


def _num_rows(check: str, values: Values, num: int) -> int:
    return int((~_finite(values)).sum()) if check == "not_finite" else num


def _finite(values: Values) -> Mask:
    """Return which rows are all finite."""
    if isinstance(values, Mapping):
        return np.asarray(np.all([_finite(sub) for sub in values.values()], axis=0))
    if values.dtype.kind != "f":
        return np.ones(len(values), dtype=np.bool_)
    return np.asarray(np.isfinite(values).reshape(len(values), -1).all(axis=1))


def _find_outside(space: Space, values: Values) -> Mask:
    """Return which rows are outside of a space whose form they have."""
    if isinstance(space, Dict | Tuple):
        parts: Any = values
        masks = [_find_outside(sub, parts[key]) for key, sub in children(space).items()]
        return np.asarray(np.any(masks, axis=0))
    if isinstance(space, Text) or isinstance(values, Mapping):
        return np.zeros(num_values(values), dtype=np.bool_)
    low, high = bounds(space)
    with np.errstate(invalid="ignore"):
        outside = (values < low) | (values > high)
    return np.asarray(outside.reshape(len(values), -1).any(axis=1))
