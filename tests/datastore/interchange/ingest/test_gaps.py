"""Steps that are missing: an episode is rejected, or kept as its contiguous runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.ingest.inspection import IngestProgress
from replaylake.datastore.interchange.ingest.receipt import Counts, IngestReceipt
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.replay.items.transitions import Transitions

_SPLIT = ReadOptions(gaps="split")


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _log(folder: Path, episodes: dict[str, list[int]], *, last_end: bool = True) -> Path:
    lines = ["episode_id,step,observation,action,reward,terminated"]
    for number, (name, steps) in enumerate(episodes.items()):
        for step in steps:
            end = int(last_end and step == steps[-1])
            lines.append(f"{name},{step},{number}.{step:02},{step % 2},{step}.0,{end}")
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    return folder / "log.csv"


def _check(receipt: IngestReceipt, name: str) -> tuple[str, int, int]:
    (check,) = [check for check in receipt.checks if check.name == name]
    return check.outcome, check.num_episodes, check.num_rows


# Contiguous from 3 (no gap), with one gap, with two, and with a run of one step at its end.
_EPISODES = {"late": [3, 4, 5], "one": [0, 1, 4, 5], "two": [1, 3, 7, 8], "tail": [0, 1, 2, 9]}


def test_by_default_an_episode_with_a_gap_is_rejected(lake: Lake, tmp_path: Path) -> None:
    receipt = ingest(lake, [_log(tmp_path, _EPISODES)], "log")
    assert receipt.episodes == Counts(committed=1, rejected=3)
    assert _check(receipt, "gap") == ("rejected", 3, 4)
    (row,) = lake.sql("select source_episode_id, first_step from log.episodes").to_pylist()
    assert row == {"source_episode_id": "late", "first_step": 3}
    rows = lake.sql("select count(*) as n, count(distinct episode_id) as e from log.quarantine")
    assert rows.to_pylist() == [{"n": 12, "e": 3}]


def test_split_keeps_every_contiguous_run(lake: Lake, tmp_path: Path) -> None:
    receipt = ingest(lake, [_log(tmp_path, _EPISODES)], "log", options=_SPLIT)
    assert receipt.episodes == Counts(committed=4)
    assert receipt.steps == Counts(committed=15)
    assert _check(receipt, "gap") == ("corrected", 3, 4)
    steps = lake.sql(
        "select source_episode_id as e, list(step order by step) as s from log.steps group by e"
    ).to_pylist()
    assert {row["e"]: row["s"] for row in steps} == _EPISODES
    ended = lake.sql("select source_episode_id as e, step from log.steps where terminated")
    assert {row["e"]: row["step"] for row in ended.to_pylist()} == {
        name: steps[-1] for name, steps in _EPISODES.items()
    }
    found = lake.sql(
        "select step, next_observation is null as unknown, terminated or truncated as ended "
        "from log.transitions where source_episode_id = 'two' order by step"
    ).to_pylist()
    # Neither 1 nor 3 has a successor in the log; 8 is the end, which is no successor either.
    assert [(row["step"], row["unknown"], row["ended"]) for row in found] == [
        (1, True, False),
        (3, True, False),
        (7, False, False),
        (8, True, True),
    ]


def test_the_next_observation_of_a_run_is_kept(lake: Lake, tmp_path: Path) -> None:
    rows = [
        {
            "episode_id": "e",
            "step": t,
            "observation": [float(t)],
            "action": 0,
            "reward": 1.0,
            "next_observation": [t + 1.0],
            "terminated": t == 5,
        }
        for t in (0, 1, 4, 5)
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ingest(lake, [tmp_path / "log.jsonl"], "log", options=_SPLIT)
    found = lake.sql("select step, next_observation[1] as o from log.transitions order by step")
    assert [tuple(row.values()) for row in found.to_pylist()] == [(0, 1), (1, 2), (4, 5), (5, 6)]


def test_replay_does_not_cross_a_gap(lake: Lake, tmp_path: Path) -> None:
    ingest(lake, [_log(tmp_path, {"one": [0, 1, 4, 5]})], "log", options=_SPLIT)
    sampler = lake.snapshot("log").replay().uniform(64, Transitions(0.9), seed=0)
    batch = sampler.sample()
    pairs = {
        (round(float(o[0]), 2), round(float(n[0]), 2))
        for o, n, d in zip(
            batch.observations, batch.next_observations, batch.discounts, strict=True
        )
        if d
    }
    assert pairs == {(0.0, 0.01), (0.04, 0.05)}


def test_an_open_end_is_that_of_the_last_run(lake: Lake, tmp_path: Path) -> None:
    log = _log(tmp_path, {"one": [0, 1, 4, 5]}, last_end=False)
    options = ReadOptions(gaps="split", open_ends="truncated")
    receipt = ingest(lake, [log], "log", options=options)
    assert _check(receipt, "no_end") == ("corrected", 1, 1)
    found = lake.sql("select step from log.steps where truncated").to_pylist()
    assert found == [{"step": 5}]


def test_a_run_that_is_refused_leaves_the_others(lake: Lake, tmp_path: Path) -> None:
    """NaN is of a row, so the whole episode goes; what no space holds is of a run."""
    log = _log(tmp_path, {"a": [0, 1], "one": [0, 1, 4, 5]})
    log.write_text(log.read_text().replace(",4.0,", ",nan,"))
    receipt = ingest(lake, [log], "log", options=_SPLIT)
    assert receipt.episodes == Counts(committed=1, rejected=1)
    (rejected,) = [check for check in receipt.checks if check.outcome == "rejected"]
    assert (rejected.name, rejected.num_rows) == ("not_finite", 1)
    rows = lake.sql("select file_row from log.quarantine order by row_number").to_pylist()
    assert [row["file_row"] for row in rows] == [2, 3, 4, 5]


@pytest.mark.parametrize("keep_bytes", [0, 1 << 20])
def test_runs_of_an_episode_come_in_one_commit(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_bytes: int
) -> None:
    monkeypatch.setattr(
        "replaylake.datastore.interchange.ingest.inspection._KEEP_BYTES", keep_bytes
    )

    class Cut(Exception):
        pass

    def cut(progress: IngestProgress) -> None:
        if progress.stage == "commit":
            raise Cut

    log = _log(tmp_path, _EPISODES)
    with pytest.raises(Cut):
        ingest(lake, [log], "log", options=_SPLIT, commit_steps=4, on_progress=cut)
    there = lake.sql("select source_episode_id as e, num_steps as n from log.episodes").to_pylist()
    assert {row["e"]: row["n"] for row in there} == {"late": 3, "one": 4}
    receipt = ingest(lake, [log], "log", options=_SPLIT, commit_steps=4)
    assert receipt.episodes == Counts(committed=2, already_present=2)
    assert receipt.steps == Counts(committed=8, already_present=7)
    rows = lake.sql("select count(*) as n, count(distinct (episode_id, step)) as d from log.steps")
    assert rows.to_pylist() == [{"n": 15, "d": 15}]
    commits = [c for c in lake.dataset("log").history() if "num_produced" in c]
    assert [commit["num_episodes"] for commit in commits] == [2, 1, 1]


def test_forty_one_ids_of_which_thirty_three_have_gaps(lake: Lake, tmp_path: Path) -> None:
    """The shape of ReAgent's JSON: rows in no order, first numbers above 0, runs of one row."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    expected: dict[str, list[int]] = {}
    for number in range(41):
        first = int(rng.integers(0, 5))
        steps = list(range(first, first + int(rng.integers(4, 9))))
        if number < 33:
            del steps[int(rng.integers(1, len(steps) - 1))]
        expected[str(number)] = steps
        rows += [
            {
                "mdp_id": str(number),
                "sequence_number": step,
                "observation": [float(number), float(step)],
                "action": 0,
                "reward": 1.0,
                "action_probability": 0.5,
            }
            for step in steps
        ]
    order = rng.permutation(len(rows))
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(rows[i]) + "\n" for i in order))
    receipt = ingest(lake, [tmp_path / "log.jsonl"], "reagent")
    assert receipt.episodes == Counts(committed=8, rejected=33)
    rows_found = lake.sql("select count(distinct episode_id) as n from reagent.quarantine")
    assert rows_found.to_pylist() == [{"n": 33}]
    split = ingest(lake, [tmp_path / "log.jsonl"], "split", options=_SPLIT)
    assert split.episodes == Counts(committed=41)
    assert _check(split, "gap") == ("corrected", 33, 33)
    found = lake.sql(
        "select source_episode_id as e, list(step order by step) as s from split.steps group by e"
    ).to_pylist()
    assert {row["e"]: row["s"] for row in found} == expected


def test_the_logs_of_reagent(lake: Lake, shared_data: Path) -> None:
    log = shared_data / "reagent" / "cartpole_training_data.json"
    receipt = ingest(lake, [log], "reagent")
    assert receipt.episodes == Counts(committed=8, rejected=33)
    ids = lake.sql("select count(distinct source_episode_id) as n from reagent.quarantine")
    assert ids.to_pylist() == [{"n": 33}]
    split = ingest(lake, [log], "split", options=_SPLIT)
    assert split.episodes == Counts(committed=41)
    assert split.steps == Counts(committed=162)
