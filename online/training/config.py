"""Online configuration: who collects, who learns, and how far the two may run apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, Literal, get_args

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.offline.learning.options import expect, from_options

Mode = Literal["async", "sync"]
EnvRunner = Literal["ray", "local"]
LearnerPlace = Literal["process", "ray"]
Agents = Literal["shared", "each"]
_FROM_ONE: Final = (
    "steps",
    "until_episodes",
    "workers",
    "envs_per_worker",
    "round_steps",
    "explore_steps",
    "threads",
    "batch_size",
    "frame_stack",
    "min_size",
    "capacity",
    "broadcast_updates",
    "log_steps",
    "evaluate_steps",
    "selection_episodes",
    "evaluation_episodes",
    "patience",
    "checkpoint_steps",
    "keep_checkpoints",
)
_FROM_ZERO: Final = (
    "action_noise",
    "temperature",
    "random_steps",
    "learner_gpus",
    "max_staleness",
    "seed",
)
_ABOVE_ZERO: Final = (
    "flush_interval_s",
    "start_timeout_s",
    "answer_timeout_s",
    "worker_cpus",
    "samples_per_insert",
    "error_buffer",
)
_SHARES: Final = (
    "epsilon_start",
    "epsilon_end",
    "discount",
    "priority_alpha",
    "priority_beta",
)
# Fields of the configuration that a run's record has beside it, by their names there.
_STORED_NAMES: Final = {
    "env_id": "env",
    "policy_name": "policy",
    "env_args": "env_args",
    "address": "address",
}


@dataclass(frozen=True)
class OnlineConfig:
    """Options of an online run; the lake and the dataset are arguments of `train_online`.

    A step is a step of one environment; with several agents, a step of one agent.
    """

    algorithm: str
    # A Gymnasium id, or `module:function`, see docs/ENVIRONMENTS.md; a run needs one. env_args:
    # what it is made with; JSON values.
    env: str = ""
    env_args: Mapping[str, Any] = field(default_factory=dict)
    # What the policy is registered as; a run needs one.
    policy: str = ""
    steps: int = 100_000
    # End once an evaluation returns this on average; where the last so many episodes did, one is
    # made at once.
    until_return: float | None = None
    until_episodes: int = 20

    # Collecting. `local` does it in this process, between updates; Ray's workers beside them.
    env_runner: EnvRunner = "ray"
    workers: int = 2
    envs_per_worker: int = 8
    worker_cpus: float = 1.0
    # Of a Ray that runs already; None starts one here.
    address: str | None = None
    # async: workers and learner go on at once, as far apart as the rate limiter lets them. sync:
    # they take turns, a round of steps and then its updates.
    mode: Mode = "async"
    # Recorded or only kept to be sampled, to measure what recording costs.
    record: bool = True
    # A worker hands over what it has after so many seconds: half of what a step waits on average
    # before it can be sampled, and a shard each.
    flush_interval_s: float = 0.2
    # Steps that a worker collects at most before it takes new weights.
    round_steps: int = 512
    # Seconds that a worker's or the learner's process may take to start, which includes the wait
    # for free CPUs and GPUs. A node that an autoscaler has to boot comes within five minutes.
    start_timeout_s: float = 300.0
    # Seconds without an answer after which whatever works counts as hung: a worker, which may make
    # an environment or take one step for so long; the learner; a write to the store.
    answer_timeout_s: float = 600.0

    # Exploring. Of an algorithm that acts by values: the probability of a random action, falling
    # over `explore_steps` from the first to the second.
    epsilon_start: float = 1.0
    epsilon_end: float = 0.05
    # None: a tenth of the steps.
    explore_steps: int | None = None
    # Of one with deterministic actions: Gaussian noise, in halves of the action's range.
    action_noise: float = 0.1
    # Of a stochastic one.
    temperature: float = 1.0
    # Uniform actions until so many steps are there. None: until the learner starts, of algorithms
    # whose actions are continuous.
    random_steps: int | None = None

    # Of an environment with several agents. shared: one policy acts for all, and learns from all
    # their steps. each: every agent has its own, which learns from its own steps.
    agents: Agents = "shared"

    # Learning.
    seed: int = 0
    discount: float = 0.99
    device: str = "cpu"
    threads: int = 1
    # In this process, or in an actor of Ray's, which may have GPUs.
    learner: LearnerPlace = "process"
    learner_gpus: float = 0.0
    # How many consecutive observations are learned from as one; the policy still acts on single
    # ones, and remembers the others.
    frame_stack: int = 1
    # None: the algorithm's own, by what suits it online.
    batch_size: int | None = None
    # Steps before the first update.
    min_size: int = 1000
    # Newest steps that can be sampled.
    capacity: int = 1_000_000
    # Steps sampled for each step that came; a batch counts all its rows. None: an update a step.
    samples_per_insert: float | None = None
    # Steps by which collecting may be ahead of that ratio. None: two rounds of all workers; one
    # where they take turns.
    error_buffer: float | None = None
    # Versions that the policy of a sampled step may be behind, of algorithms that take each step
    # once; older steps are left out. Of others, those that a worker's policy may be behind.
    max_staleness: int | None = None
    # Updates between two broadcasts of the policy, at least.
    broadcast_updates: int = 1
    prioritized: bool = False
    priority_alpha: float = 0.6
    priority_beta: float = 0.4
    # Other datasets, and which share of each batch comes from them.
    mix: Mapping[str, float] = field(default_factory=dict)
    # `name`, `name:version` or `name@alias` of a policy to go on from.
    start_from: str | None = None

    # Watching, choosing, keeping.
    log_steps: int = 1000
    # None: ten times in all.
    evaluate_steps: int | None = None
    selection_episodes: int = 10
    evaluation_episodes: int = 20
    patience: int | None = None
    # None: as often as the policy is evaluated.
    checkpoint_steps: int | None = None
    keep_checkpoints: int = 2
    # Merge small shards into large ones as they come.
    compact: bool = True

    # The algorithm's own, by key; see `replaylake algorithms`.
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_number = not isinstance(value, float) or math.isfinite(value)
            expect(is_number, f"online: {name}", value, "a finite number")
        for name in _FROM_ONE:
            value = getattr(self, name)
            expect(value is None or value >= 1, f"online: {name}", value, "1 or more")
        for name in _FROM_ZERO:
            value = getattr(self, name)
            expect(value is None or value >= 0, f"online: {name}", value, "0 or more")
        for name in _SHARES:
            value = getattr(self, name)
            expect(0 <= value <= 1, f"online: {name}", value, "0 to 1")
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            expect(value is None or value > 0, f"online: {name}", value, "more than 0")
        for name, known in (
            ("mode", get_args(Mode)),
            ("env_runner", get_args(EnvRunner)),
            ("learner", get_args(LearnerPlace)),
            ("agents", get_args(Agents)),
        ):
            value = getattr(self, name)
            expect(value in known, f"online: {name}", value, f"one of {', '.join(known)}")
        for dataset, ratio in self.mix.items():
            expect(0 < ratio < 1, f"online: mix: {dataset}", ratio, "a share between 0 and 1")
        total = sum(self.mix.values())
        expect(total < 1, "online: mix", total, "shares below 1 together")
        is_small = self.min_size <= self.capacity
        expect(is_small, "online: min_size", self.min_size, "at most capacity")

    @property
    def learns_in_ray(self) -> bool:
        """Whether the learner runs as a Ray actor."""
        return self.learner == "ray" or self.learner_gpus > 0

    @property
    def num_workers(self) -> int:
        """The number of Ray workers; 1 for `local`, which collects in this process."""
        return 1 if self.env_runner == "local" else self.workers

    @property
    def evaluate_interval_steps(self) -> int:
        """Steps from one measurement of the policy to the next."""
        return self.evaluate_steps or max(1, self.steps // 10)

    @property
    def save_interval_steps(self) -> int:
        """Steps from one checkpoint to the next."""
        return self.checkpoint_steps or self.evaluate_interval_steps


ONLINE_OPTIONS: Final = tuple(f.name for f in fields(OnlineConfig) if f.name != "options")


def online_config(options: Mapping[str, Any]) -> OnlineConfig:
    """Sort flat options into the run's own and the algorithm's, which are checked later.

    The algorithm's may stand beside the run's, or in a table `options`. Raises: ConfigInvalidError.
    """
    own = set(ONLINE_OPTIONS)
    nested = options.get("options", {})
    if not isinstance(nested, dict):
        raise ConfigInvalidError(f"online: options: found {nested!r}, expected a table of options.")
    theirs = {key: value for key, value in options.items() if key not in own | {"options"}}
    ours = {key: value for key, value in options.items() if key in own}
    if "algorithm" not in ours:
        raise ConfigInvalidError(
            "online: algorithm: found none, expected one such as dqn, sac, impala or ppo. "
            "`replaylake algorithms` lists them."
        )
    mix = ours.pop("mix", {})
    config = from_options(OnlineConfig, ours, "online")
    return replace(config, options={**nested, **theirs}, mix=dict(mix))


@dataclass(frozen=True)
class OnlineRequest:
    """The arguments of `train_online`: enough to resume the run in another process."""

    dataset: str
    config: OnlineConfig

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        config = asdict(self.config)
        beside = {key: config.pop(name) for key, name in _STORED_NAMES.items()}
        return {"dataset": self.dataset, **beside, "config": config}

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> OnlineRequest:
        """Return what to_json wrote down. Raises: ConfigInvalidError."""
        try:
            options = dict(body["config"])
            fields = {name: body[key] for key, name in _STORED_NAMES.items() if key in body}
            fields |= {"options": options.pop("options"), "mix": options.pop("mix")}
            config = replace(from_options(OnlineConfig, options, "online"), **fields)
            return OnlineRequest(body["dataset"], config)
        except (KeyError, TypeError) as error:
            raise ConfigInvalidError(
                f"run: found an incomplete request ({type(error).__name__}: {error}), "
                "expected the arguments of `train online`. It was written by another "
                "version of ReplayLake: train again."
            ) from error
