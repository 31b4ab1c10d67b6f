import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from replaylake.datastore.errors import (
    ConfigInvalidError,
    NotFoundError,
    PackageInvalidError,
    SpaceUnsupportedError,
)
from replaylake.datastore.lake.policies.package import load_policy
from replaylake.datastore.maintenance.lineage import lineage
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.running.training.interruption import RunInterrupted
from replaylake.online.train import resume_online, train_online
from replaylake.online.training.config import OnlineConfig, OnlineRequest

# Small, so that a run takes a second.
OPTIONS = {"hidden_sizes": [16]}
SMALL = OnlineConfig(
    "dqn",
    env_runner="local",
    steps=1200,
    min_size=200,
    batch_size=16,
    log_steps=400,
    evaluate_steps=600,
    selection_episodes=2,
    evaluation_episodes=3,
    envs_per_worker=4,
    round_steps=64,
    options=OPTIONS,
)


def request(env_id="CartPole-v1", **changes):
    return replace(SMALL, **changes, env=env_id, policy="learned")


def rows(lake, query):
    return lake.sql(query).to_pylist()


def test_a_run_collects_learns_and_registers(lake):
    points, remarks = [], []
    result = train_online(
        lake,
        "live",
        request(),
        callbacks=Callbacks(on_metrics=lambda *p: points.append(p), on_remark=remarks.append),
    )
    assert result.num_steps == 1200
    assert result.num_updates == 1000  # one a step, after the first 200
    assert remarks == []
    (row,) = rows(
        lake,
        "select count(*) n, count(distinct (episode_id, step)) d, count(behavior_log_prob) l,"
        " min(policy) p, max(policy_version) v from live.steps",
    )
    assert row == {"n": 1200, "d": 1200, "l": 1200, "p": f"run:{result.run_id}", "v": row["v"]}
    assert row["v"] > 3
    (run,) = rows(lake, "select * from runs")
    assert (run["status"], run["kind"], run["run_id"]) == ("done", "train online", result.run_id)
    policy = load_policy(result.policy.path)
    (own,) = policy.manifest.body["datasets"]
    assert (own["version"], own["since"]) == (result.dataset_version, 0)
    assert (own["num_steps"], own["producers"]) == (1200, [f"online/{result.run_id}"])
    (row,) = rows(lake, "select count(distinct episode_id) n from live.steps")
    assert own["num_episodes"] == row["n"]
    assert result.evaluation.mean_return == np.mean(result.evaluation.returns)
    last = points[-2][1]
    # A row: two observations of 4 floats, an action, 4 floats more, key, number and a flag.
    row_bytes = 2 * 16 + 8 + 4 * 4 + 16 + 8 + 1
    assert (
        last["profile/trainer/sample/bytes"]
        == last["profile/trainer/sample/items"] * 16 * row_bytes
    )
    shards = lake.snapshot("live").files
    assert last["profile/background/commit/bytes"] == sum(one.size_bytes for one in shards)
    names = {name for _, values in points for name in values}
    assert {
        "return",
        "env_steps",
        "q_loss",
        "profile/trainer/update/seconds",
        "steps_per_s",
    } <= names


@pytest.mark.slow
def test_lineage_says_what_a_run_collected_and_not_what_was_there_before(lake):
    train_online(lake, "live", request(steps=400))
    before = lake.dataset("live").snapshot()
    result = train_online(lake, "live", request(steps=500))
    files = set(lake.snapshot("live").files) - set(before.files)
    digest = hashlib.sha256("".join(sorted(one.sha256 for one in files)).encode()).hexdigest()
    (own,) = lineage.trace_policy(lake, str(result.policy))["datasets"]
    assert (own["num_steps"], own["content_hash"]) == (500, digest)
    (run,) = [run for run in lake.registry.runs() if run["run_id"] == result.run_id]
    assert run["datasets"][0]["since"] == before.version
    assert run["datasets"][0]["content_hash"] == digest


