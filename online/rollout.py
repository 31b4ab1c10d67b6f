"""Rollout: collect episodes with a policy, by workers that write them into the lake as they go."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from replaylake.datastore.dataset import Dataset
from replaylake.datastore.errors import (
    AlreadyExists,
    ConfigInvalid,
    ReplayLakeError,
    SchemaMismatch,
)
from replaylake.datastore.lake import Lake
from replaylake.datastore.locations import check_shareable
from replaylake.datastore.names import new_ulid
from replaylake.offline.environments.games import Game
from replaylake.offline.environments.ids import make_any, spaces_of
from replaylake.offline.evaluate import check_spaces
from replaylake.online.acting import RANDOM, Acting, AgentsActing
from replaylake.online.collection import GROUP_INTERVAL_S, Pauses, collect
from replaylake.online.committer import Committer
from replaylake.online.pool import WorkerPool
from replaylake.online.ray_pool import RayPool, import_ray
from replaylake.online.returns import Returns
from replaylake.online.shipment import LocalPool, Order, Shipment
from replaylake.online.worker import RolloutConfig
from replaylake.online.workers import make_worker


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
        """Return a JSON object."""
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
    temperature: float = 1.0,
    epsilon: float = 0.0,
    on_progress: Callable[[int, int], None] | None = None,
    on_trouble: Callable[[str], None] | None = None,
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
        temperature: of a stochastic head; 0 takes the mode.
        epsilon: probability of a uniform action instead (Discrete).
        on_progress: called with (episodes finished, episodes) after each shipment.
        on_trouble: called with what the store says where it refuses, as a full disk does. Nothing
            more is collected until it takes what there is, which is tried twice a second.

    Raises: NotFound, NameRefused, ConfigInvalid, SchemaMismatch, SpaceUnsupported, PackageInvalid
    before anything is written; RolloutFailed naming the episode if the environment raises or a
    worker dies. Episodes that were handed over before are committed even then, whole.
    """
    if num_episodes < 1 or num_workers < 0:
        raise ConfigInvalid(
            f"rollout: found {num_episodes} episodes and {num_workers} workers, expected at least "
            "1 episode and 0 or more workers."
        )
    started = time.time()
    exploring = {"temperature": temperature, "epsilon": epsilon}
    acting = _acting(lake, policy, agent_policies or {}, config, exploring)
    target = lake.dataset(dataset)
    mask_size = _check_acting(acting, config)
    if num_workers:
        check_shareable(lake.url, "rollout workers")
        import_ray()
    if not lake.registry.exists():
        lake.registry.create()
    _prepare(target, config, mask_size)
    run_id = new_ulid()
    record = {
        "kind": "rollout",
        "dataset": dataset,
        **_named(acting),
        "config": asdict(config),
        "num_workers": num_workers,
        "started_ms": round(started * 1000),
    }
    lake.registry.record_run(run_id, {**record, "status": "running"})
    producer = f"rollout/{run_id}"
    orders = _orders(lake, dataset, producer, acting, config, num_episodes, num_workers)
    committer = Committer(target, producer, interval_s=GROUP_INTERVAL_S)
    returns = Returns()

    def note(shipment: Shipment) -> None:
        returns.add(shipment.ends)
        if on_progress is not None:
            on_progress(returns.num_games, num_episodes)

    try:
        with closing(_pool(orders, num_workers, config)) as pool:
            collect(pool, config.flush_steps, committer, note, Pauses(on_trouble))
    except BaseException as error:
        totals = _settle(committer)
        ended = {"status": "failed", "ended_ms": _now_ms(), "error": str(error), **totals}
        with suppress(ReplayLakeError):
            lake.registry.record_run(run_id, {**record, **ended})
        if not isinstance(error, ReplayLakeError):
            raise
        raise type(error)(
            f"{error} Committed to {dataset!r} before it: {totals['num_episodes']} of "
            f"{num_episodes} episodes, each whole."
        ) from error
    receipt = RolloutReceipt(
        run_id=run_id,
        dataset=dataset,
        version=committer.commits[-1].version,
        env_id=config.env_id,
        **{**_named(acting), **_totals(committer)},
        seed=config.seed,
        num_workers=len(orders) if num_workers else 0,
        num_games=returns.num_games,
        mean_return=returns.mean,
        agent_returns=returns.by_agent,
        num_commits=len(committer.commits),
        wall_s=time.time() - started,
    )
    ended = {"status": "finished", "ended_ms": _now_ms(), **receipt.to_json()}
    lake.registry.record_run(run_id, {**record, **ended})
    return receipt


