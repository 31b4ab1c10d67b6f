"""Workers: what collects episodes, and which kind an environment needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.lake.policies.policy import Policy
from replaylake.datastore.lake.runs.timings import Timings
from replaylake.offline.environments.games import Game
from replaylake.offline.environments.ids import make_any
from replaylake.online.collecting.behavior_policy import BehaviorPolicies, require_single
from replaylake.online.collecting.multi_agent import MultiAgentWorker
from replaylake.online.collecting.step_buffer import EpisodeEnd
from replaylake.online.collecting.worker import RolloutConfig, RolloutWorker


class Worker(Protocol):
    """Collects episodes; see RolloutWorker for what each of these does."""

    timings: Timings

    @property
    def policy(self) -> Policy: ...
    @property
    def exhausted(self) -> bool: ...
    @property
    def open_episodes(self) -> list[str]: ...
    @property
    def mask_size(self) -> int | None: ...
    @property
    def first_step_at(self) -> float | None: ...
    def set_behavior_policy(self, behavior_policy: BehaviorPolicies) -> None: ...
    def advance(self, num_steps: int, interval_s: float) -> int: ...
    def take_episodes(self, with_open: bool) -> Sequence[Episode]: ...
    def take_ends(self) -> list[EpisodeEnd]: ...
    def close(self) -> None: ...


def make_worker(
    config: RolloutConfig,
    episodes: Iterator[int],
    policies: BehaviorPolicies,
    *,
    producer: str,
    worker: int = 0,
) -> Worker:
    """Return the worker for an environment of one agent or of several.

    For the arguments see RolloutWorker; policies: one policy, or one for each agent by its name.
    Raises: as the workers; ConfigInvalidError for policies by agent where there is only one.
    """
    env = make_any(config.env, config.env_args)
    env.close()
    if isinstance(env, Game):
        return MultiAgentWorker(config, episodes, policies, producer=producer, worker=worker)
    return RolloutWorker(
        config, episodes, require_single(policies), producer=producer, worker=worker
    )
