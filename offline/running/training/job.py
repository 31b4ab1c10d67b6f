"""TrainingJob: a request made ready: data opened, learner made, a sampler that feeds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.policies.policy import Policy
from replaylake.datastore.replay.sampler import Sampler
from replaylake.datastore.replay.to_torch import TorchSampler
from replaylake.datastore.replay.view import ReplayView
from replaylake.offline.algorithms.catalog import make_learner, missing_capability_error
from replaylake.offline.callbacks import OnReading
from replaylake.offline.evaluation.evaluate import Evaluation, EvaluationConfig, evaluate
from replaylake.offline.learning.learner import Learner
from replaylake.offline.learning.normalization import fit_statistics
from replaylake.offline.learning.process_group import SINGLE_PROCESS, ProcessGroup
from replaylake.offline.networks.graph import TorchPolicy
from replaylake.offline.running.training.config import TrainRequest
from replaylake.offline.running.training.data import TrainingData, open_data
from replaylake.offline.running.training.policy_selection import (
    Measure,
    PolicySelection,
    make_measure,
)
from replaylake.offline.running.training.process_group import (
    DataParallelLearner,
    LeaderMeasure,
    make_gradient_average,
)

# A learner is done with a batch when it asks for the next.
_REUSE: Final = 2


@dataclass(frozen=True)
class TrainingJob:
    """What a trainer needs."""

    request: TrainRequest
    data: TrainingData
    learner: Learner
    sampler: TorchSampler
    measure: Measure | None

    def selection(self) -> PolicySelection:
        """Return an empty one, for this measure."""
        higher = self.measure is None or self.measure.higher_is_better
        patience = self.request.config.patience if self.measure is not None else None
        return PolicySelection(self.data.measure, higher, patience)

    def manifest(self, run_id: str) -> dict[str, Any]:
        """Return what a package says of where its policy comes from."""
        request, config = self.request, self.request.config
        split = config.split()
        options = {**request.to_json()["config"], "options": dict(self.learner.config)}
        return {
            "name": config.policy,
            "run_id": run_id,
            "algorithm": config.algorithm,
            "seed": config.seed,
            "config": options,
            "normalization": dict(self.learner.normalization),
            "datasets": self.data.lineage(request),
            "holdout": None if split is None else split.to_json(),
            "sampling": self._sampling(),
            "selection": None,
            "metrics": {},
            "evaluation": None,
        }

    def observation_statistics(self) -> dict[str, Any]:
        """Return mean and std of the training observations, for a server to tell drift from.

        By element of each Box leaf, as `normalization` says them. Cost: where the learner did not
        scale them, a pass over them, about 40 ns an element.
        """
        statistics = self.learner.normalization.get("observations")
        if statistics is None:
            request = self.request
            facts = fit_statistics(
                self.data.snapshots,
                self.data.where,
                request.config.where_steps,
                request.config.reward,
                observations=True,
                actions=False,
            )
            statistics = facts.to_json().get("observations") or {}
        return dict(statistics)

    def _sampling(self) -> dict[str, Any]:
        sampler = self.sampler.sampler
        assert isinstance(sampler, Sampler), "a view's own, as make_sampler makes it"
        return sampler.describe()


def make_final_evaluation(request: TrainRequest) -> Callable[[Policy], Evaluation] | None:
    """Return what measures the policy of a run's end, on seeds that its choice did not use."""
    config = request.config
    if config.env is None:
        return None
    evaluation = EvaluationConfig(
        config.env,
        env_args=config.env_args,
        episodes=config.evaluation_episodes,
        seed=config.seed,
    )
    return lambda policy: evaluate(policy, evaluation)


def prepare(
    lake: Lake,
    request: TrainRequest,
    *,
    on_reading: OnReading | None = None,
    group: ProcessGroup = SINGLE_PROCESS,
) -> TrainingJob:
    """Open the data of a pinned request, and make its learner and sampler.

    group: the learners that this one makes each update with.
    Raises: as open_data, fit_statistics and make_learner.
    """
    config = request.config
    data = open_data(lake, request, on_reading=on_reading)
    # The same steps give the same bits, so a run that goes on is scaled as it was before.
    facts = fit_statistics(
        data.snapshots,
        data.where,
        config.where_steps,
        config.reward,
        observations=config.normalize_observations,
        rewards=config.normalize_rewards,
    )
    spec = data.view.spec
    learner = make_learner(
        config.algorithm,
        spec.observation_space,
        spec.action_space,
        options=config.options,
        seed=config.seed,
        discount=config.discount,
        device=config.device,
        facts=facts,
        reduce=make_gradient_average(group),
        frame_stack=config.frame_stack,
    )
    if learner.on_policy is not None:
        # One of the user's own, of which this shows only now.
        raise missing_capability_error(data.algorithm, "logs")
    measure = make_measure(data.measure, request, data.held_out)
    if measure is not None:
        measure.check(TorchPolicy(learner.policy(), config.device))
    if group.size > 1:
        learner = DataParallelLearner(learner, group, config.device)
        measure = None if measure is None else LeaderMeasure(measure, group)
    learner.prepare(data.view)
    sampler = make_sampler(data.view, learner, request)
    return TrainingJob(
        request=request,
        data=data,
        learner=learner,
        sampler=sampler,
        measure=measure,
    )


def make_sampler(view: ReplayView, learner: Learner, request: TrainRequest) -> TorchSampler:
    """Return what draws the learner's batches, as tensors on its device."""
    config = request.config
    sampler: Sampler
    if config.prioritized:
        sampler = view.prioritized(
            config.batch_size,
            learner.item,
            seed=config.seed,
            alpha=config.priority_alpha,
            beta=config.priority_beta,
            beta_updates=config.updates,
        )
    elif config.weight is not None:
        sampler = view.weighted(
            config.batch_size, learner.item, weight=config.weight, seed=config.seed
        )
    else:
        sampler = view.uniform(config.batch_size, learner.item, seed=config.seed)
    is_cuda = torch.device(config.device).type == "cuda"
    return TorchSampler(sampler, config.device, reuse=_REUSE, pinned=is_cuda)
