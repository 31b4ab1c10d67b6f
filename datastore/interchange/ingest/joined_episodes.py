"""Joined episodes: many episodes as one long one, for checks that numpy then makes at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Array, Values, as_batch, concatenate
from replaylake.datastore.errors import EpisodeInvalid


def joined(episodes: Sequence[Episode]) -> Episode:
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
