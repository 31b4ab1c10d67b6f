"""The door: every episode is checked against the dataset's spaces before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from replaylake.datastore.episode import MAX_STEP, Episode, check_in_spaces, checked
from replaylake.datastore.errors import EpisodeInvalid, SourceInvalid
from replaylake.datastore.formats.format import Finding, Rejected
from replaylake.datastore.inference import infer_spec
from replaylake.datastore.schema import DatasetSpec
from replaylake.datastore.spaces import (
    Array,
    Box,
    Discrete,
    MultiDiscrete,
    Space,
    Values,
    as_batch,
    concatenate,
    describe,
)

Refusal = tuple[Rejected, Episode]


class Door:
    """Checks episodes and finds the spaces they need.

    `spec` is the dataset's, where it exists; `spaces` an environment's observation and action
    space, whose bounds hold too. With neither, the narrowest that hold all episodes are found.
    """

    def __init__(self, spec: DatasetSpec | None, spaces: tuple[Space, Space] | None) -> None:
        self._spec = spec
        self._spaces = spaces
        self._found: DatasetSpec | None = None
        self._mask_size = None if spec is None else spec.mask_size

    def check(self, batch: Sequence[Episode]) -> tuple[list[Episode], list[Refusal]]:
        """Return the episodes that fit, shaped for the spaces, and those that do not.

        Raises: EpisodeInvalid if episodes differ so that no one space holds them.
        """
        episodes = [self.fitted(episode) for episode in batch]
        if not episodes:
            return [], []
        episodes, refused = _countable(episodes)
        if episodes and self._known is None:
            self._check_masks(episodes)
            self._learn(episodes)
        if episodes and (spaces := self._known or self._learned) is not None:
            try:
                self._check_one(_joined(episodes), spaces)
            except EpisodeInvalid:
                episodes, more = self._sort_out(episodes, spaces)
                refused += more
        if episodes:
            self._check_masks(episodes)
        return episodes, refused

    def spec(self, num_actions: int | None) -> DatasetSpec:
        """Return the spaces of the dataset; `num_actions` is the width of the logged policy's head.

        Raises: SourceInvalid if no episode was seen.
        """
        if self._spec is not None:
            return self._spec
        if self._spaces is not None:
            return DatasetSpec(*self._spaces, self._mask_size)
        found = self._found
        if found is None:
            raise SourceInvalid("found no valid episode, expected at least one.")
        action = found.action_space
        if isinstance(action, Discrete) and self._mask_size is None:
            action = replace(action, n=max(action.n, num_actions or 0))
        return DatasetSpec(found.observation_space, action, self._mask_size)

    def fitted(self, episode: Episode) -> Episode:
        """Give lone numbers the dim of a space of shape [1], where that is what is known."""
        if self._known is None:
            return episode
        observation_space, action_space = self._known
        final = episode.final_observation
        if final is not None:
            final = _fit(observation_space, as_batch(final))
            final = {k: v[0] for k, v in final.items()} if isinstance(final, Mapping) else final[0]
        return replace(
            episode,
            observations=_fit(observation_space, episode.observations),
            actions=_fit(action_space, episode.actions),
            final_observation=final,
        )

    @property
    def has_environment(self) -> bool:
        """Whether an environment's spaces were named."""
        return self._spaces is not None

    @property
    def _known(self) -> tuple[Space, Space] | None:
        if self._spec is not None:
            return self._spec.observation_space, self._spec.action_space
        return self._spaces

    @property
    def _learned(self) -> tuple[Space, Space] | None:
        found = self._found
        return None if found is None else (found.observation_space, found.action_space)

    def _check_one(self, episode: Episode, known: tuple[Space, Space]) -> None:
        ready = checked(episode, *known)
        if self._spaces is not None:
            check_in_spaces(ready, *self._spaces)

    def _sort_out(
        self, episodes: Sequence[Episode], known: tuple[Space, Space]
    ) -> tuple[list[Episode], list[Refusal]]:
        accepted, refused = [], []
        for episode in episodes:
            try:
                # The observations speak before the final one, which is no column of most logs.
                self._check_one(replace(episode, final_observation=None), known)
                self._check_one(episode, known)
            except EpisodeInvalid as error:
                name = episode.source_episode_id or episode.episode_id
                message = str(error).removeprefix(f"episode {name}: ")
                refused.append(_refusal(episode, "space", message))
            else:
                accepted.append(episode)
        return accepted, refused

    def _check_masks(self, episodes: Sequence[Episode]) -> None:
        sizes = {e.action_masks.shape[1] for e in episodes if e.action_masks is not None}
        if self._mask_size is None and self._spec is None:
            self._mask_size = min(sizes, default=None)
        if sizes - {self._mask_size}:
            expected = "none" if self._mask_size is None else f"{self._mask_size} actions"
            raise EpisodeInvalid(
                f"action_mask: found masks of {sorted(sizes)} actions, expected {expected} as in "
                "the rest of the dataset. Ingest into a new dataset."
            )

    def _learn(self, episodes: Sequence[Episode]) -> None:
        try:
            # One long pseudo-episode: inferring from each costs more than reading it.
            found = infer_spec(episodes if self._mask_size else [_joined(episodes)])
        except EpisodeInvalid:
            # It may not join; then the episodes say why.
            found = infer_spec(episodes)
        self._found = found if self._found is None else _wider(self._found, found)


