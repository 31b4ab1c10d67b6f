"""Models of values for the direct method and for doubly robust estimators, cross-fitted.

What is predicted of an episode comes from a model that was fitted on others of the evaluated ones,
never on the policy's training set: there the policy and the model would share the same luck.
One-step logs get a model of the reward; longer episodes fitted Q evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import take
from replaylake.datastore.lake.logged_steps import LoggedSteps
from replaylake.offline.evaluation.ope.folds import each_fold, episode_folds
from replaylake.offline.evaluation.ope.fqe import fit
from replaylake.offline.evaluation.ope.fqe_config import FQEConfig
from replaylake.offline.evaluation.ope.target_policy import TargetPolicy
from replaylake.offline.evaluation.ope.transition_arrays import (
    TransitionArrays,
    from_decisions,
    from_steps,
)
from replaylake.offline.evaluation.ope.value_network import (
    ActionValues,
    TransitionRows,
    make_adam,
    map_chunks,
)

# Of the reward model: a fold's predictions come from the four others.
REWARD_FOLDS: Final = 5
# Of fitted Q evaluation, which takes seconds a fit.
FQE_FOLDS: Final = 2
_VALIDATION_SHARE: Final = 0.2
_CHECK_UPDATES: Final = 50
_PATIENCE: Final = 5
# At most so many updates: it stops where it gets no better.
REWARD_CONFIG: Final = FQEConfig(updates=2000, hidden_sizes=(64, 64), learning_rate=2e-3)
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class PredictedValues:
    """What a model says of each logged step, float64 [M] each.

    q_logged: the value of the logged action under the policy. v_target: that of the observation.
    model: which model, and how it was fitted. is_empty: it found nothing to tell one action from
    another, and so says of every policy what the log's mean is.
    """

    q_logged: NDArray[np.float64]
    v_target: NDArray[np.float64]
    model: str
    is_empty: bool = False


def predict_values(
    steps: LoggedSteps,
    target: TargetPolicy,
    discount: float,
    *,
    config: FQEConfig | None = None,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> PredictedValues:
    """Fit fitted Q evaluation on folds of the episodes, and predict each fold by the others.

    Raises: SpaceUnsupportedError, TrainingError, EmptyReplayError.
    """
    config = config or FQEConfig()
    assert steps.observations is not None
    q, v = np.empty(steps.num_steps), np.empty(steps.num_steps)
    folds = episode_folds(steps.num_episodes, FQE_FOLDS, seed)
    num_folds = int(folds.max()) + 1
    is_exact = True
    for number, inside in each_fold(folds):
        rows = np.flatnonzero(inside[steps.episode_of])
        arrays = from_steps(steps, discount, ~inside)

        def tell(done: int, total: int, fold: int = number) -> None:
            if on_progress is not None:
                on_progress(fold * total + done, num_folds * total)

        model = fit(target, arrays, config, seed + number, on_progress=tell)
        is_exact &= model.num_updates == 0
        observations = take(steps.observations, rows)
        q[rows] = model.q(observations, take(steps.actions, rows))
        masks = None if steps.action_masks is None else steps.action_masks[rows]
        v[rows] = model.v(observations, masks)
    how = "solved exactly" if is_exact else f"{config.updates:,} updates"
    return PredictedValues(
        q, v, f"fitted Q evaluation ({how}), cross-fitted over {num_folds} folds of the episodes"
    )


def predict_rewards(
    steps: LoggedSteps,
    target: TargetPolicy | NDArray[np.floating[Any]],
    *,
    config: FQEConfig = REWARD_CONFIG,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> PredictedValues:
    """Fit a model of the reward of one-step episodes, and predict each fold by the others.

    target: the policy, or its probabilities float64 [M, A] of Discrete actions. A model that is
    no better than the mean reward on episodes left out of it is given up for that mean.
    Deterministic on the CPU. Raises: SpaceUnsupportedError.
    """
    assert steps.observations is not None
    arrays = from_decisions(steps)
    q, v = np.empty(steps.num_steps), np.empty(steps.num_steps)
    folds = episode_folds(steps.num_episodes, REWARD_FOLDS, seed)
    num_folds, num_means = int(folds.max()) + 1, 0
    for number, inside in each_fold(folds):
        model = _RewardModel(arrays, target, np.flatnonzero(~inside), config, seed + number)
        num_means += model.is_mean
        rows = np.flatnonzero(inside)
        q[rows], v[rows] = model.predict(rows)
        if on_progress is not None:
            on_progress(number + 1, num_folds)
    how = f"a model of the reward, cross-fitted over {num_folds} folds"
    if num_means:
        how += f", in {num_means} of which no model was better than the mean reward"
    return PredictedValues(q, v, how, is_empty=2 * num_means > num_folds)


class _RewardModel:
    """The reward as a function of observation and action, fitted on some rows of a one-step log."""

    def __init__(
        self,
        arrays: TransitionArrays,
        target: TargetPolicy | NDArray[np.floating[Any]],
        rows: NDArray[np.int64],
        config: FQEConfig,
        seed: int,
    ) -> None:
        self._arrays, self._target = arrays, target
        rng = np.random.default_rng([seed, 9])
        rows = rng.permutation(rows)
        num_left_out = int(_VALIDATION_SHARE * len(rows))
        self.mean = float(arrays.rewards[rows].mean())
        validation, rows = rows[:num_left_out], rows[num_left_out:]
        self._values = ActionValues(arrays, config, seed, torch.device("cpu"), rows)
        rewards = arrays.rewards[validation]
        mean = float(arrays.rewards[rows].mean())
        best = float(((rewards - mean) ** 2).mean()) if num_left_out else 0.0
        self.is_mean = True
        # Nothing follows a one-step episode, so nothing is asked of the policy here.
        data = TransitionRows(self._values, arrays, None)
        network = self._values.online
        parameters, optimizer = make_adam(network, config.learning_rate)
        weights, num_worse = network.state_dict(), 0
        for update in range(1, config.updates + 1):
            batch = torch.from_numpy(rows[rng.integers(len(rows), size=config.batch_size)])
            parameters.differentiate(data.loss(batch), retain_graph=False)
            optimizer.step()
            if update % _CHECK_UPDATES:
                continue
            error = float(((rewards - self._q(validation)) ** 2).mean()) if num_left_out else 0.0
            num_worse = 0 if error < best else num_worse + 1
            if error < best:
                best, self.is_mean = error, False
                weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}
            if num_worse >= _PATIENCE:
                break
        network.load_state_dict(weights)

    def predict(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return q of the logged action and v of the observation at some rows."""
        if self.is_mean:
            return np.full(len(rows), self.mean), np.full(len(rows), self.mean)
        return self._q(rows), self._v(rows)

    def _q(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        values, arrays = self._values, self._arrays

        def ask(some: slice) -> NDArray[np.float64]:
            at = rows[some]
            inputs = values.actions.encode(take(arrays.actions, at))
            return values.q(values.online, take(arrays.observations, at), inputs)

        return map_chunks(len(rows), ask)

    def _v(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        values, arrays, target = self._values, self._arrays, self._target
        rng = np.random.default_rng(0)

        def ask(some: slice) -> NDArray[np.float64]:
            at = rows[some]
            observations = take(arrays.observations, at)
            if isinstance(target, TargetPolicy):
                masks = None if arrays.action_masks is None else arrays.action_masks[at]
                actions = values.query_policy(target, observations, masks, rng)
            else:
                actions = values.tensor(target[at].astype(np.float32))
            return values.v(values.online, observations, actions)

        return map_chunks(len(rows), ask)
