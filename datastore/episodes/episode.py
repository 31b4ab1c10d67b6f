"""Episode: what every writer hands to the lake and every reader of a foreign format returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
    Values,
    as_batch,
    as_values,
    check_bounds,
    children,
    leaves,
    take,
)
from replaylake.datastore.episodes.tokenizer import Tokenizer
from replaylake.datastore.episodes.tokens import has_tokens, to_arrow_columns, validate_tokens
from replaylake.datastore.errors import EpisodeInvalidError

MAX_STEP: Final = 2**31 - 1
# Fields of Episode that hold one value a step and may be absent.
PER_STEP: Final = (
    "behavior_log_probs",
    "policies",
    "policy_versions",
    "action_masks",
    "timestamps",
    "env_steps",
)
# A softmax in float32 may give a sure action a little more than 1.
LOG_PROB_TOLERANCE: Final = 1e-6


@dataclass(frozen=True)
class Episode:
    """The steps of one agent from reset to end, or a contiguous piece of them.

    Row t has the observation before action t, the action as executed, and the reward, termination
    and truncation that the action caused. T is the number of steps.

    Shapes: observations [T, *obs] (a mapping of arrays for Dict and Tuple spaces); actions [T,
    *act]; rewards float64 [T], undiscounted and unscaled (NaN where unknown, in datasets with
    optional rewards); final_observation [*obs], the observation after the last step, or None if the
    log lacks it.

    The following arrays have one value per step, or are None if unknown: behavior_log_probs float32
    [T] (ln of the probability or density that the acting policy gave the action; NaN for a step
    without it), policies object [T] of str, policy_versions int64 [T], action_masks bool [T, A],
    timestamps int64 [T] (us since 1970, UTC), env_steps int32 [T] (the number of the environment
    step; equal to the step if there is one agent).

    `terminated` and `truncated` describe the last step; if both are false, the episode is still
    open. `extras` has further columns: arrays of length T with a type that pyarrow supports.
    """

    episode_id: str
    observations: Values
    actions: Values
    rewards: Array
    terminated: bool = False
    truncated: bool = False
    final_observation: Any = None
    agent_id: str = ""
    first_step: int = 0
    behavior_log_probs: Array | None = None
    policies: NDArray[np.object_] | None = None
    policy_versions: Array | None = None
    action_masks: Array | None = None
    timestamps: Array | None = None
    env_steps: Array | None = None
    source_episode_id: str | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rewards)


def validate(
    episode: Episode,
    observation_space: Space,
    action_space: Space,
    *,
    rewards_optional: bool = False,
    tokenizer: Tokenizer | None = None,
) -> Episode:
    """Return the episode with every array in its stored dtype, or refuse it whole.

    Checks lengths, shapes, dtypes (cast when exact), finite numbers (a reward may be NaN, unknown,
    where `rewards_optional` says so), the steps' range and, for countable actions, the space's
    bounds (one outside would index past a network's head), the action's own mask, and that no
    log-probability is above 0. Observation bounds are for `check_in_spaces`, because real logs
    overshoot nominal ones. Token columns are checked by `validate_tokens`, with the dataset's
    tokenizer where it states one.

    Raises: EpisodeInvalidError with the episode, the field, what was found and what was expected;
    SchemaMismatchError for token columns of other types.
    """
    try:
        ready = _validate(episode, observation_space, action_space, rewards_optional)
        return with_valid_tokens(ready, tokenizer) if has_tokens(episode.extras) else ready
    except EpisodeInvalidError as error:
        name = episode.source_episode_id or episode.episode_id
        raise EpisodeInvalidError(f"episode {name}: {error}") from error


def with_valid_tokens(episode: Episode, tokenizer: Tokenizer | None) -> Episode:
    """Return an episode with its token columns as they are stored, and its behavior log-probs.

    Raises: as validate_tokens, without the episode's name.
    """
    columns = validate_tokens(
        to_arrow_columns(episode.extras), episode.behavior_log_probs, tokenizer
    )
    return replace(
        episode,
        extras={**episode.extras, **columns.arrays},
        behavior_log_probs=columns.behavior_log_probs,
    )


def check_in_spaces(episode: Episode, observation_space: Space, action_space: Space) -> None:
    """Refuse observations and actions outside an environment's bounds.

    Raises: EpisodeInvalidError.
    """
    try:
        check_bounds(observation_space, episode.observations, "observation")
        check_bounds(action_space, episode.actions, "action")
    except EpisodeInvalidError as error:
        name = episode.source_episode_id or episode.episode_id
        raise EpisodeInvalidError(f"episode {name}: {error}") from error


def _validate(
    episode: Episode, observation_space: Space, action_space: Space, rewards_optional: bool
) -> Episode:
    num = len(episode.rewards)
    if num == 0:
        raise EpisodeInvalidError(
            "found no steps, expected at least one. Leave empty episodes out."
        )
    if episode.first_step < 0 or episode.first_step + num - 1 > MAX_STEP:
        raise EpisodeInvalidError(
            f"step: found {episode.first_step}..{episode.first_step + num - 1}, expected "
            f"0..{MAX_STEP}. Renumber the steps from 0."
        )
    final = episode.final_observation
    if final is not None:
        final = take(as_values(observation_space, as_batch(final), "final_observation", 1), 0)
    actions = as_values(action_space, episode.actions, "action", num)
    _check_discrete(action_space, actions, "action")
    masks = _validate_masks(episode.action_masks, num)
    if masks is not None and isinstance(action_space, Discrete):
        _check_allowed(np.asarray(actions), action_space, masks)
    log_probs = _validate_log_probs(episode.behavior_log_probs, num)
    if log_probs is not None and is_countable(action_space):
        _check_probabilities(log_probs)
    return replace(
        episode,
        observations=as_values(observation_space, episode.observations, "observation", num),
        actions=actions,
        rewards=_validate_rewards(episode.rewards, num, rewards_optional),
        final_observation=final,
        behavior_log_probs=log_probs,
        policy_versions=_validate_optional(
            episode.policy_versions, np.int64, "policy_version", num
        ),
        policies=_validate_policies(episode.policies, num),
        action_masks=masks,
        timestamps=_validate_optional(episode.timestamps, np.int64, "timestamp", num),
        env_steps=_validate_optional(episode.env_steps, np.int32, "env_step", num),
        extras={name: _validate_extra(name, array, num) for name, array in episode.extras.items()},
    )


def _check_discrete(space: Space, values: Values, what: str) -> None:
    """Check the bounds of countable actions alone: logged continuous ones overshoot at times."""
    if isinstance(space, Dict | Tuple):
        parts: Any = values
        for key, sub in children(space).items():
            _check_discrete(sub, parts[key], f"{what}.{key}")
    elif isinstance(space, Discrete | MultiDiscrete | MultiBinary):
        check_bounds(space, values, what)


def is_countable(space: Space) -> bool:
    """Whether actions of this space have probabilities, not densities."""
    return not any(isinstance(leaf, Box | Text) for _, leaf in leaves(space))


def _check_allowed(actions: Array, space: Discrete, masks: Array) -> None:
    """Refuse an action that its own mask forbids: no policy could have chosen it."""
    indices = actions - space.start
    # The space may be wider than the mask, whose width the dataset fixes and the encoder checks.
    inside = indices < masks.shape[1]
    allowed = np.zeros(len(indices), dtype=bool)
    allowed[inside] = masks[inside, indices[inside]]
    if not allowed.all():
        row = int(np.argmin(allowed))
        raise EpisodeInvalidError(
            f"action at step {row}: found {actions[row]}, which its action_mask forbids, expected "
            f"one of {(np.flatnonzero(masks[row]) + space.start).tolist()}. Check that mask and "
            "action belong to the same step."
        )


def _check_probabilities(log_probs: Array) -> None:
    """Refuse the logarithm of more than 1. A density may be above it; NaN is an unknown one."""
    above = log_probs > LOG_PROB_TOLERANCE
    if above.any():
        row = int(np.argmax(above))
        raise EpisodeInvalidError(
            f"behavior_log_prob at step {row}: found {log_probs[row]:g}, expected at most 0, the "
            "natural logarithm of a probability. Map a column of probabilities as behavior_prob."
        )


def _validate_numbers(raw: Any, dtype: Any, what: str, num: int) -> Array:
    return np.asarray(as_values(Box((), np.dtype(dtype).name), raw, what, num))


def _validate_optional(raw: Any, dtype: Any, what: str, num: int) -> Array | None:
    return None if raw is None else _validate_numbers(raw, dtype, what, num)


def _validate_rewards(raw: Any, num: int, is_optional: bool) -> Array:
    rewards = np.asarray(raw) if is_optional else None
    if rewards is None or rewards.shape != (num,) or rewards.dtype.kind != "f":
        return _validate_numbers(raw, np.float64, "reward", num)
    unknown = np.isnan(rewards)
    known = _validate_numbers(np.where(unknown, 0, rewards), np.float64, "reward", num)
    return np.where(unknown, np.nan, known)


def _validate_log_probs(raw: Any, num: int) -> Array | None:
    if raw is None:
        return None
    try:
        with np.errstate(over="ignore"):
            log_probs = np.asarray(raw, dtype=np.float64).astype(np.float32)
    except (TypeError, ValueError) as error:
        raise EpisodeInvalidError(
            f"behavior_log_prob: {error}, expected one number per step."
        ) from error
    if log_probs.shape != (num,):
        raise EpisodeInvalidError(
            f"behavior_log_prob: found shape {list(log_probs.shape)}, expected [{num}]."
        )
    if np.isinf(log_probs).any():
        row = int(np.argwhere(np.isinf(log_probs))[0][0])
        raise EpisodeInvalidError(
            f"behavior_log_prob at step {row}: found {log_probs[row]}, expected a finite number "
            "or NaN where it is unknown. An action with probability 0 cannot have been taken."
        )
    return log_probs


def _validate_policies(raw: Any, num: int) -> NDArray[np.object_] | None:
    if raw is None:
        return None
    policies = np.asarray(raw, dtype=object)
    if policies.shape != (num,):
        raise EpisodeInvalidError(f"policy: found shape {list(policies.shape)}, expected [{num}].")
    for policy in set(policies.tolist()):
        if policy is not None and not isinstance(policy, str):
            raise EpisodeInvalidError(
                f"policy: found {policy!r}, expected names, or None if unknown."
            )
    return policies


def _validate_masks(raw: Any, num: int) -> Array | None:
    if raw is None:
        return None
    masks = np.asarray(raw)
    if masks.ndim != 2 or len(masks) != num or masks.dtype != np.bool_:
        raise EpisodeInvalidError(
            f"action_mask: found {masks.dtype} {list(masks.shape)}, expected bool [{num}, A]."
        )
    return masks


def _validate_extra(name: str, array: Any, num: int) -> Any:
    try:
        length = len(array)
    except TypeError:
        length = 0
    if length != num:
        raise EpisodeInvalidError(f"{name}: found {length} rows, expected {num}, one per step.")
    return array
