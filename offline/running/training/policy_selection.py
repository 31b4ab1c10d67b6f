"""Selection: which of a run's policies is registered: the best one by a measure, not the last.

environment   mean return of some episodes, on seeds that the closing evaluation does not use; of
              the environment's own reward, so by default not where --reward gives another
fqe           value of the held-out episodes' first states, by fitted Q evaluation
loss          held-out negative log-likelihood of the logged actions; of a Box's the mean squared
              error of the most likely one
last          none: the policy of the last update

The best of several noisy numbers is too good by chance. So a measured value is never reported as
what the policy is worth: the closing evaluation and `ope` measure again, otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, Protocol

import numpy as np

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.schema import REWARD
from replaylake.datastore.episodes.spaces import Array, Box
from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError, TrainingError
from replaylake.datastore.lake.policies.policy import Policy
from replaylake.datastore.query.expressions import canonical_reward
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.view import ReplayView
from replaylake.offline.evaluation.evaluate import EvaluationConfig, evaluate
from replaylake.offline.evaluation.ope.fqe import fitted_q_evaluation
from replaylake.offline.evaluation.ope.fqe_config import FQEConfig
from replaylake.offline.running.training.config import TrainConfig, TrainRequest

MeasureName = Literal["environment", "fqe", "loss", "last"]

# Seeds from here on are the selection's: far from those of any closing evaluation.
FIRST_SEED: Final = 1 << 20
_ROWS_AT_ONCE: Final = 4096
_ROWS_CHECKED: Final = 8


class Measure(Protocol):
    """What a policy is judged by."""

    @property
    def name(self) -> MeasureName:
        """As `select` calls it."""
        ...

    @property
    def higher_is_better(self) -> bool:
        """Whether it is a return and no loss."""
        ...

    def check(self, policy: Policy) -> None:
        """Refuse what no such policy can be judged by, before anything is learned.

        Raises: EmptyReplayError, ConfigInvalidError, SpaceUnsupportedError.
        """
        ...

    def __call__(self, policy: Policy) -> float:
        """Judge the policy as it is now. The same policy gives the same number."""
        ...


@dataclass(frozen=True)
class EnvironmentReturn:
    """Mean return of deterministic episodes."""

    env_id: str
    episodes: int
    seed: int
    env_args: Mapping[str, Any] = field(default_factory=dict)
    name: MeasureName = "environment"
    higher_is_better: bool = True

    def check(self, policy: Policy) -> None:
        """Do nothing: its spaces were looked at when the data were opened."""

    def __call__(self, policy: Policy) -> float:
        config = EvaluationConfig(
            self.env_id,
            env_args=self.env_args,
            episodes=self.episodes,
            seed=FIRST_SEED + self.seed,
        )
        return evaluate(policy, config).mean_return


@dataclass(frozen=True)
class FQEValue:
    """Mean value of held-out first states; see ope/fqe.py."""

    held_out: ReplayView
    discount: float
    updates: int
    seed: int
    device: str
    name: MeasureName = "fqe"
    higher_is_better: bool = True

    def check(self, policy: Policy) -> None:
        """Refuse held-out steps that no value can be fitted to. Cost: a fit of one update."""
        if num := self.held_out.num_unknown_rewards:
            raise ConfigInvalidError(
                f"training: select 'fqe': {num} of {len(self.held_out.packed.steps)} held-out "
                "steps have no reward, expected one for each. Add rewards with `replaylake "
                "annotate` or `reward`, or set select to loss or last."
            )
        if not self.held_out.num_transitions:
            raise EmptyReplayError(
                f"training: select 'fqe': found {len(self.held_out.packed.steps)} held-out steps, "
                "none with a next observation or a termination, expected some. Hold out more, or "
                "set select to loss or last."
            )
        self._fit_value(policy, FQEConfig(updates=1, table_cells=0))

    def __call__(self, policy: Policy) -> float:
        return self._fit_value(policy, FQEConfig(updates=self.updates))

    def _fit_value(self, policy: Policy, config: FQEConfig) -> float:
        try:
            fitted = fitted_q_evaluation(
                policy,
                self.held_out,
                discount=self.discount,
                config=config,
                seed=self.seed,
                device=self.device,
            )
        except TrainingError:
            # It diverged: of this policy nothing is known, and the run goes on.
            return math.nan
        return fitted.value


@dataclass(frozen=True)
class HeldOutLoss:
    """How unlikely the held-out actions are to the policy, or how far from its own."""

    held_out: ReplayView
    name: MeasureName = "loss"
    higher_is_better: bool = False

    def check(self, policy: Policy) -> None:
        """Judge by some of the steps."""
        sampler = self.held_out.in_order(_ROWS_CHECKED, Transitions(only_bootstrappable=False))
        _losses(policy, sampler.sample())

    def __call__(self, policy: Policy) -> float:
        sampler = self.held_out.in_order(_ROWS_AT_ONCE, Transitions(only_bootstrappable=False))
        num_batches = -(-len(self.held_out.packed.steps) // _ROWS_AT_ONCE)
        losses = [_losses(policy, sampler.sample()) for _ in range(num_batches)]
        return float(np.concatenate(losses).mean())


def _losses(policy: Policy, batch: Batch[Array]) -> Array:
    """Return each row's loss, float64 [M]."""
    if isinstance(policy.spec.action_space, Box):
        # Of a clipped gaussian the density at a bound is not known, and logs are full of those.
        actions = policy.act(batch.observations, rng=np.random.default_rng(0)).actions
        distances: Array = actions.astype(np.float64) - np.asarray(batch.actions)
        squares: Array = distances.reshape(len(distances), -1) ** 2
        return np.asarray(squares.mean(axis=1))
    log_probs = policy.log_probs(
        batch.observations,
        batch.actions,
        deterministic=False,
        action_mask=batch.action_masks,
    )
    return np.asarray(-log_probs)


