"""AskedPolicy: the policy that a question names, found and fitted to the dataset's spaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.compatibility import find_encoding_mismatch, is_compatible
from replaylake.datastore.episodes.schema import ACTION_FEATURES, REWARD, DatasetSpec
from replaylake.datastore.episodes.spaces import (
    Dict,
    Space,
    Tuple,
    Values,
    children,
    describe,
    value_dtype,
)
from replaylake.datastore.errors import (
    ConfigInvalidError,
    QueryError,
    SchemaMismatchError,
    SpaceUnsupportedError,
)
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.logged_steps import LoggedSteps
from replaylake.datastore.lake.policies.package import load_policy
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.lake.policies.uniform import UniformPolicy
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.query.expressions import canonical_reward, check_reward
from replaylake.offline.evaluation.ope.evaluation_request import (
    ASKED,
    STORED,
    TRAINING,
    EvaluatedReward,
    EvaluationRequest,
)
from replaylake.offline.evaluation.ope.target_policy import TargetPolicy
from replaylake.offline.evaluation.ope.training_set import TrainingSet, training_set

RANDOM: Final = "random"
# Measures of a checkpoint that are taken on what training held out.
_CHOSEN_ON_HELD_OUT_NOTE: Final = ("fqe", "loss")


@dataclass(frozen=True, eq=False)
class EvaluatedPolicy:
    """Who is evaluated. target: None where SQL says what it does.

    reference: how a report names it. training: what it was trained on, and discount with which
    gamma, None if unknown. notes: what is not known of it.
    """

    target: TargetPolicy | None
    reference: Mapping[str, Any]
    training: TrainingSet
    notes: tuple[str, ...] = ()
    discount: float | None = None

    @property
    def is_stateful(self) -> bool:
        """Whether what it does depends on earlier observations of the episode, too."""
        return self.target is not None and self.target.is_stateful

    def cast_observations(self, steps: LoggedSteps) -> LoggedSteps:
        """Return the steps with observations in the dtypes that the policy takes."""
        if self.target is None or steps.observations is None:
            return steps
        space = self.target.policy.spec.observation_space
        final = steps.final_observations
        return replace(
            steps,
            observations=as_dtypes(space, steps.observations),
            final_observations=None if final is None else as_dtypes(space, final),
        )

    def get_observations(self, steps: LoggedSteps) -> Values:
        """Return the observations [M, *obs] as the policy takes them."""
        observations = self.cast_observations(steps).observations
        assert observations is not None  # they are always read
        return observations


def load_evaluated_policy(
    lake: Lake, request: EvaluationRequest, spec: DatasetSpec
) -> EvaluatedPolicy:
    """Find the policy.

    Raises: NotFoundError, InvalidNameError, SchemaMismatchError, SpaceUnsupportedError.
    """
    if request.policy is None:
        identity: dict[str, Any] = {"policy": None, "target_prob": request.target_prob}
        unknown = "whether the policy of `target_prob` was made from these episodes is not known"
        return EvaluatedPolicy(None, identity, TrainingSet(unknown=unknown))
    _refuse_candidates(request.policy, spec)
    if request.policy == RANDOM:
        uniform = UniformPolicy(spec.observation_space, spec.action_space)
        identity = {"policy": RANDOM, "policy_version": None, "acts": "uniform"}
        return EvaluatedPolicy(TargetPolicy(uniform), identity, TrainingSet())
    ref = lake.registry.resolve(request.policy)
    policy = load_policy(ref.path, ref.manifest_sha256)
    _check_spaces(str(ref), policy.spec, spec)
    target = TargetPolicy(policy, request.exploration)
    training = training_set(lake, ref)
    identity = {
        "policy": ref.name,
        "policy_version": ref.version,
        "selected_by": ref.selected_by,
        "acts": target.describe(),
    }
    notes = []
    selection = policy.manifest.body.get("selection") or {}
    if training.holdout is not None and selection.get("measure") in _CHOSEN_ON_HELD_OUT_NOTE:
        num = len(selection.get("history") or ())
        notes.append(
            f"{ref} is the best of {num} checkpoints by {selection['measure']} on the held-out "
            "episodes: estimates on them may be a little too high"
        )
    discount = (policy.manifest.body.get("config") or {}).get("discount")
    return EvaluatedPolicy(target, identity, training, tuple(notes), discount)


def _refuse_candidates(policy: str, spec: DatasetSpec) -> None:
    """Raise if candidates differ from step to step: fixed actions are no choice among them.

    Raises: SpaceUnsupportedError.
    """
    if ACTION_FEATURES in spec.extras:
        raise SpaceUnsupportedError(
            f"policy {policy}: found steps whose candidates have features of their own "
            f"({ACTION_FEATURES}), and a policy of fixed actions, expected the probability that the"
            " policy gives the candidate that was taken. Compute it where the policy is, store it "
            "with annotate, and name the column in `target_prob`."
        )


def evaluated_reward(
    policy: EvaluatedPolicy, request: EvaluationRequest, snapshot: Snapshot
) -> EvaluatedReward:
    """Return which reward a policy is evaluated by: what is asked for, else its training's.

    A cost that a policy learned to keep low by `reward="-reward"` would else be judged as a return.
    Raises: QueryRefusedError; QueryError where the snapshot lacks a column of the training's;
    ConfigInvalidError where it was trained with several and none is asked for.
    """
    rewards = policy.training.rewards()
    training = " and ".join(rewards) or None
    if request.reward is not None:
        return EvaluatedReward(canonical_reward(request.reward), ASKED, training)
    if len(rewards) > 1:
        raise ConfigInvalidError(
            f"{_name(policy)}: was trained with different rewards, {training}; expected "
            "one for the evaluation. Name one with `reward`."
        )
    if training is None:
        return EvaluatedReward(REWARD, STORED, None)
    try:
        check_reward(snapshot.table, training)
    except QueryError as error:
        raise QueryError(
            f"{_name(policy)}: was trained with the reward {training}, which has no numeric value "
            f"for the steps of {snapshot.dataset}@{snapshot.version}: {error} Name another with "
            f"`reward`; `reward` {REWARD} is the stored one."
        ) from error
    return EvaluatedReward(training, TRAINING, training)


def _name(policy: EvaluatedPolicy) -> str:
    return f"{policy.reference['policy']}:{policy.reference['policy_version']}"


def _check_spaces(name: str, policy: PolicySpec, dataset: DatasetSpec) -> None:
    """Refuse a policy that cannot take the dataset's observations. Raises: SchemaMismatchError."""
    for what in ("observation_space", "action_space"):
        ours, theirs = getattr(policy, what), getattr(dataset, what)
        if not is_compatible(ours, theirs, any_width=True):
            raise SchemaMismatchError(
                f"policy {name}: its {what.replace('_', ' ')} is {describe(ours)}, the dataset's "
                f"is {describe(theirs)}, expected the same space. Evaluate it on a log of its "
                "own task."
            )
    if (differs := find_encoding_mismatch(policy.encoding, dataset.encoding)) is not None:
        raise SchemaMismatchError(
            f"policy {name}: {differs}, expected observations with the encoding that it was "
            "trained with. "
            "Ingest the log into the dataset that it was trained on."
        )


def as_dtypes(space: Space, values: Any) -> Any:
    """Return values [N, *obs] in the dtypes of a policy's space."""
    if isinstance(space, Dict | Tuple):
        return {key: as_dtypes(sub, values[key]) for key, sub in children(space).items()}
    return np.asarray(values).astype(value_dtype(space), copy=False)