@pytest.mark.slow
def test_every_step_has_the_log_probability_that_its_epsilon_gives(lake):
    train_online(lake, "live", request(epsilon_start=0.5, epsilon_end=0.5))
    probs = rows(lake, "select distinct round(exp(behavior_log_prob), 4) p from live.steps")
    # Of two actions: half of epsilon, and the rest with it.
    assert sorted(row["p"] for row in probs) == [0.25, 0.75]


@pytest.mark.slow
def test_the_local_run_is_the_same_again(lake, tmp_path):
    from replaylake.datastore.lake.lake import open_lake

    first = train_online(lake, "live", request(steps=600))
    other = open_lake(tmp_path / "other", create=True)
    second = train_online(other, "live", request(steps=600))
    assert first.evaluation.returns == second.evaluation.returns
    of = "select observation, action, reward from live.steps order by seed, step"
    assert lake.sql(of).equals(other.sql(of))


@pytest.mark.slow
def test_nothing_is_recorded_where_that_is_off(lake):
    result = train_online(lake, "live", request(record=False))
    assert (result.num_steps, result.num_updates) == (1200, 1000)
    assert lake.snapshot("live").num_steps == 0
    (own,) = load_policy(result.policy.path).manifest.body["datasets"]
    assert (own["num_steps"], own["content_hash"]) == (0, None)


@pytest.mark.slow
def test_a_continuous_policy_begins_with_uniform_actions(lake):
    config = replace(
        SMALL, algorithm="sac", steps=500, evaluate_steps=None, options={"hidden_sizes": [16]}
    )
    result = train_online(lake, "live", replace(config, env="Pendulum-v1", policy="learned"))
    assert result.num_updates == 300
    found = rows(lake, "select policy, count(*) n from live.steps group by all order by 1")
    assert [row["policy"] for row in found] == ["random", f"run:{result.run_id}"]
    assert 200 <= found[0]["n"] <= 264  # and the rest of a round


@pytest.mark.slow
def test_noise_has_no_density(lake):
    config = replace(
        SMALL, algorithm="td3", steps=400, evaluate_steps=None, options={"hidden_sizes": [16]}
    )
    train_online(lake, "live", replace(config, env="Pendulum-v1", policy="learned"))
    found = rows(
        lake, "select policy != 'random' own, count(behavior_log_prob) n from live.steps group by 1"
    )
    assert {row["own"]: row["n"] > 0 for row in found} == {True: False, False: True}


def test_a_run_ends_once_it_returns_enough(lake):
    result = train_online(lake, "live", request(steps=100_000, until_return=8.0, until_episodes=5))
    assert result.converged
    assert result.num_steps < 10_000
    assert result.selection["value"] >= 8.0


@pytest.mark.slow
def test_a_run_that_gets_no_better_ends(lake):
    result = train_online(
        lake,
        "live",
        request(
            steps=100_000,
            evaluate_steps=200,
            patience=2,
            options={**OPTIONS, "learning_rate": 1e-9},
        ),
    )
    assert not result.converged
    assert result.selection["stopped_early"]
    assert result.num_steps < 10_000


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_all_that_it_collected(lake):
    seen = []

    def told(progress):
        seen.append(progress.num_steps)

    with pytest.raises(RunInterrupted) as interrupted:
        train_online(
            lake,
            "live",
            request(steps=2000),
            callbacks=Callbacks(on_progress=told, should_end=lambda: bool(seen and seen[-1] > 0)),
        )
    before = _steps(lake)
    assert 0 < before < 2000
    (run,) = rows(lake, "select * from runs")
    assert run["status"] == "interrupted"
    result = resume_online(lake, interrupted.value.run_id)
    assert result.num_steps == 2000
    assert result.num_updates == 1800
    (row,) = rows(lake, "select count(*) n, count(distinct (episode_id, step)) d from live.steps")
    assert row == {"n": 2000, "d": 2000}
    # Episodes that were open have no end, and a commit names them.
    left = rows(lake, "select episode_id e from live.episodes where not complete")
    told_lost = [c.get("abandoned_episodes") for c in lake.dataset("live").history()]
    assert sorted(row["e"] for row in left) == sorted(e for told in told_lost if told for e in told)
    assert resume_online(lake, result.run_id).already_finished