def has_own_reward(request: TrainRequest) -> bool:
    """Return whether the reward is an expression, and not the one that was logged."""
    return canonical_reward(request.config.reward) != REWARD


def measure_name(request: TrainRequest, uses_rewards: bool) -> MeasureName:
    """Return what a run is judged by. Raises: ConfigInvalidError for what it has not been given.

    An environment knows its own reward alone: it chooses the policy of another one only where it
    is asked to, as the best of a cost's policies would be its worst.
    """
    config = request.config
    held_out = config.split() is not None
    if config.select == "auto":
        if config.env is not None and not (uses_rewards and has_own_reward(request)):
            return "environment"
        if not held_out or config.frame_stack > 1:
            return "last"
        return "fqe" if uses_rewards else "loss"
    if config.select == "environment" and config.env is None:
        raise _missing_input_error(config.select, "no environment", "one", "Name it with `env`")
    if config.select in ("fqe", "loss") and not held_out:
        raise _missing_input_error(
            config.select,
            "no held-out episodes",
            "some: estimates on the training data are too high for every policy",
            "Set `holdout`, as in 0.2",
        )
    _check_stateless(config)
    return config.select


def _check_stateless(config: TrainConfig) -> None:
    if config.select in ("fqe", "loss") and config.frame_stack > 1:
        raise _missing_input_error(
            config.select,
            f"frame_stack {config.frame_stack}",
            "1: its policies need earlier observations, which held-out steps lack",
            "Name an environment to select in with `env`",
        )


def make_measure(
    name: MeasureName, request: TrainRequest, held_out: ReplayView | None
) -> Measure | None:
    """Return what judges the policies; None where the last one is taken."""
    config = request.config
    if name == "environment":
        assert config.env is not None, "measure_name checked it"
        return EnvironmentReturn(
            config.env, config.selection_episodes, config.seed, config.env_args
        )
    if name == "last":
        return None
    assert held_out is not None, "the data were opened for this measure"
    if name == "loss":
        return HeldOutLoss(held_out)
    return FQEValue(held_out, config.discount, config.num_fqe_updates, config.seed, config.device)


@dataclass(frozen=True)
class SelectionPoint:
    """A policy on the way: its update, what the measure said, and the metrics since the one before.

    value: None where nothing was measured, or the number was not finite.
    """

    update: int
    value: float | None
    metrics: Mapping[str, float]


@dataclass
class PolicySelection:
    """The measurements of a run so far, and which was the best.

    Only a better value replaces the best one: of equal ones the earliest is kept. A value that is
    not finite is worse than any. Where nothing has a value, the last policy is the best.
    """

    measure: MeasureName
    higher_is_better: bool = True
    patience: int | None = None
    history: list[tuple[int, float | None]] = field(default_factory=list)
    best: SelectionPoint | None = None
    last: SelectionPoint | None = None
    num_worse: int = 0

    def add(self, update: int, value: float | None, metrics: Mapping[str, float]) -> bool:
        """Take the next measurement; return whether it is the best one so far."""
        if value is not None and not math.isfinite(value):
            value = None
        self.last = SelectionPoint(update, value, dict(metrics))
        self.history.append((update, value))
        if is_best := self._is_better(value):
            self.best, self.num_worse = self.last, 0
        else:
            self.num_worse += 1
        return is_best

    @property
    def chosen(self) -> SelectionPoint:
        """The policy to register."""
        point = self.best or self.last
        assert point is not None, "a run ends with a measurement"
        return point

    @property
    def is_exhausted(self) -> bool:
        """Whether the run has gone on for long enough without getting better."""
        return self.patience is not None and self.num_worse >= self.patience

    def to_json(self) -> dict[str, Any]:
        """Return what a manifest keeps: the measure, the choice, and all measurements."""
        return {
            "measure": self.measure,
            "update": self.chosen.update,
            "value": self.chosen.value,
            "higher_is_better": self.higher_is_better,
            "stopped_early": self.is_exhausted,
            "history": [{"update": update, "value": value} for update, value in self.history],
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "measure": self.measure,
            "history": [list(entry) for entry in self.history],
            "best": None if self.best is None else asdict(self.best),
            "last": None if self.last is None else asdict(self.last),
            "num_worse": self.num_worse,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history = [(update, value) for update, value in state["history"]]
        self.best = None if state["best"] is None else SelectionPoint(**state["best"])
        self.last = None if state["last"] is None else SelectionPoint(**state["last"])
        self.num_worse = state["num_worse"]

    def _is_better(self, value: float | None) -> bool:
        if value is None:
            return False
        if self.best is None or self.best.value is None:
            return True
        sign = 1 if self.higher_is_better else -1
        return sign * value > sign * self.best.value


def _missing_input_error(select: str, value: str, expected: str, advice: str) -> ConfigInvalidError:
    return ConfigInvalidError(
        f"training: select {select!r}: found {value}, expected {expected}. {advice}, or leave "
        "select out."
    )
