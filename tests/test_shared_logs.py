"""Other people's logs through the command line, against the numbers that are known of them.

`shared/data/MANIFEST.md` says where each number comes from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replaylake.cli.main import main
from replaylake.datastore.lake.lake import Lake, open_lake

Ingest = Callable[..., dict[str, Any]]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


@pytest.fixture
def ingest(
    lake: Lake, tmp_path: Path, shared_data: Path, capsys: pytest.CaptureFixture[str]
) -> Ingest:
    """Run `replaylake ingest` on a file of the shared logs, and return its receipt."""

    def run(source: str, *options: str, dataset: str = "log") -> dict[str, Any]:
        place = ["--lake", str(tmp_path / "lake"), "--dataset", dataset, "--json"]
        capsys.readouterr()
        assert main(["ingest", str(shared_data / source), *place, *options]) == 0
        receipt: dict[str, Any] = json.loads(capsys.readouterr().out)
        return receipt

    return run


def _episodes(lake: Lake, what: str, dataset: str = "log") -> dict[str, Any]:
    row: dict[str, Any] = lake.sql(f"SELECT {what} FROM {dataset}.episodes").to_pylist()[0]
    return row


_COUNTS = (
    'count(*) AS num, CAST(sum(num_steps) AS BIGINT) AS steps, avg("return") AS mean, '
    "count(*) FILTER (terminated) AS terminated, count(*) FILTER (truncated) AS truncated"
)


def test_rllib_batches_are_their_rows(ingest: Ingest, lake: Lake) -> None:
    ingest("rllib_cartpole/small.json", dataset="batches")
    ingest("rllib_cartpole/cartpole-v1.jsonl", dataset="rows")
    for name in ("batches", "rows"):
        found = _episodes(lake, _COUNTS, name)
        assert found == {"num": 3, "steps": 102, "mean": 34.0, "terminated": 3, "truncated": 0}
    # The rows were rounded to ten digits.
    differ = lake.sql(
        """SELECT count(*) AS num FROM batches.steps AS a FULL JOIN rows.steps AS b
        USING (source_episode_id, step)
        WHERE a.action IS DISTINCT FROM b.action OR a.reward IS DISTINCT FROM b.reward
        OR a.terminated IS DISTINCT FROM b.terminated
        OR coalesce(list_max(list_transform(list_zip(a.observation::DOUBLE[],
            b.observation::DOUBLE[]), lambda p: abs(p[1] - p[2]))), 1) > 1e-9
        OR coalesce(abs(a.behavior_log_prob - b.behavior_log_prob), 1) > 1e-6"""
    )
    assert differ.to_pylist() == [{"num": 0}]


@pytest.mark.slow
def test_rllib_pendulum_has_no_ends_and_half_the_torque(ingest: Ingest, lake: Lake) -> None:
    receipt = ingest("rllib_pendulum/pendulum-v1_enormous", "--env", "Pendulum-v1")
    found = _episodes(lake, _COUNTS)
    assert (found["num"], found["steps"]) == (82, 16_231)
    assert found["mean"] == pytest.approx(-142.9524447262952, rel=1e-12)
    assert found["terminated"] == found["truncated"] == 0
    alignment = receipt["alignment"]
    assert not alignment["is_aligned"]
    assert "0.5 times the environment's" in alignment["cause"]
    assert alignment["num_explained"] == alignment["num_checked_explained"] > 1_000
    (scale,) = re.findall(r"`action_scale` (\S+)", alignment["advice"])
    again = ingest(
        "rllib_pendulum/pendulum-v1_enormous",
        "--env",
        "Pendulum-v1",
        "--action-scale",
        scale,
        dataset="scaled",
    )
    assert again["alignment"]["is_aligned"]
    assert again["alignment"]["num_agree"] == again["alignment"]["num_checked"]


def test_rllib_packed_columns(ingest: Ingest, lake: Lake) -> None:
    ingest("rllib_pendulum/small.json")
    found = _episodes(lake, _COUNTS)
    assert (found["num"], found["steps"], found["terminated"]) == (1, 40, 0)
    assert found["mean"] == pytest.approx(-306.37472677, abs=1e-8)


def test_reagent_parquet_in_a_zip(ingest: Ingest, lake: Lake) -> None:
    receipt = ingest("reagent/dqn_workflow.zip")
    found = _episodes(lake, _COUNTS + ", avg(num_steps) AS length, min(first_step) AS first")
    assert (found["num"], found["steps"], found["terminated"]) == (18, 323, 18)
    assert found["length"] == pytest.approx(17.94, abs=0.005)
    assert found["first"] == 1
    assert receipt["steps"]["rejected"] == 0
    chances = lake.sql("SELECT DISTINCT round(exp(behavior_log_prob), 6) AS p FROM log.steps")
    assert chances.to_pylist() == [{"p": 0.5}]


def test_reagent_json_with_gaps(ingest: Ingest, lake: Lake) -> None:
    receipt = ingest("reagent/cartpole_training_data.json")
    assert receipt["episodes"]["read"] == 41
    assert (receipt["episodes"]["committed"], receipt["episodes"]["rejected"]) == (8, 33)
    (gaps,) = [check for check in receipt["checks"] if check["name"] == "gap"]
    assert (gaps["outcome"], gaps["num_episodes"]) == ("rejected", 33)
    quarantined = lake.sql(
        "SELECT count(DISTINCT source_episode_id) AS num, count(*) AS rows FROM log.quarantine "
        "WHERE list_contains(checks, 'gap')"
    )
    assert quarantined.to_pylist() == [{"num": 33, "rows": receipt["steps"]["rejected"]}]
    split = ingest("reagent/cartpole_training_data.json", "--gaps", "split", dataset="split")
    assert split["steps"] == {"read": 162, "committed": 162, "rejected": 0, "already_present": 0}
    # The log has each next state: it is kept where no row follows, and so no gap is bridged.
    runs = lake.sql(
        """SELECT count(final_observation) AS kept, count(*) AS steps,
        (SELECT count(*) FROM split.steps AS a JOIN split.steps AS b
         ON a.episode_id = b.episode_id AND b.step = a.step + 1) AS followed
        FROM split.steps"""
    ).to_pylist()[0]
    assert runs["kept"] == runs["steps"] - runs["followed"]
    assert runs["followed"] > 0


def test_imitation_npz(ingest: Ingest, lake: Lake) -> None:
    receipt = ingest("imitation/cartpole_0_final.npz", "--env", "CartPole-v1")
    found = _episodes(lake, _COUNTS + ", min(num_steps) AS least, max(num_steps) AS greatest")
    assert (found["num"], found["steps"], found["terminated"]) == (57, 26_964, 57)
    assert found["mean"] == pytest.approx(473.0526, abs=1e-4)
    assert (found["least"], found["greatest"]) == (393, 500)
    assert any("infos" in note and "pickled" in note for note in receipt["notes"])
    assert receipt["alignment"]["is_aligned"]
    (limit,) = [check for check in receipt["checks"] if check["name"] == "time_limit"]
    assert "`time_limit` 500" in limit["advice"]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "clicks"), [("random", 46), ("bts", 69)])
def test_open_bandit(ingest: Ingest, lake: Lake, policy: str, clicks: int) -> None:
    ingest(f"obd/{policy}/men/men.csv", "--format", "bandit")
    row = lake.sql(
        "SELECT count(*) AS num, CAST(sum(reward) AS BIGINT) AS clicks, "
        "count(*) FILTER (terminated) AS ended, count(behavior_log_prob) AS chances, "
        "count(DISTINCT position) AS positions FROM log.steps"
    ).to_pylist()[0]
    assert row == {
        "num": 10_000,
        "clicks": clicks,
        "ended": 10_000,
        "chances": 10_000,
        "positions": 3,
    }
    columns = {field.name for field in lake.snapshot("log").table.schema}
    assert {"user_feature_0", "user_feature_3", "user_item_affinity_33", "timestamp"} <= columns


@pytest.mark.parametrize("storage", ["hdf5", "arrow"])
def test_minari(ingest: Ingest, lake: Lake, storage: str) -> None:
    ingest(f"minari/lab/cartpole-{storage}-v0", "--env", "CartPole-v1")
    found = _episodes(lake, _COUNTS)
    assert found["mean"] == pytest.approx(261.22)
    assert {**found, "mean": 0} == {
        "num": 50,
        "steps": 13_061,
        "mean": 0,
        "terminated": 25,
        "truncated": 25,
    }


def test_tau_bench_few_shot(ingest: Ingest, lake: Lake) -> None:
    ingest("tau_bench/MockAirlineDomainEnv-few_shot.jsonl")
    found = _episodes(lake, 'count(*) AS num, count("return") AS known')
    assert found == {"num": 19, "known": 0}
    rewards = lake.sql("SELECT count(*) AS num, count(reward) AS known FROM log.steps").to_pylist()
    assert rewards[0]["num"] > 0
    assert rewards[0]["known"] == 0