def fresh_seed() -> int:
    """Return a seed of 30 bits, for a run that is to collect other episodes than earlier ones."""
    # Some environments hand their seed to a C int.
    return int.from_bytes(os.urandom(4), "big") >> 2


def _resolve(lake: Lake, policy: str) -> Acting:
    if policy == RANDOM:
        return Acting()
    ref = lake.registry.resolve(policy)
    return Acting(ref.name, ref.version, ref.path)


def _acting(
    lake: Lake,
    policy: str,
    agent_policies: Mapping[str, str],
    config: RolloutConfig,
    exploring: Mapping[str, Any],
) -> AgentsActing:
    """Return who acts: one for all, or for each agent the one named for it or else `policy`."""
    everyone = replace(_resolve(lake, policy), **exploring)
    if not agent_policies:
        return everyone
    env = make_any(config.env_id, config.env_args)
    env.close()
    if not isinstance(env, Game):
        raise ConfigInvalid(
            f"{config.env_id}: found policies for {', '.join(agent_policies)}, expected one "
            "policy: it is an environment of one agent."
        )
    named = {
        agent: replace(_resolve(lake, text), **exploring) for agent, text in agent_policies.items()
    }
    return dict.fromkeys(env.agents, everyone) | named


def _named(acting: AgentsActing) -> dict[str, Any]:
    """Return the policy's name and version, as receipts and records say it."""
    if isinstance(acting, Acting):
        return {"policy": acting.name, "policy_version": acting.version}
    texts = [f"{agent}={one.name}:{one.version}" for agent, one in acting.items()]
    return {"policy": ", ".join(texts), "policy_version": None}


def _orders(
    lake: Lake,
    dataset: str,
    producer: str,
    acting: AgentsActing,
    config: RolloutConfig,
    num_episodes: int,
    num_workers: int,
) -> list[Order]:
    """Deal the episodes out to the workers in turn; one order where there are none."""
    stride = max(1, min(num_workers, num_episodes))
    return [
        Order(lake.url, dataset, producer, i, range(i, num_episodes, stride), acting, config)
        for i in range(stride)
    ]


def _check_acting(acting: AgentsActing, config: RolloutConfig) -> int | None:
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


def _prepare(dataset: Dataset, config: RolloutConfig, mask_size: int | None) -> None:
    """Create the dataset with the environment's spaces, or check that it has such.

    Raises: SchemaMismatch.
    """
    env_id = config.env_id
    if not dataset.exists():
        # Another process may create it at this moment; its spaces are checked below.
        with suppress(AlreadyExists):
            dataset.create(*spaces_of(env_id, config.env_args), mask_size=mask_size)
    spec = dataset.spec
    check_spaces(env_id, spec.observation_space, spec.action_space, config.env_args)
    if mask_size not in (None, spec.mask_size):
        raise SchemaMismatch(
            f"{dataset.name}: found action masks of width {mask_size} in {env_id}, expected "
            f"{spec.mask_size or 'none'} as the dataset was created. Collect into a new dataset."
        )


def _pool(orders: Sequence[Order], num_workers: int, config: RolloutConfig) -> WorkerPool:
    if num_workers:
        return RayPool(orders, interval_s=config.flush_interval_s)
    return LocalPool(orders, interval_s=config.flush_interval_s)


def _settle(committer: Committer) -> dict[str, int]:
    """Commit what was handed over before a failure, if that still works; returns the totals."""
    with suppress(ReplayLakeError):
        committer.flush()
    return _totals(committer)


def _totals(committer: Committer) -> dict[str, int]:
    names = ("num_episodes", "num_steps", "num_shards", "num_bytes")
    return {name: sum(getattr(commit, name) for commit in committer.commits) for name in names}


def _now_ms() -> int:
    return round(time.time() * 1000)
