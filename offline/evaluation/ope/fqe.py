"""Fitted Q evaluation: what a policy is worth, by a model of its action values.

Le et al. 2019, "Batch Policy Learning under Constraints", algorithm 3. q is regressed onto

    r + discount * E_{a' ~ policy} q'(s', a')

where q' follows q slowly instead of being refitted from the start in each round. It needs no
probabilities of the logged actions, and trusts its model where the log has little: of actions that
were never logged it knows nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import Values
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.datastore.lake.policies.policy import Policy
from replaylake.datastore.replay.view import ReplayView
from replaylake.offline.evaluation.ope.fqe_config import FQEConfig, OnProgress
from replaylake.offline.evaluation.ope.target_policy import TargetPolicy
from replaylake.offline.evaluation.ope.transition_arrays import TransitionArrays, from_view
from replaylake.offline.evaluation.ope.value_network import ValueModel
from replaylake.offline.evaluation.ope.value_table import ValueTable, has_table


@dataclass(frozen=True, eq=False)
class FQE:
    """A fitted model of the action values of a policy.

    value: the mean value of the first observations of the episodes it was fitted on. num_updates:
    how many were made; 0 where it was solved for exactly.
    """

    value: float
    num_updates: int
    _model: ValueModel | ValueTable = field(repr=False)

    def q(self, observations: Values, actions: Values) -> NDArray[np.float64]:
        """Return the value of actions [N, *act] at observations [N, *obs]: float64 [N]."""
        return self._model.q(observations, actions)

    def v(
        self, observations: Values, action_masks: NDArray[np.bool_] | None = None
    ) -> NDArray[np.float64]:
        """Return the value of observations [N, *obs] under the policy: float64 [N]."""
        return self._model.v(observations, action_masks)


def fitted_q_evaluation(
    policy: Policy,
    view: ReplayView,
    *,
    discount: float,
    config: FQEConfig | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    exploration: Exploration | None = None,
    on_progress: OnProgress | None = None,
) -> FQE:
    """Fit the action values of a policy on the transitions of a view.

    Args:
        policy: stateless, of the view's spaces.
        view: whose steps; the value is that of its episodes' first observations.
        discount: gamma, below 1 unless every episode ends by termination.
        config: how the model is fitted.
        seed: of weights and batches, and of actions that the policy draws.
        device: where torch computes.
        exploration: how the policy acts; by default it takes its mode.
        on_progress: called with (updates done, updates) now and then.

    Deterministic on the CPU. What the policy does at every next observation is asked once, before
    the first update. Raises: EmptyReplayError; SpaceUnsupportedError for a policy with a state, or
    spaces that no critic takes; TrainingError where the model diverges. Memory: the view's
    transitions.
    """
    target = TargetPolicy(policy, exploration or Exploration())
    target.check_stateless()
    arrays = from_view(view, discount)
    return fit(target, arrays, config or FQEConfig(), seed, device, on_progress)


def fit(
    target: TargetPolicy,
    arrays: TransitionArrays,
    config: FQEConfig,
    seed: int = 0,
    device: torch.device | str = "cpu",
    on_progress: OnProgress | None = None,
) -> FQE:
    """Fit the action values of a policy on transitions; see fitted_q_evaluation."""
    model: ValueModel | ValueTable
    if has_table(arrays.spec, config):
        model, num_updates = ValueTable(target, arrays), 0
    else:
        model = ValueModel(target, arrays, config, seed, device, on_progress)
        num_updates = model.num_updates
    values = model.v(arrays.initial_observations, arrays.initial_action_masks)
    return FQE(float(values.mean()), num_updates, model)
