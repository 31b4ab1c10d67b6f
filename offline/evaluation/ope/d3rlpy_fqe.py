"""Fitted Q evaluation by d3rlpy: its FQE and DiscreteFQE with any policy of ours as the target.

Le et al. 2019, "Batch Policy Learning under Constraints", algorithm 3; see fqe.py beside it for
our own. d3rlpy asks an algorithm of its own what it would do next; here that is answered by what
our policy does at the logged next observations, asked before the first update.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import Values
from replaylake.datastore.errors import ConfigInvalidError, TrainingError
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.datastore.lake.policies.policy import Policy
from replaylake.datastore.replay.view import ReplayView
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.evaluation.ope.d3rlpy_fqe_model import FQEModel
from replaylake.offline.evaluation.ope.fqe_config import FQEConfig, OnProgress
from replaylake.offline.evaluation.ope.target_policy import TargetPolicy
from replaylake.offline.evaluation.ope.transition_arrays import TransitionArrays, from_view
from replaylake.offline.networks.actors import NO_STATISTICS

_CHECK_UPDATES: Final = 250


@dataclass(frozen=True, eq=False)
class D3rlpyFQE:
    """The fitted model. value: the mean value of the first observations; num_updates: made."""

    value: float
    num_updates: int
    _target: TargetPolicy = field(repr=False)
    _model: FQEModel = field(repr=False)
    _seed: int = field(default=0, repr=False)

    def q(self, observations: Values, actions: Values) -> NDArray[np.float64]:
        """Return the value of actions [N, *act] at observations [N, *obs]: float64 [N]."""
        return self._model.q(observations, actions)

    def v(
        self, observations: Values, action_masks: NDArray[np.bool_] | None = None
    ) -> NDArray[np.float64]:
        """Return the value of observations [N, *obs] under the policy: float64 [N]."""
        rng = np.random.default_rng([self._seed, 1])
        return self._model.values(self._target, observations, action_masks, rng)


def d3rlpy_fqe(
    policy: Policy,
    view: ReplayView,
    *,
    discount: float,
    config: FQEConfig | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    exploration: Exploration | None = None,
    on_progress: OnProgress | None = None,
    facts: DatasetStatistics = NO_STATISTICS,
) -> D3rlpyFQE:
    """Fit the action values of a policy on the transitions of a view, as fitted_q_evaluation does.

    Of the config, `updates`, `batch_size`, `learning_rate` and, but for images, `hidden_sizes` are
    taken as they are. d3rlpy's target network is a copy made every round(1 / target_tau) updates;
    the learning rate stays; `table_cells` is not looked at: nothing is solved for exactly. Of a
    policy of a Box that draws, each update takes one of `action_samples` draws. Rewards are divided
    by the standard deviation of the logged returns, and values multiplied by it. Observations are
    normalised by `facts`, where those say by what.

    Raises: EmptyReplayError, ExtraMissingError; ConfigInvalidError for a tolerance, which d3rlpy
    has none of; SpaceUnsupportedError for a policy with a state, or spaces that d3rlpy's critics do
    not take; TrainingError where the model diverges.
    """
    target = TargetPolicy(policy, exploration or Exploration())
    target.check_stateless()
    arrays = from_view(view, discount)
    return fit_by_d3rlpy(
        target, arrays, config or FQEConfig(), discount, seed, device, on_progress, facts
    )


def fit_by_d3rlpy(
    target: TargetPolicy,
    arrays: TransitionArrays,
    config: FQEConfig,
    discount: float,
    seed: int = 0,
    device: torch.device | str = "cpu",
    on_progress: OnProgress | None = None,
    facts: DatasetStatistics = NO_STATISTICS,
) -> D3rlpyFQE:
    """Fit the action values of a policy on transitions; see d3rlpy_fqe."""
    if config.tolerance:
        raise ConfigInvalidError(
            f"d3rlpy's FQE: found tolerance {config.tolerance:g}, expected 0: it makes all updates."
            " Leave it out, or use our own FQE."
        )
    model = FQEModel(arrays, config, discount, seed, torch.device(device), facts)
    rng = np.random.default_rng([seed, 0])
    chosen = model.query_policy(target, arrays.next_observations, arrays.next_action_masks, rng)
    for update in range(config.updates):
        loss = model.update(arrays, rng.integers(len(arrays), size=config.batch_size), chosen, rng)
        if (update + 1) % _CHECK_UPDATES == 0 or update + 1 == config.updates:
            _check_finite(loss, update + 1)
            if on_progress is not None:
                on_progress(update + 1, config.updates)
    values = model.values(target, arrays.initial_observations, arrays.initial_action_masks, rng)
    return D3rlpyFQE(float(values.mean()), config.updates, target, model, seed)


def _check_finite(loss: float, update: int) -> None:
    if not np.isfinite(loss):
        raise TrainingError(
            f"d3rlpy's FQE, update {update}: found a loss of {loss}, expected a finite number. "
            "Give a lower discount or learning rate; with discount 1 the values of episodes that "
            "never terminate have no bound."
        )
