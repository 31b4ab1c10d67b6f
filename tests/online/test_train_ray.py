"""Runs on Ray: real actors, a real object store, and the lake between them."""

import os
import time
from dataclasses import replace

import pytest

from replaylake.offline.callbacks import Callbacks
from replaylake.offline.running.training.interruption import RunInterrupted
from replaylake.online.train import resume_online, train_online
from replaylake.online.training.config import OnlineConfig

pytestmark = pytest.mark.slow

SMALL = OnlineConfig(
    "dqn",
    workers=2,
    steps=1600,
    min_size=200,
    batch_size=16,
    log_steps=400,
    evaluate_steps=800,
    selection_episodes=2,
    evaluation_episodes=3,
    envs_per_worker=4,
    round_steps=64,
    flush_interval_s=0.1,
    options={"hidden_sizes": [16]},
)


def request(**changes):
    return replace(SMALL, **changes, env="CartPole-v1", policy="learned")


def counted(lake):
    (row,) = lake.sql(
        "select count(*) n, count(distinct (episode_id, step)) d, count(distinct worker) w,"
        " count(distinct policy_version) v from live.steps"
    ).to_pylist()
    acknowledged = sum(c.get("num_steps") or 0 for c in lake.dataset("live").history())
    assert row["n"] == row["d"] == acknowledged
    return row


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_workers_collect_what_the_learner_learns_from(lake, mode, toys, tmp_path):
    points, folder = {}, tmp_path / "workers"
    folder.mkdir()
    # One worker could be done with all of it before the other has started.
    env_args = {"folder": str(folder), "num": 2, "apart": os.getpid()}
    asked = replace(request(mode=mode), env="replaylake_faults:Meeting", env_args=env_args)
    began = time.monotonic()
    result = train_online(
        lake,
        "live",
        asked,
        callbacks=Callbacks(on_metrics=lambda _, values: points.update(values)),
    )
    row = counted(lake)
    assert (row["n"], row["w"]) == (result.num_steps, 2)
    assert 1600 <= result.num_steps < 1600 + 2 * 4
    assert result.num_updates == result.num_steps - 200
    # Each round of a synchronous run is acted by the policy that learned from the one before.
    assert row["v"] > 3
    links = {name.split("/")[2] for name in points if name.count("/") == 3}
    assert {"env_step", "inference", "shard_write", "commit", "decode", "update"} <= links
    assert 0 < points["latency_ms"] < 1000 * (time.monotonic() - began)


def test_a_learner_in_an_actor_registers_the_same_kind_of_policy(lake):
    started, remarks = [], []
    result = train_online(
        lake,
        "live",
        request(learner="ray", workers=1),
        callbacks=Callbacks(on_start=started.append, on_remark=remarks.append),
    )
    assert [start.run_id for start in started] == [result.run_id]
    assert result.policy.version == 1
    assert result.num_updates == counted(lake)["n"] - 200


def test_a_learner_in_an_actor_is_interrupted_and_goes_on(lake):
    seen = []
    with pytest.raises(RunInterrupted) as interrupted:
        train_online(
            lake,
            "live",
            request(learner="ray", steps=100_000),
            callbacks=Callbacks(
                on_progress=lambda progress: seen.append(progress.update),
                should_end=lambda: bool(seen) and seen[-1] > 50,
            ),
        )
    num_steps = counted(lake)["n"] + 1000
    assert 1200 < num_steps < 100_000
    (run,) = lake.registry.runs()
    # As if it had been asked for no more.
    run["request"]["config"]["steps"] = num_steps
    lake.registry.record_run(run["run_id"], {k: v for k, v in run.items() if k != "run_id"})
    result = resume_online(lake, interrupted.value.run_id)
    assert num_steps <= counted(lake)["n"] == result.num_steps < num_steps + 10


@pytest.mark.parametrize(
    ("agents", "algorithm"),
    [
        ("shared", "dqn"),
        ("each", "ppo"),
        pytest.param("shared", "ppo", marks=pytest.mark.chaos),
        pytest.param("each", "dqn", marks=pytest.mark.chaos),
    ],
)
def test_games_are_learned_from_workers_in_other_processes(lake, algorithm, agents):
    options = {"hidden_sizes": [16]}
    if algorithm == "ppo":
        options |= {"length": 8, "num_sequences": 8}
    config = replace(SMALL, algorithm=algorithm, agents=agents, options=options)
    result = train_online(
        lake, "live", replace(config, env="pettingzoo:classic/tictactoe-v3", policy="learned")
    )
    names = {"shared": [], "each": ["learned_player_1:1", "learned_player_2:1"]}
    assert [str(ref) for ref in result.policies.values()] == names[agents]
    assert result.num_updates > 0
    (row,) = lake.sql(
        "select count(*) n, count(distinct (episode_id, agent_id, step)) d,"
        " count(distinct agent_id) agents, count(distinct policy_version) v from live.steps"
    ).to_pylist()
    # Of games that were open in the end, one in each environment, the last move is not there.
    assert result.num_steps - 8 <= row["n"] == row["d"] <= result.num_steps
    assert row["agents"] == 2
    assert row["v"] > 1
    assert result.update == result.num_updates
