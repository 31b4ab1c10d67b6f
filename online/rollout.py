"""Rollout: collect episodes with a policy, by workers that write them into the lake as they go."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from replaylake.datastore.errors import ConfigInvalidError, ReplayLakeError
from replaylake.datastore.lake.commit import Commit
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage.locations import check_shareable
from replaylake.offline.environments.games import Game
from replaylake.offline.environments.ids import make_any
from replaylake.offline.evaluation.evaluate import check_spaces
from replaylake.offline.running.local_ray import START_TIMEOUT_S
from replaylake.offline.running.training.interruption import interrupt_on_sigterm
from replaylake.online.collecting.behavior_policy import RANDOM, BehaviorPolicies, BehaviorPolicy
from replaylake.online.collecting.returns import ReturnTotals
from replaylake.online.collecting.rollout_batch import RolloutBatch, WorkerSpec
from replaylake.online.collecting.worker import RolloutConfig
from replaylake.online.collecting.workers import make_worker
from replaylake.online.pools.cluster import import_ray
from replaylake.online.pools.local_pool import LocalPool
from replaylake.online.pools.pool import ANSWER_TIMEOUT_S, WorkerPool
from replaylake.online.pools.ray_pool import RayPool
from replaylake.online.recording.collection import GROUP_INTERVAL_S, collect
from replaylake.online.recording.dataset_setup import ensure_dataset
from replaylake.online.recording.episode_committer import EpisodeCommitter
from replaylake.online.recording.storage_retry import StorageRetry


@dataclass(frozen=True)
class RolloutReceipt:
    """What a rollout committed; version is the dataset's after its last commit.

    seed: episode i was reset with seed + i. num_workers is 0 where no Ray was used. policy: where
    agents have different ones each with its agent, and policy_version is None. num_episodes: an
    agent's part in a game is one; num_games of these were played. mean_return: of games, over the
    agents' sums; agent_returns: each agent's mean, where there are several.
    """

    run_id: str
    dataset: str
    version: int
    env_id: str
    policy: str
    policy_version: int | None
    seed: int
    num_workers: int
    num_games: int
    num_episodes: int
    num_steps: int
    mean_return: float
    agent_returns: Mapping[str, float]
    num_commits: int
    num_shards: int
    num_bytes: int
    wall_s: float

    @property
    def steps_per_s(self) -> float:
        """Recorded steps a second, start-up included."""
        return self.num_steps / self.wall_s

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "steps_per_s": self.steps_per_s}


def rollout(
    lake: Lake,
    dataset: str,
    policy: str,
    config: RolloutConfig,
    *,
    num_episodes: int,
    agent_policies: Mapping[str, str] | None = None,
    num_workers: int = 0,
    worker_cpus: float = 1.0,
    address: str | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
    answer_timeout_s: float = ANSWER_TIMEOUT_S,
    temperature: float = 1.0,
    epsilon: float = 0.0,
    on_progress: Callable[[int, int], None] | None = None,
    on_remark: Callable[[str], None] | None = None,
) -> RolloutReceipt:
    """Collect whole episodes and commit them to a dataset, which is created if it does not exist.

    Args:
        lake: where the dataset and the policies are; a handle on none yet makes it.
        dataset: its name.
        policy: `random`, or `name`, `name:version` or `name@alias` of a registered one.
        config: how each worker collects; the episodes depend on its seed, not on the workers.
        num_episodes: how many; with several agents, games.
        agent_policies: of agents by name, in place of `policy`.
        num_workers: Ray actors; 0 collects in this process and imports no Ray.
        worker_cpus: CPUs of Ray's that each takes up; a fraction, or a whole number.
        address: of a Ray that runs already; None starts one here, if there are workers.
        start_timeout_s: how long a worker's process may take to start, waiting for CPUs included.
        answer_timeout_s: how long a worker may be silent, and the store at a commit.
        temperature: of a stochastic head; 0 takes the mode.
        epsilon: probability of a uniform action instead (Discrete).
        on_progress: called with (episodes finished, episodes) after each shipment.
        on_remark: called with what a person should know: a store that refuses, as a full disk does
            (nothing more is collected until it takes what there is, which is tried twice a second),
            and nodes that do not see the lake.

    Raises: NotFoundError, InvalidNameError, ConfigInvalidError, SchemaMismatchError,
    SpaceUnsupportedError, PackageInvalidError before anything is written; RolloutError naming the
    episode if the environment raises or a worker dies. Episodes that were handed over before are
    committed even then, whole.
    """
    if num_episodes < 1 or num_workers < 0:
        raise ConfigInvalidError(
            f"rollout: found {num_episodes} episodes and {num_workers} workers, expected at least "
            "1 episode and 0 or more workers."
        )
    started = time.time()
    exploring = {"temperature": temperature, "epsilon": epsilon}
    acting = resolve_policies(lake, policy, agent_policies or {}, config, exploring)
    target = lake.dataset(dataset)
    mask_size = _check_acting(acting, config)
    if num_workers:
        check_shareable(lake.url, "rollout workers")
        import_ray(address)
    if not lake.registry.exists():
        lake.registry.create()
    ensure_dataset(target, config.env_id, config.env_args, mask_size=mask_size)
    run_id = new_ulid()
    orders = _make_worker_specs(
        lake, dataset, f"rollout/{run_id}", acting, config, num_episodes, num_workers
    )
    record = {
        "kind": "rollout",
        "dataset": dataset,
        **describe_policies(acting),
        "config": asdict(config),
        "num_workers": num_workers,
        "started_ms": round(started * 1000),
    }
    lake.registry.record_run(run_id, {**record, "status": "running"})
    recorder = EpisodeCommitter(
        target,
        f"rollout/{run_id}",
        interval_s=GROUP_INTERVAL_S,
        answer_timeout_s=answer_timeout_s,
    )
    remark = on_remark or (lambda remark: None)
    run = _RolloutRun(lake, dataset, run_id, recorder, num_episodes, on_progress, remark)
    start_pool: Callable[[Sequence[WorkerSpec]], WorkerPool] = partial(
        RayPool,
        interval_s=config.flush_interval_s,
        cpus_per_worker=worker_cpus,
        address=address,
        start_timeout_s=start_timeout_s,
        answer_timeout_s=answer_timeout_s,
    )
    if not num_workers:
        start_pool = partial(LocalPool, interval_s=config.flush_interval_s)
    try:
        with (
            interrupt_on_sigterm(),
            closing(start_pool(orders)) as pool,
        ):
            run.collect(pool, config.flush_steps)
    except ReplayLakeError as error:
        totals = run.fail(record, error)
        raise type(error)(
            f"{error} Committed to {dataset!r} before it: {totals['num_episodes']} of "
            f"{num_episodes} episodes, each whole."
        ) from error
    except BaseException as error:
        run.fail(record, error)
        raise
    receipt = run.receipt(acting, config, len(orders) if num_workers else 0, started)
    run.end(record, {"status": "finished", **receipt.to_json()})
    return receipt


class _RolloutRun:
    """A rollout that is made: what it commits, and what its record says."""

    def __init__(
        self,
        lake: Lake,
        dataset: str,
        run_id: str,
        recorder: EpisodeCommitter,
        num_episodes: int,
        on_progress: Callable[[int, int], None] | None,
        on_remark: Callable[[str], None],
    ) -> None:
        self._lake, self._dataset, self._run_id = lake, dataset, run_id
        self._recorder = recorder
        self._num_episodes = num_episodes
        self._on_progress, self._on_remark = on_progress, on_remark
        self._returns = ReturnTotals()
        self._commits: list[Commit] = []

    def collect(self, pool: WorkerPool, flush_steps: int) -> None:
        for remark in pool.remarks:
            self._on_remark(remark)
        collect(pool, flush_steps, self._recorder, StorageRetry(self._on_remark), self._add_batch)
        self._commit_remaining()

    def _commit_remaining(self) -> None:
        """Commit what was handed over, if the store takes it."""
        self._recorder.close()
        with suppress(ReplayLakeError):
            self._commits += [one.commit for one in self._recorder.take_acknowledged()]

    def _add_batch(self, shipment: RolloutBatch) -> None:
        self._returns.add(shipment.ends)
        if self._on_progress is not None:
            self._on_progress(self._returns.num_games, self._num_episodes)

    def totals(self) -> dict[str, int]:
        names = ("num_episodes", "num_steps", "num_shards", "num_bytes")
        return {name: sum(getattr(commit, name) for commit in self._commits) for name in names}

    def receipt(
        self, acting: BehaviorPolicies, config: RolloutConfig, num_workers: int, started: float
    ) -> RolloutReceipt:
        """Return it, of a rollout that is complete. started: Unix time (s)."""
        return RolloutReceipt(
            run_id=self._run_id,
            dataset=self._dataset,
            version=self._commits[-1].version,
            env_id=config.env_id,
            **{**describe_policies(acting), **self.totals()},
            seed=config.seed,
            num_workers=num_workers,
            num_games=self._returns.num_games,
            mean_return=self._returns.mean,
            agent_returns=self._returns.by_agent,
            num_commits=len(self._commits),
            wall_s=time.time() - started,
        )

    def fail(self, record: Mapping[str, Any], error: BaseException) -> dict[str, int]:
        """Write down that it failed, if the lake takes it; return what was committed."""
        self._commit_remaining()
        totals = self.totals()
        with suppress(ReplayLakeError):
            self.end(record, {"status": "failed", "error": str(error), **totals})
        return totals

    def end(self, record: Mapping[str, Any], ended: Mapping[str, Any]) -> None:
        """Write down how it ended."""
        ended_ms = round(time.time() * 1000)
        self._lake.registry.record_run(self._run_id, {**record, "ended_ms": ended_ms, **ended})


def fresh_seed() -> int:
    """Return a seed of 30 bits, for a run that is to collect other episodes than earlier ones."""
    # Some environments hand their seed to a C int.
    return int.from_bytes(os.urandom(4), "big") >> 2


def _make_worker_specs(
    lake: Lake,
    dataset: str,
    producer: str,
    acting: BehaviorPolicies,
    config: RolloutConfig,
    num_episodes: int,
    num_workers: int,
) -> list[WorkerSpec]:
    """Deal the episodes out to the workers in turn; one order where there are none."""
    stride = max(1, min(num_workers, num_episodes))
    return [
        WorkerSpec(lake.url, dataset, producer, i, range(i, num_episodes, stride), acting, config)
        for i in range(stride)
    ]


def _check_acting(acting: BehaviorPolicies, config: RolloutConfig) -> int | None:
    """Take one step, so that what cannot work is refused before anything is written.

    Returns: the width of the environment's action masks, None if it has none.
    """
    probe = make_worker(replace(config, num_envs=1), iter([0]), acting, producer="probe")
    try:
        spec = probe.policy.spec
        check_spaces(config.env_id, spec.observation_space, spec.action_space, config.env_args)
        mask_size = probe.mask_size
        probe.advance(1, math.inf)
    finally:
        probe.close()
    return mask_size


def resolve_policies(
    lake: Lake,
    policy: str,
    agent_policies: Mapping[str, str],
    config: RolloutConfig,
    exploring: Mapping[str, Any],
) -> BehaviorPolicies:
    """Return who acts: one for all, or for each agent the one named for it or else `policy`.

    exploring: of all, as Acting has it. Raises: NotFoundError, InvalidNameError; ConfigInvalidError
    for policies by agent where there is only one.
    """
    everyone = replace(_resolve_policy(lake, policy), **exploring)
    if not agent_policies:
        return everyone
    env = make_any(config.env_id, config.env_args)
    env.close()
    if not isinstance(env, Game):
        raise ConfigInvalidError(
            f"{config.env_id}: found policies for {', '.join(agent_policies)}, expected one "
            "policy: it is an environment of one agent."
        )
    own = {
        a: replace(_resolve_policy(lake, text), **exploring) for a, text in agent_policies.items()
    }
    return dict.fromkeys(env.agents, everyone) | own


def describe_policies(acting: BehaviorPolicies) -> dict[str, Any]:
    """Return the policy's name and version, as receipts and records say it."""
    if isinstance(acting, BehaviorPolicy):
        return {"policy": acting.name, "policy_version": acting.version}
    texts = [f"{agent}={one.name}:{one.version}" for agent, one in acting.items()]
    return {"policy": ", ".join(texts), "policy_version": None}


def _resolve_policy(lake: Lake, policy: str) -> BehaviorPolicy:
    if policy == RANDOM:
        return BehaviorPolicy()
    ref = lake.registry.resolve(policy)
    return BehaviorPolicy(ref.name, ref.version, ref.path, manifest_sha256=ref.manifest_sha256)
