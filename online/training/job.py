"""Job: a request made ready: what can be refused is, and learner and dataset are made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import ConfigInvalidError, PackageInvalidError
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.policies.package import check_package, load_learner_weights
from replaylake.datastore.names import check_policy_name
from replaylake.datastore.replay.view import ReplayView
from replaylake.datastore.storage.locations import check_shareable
from replaylake.offline.algorithms.catalog import (
    Capability,
    check_algorithm,
    check_options,
    make_learner,
    missing_capability_error,
    require,
)
from replaylake.offline.algorithms.info import AlgorithmInfo
from replaylake.offline.environments.ids import spaces_of
from replaylake.offline.learning.learner import Learner
from replaylake.offline.learning.options import expect
from replaylake.online.collecting.behavior_policy import BehaviorPolicy
from replaylake.online.collecting.step_buffer import POLICY_STATE
from replaylake.online.collecting.worker import RolloutConfig
from replaylake.online.collecting.workers import make_worker
from replaylake.online.recording.committed_steps import CollectedData
from replaylake.online.recording.dataset_setup import ensure_dataset
from replaylake.online.training.agents import (
    AgentLearners,
    agents_of,
    check_each,
    policy_names,
)
from replaylake.online.training.config import ONLINE_OPTIONS, OnlineConfig, OnlineRequest


@dataclass(frozen=True)
class OnlineJob:
    """A request made ready.

    agents: of a game; none where the environment is one of one agent. since: the dataset's version
    before the run's first commit.
    """

    request: OnlineRequest
    learner: Learner
    agents: tuple[str, ...]
    dataset: Dataset
    since: int
    mixed: Mapping[str, ReplayView]
    mixed_lineage: tuple[Mapping[str, Any], ...]

    @property
    def config(self) -> OnlineConfig:
        return self.request.config

    @property
    def batch_size(self) -> int:
        """Steps a batch."""
        assert self.config.batch_size is not None, "resolved"
        return self.config.batch_size

    @property
    def samples_once(self) -> bool:
        return self.learner.on_policy is not None

    @property
    def writes_to_view(self) -> bool:
        """Whether what is collected is put into the view, and not found in the lake."""
        config = self.config
        return config.agents == "shared" and (config.env_runner == "local" or not config.record)


def prepare(
    lake: Lake, request: OnlineRequest, *, record: Mapping[str, Any] | None = None
) -> OnlineJob:
    """Check all that can be refused before anything is collected, and make the learner."""
    env, env_args = request.config.env, request.config.env_args
    expect(bool(env), "online: env", env, "the environment to collect in")
    check_policy_name(request.config.policy)
    spaces = spaces_of(env, env_args)
    mask_size = _mask_size(request)
    needed = _find_needs(request.config, mask_size)
    algorithm = check_algorithm(request.config.algorithm, spaces[1], needed=needed)
    check_options(
        request.config.algorithm, spaces[1], request.config.options, others=ONLINE_OPTIONS
    )
    start = (
        None if request.config.start_from is None else _load_initial_policy(lake, request.config)
    )
    config = resolve_config(request.config, algorithm, None if start is None else start.options)
    request = replace(request, config=config)
    require(algorithm, "rewards", needed=needed)
    if config.prioritized:
        require(algorithm, "priorities", needed=needed)
    if config.env_runner == "ray":
        check_shareable(lake.url, "rollout workers")
    agents = agents_of(env, env_args)
    learner = _learner(request, spaces, agents, start)
    _check_steps(config, learner)
    if mask_size is not None:
        require(algorithm, "action masks", needed=needed)
    if config.mix and learner.on_policy is not None:
        raise missing_capability_error(algorithm, "replay", needed=needed)
    pinned = {name: name for name in config.mix}
    if record is not None:
        pinned = {d["named"]: f"{d['dataset']}@{d['version']}" for d in record["mixed"]}
    mixed = {
        name: lake.snapshot(at).replay(frame_stack=config.frame_stack)
        for name, at in pinned.items()
    }
    if not lake.registry.exists():
        lake.registry.create()
    dataset = lake.dataset(request.dataset)
    ensure_dataset(dataset, env, env_args, mask_size=mask_size)
    state_size = learner.policy().spec.recorded_state_size
    if learner.on_policy is not None and state_size:
        # The view asks for it before a worker has written the first step.
        dataset.add_vectors(POLICY_STATE, state_size)
    since = int(record["since"]) if record is not None else dataset.snapshot().version
    return OnlineJob(request, learner, agents, dataset, since, mixed, _lineage_of(mixed))


def _find_needs(config: OnlineConfig, mask_size: int | None) -> frozenset[Capability]:
    """Return what an algorithm needs for this environment and these options."""
    needed: set[Capability] = {"rewards"}
    if config.prioritized:
        needed.add("priorities")
    if config.mix:
        needed.add("replay")
    if mask_size is not None:
        needed.add("action masks")
    return frozenset(needed)


def _lineage_of(mixed: Mapping[str, ReplayView]) -> tuple[Mapping[str, Any], ...]:
    """Return what a package says of the other datasets that were drawn from."""
    selections = {name: vars(view.selections[0]) for name, view in mixed.items()}
    return tuple(
        {**selection, "columns": list(selection["columns"]), "named": name}
        for name, selection in selections.items()
    )


def _learner(
    request: OnlineRequest,
    spaces: tuple[Any, Any],
    agents: Sequence[str],
    start: _InitialPolicy | None,
) -> Learner:
    """Make the learner, or all agents' own as one."""
    config = request.config

    def make(seed: int) -> Learner:
        learner = make_learner(
            config.algorithm,
            *spaces,
            options=config.options,
            seed=seed,
            discount=config.discount,
            device=config.device,
            frame_stack=config.frame_stack,
        )
        if start is not None:
            learner.load_state_dict(start.weights)
        return learner

    if config.agents == "shared":
        return make(config.seed)
    check_each(agents, env_id=config.env, has_mix=bool(config.mix), records=config.record)
    policy_names(config.policy, agents)
    # Not the same weights: equals that see the same would do the same.
    return AgentLearners({agent: make(config.seed + i) for i, agent in enumerate(agents)})


