"""What each algorithm of ours returns, beside d3rlpy's on the same data, batches and seeds.

Both learn through `train`, so that they see the same rows in the same order; d3rlpy's mathematics
and its networks are its own. Data: RLlib's CartPole and Pendulum logs where they are given, and
uniform random play of the same two environments, recorded here. A line is the mean return over
seeds of the policy after its last update, over 20 episodes each, with the least and the greatest
seed. A bar of RLlib's own tests is named where it has one.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.policies.uniform import UniformPolicy
from replaylake.offline.environments.ids import make, spaces_of
from replaylake.offline.running.train import TrainConfig, train

ENVIRONMENTS: Final = {"cartpole": "CartPole-v1", "pendulum": "Pendulum-v1"}


@dataclass(frozen=True)
class Case:
    """One algorithm on one dataset. theirs: d3rlpy's name for it, where it has one."""

    dataset: str
    ours: str
    updates: int
    theirs: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    their_options: Mapping[str, Any] = field(default_factory=dict)
    bar: float | None = None


# d3rlpy copies its target networks every 8,000 updates; ours does every 500.
_SYNCED: Final = {"target_update_interval": 500}
# With rewards of -16 to 0 the default temperature of 3 leaves weights of 0 and of the greatest.
_MILD: Final = {"expectile": 0.8, "weight_temp": 0.1}

CASES: Final = (
    Case("cartpole_log", "bc", 1000, "d3rlpy:bc", bar=350),
    Case("cartpole_log", "marwil", 1000, bar=250),
    Case("cartpole_log", "cql", 1000, "d3rlpy:cql", their_options=_SYNCED, bar=450),
    Case("cartpole_random", "dqn", 3000, "d3rlpy:double_dqn", {"double": True}, _SYNCED),
    Case("pendulum_log", "bc", 750, "d3rlpy:bc", bar=-200),
    Case("pendulum_log", "iql", 750, "d3rlpy:iql", _MILD, _MILD, bar=-200),
    Case("pendulum_log", "td3_plus_bc", 1000, "d3rlpy:td3_plus_bc"),
    Case("pendulum_log", "awac", 1000, "d3rlpy:awac"),
    Case("pendulum_random", "sac", 3000, "d3rlpy:sac"),
    Case("pendulum_random", "td3", 3000, "d3rlpy:td3"),
    Case("pendulum_random", "cql", 500, "d3rlpy:cql"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="holds the lake between runs")
    parser.add_argument("--logs", type=Path, help="folder with rllib_cartpole and rllib_pendulum")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", help="algorithms, by commas")
    options = parser.parse_args()
    lake = open_lake(options.folder / "returns", create=True)
    prepare(lake, options.logs)
    wanted = options.only.split(",") if options.only else None
    for case in CASES:
        if case.dataset in lake.datasets() and (wanted is None or case.ours in wanted):
            for line in lines(lake, case, options.seeds):
                print(json.dumps(line), flush=True)


def lines(lake: Lake, case: Case, num_seeds: int) -> Iterator[dict[str, Any]]:
    for name in filter(None, (case.ours, case.theirs)):
        given = case.options if name == case.ours else case.their_options
        returns = [final_return(lake, case, name, given, seed) for seed in range(num_seeds)]
        yield {
            "workload": f"return {case.dataset}, {case.ours}, {case.updates:,} updates",
            "system": "ours" if name == case.ours else "d3rlpy",
            "figure": statistics.mean(returns),
            "unit": "return",
            "least": min(returns),
            "greatest": max(returns),
            **({} if case.bar is None else {"bar": case.bar}),
        }


def final_return(lake: Lake, case: Case, name: str, options: Mapping[str, Any], seed: int) -> float:
    config = TrainConfig(
        algorithm=name, updates=case.updates, seed=seed, select="last", options=options
    )
    env_id = ENVIRONMENTS[case.dataset.partition("_")[0]]
    trained = train(lake, [case.dataset], replace(config, policy="returns", env=env_id))
    assert trained.evaluation is not None, "an environment was named"
    return trained.evaluation.mean_return


def prepare(lake: Lake, logs: Path | None) -> None:
    """Record random play, and ingest RLlib's logs where they are."""
    for name, env_id in ENVIRONMENTS.items():
        dataset = lake.dataset(f"{name}_random")
        if dataset.find_commit("bench", 0) is None:
            dataset.append(random_play(env_id, num_steps=20_000), producer="bench", sequence=0)
    if logs is not None:
        ingest_logs(lake, logs)


def ingest_logs(lake: Lake, logs: Path) -> None:
    """Pendulum's is logged in half of the environment's torque."""
    for name, path, scale in (
        ("cartpole", "rllib_cartpole/cartpole-v1_large", None),
        ("pendulum", "rllib_pendulum/pendulum-v1_enormous", 2.0),
    ):
        if f"{name}_log" not in lake.datasets():
            observation_space, action_space = spaces_of(ENVIRONMENTS[name])
            ingest(
                lake,
                [logs / path],
                f"{name}_log",
                options=ReadOptions(action_scale=scale),
                observation_space=observation_space,
                action_space=action_space,
            )


def random_play(env_id: str, num_steps: int) -> list[Episode]:
    """Play uniformly at random; with each action's log-probability."""
    policy, rng = UniformPolicy(*spaces_of(env_id)), np.random.default_rng(0)
    env, episodes, num = make(env_id), [], 0
    while num < num_steps:
        seen, _ = env.reset(seed=len(episodes))
        observations, actions, rewards, log_probs = [seen], [], [], []
        terminated = truncated = False
        while not (terminated or truncated):
            act = policy.act(seen[None], rng=rng, deterministic=False)
            seen, reward, terminated, truncated, _ = env.step(act.actions[0])
            observations.append(seen)
            actions.append(act.actions[0])
            rewards.append(float(reward))
            assert act.log_probs is not None, "a uniform policy has densities"
            log_probs.append(act.log_probs[0])
        num += len(rewards)
        episodes.append(
            Episode(
                f"random/{len(episodes):05d}",
                np.array(observations[:-1]),
                np.array(actions),
                np.array(rewards),
                terminated=terminated,
                truncated=truncated,
                final_observation=observations[-1],
                behavior_log_probs=np.array(log_probs, np.float32),
            )
        )
    env.close()  # type: ignore[no-untyped-call]
    return episodes


if __name__ == "__main__":
    main()
