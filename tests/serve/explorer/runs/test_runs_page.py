"""Runs and policies: lists, pages, and two runs side by side."""

import json
import time

import numpy as np
import pytest

from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.runs.checkpoints import Checkpoints
from replaylake.datastore.lake.runs.metrics import Curve, MetricsLog
from replaylake.serve.explorer.runs.runs_page import thin_curve

RUNS = ("01aaaaaaaaaaaaaaaaaaaaaaaa", "01bbbbbbbbbbbbbbbbbbbbbbbb")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, reader_type, episode_maker, hostile, kit):
    """Two runs with losses, of which the second has a hostile option; a policy with an alias."""
    lake = open_lake(tmp_path_factory.mktemp("trained") / "lake", create=True)
    lake.dataset("walks").append([episode_maker(f"w/{n}", 4, seed=n) for n in range(3)])
    for place, run_id in enumerate(RUNS):
        record = {
            "run_id": run_id,
            "kind": "offline",
            "status": "done",
            "algorithm": "bc",
            "seed": place,
            "config": {"updates": 30, "learning_rate": 0.1 * (place + 1), "note": hostile},
            "datasets": [
                {"dataset": "walks", "version": 1, "where": "num_steps > 2", "num_episodes": 3}
            ],
            "started_ms": 1_700_000_000_000 + place,
            "ended_ms": 1_700_000_065_000,
            "policy": "walker",
            "policy_version": place + 1,
        }
        lake.registry.record_run(run_id, record)
        with MetricsLog(lake.storage, run_id) as log:
            for update in range(10 * place, 30, 10):
                values = {"loss": 1.0 / (1 + update + place), f"own_{place}": float("nan")}
                log.add(update, values, time.time())
        package = kit.save_policy(tmp_path_factory.mktemp("package") / "p")
        lineage = {
            "algorithm": "bc",
            "run_id": run_id,
            "datasets": [{"dataset": "walks", "version": 1, "where": None}],
        }
        lake.registry.register("walker", package, run_id=run_id, lineage=lineage)
    lake.registry.set_alias("walker", "champion", 1)
    return reader_type(lake)


def test_runs_are_listed_newest_first(trained):
    page = trained.page("/runs")
    assert [text for text in page.texts if text in RUNS] == [*RUNS[::-1]]
    assert "1 min 05 s" in page.texts
    assert "/datasets/walks?at=1" in page.links
    assert [run["run_id"] for run in trained.json("/runs.json")["runs"]] == [*RUNS[::-1]]


def test_a_run_has_its_curves_options_and_data(trained, hostile):
    page = trained.page(f"/runs/{RUNS[0]}")
    (data,) = [text for text in page.texts if text.startswith('{"x":')]
    plots = {one["title"]: one for one in json.loads(data)["plots"]}
    assert plots["loss"]["x"] == [0, 10, 20]
    assert plots["loss"]["series"][0]["values"] == [1.0, 0.09090909, 0.04761905]
    assert plots["own_0"]["series"][0]["values"] == [None] * 3
    query = next(text for text in page.texts if "FROM metrics" in text)
    assert len(trained.lake.sql(query)) == sum(len(plot["x"]) for plot in plots.values())
    assert any("learning_rate" in text for text in page.texts)
    assert "/datasets/walks/episodes?where=num_steps+%3E+2&at=1" in page.links
    assert any(text.strip().startswith("</td><script>") for text in page.texts)


def test_two_runs_side_by_side(trained):
    page = trained.page(f"/runs/{RUNS[0]}?with={RUNS[1]}")
    (data,) = [text for text in page.texts if text.startswith('{"x":')]
    loss = next(one for one in json.loads(data)["plots"] if one["title"] == "loss")
    assert loss["x"] == [0, 10, 20]
    assert [one["values"][0] for one in loss["series"]] == [1.0, None]
    assert {"learning_rate", "0.1", "0.2", "seed"} <= set(page.texts)
    body = trained.json(f"/runs/{RUNS[0]}.json?with=walker:2")
    assert [run["run_id"] for run in body["runs"]] == [*RUNS]


def test_runs_that_are_not_there(trained, empty):
    trained.page("/runs/99nothing", 404)
    assert "No run has trained in this lake." in empty.page("/runs").text
    assert "No policy is registered in this lake." in empty.page("/policies").text
    empty.page("/policies/walker", 404)


def test_a_policy_leads_back_to_its_data(trained):
    (policy,) = trained.json("/policies.json")["policies"]
    assert (policy["num_versions"], policy["aliases"]) == (2, {"champion": 1})
    page = trained.page("/policies/walker")
    assert f"/runs/{RUNS[1]}" in page.links
    assert "/datasets/walks?at=1" in page.links
    assert "champion" in page.texts
    moves = trained.json("/policies/walker.json")["moves"]
    assert [(move["alias"], move["to_version"]) for move in moves] == [("champion", 1)]


def test_long_curves_keep_their_ends():
    num = 12_345
    curve = thin_curve(Curve(np.arange(num), np.arange(num, dtype=float)))
    assert 1900 < len(curve.updates) <= 2000
    assert (curve.updates[0], curve.updates[-1]) == (0, num - 1)
    assert np.array_equal(curve.updates, curve.values)


def test_long_curves_keep_each_spike():
    num = 12_345
    values = np.zeros(num)
    values[[777, 4000]] = 100.0, -100.0
    values[100:200] = np.nan
    curve = thin_curve(Curve(np.arange(num), values))
    assert set(zip(curve.updates.tolist(), curve.values.tolist(), strict=True)) >= {
        (777, 100.0),
        (4000, -100.0),
    }
    assert np.isnan(curve.values).any()
    assert len(curve.updates) <= 2000


