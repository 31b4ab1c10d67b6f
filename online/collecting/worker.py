"""Rollout worker: environments stepped in lockstep with one policy, giving whole episodes.

Episode i resets its environment with seed + i and draws its actions from a stream of its own, so
the episodes do not depend on how many workers or environments collect them. (A network's outputs
may differ in the last bit between batch sizes, which moves an action only if its draw lies there.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.lake.policies.policy import Policy
from replaylake.datastore.lake.runs.timings import Timings
from replaylake.offline.environments.ids import make
from replaylake.offline.environments.spaces import from_gymnasium
from replaylake.offline.learning.options import expect
from replaylake.online.collecting.actor import Actor
from replaylake.online.collecting.behavior_policy import (
    BehaviorPolicies,
    BehaviorPolicy,
    require_single,
)
from replaylake.online.collecting.step_buffer import EpisodeEnd as EpisodeEnd
from replaylake.online.collecting.step_buffer import take_steps
from replaylake.online.collecting.vector_env import VectorEnv


@dataclass(frozen=True)
class RolloutConfig:
    """Options of a rollout; the lake, dataset and policy are arguments of `rollout`.

    The episodes depend on the seed, not on the number of workers or environments.
    """

    # A Gymnasium id, or `module:function`, see docs/ENVIRONMENTS.md. env_args: what it is made
    # with; JSON values.
    env: str
    env_args: Mapping[str, Any] = field(default_factory=dict)
    # With several agents, games.
    episodes: int = 100
    # Of the first episode.
    seed: int = 0
    # Policies of agents by name, in place of the one that is given.
    agent_policies: Mapping[str, str] = field(default_factory=dict)
    # Ray's; 0 collects in this process and imports no Ray.
    workers: int = 0
    # Stepped together, one call of the policy for all.
    envs_per_worker: int = 8
    # Of Ray's that each worker takes up; a fraction, or a whole number.
    worker_cpus: float = 1.0
    # Of a Ray that runs already; None starts one here, if there are workers.
    address: str | None = None
    # Seconds that a worker's process may take to start, waiting for CPUs included; and that a
    # worker may be silent, and the store at a commit.
    start_timeout_s: float = 300.0
    answer_timeout_s: float = 600.0
    # Of a stochastic policy; 0 takes the mode.
    temperature: float = 1.0
    # Probability of a uniform action instead (Discrete).
    epsilon: float = 0.0
    # A worker hands over what it has after so many steps or seconds, whichever is first. About a
    # second of CartPole: a crash loses no more, and shards stay few.
    flush_steps: int = 65_536
    flush_interval_s: float = 2.0

    def __post_init__(self) -> None:
        for name in ("episodes", "envs_per_worker", "flush_steps"):
            expect(getattr(self, name) >= 1, f"rollout: {name}", getattr(self, name), "1 or more")
        for name in ("seed", "workers"):
            expect(getattr(self, name) >= 0, f"rollout: {name}", getattr(self, name), "0 or more")
        is_positive = self.flush_interval_s > 0
        expect(is_positive, "rollout: flush_interval_s", self.flush_interval_s, "above 0")


class RolloutWorker:
    """Collects the episodes whose numbers it is given, in any process and without a lake."""

    def __init__(
        self,
        config: RolloutConfig,
        episodes: Iterator[int],
        behavior_policy: BehaviorPolicy,
        *,
        producer: str,
        worker: int = 0,
    ) -> None:
        """Make the environments and load the policy.

        Args:
            config: how to collect.
            episodes: numbers of the episodes; may be endless.
            behavior_policy: who acts at first.
            producer: what the episodes' ids begin with.
            worker: which worker this is, for the `worker` column.

        Raises: NotFoundError, ExtraMissingError, PackageInvalidError, SpaceUnsupportedError,
        RolloutError, EpisodeInvalidError.
        """
        self._producer = producer
        self._worker = worker
        self._actors = [(behavior_policy.name, behavior_policy.version)]
        self._first_at: float | None = None
        self.timings = Timings("workers")
        envs: list[Any] = []
        try:
            for _ in range(config.envs_per_worker):
                envs.append(make(config.env, **config.env_args))
            self._env = envs[0]
            self._actor = Actor(behavior_policy, self._env)
            self._envs = VectorEnv(
                envs,
                (from_gymnasium(envs[0].observation_space), from_gymnasium(envs[0].action_space)),
                episodes,
                config.seed,
                self._actor,
                name=f"rollout worker {worker}",
                env_id=config.env,
            )
        except BaseException:
            for env in envs:
                env.close()
            raise

    @property
    def policy(self) -> Policy:
        """Who acts now."""
        return self._actor.policy

    @property
    def exhausted(self) -> bool:
        """Whether every episode has been collected."""
        return not len(self._envs)

    @property
    def open_episodes(self) -> list[str]:
        """Ids of the open episodes of which pieces were taken."""
        return [open_.episode_id for open_ in self._envs.open_episodes if open_.num_taken]

    @property
    def mask_size(self) -> int | None:
        """Width of the environment's action masks; None if it gives none."""
        return self._envs.mask_size

    @property
    def first_step_at(self) -> float | None:
        """When (Unix time, s) the first step was made since steps were taken last; None: none."""
        return self._first_at

    def set_behavior_policy(self, behavior_policy: BehaviorPolicies) -> None:
        """Act with another policy from the next step on; open episodes go on under it.

        What the last one remembers of them stays, if the new one remembers as many numbers.
        Raises: PackageInvalidError, SpaceUnsupportedError; ConfigInvalidError for policies by
        agent.
        """
        if not self.exhausted:
            one = require_single(behavior_policy)
            self._actor = Actor(one, self._env)
            self._envs.set_actor(self._actor)
            self._actors.append((one.name, one.version))

    def advance(self, num_steps: int, interval_s: float) -> int:
        """Step all environments until so many steps or seconds have passed or nothing is left.

        Returns: the steps that were made, of all environments together. Raises: RolloutError
        naming the episode if the environment raises, EpisodeInvalidError if it gives what its
        spaces do not hold.
        """
        lanes, clock, actor = self._envs, time.perf_counter, len(self._actors) - 1
        if self._first_at is None and len(lanes):
            self._first_at = time.time()
        num_done, inference_s, env_s = 0, 0.0, 0.0
        started = now = clock()
        while (num := len(lanes)) and num_done < num_steps and now - started < interval_s:
            actions = lanes.act(actor)
            middle = clock()
            lanes.step(actions)
            num_done += num
            inference_s += middle - now
            now = clock()
            env_s += now - middle
        self.timings.add("inference", inference_s, num_done)
        self.timings.add("env_step", env_s, num_done)
        return num_done

    def take_episodes(self, with_open: bool) -> Sequence[Episode]:
        """Return what was recorded since the last call: the episodes that ended.

        with_open: the steps so far of open ones as well, as pieces; later pieces go on from there.
        """
        self._envs.flush_block()
        steps = take_steps(
            self._envs.take_buffers(),
            self._actors,
            producer=self._producer,
            worker=self._worker,
            with_open=with_open,
        )
        self._first_at = None
        if with_open:
            # Steps that wait name who acted by number; now none does.
            self._actors = self._actors[-1:]
        return steps

    def take_ends(self) -> list[EpisodeEnd]:
        """Return the episodes that ended since the last call."""
        ends, self._envs.ends = self._envs.ends, []
        return ends

    def close(self) -> None:
        """Close the environments; what was not taken is dropped."""
        self._envs.close()