def _countable(episodes: Sequence[Episode]) -> tuple[list[Episode], list[Refusal]]:
    """Refuse what the writer would refuse after the dataset was made: ids and step numbers."""
    accepted, refused = [], []
    for episode in episodes:
        ticks = episode.env_steps
        greatest = episode.first_step + len(episode) - 1
        if ticks is not None and len(ticks):
            greatest = max(greatest, int(ticks.max()))
        if "\0" in episode.episode_id or "\0" in episode.agent_id:
            found = f"episode_id and agent_id: found {episode.episode_id!r}, expected text without "
            refused.append(_refusal(episode, "name", f"{found}NUL"))
        elif greatest > MAX_STEP or (ticks is not None and int(ticks.min()) < -MAX_STEP):
            found = f"step or env_step: found {greatest}, expected at most {MAX_STEP}"
            refused.append(_refusal(episode, "step", found))
        else:
            accepted.append(episode)
    return accepted, refused


def _refusal(episode: Episode, check: str, message: str) -> Refusal:
    name = episode.source_episode_id or episode.episode_id
    return Rejected(name, len(episode), (Finding(check, message),)), episode


def _joined(episodes: Sequence[Episode]) -> Episode:
    """Return one long pseudo-episode: numpy then checks all of them at once.

    Raises: EpisodeInvalid if their arrays cannot be joined.
    """
    finals = [as_batch(e.final_observation) for e in episodes if e.final_observation is not None]
    try:
        return Episode(
            episode_id="",
            observations=concatenate([*(e.observations for e in episodes), *finals]),
            actions=concatenate(
                [*(e.actions for e in episodes), *_repeated(episodes, len(finals))]
            ),
            rewards=np.concatenate([*(e.rewards for e in episodes), np.zeros(len(finals))]),
            behavior_log_probs=_joined_log_probs(episodes, len(finals)),
            action_masks=_joined_masks(episodes, len(finals)),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise EpisodeInvalid(f"episodes of different shapes: {error}") from error


def _joined_log_probs(episodes: Sequence[Episode], num_finals: int) -> Array | None:
    if all(episode.behavior_log_probs is None for episode in episodes):
        return None
    unknown = [np.full(len(e), np.nan, np.float32) for e in episodes]
    known = [e.behavior_log_probs for e in episodes]
    parts = [u if k is None else k for k, u in zip(known, unknown, strict=True)]
    return np.concatenate([*parts, np.full(num_finals, np.nan, np.float32)])


def _joined_masks(episodes: Sequence[Episode], num_finals: int) -> Array | None:
    masks = [episode.action_masks for episode in episodes]
    width = max((mask.shape[1] for mask in masks if mask is not None), default=None)
    if width is None:
        return None
    lengths = [*map(len, episodes), num_finals]
    filled = [np.ones((num, width), dtype=np.bool_) for num in lengths]
    parts = [f if m is None else m for m, f in zip([*masks, None], filled, strict=True)]
    return np.concatenate(parts)


def _repeated(episodes: Sequence[Episode], num: int) -> list[Values]:
    """Return `num` copies of the first action, to go with the final observations."""
    first = episodes[0].actions
    return [_pick(first, np.zeros(num, np.int64))] if num else []


def _pick(values: Values, rows: Any) -> Values:
    if isinstance(values, Mapping):
        return {key: _pick(sub, rows) for key, sub in values.items()}
    picked: Values = values[rows]
    return picked


def _fit(space: Space, values: Values) -> Values:
    """Reshape [T] to [T, 1] for a Box of shape [1], and back for one of shape []."""
    if isinstance(values, Mapping) or not isinstance(space, Box):
        return values
    if space.shape == (1,) and values.ndim == 1:
        return values[:, None]
    return values[:, 0] if space.shape == () and values.shape[1:] == (1,) else values


def _wider(first: DatasetSpec, second: DatasetSpec) -> DatasetSpec:
    if first.observation_space != second.observation_space:
        raise _differ("observation", first.observation_space, second.observation_space)
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
        raise _differ("action", one, other)
    return DatasetSpec(first.observation_space, one)


def _differ(what: str, first: Space, second: Space) -> EpisodeInvalid:
    return EpisodeInvalid(
        f"{what}: found {describe(first)} in some episodes and {describe(second)} in others, "
        "expected one. Ingest them into two datasets."
    )