def test_a_page_says_where_a_curve_is_thinned(trained):
    run_id = "01cccccccccccccccccccccccc"
    trained.lake.registry.record_run(run_id, {"run_id": run_id, "kind": "offline"})
    with MetricsLog(trained.lake.storage, run_id) as log:
        for update in range(2100):
            log.add(update, {"loss": 16_777_217.0}, 0.0)
    page = trained.page(f"/runs/{run_id}")
    assert any("up to 2,100 points" in text for text in page.texts)
    (data,) = [text for text in page.texts if text.startswith('{"x":')]
    assert set(json.loads(data)["plots"][0]["series"][0]["values"]) == {16_777_217.0}


def test_a_run_has_its_checkpoints_and_the_commands_that_use_them(tmp_path, reader_type):
    lake = open_lake(tmp_path / "a lake", create=True)
    record = {"run_id": "01run", "kind": "train offline", "status": "interrupted"}
    lake.registry.record_run("01run", record)
    reader = reader_type(lake)
    title = "Checkpoints and TensorBoard"
    assert title not in reader.page("/runs/01run").texts
    checkpoints = Checkpoints(lake.storage, "01run")
    checkpoints.save(500, {"w": np.zeros(1)}, {})
    assert "Checkpoint of update 500." in reader.page("/runs/01run").texts
    checkpoints.save(1000, {"w": np.zeros(1)}, {})
    events = lake.path / "_lake" / "runs" / "01run" / "tensorboard"
    events.mkdir()
    page = reader.page("/runs/01run")
    assert title in page.texts
    assert "Checkpoints of updates 500, 1,000." in page.texts
    assert "replaylake train offline --resume 01run" in page.texts
    assert f"tensorboard --logdir '{events}'" in page.texts
    lake.registry.record_run("01run", {**record, "status": "done"})
    assert not any("--resume" in text for text in reader.page("/runs/01run").texts)


def test_a_sweep_is_drawn_from_options_to_values(sweep_lake, reader_type, hostile):
    page = reader_type(sweep_lake).page("/runs/01sweep")
    assert "Curves" not in page.texts
    assert "learning_rate (log)" in page.texts
    lines = [attributes for tag, attributes in page.tags if tag == "polyline"]
    drawn = [one["points"] for one in lines if one["class"].startswith("line")]
    # Rate in the middle of its axis, the second of two sizes and notes, the least value: the best,
    # and so the last. Trial 2 has no value yet.
    assert drawn == [
        "50,96 150,73 250,73 350,4",
        "50,4 150,73 250,73",
        "50,50 150,27 250,27 350,96",
    ] or drawn == [
        "50,4 150,73 250,73",
        "50,96 150,73 250,73 350,4",
        "50,50 150,27 250,27 350,96",
    ]
    assert lines[-1]["class"] == "line best"
    assert "/runs/01trial" in page.links
    assert any("no value yet" in text for text in page.texts)
    assert any(hostile in text for text in page.texts)
    assert "selection/loss" in page.texts


def test_a_sweep_has_differences_from_its_best_options(sweep_lake, reader_type, hostile):
    lake = sweep_lake
    before = next(one for one in lake.registry.runs() if one["run_id"] == "01sweep")
    results = [
        {"options": {"note": hostile}, "mean": 0.25, "difference": None},
        {
            "options": {"learning_rate": 1e-5},
            "difference": 0.25,
            "difference_low": -0.125,
            "difference_high": 0.625,
        },
        {"options": {"learning_rate": 0.1}, "difference": 2.5, "difference_low": None},
        {"options": {"learning_rate": 1.0}, "difference": None},
    ]
    try:
        lake.registry.record_run("01sweep", {**before, "results": results})
        page = reader_type(lake).page("/runs/01sweep")
    finally:
        lake.registry.record_run("01sweep", before)
    assert "Differences from the best options" in page.texts
    assert "The intervals are not tests" in " ".join(page.texts)
    assert f"selection/loss minus that of the best: note={hostile}" in page.texts
    rows = page.texts[page.texts.index("learning_rate=1e-05") :]
    assert "0.25 (-0.125 to 0.625)" in rows
    assert "2.5, no interval" in rows
    assert "learning_rate=1" not in rows
    assert "Differences from the best options" not in reader_type(lake).page("/runs/01sweep").texts


def test_a_sweep_without_trials_says_so(sweep_lake, reader_type):
    assert (
        "No trial of this sweep has begun." in reader_type(sweep_lake).page("/runs/02sweep").texts
    )


def test_a_sweep_by_returns_takes_the_closing_evaluation(tmp_path, reader_type):
    lake = open_lake(tmp_path / "lake", create=True)
    record = {"run_id": "s", "status": "done", "combinations": [{"x": 1}, {"x": 2}]}
    lake.registry.record_run("s", {**record, "measure": "selection/environment", "mode": "max"})
    for number, (selected, final) in enumerate(((90.0, 10.0), (80.0, 30.0))):
        trial = {
            "run_id": f"t{number}",
            "status": "done",
            "sweep": {"id": "s", "trial": number, "options": {"x": number}},
            "selection": {"measure": "environment", "value": selected, "update": 1},
            "evaluation": {"mean_return": final},
        }
        lake.registry.record_run(f"t{number}", trial)
    page = reader_type(lake).page("/runs/s")
    assert {"10", "30", "evaluation/return"} <= set(page.texts)
    best = [a["points"] for tag, a in page.tags if a.get("class") == "line best"]
    assert best == ["50,4 150,4"]