def _check_steps(config: OnlineConfig, learner: Learner) -> None:
    """Raises: ConfigInvalidError where the run would end before the first update."""
    plan = learner.on_policy
    if plan is not None:
        minimum, why = plan.num_sequences * plan.length, "num_sequences * length, for a batch"
    else:
        batch_size = config.batch_size or 1
        per_insert = config.samples_per_insert or batch_size
        minimum = config.min_size + max(1, math.ceil(batch_size / per_insert))
        why = f"min_size {config.min_size:,} and what an update samples"
    if config.steps < minimum:
        raise ConfigInvalidError(
            f"online: steps: found {config.steps:,}, expected {minimum:,} or more ({why}): nothing "
            "would be learned. Collect more steps, or lower that."
        )


@dataclass(frozen=True)
class _InitialPolicy:
    """What a registered policy had learned, and the options that it learned with."""

    weights: Mapping[str, Array]
    options: Mapping[str, Any]


def _load_initial_policy(lake: Lake, config: OnlineConfig) -> _InitialPolicy:
    """Read the policy that is started from. Raises: NotFoundError, PackageInvalidError."""
    assert config.start_from is not None, "asked for where there is one"
    ref = lake.registry.resolve(config.start_from)
    manifest = check_package(ref.path, ref.manifest_sha256)
    theirs = manifest.body.get("algorithm")
    if theirs != config.algorithm:
        raise PackageInvalidError(
            f"start from {ref}: found a policy of algorithm {theirs}, expected {config.algorithm} "
            f"as in this run. Train with `algorithm` {theirs}, or start from another policy."
        )
    options = manifest.body.get("config", {}).get("options", {})
    return _InitialPolicy(load_learner_weights(ref.path, ref.manifest_sha256), options)


def _mask_size(request: OnlineRequest) -> int | None:
    """Return the width of the environment's action masks; None if it gives none."""
    options = request.config
    config = RolloutConfig(options.env, env_args=dict(options.env_args), envs_per_worker=1)
    probe = make_worker(config, iter([0]), BehaviorPolicy(), producer="probe")
    try:
        return probe.mask_size
    finally:
        probe.close()


def manifest_of(job: OnlineJob, run_id: str, collected: CollectedData) -> dict[str, Any]:
    """Return what a package says of where its policy comes from."""
    request = job.request
    own = {
        "dataset": request.dataset,
        "version": collected.version,
        "named": request.dataset,
        "since": job.since,
        "producers": list(collected.producers),
        "where": None,
        "reward": None,
        "where_steps": None,
        "num_episodes": collected.num_episodes,
        "num_steps": collected.num_steps,
        "content_hash": collected.content_hash,
    }
    return {
        "name": job.config.policy,
        "run_id": run_id,
        "algorithm": job.config.algorithm,
        "seed": job.config.seed,
        "config": {**request.to_json()["config"], "options": dict(job.learner.config)},
        "normalization": dict(job.learner.normalization),
        "env_id": job.config.env,
        "datasets": [own, *map(dict, job.mixed_lineage)],
        "holdout": None,
        "sampling": None,
        "selection": None,
        "metrics": {},
        "evaluation": None,
    }


def first_record(job: OnlineJob) -> dict[str, Any]:
    request = job.request
    return {
        "policy": job.config.policy,
        "dataset": request.dataset,
        "env_id": job.config.env,
        "since": job.since,
        "mixed": [dict(row) for row in job.mixed_lineage],
        "algorithm": job.config.algorithm,
        "seed": job.config.seed,
        "config": {**request.to_json()["config"], "options": dict(job.learner.config)},
        "request": request.to_json(),
    }


@dataclass(frozen=True)
class OnlineDefaults:
    """batch_size: steps a batch. options: of the algorithm."""

    batch_size: int = 256
    options: Mapping[str, Any] = field(default_factory=dict)


# CartPole, mean of 20 greedy episodes, 3 seeds: 500 from 20,000 to 25,000 steps on; without the
# dueling heads and three steps it went between 14 and 500, and with the offline defaults it did not
# learn within 60,000 (2 cores, 2026-11-22).
_DQN: Final = OnlineDefaults(
    batch_size=64,
    options={
        "learning_rate": 1e-3,
        "double": True,
        "dueling": True,
        "n_step": 3,
        "target_update_period": 1,
        "tau": 0.005,
    },
)


def online_defaults(algorithm: AlgorithmInfo) -> OnlineDefaults:
    """Return them for an algorithm; where nothing better is known, those of the algorithm."""
    if (algorithm.name, algorithm.provider) == ("dqn", "replaylake"):
        return _DQN
    return OnlineDefaults()


def resolve_config(
    config: OnlineConfig, algorithm: AlgorithmInfo, started: Mapping[str, Any] | None
) -> OnlineConfig:
    """Return the config with nothing left to a default that may change.

    started: the options of the policy that is started from, whose networks are to be gone on with.
    """
    defaults = online_defaults(algorithm)
    options = defaults.options if started is None else started
    batch_size = config.batch_size or defaults.batch_size
    # Nobody asks for a GPU to leave it idle.
    device = "cuda" if config.learner_gpus and config.device == "cpu" else config.device
    options = {**options, **config.options}
    return replace(config, batch_size=batch_size, device=device, options=options)
