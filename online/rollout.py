"""Rollout: collect episodes with a policy, by workers that write them into the lake as they go."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from replaylake.datastore.errors import ConfigInvalidError, ReplayLakeError
from replaylake.datastore.lake.commit import Commit
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage.locations import check_shareable
from replaylake.offline.callbacks import Callbacks, EpisodeProgress
from replaylake.offline.environments.games import Game
from replaylake.offline.environments.ids import make_any
from replaylake.offline.evaluation.evaluate import check_spaces
from replaylake.offline.running.training.interruption import interrupt_on_sigterm
from replaylake.online.collecting.behavior_policy import RANDOM, BehaviorPolicies, BehaviorPolicy
from replaylake.online.collecting.returns import ReturnTotals
from replaylake.online.collecting.rollout_batch import RolloutBatch, WorkerSpec
from replaylake.online.collecting.worker import RolloutConfig
from replaylake.online.collecting.workers import make_worker
from replaylake.online.pools.cluster import import_ray
from replaylake.online.pools.local_pool import LocalPool
from replaylake.online.pools.pool import WorkerPool
from replaylake.online.pools.ray_pool import RayPool
from replaylake.online.recording.collection import GROUP_INTERVAL_S, collect
from replaylake.online.recording.dataset_setup import ensure_dataset
from replaylake.online.recording.episode_committer import EpisodeCommitter
from replaylake.online.recording.storage_retry import StorageRetry

# Fields of the configuration that a run's record has under other names.
_STORED_NAMES: Final = {"env": "env_id", "envs_per_worker": "num_envs"}


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
    callbacks: Callbacks | None = None,
) -> RolloutReceipt:
    """Collect whole episodes and commit them to a dataset, which is created if it does not exist.

    Args:
        lake: the lake of the dataset and the policies; it is created if it does not exist.
        dataset: its name.
        policy: `random`, or `name`, `name:version` or `name@alias` of a registered policy.
        config: environment, episodes, workers, exploration.
        callbacks: on_progress (EpisodeProgress), each time a worker returns episodes; on_remark, if
            the store rejects writes, for example because the disk is full (collection pauses, and
            the write is tried twice a second), and if nodes cannot access the lake.

    Raises: NotFoundError, InvalidNameError, ConfigInvalidError, SchemaMismatchError,
    SpaceUnsupportedError, PackageInvalidError before anything is written; RolloutError that names
    the episode if the environment raises or a worker dies. Whole episodes that were returned before
    are committed in this case too.
    """
    started = time.time()
    policies = resolve_policies(lake, policy, config)
    target = lake.dataset(dataset)
    mask_size = _check_acting(policies, config)
    if config.workers:
        check_shareable(lake.url, "rollout workers")
        import_ray(config.address)
    if not lake.registry.exists():
        lake.registry.create()
    ensure_dataset(target, config.env, config.env_args, mask_size=mask_size)
    run_id = new_ulid()
    orders = _make_worker_specs(lake, dataset, f"rollout/{run_id}", policies, config)
    record = {
        "kind": "rollout",
        "dataset": dataset,
        **describe_policies(policies),
        "config": {_STORED_NAMES.get(key, key): value for key, value in asdict(config).items()},
        "num_workers": config.workers,
        "started_ms": round(started * 1000),
    }
    lake.registry.record_run(run_id, {**record, "status": "running"})
    recorder = EpisodeCommitter(
        target,
        f"rollout/{run_id}",
        interval_s=GROUP_INTERVAL_S,
        answer_timeout_s=config.answer_timeout_s,
    )
    run = _RolloutRun(lake, dataset, run_id, recorder, config.episodes, callbacks or Callbacks())
    try:
        with (
            interrupt_on_sigterm(),
            closing(_start_pool(orders, config)) as pool,
        ):
            run.collect(pool, config.flush_steps)
    except ReplayLakeError as error:
        totals = run.fail(record, error)
        raise type(error)(
            f"{error} Committed to {dataset!r} before: {totals['num_episodes']} of "
            f"{config.episodes} episodes, each whole.",
            parameter=error.parameter,
        ) from error
    except BaseException as error:
        run.fail(record, error)
        raise
    receipt = run.receipt(policies, config, len(orders) if config.workers else 0, started)
    run.end(record, {"status": "finished", **receipt.to_json()})
    return receipt


def _start_pool(orders: Sequence[WorkerSpec], config: RolloutConfig) -> WorkerPool:
    if not config.workers:
        return LocalPool(orders, interval_s=config.flush_interval_s)
    return RayPool(
        orders,
        interval_s=config.flush_interval_s,
        cpus_per_worker=config.worker_cpus,
        address=config.address,
        start_timeout_s=config.start_timeout_s,
        answer_timeout_s=config.answer_timeout_s,
    )


class _RolloutRun:
    """A rollout that is made: what it commits, and what its record says."""

    def __init__(
        self,
        lake: Lake,
        dataset: str,
        run_id: str,
        recorder: EpisodeCommitter,
        num_episodes: int,
        callbacks: Callbacks,
    ) -> None:
        self._lake, self._dataset, self._run_id = lake, dataset, run_id
        self._recorder = recorder
        self._num_episodes = num_episodes
        self._callbacks = callbacks
        self._returns = ReturnTotals()
        self._commits: list[Commit] = []

    def collect(self, pool: WorkerPool, flush_steps: int) -> None:
        for remark in pool.remarks:
            self._callbacks.report_remark(remark)
        retry = StorageRetry(self._callbacks.report_remark)
        collect(pool, flush_steps, self._recorder, retry, self._add_batch)
        self._commit_remaining()

    def _commit_remaining(self) -> None:
        """Commit what was handed over, if the store takes it."""
        self._recorder.close()
        with suppress(ReplayLakeError):
            self._commits += [one.commit for one in self._recorder.take_acknowledged()]

    def _add_batch(self, batch: RolloutBatch) -> None:
        self._returns.add(batch.ends)
        if self._callbacks.on_progress is not None:
            self._callbacks.on_progress(
                EpisodeProgress(self._returns.num_games, self._num_episodes)
            )

    def totals(self) -> dict[str, int]:
        names = ("num_episodes", "num_steps", "num_shards", "num_bytes")
        return {name: sum(getattr(commit, name) for commit in self._commits) for name in names}

    def receipt(
        self, policies: BehaviorPolicies, config: RolloutConfig, num_workers: int, started: float
    ) -> RolloutReceipt:
        """Return it, of a rollout that is complete. started: Unix time (s)."""
        return RolloutReceipt(
            run_id=self._run_id,
            dataset=self._dataset,
            version=self._commits[-1].version,
            env_id=config.env,
            **{**describe_policies(policies), **self.totals()},
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
    policies: BehaviorPolicies,
    config: RolloutConfig,
) -> list[WorkerSpec]:
    """Deal the episodes out to the workers in turn; one order where there are none."""
    numbers = range(config.episodes)
    stride = max(1, min(config.workers, config.episodes))
    return [
        WorkerSpec(lake.url, dataset, producer, i, numbers[i::stride], policies, config)
        for i in range(stride)
    ]


def _check_acting(policies: BehaviorPolicies, config: RolloutConfig) -> int | None:
    """Take one step, so that what cannot work is refused before anything is written.

    Returns: the width of the environment's action masks, None if it has none.
    """
    probe = make_worker(replace(config, envs_per_worker=1), iter([0]), policies, producer="probe")
    try:
        spec = probe.policy.spec
        check_spaces(config.env, spec.observation_space, spec.action_space, config.env_args)
        mask_size = probe.mask_size
        probe.advance(1, math.inf)
    finally:
        probe.close()
    return mask_size


def resolve_policies(lake: Lake, policy: str, config: RolloutConfig) -> BehaviorPolicies:
    """Return who acts: one for all, or for each agent the one named for it or else `policy`.

    Raises: NotFoundError, InvalidNameError; ConfigInvalidError for policies by agent where there is
    only one.
    """
    exploring: dict[str, Any] = {"temperature": config.temperature, "epsilon": config.epsilon}
    agent_policies = config.agent_policies
    everyone = replace(_resolve_policy(lake, policy), **exploring)
    if not agent_policies:
        return everyone
    env = make_any(config.env, config.env_args)
    env.close()
    if not isinstance(env, Game):
        raise ConfigInvalidError(
            f"{config.env}: found policies for {', '.join(agent_policies)}, expected one "
            "policy, because the environment has one agent."
        )
    own = {
        a: replace(_resolve_policy(lake, text), **exploring) for a, text in agent_policies.items()
    }
    return dict.fromkeys(env.agents, everyone) | own


def describe_policies(policies: BehaviorPolicies) -> dict[str, Any]:
    """Return the policy's name and version, as receipts and records say it."""
    if isinstance(policies, BehaviorPolicy):
        return {"policy": policies.name, "policy_version": policies.version}
    texts = [f"{agent}={one.name}:{one.version}" for agent, one in policies.items()]
    return {"policy": ", ".join(texts), "policy_version": None}


def _resolve_policy(lake: Lake, policy: str) -> BehaviorPolicy:
    if policy == RANDOM:
        return BehaviorPolicy()
    ref = lake.registry.resolve(policy)
    return BehaviorPolicy(ref.name, ref.version, ref.path, manifest_sha256=ref.manifest_sha256)