@pytest.mark.slow
def test_steps_are_taken_once_over_an_interrupt(lake):
    points, seen = [], []
    ppo = request(
        algorithm="ppo", steps=6000, log_steps=200, evaluate_steps=2000,
        min_size=1, batch_size=None,
        options={"hidden_sizes": [16], "num_sequences": 4, "length": 16},
    )  # fmt: skip
    with pytest.raises(RunInterrupted) as interrupted:
        train_online(
            lake,
            "live",
            ppo,
            callbacks=Callbacks(
                on_progress=lambda progress: seen.append(progress.num_steps),
                should_end=lambda: bool(seen and seen[-1] > 3000),
            ),
        )
    result = resume_online(
        lake,
        interrupted.value.run_id,
        callbacks=Callbacks(on_metrics=lambda _, values: points.append(values)),
    )
    assert result.num_steps == 6000
    staleness = [values["staleness"] for values in points if "staleness" in values]
    assert len(staleness) > 3
    assert min(staleness) >= 0
    assert max(staleness) < 5
    # But for a few around the interrupt.
    assert 0.9 < points[-2]["samples_per_insert"] < 1.02


@pytest.mark.slow
def test_offline_data_are_mixed_in(lake):
    train_online(lake, "live", request(steps=600))
    result = train_online(lake, "more", request(mix={"live@1": 0.5}))
    datasets = load_policy(result.policy.path).manifest.body["datasets"]
    assert [(d["dataset"], d["named"]) for d in datasets] == [("more", "more"), ("live", "live@1")]


@pytest.mark.slow
def test_a_run_starts_from_a_policy(lake):
    first = train_online(lake, "live", request())
    again = train_online(lake, "live", request(steps=300, start_from="learned", options=OPTIONS))
    assert again.policy.version == first.policy.version + 1
    config = replace(SMALL, algorithm="sac", start_from="learned")
    asked = replace(config, env="Pendulum-v1", policy="learned")
    with pytest.raises(PackageInvalidError, match="of algorithm dqn, expected sac"):
        train_online(lake, "other", asked)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"algorithm": "dqm"}, NotFoundError, "dqn"),
        ({"algorithm": "bc"}, ConfigInvalidError, "clones"),
        ({"algorithm": "sac", "options": {"lrr": 1}}, ConfigInvalidError, "lrr"),
        ({"algorithm": "td3"}, SpaceUnsupportedError, "Discrete"),
        ({"mix": {"absent": 0.5}}, NotFoundError, "absent"),
        ({"start_from": "none"}, NotFoundError, "none"),
        ({"device": "cuda:7"}, ConfigInvalidError, "cuda"),
        ({"steps": 200}, ConfigInvalidError, "found 200, expected 201 or more"),
        ({"steps": 99, "algorithm": "ppo"}, ConfigInvalidError, "num_sequences"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_there(lake, changes, error, says):
    with pytest.raises(error, match=says):
        train_online(lake, "live", request(**{"options": {}, **changes}))
    assert rows(lake, "select * from runs") == []


@pytest.mark.parametrize("name", ["until_return", "samples_per_insert", "flush_interval_s"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_nothing_reaches_is_refused(name, value):
    with pytest.raises(
        ConfigInvalidError, match=f"online: {name}: found {value}, expected a finite"
    ):
        replace(SMALL, **{name: value})


def test_the_request_survives_json():
    asked = OnlineRequest(
        "live",
        replace(
            SMALL, mix={"a@1": 0.25}, env="m:f", policy="p", env_args={"speed": 2}, address="auto"
        ),
    )
    assert OnlineRequest.from_json(json.loads(json.dumps(asked.to_json()))) == replace(
        asked, config=replace(asked.config, options=OPTIONS)
    )


def _steps(lake):
    return lake.snapshot("live").num_steps
