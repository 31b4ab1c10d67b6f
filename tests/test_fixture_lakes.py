"""The lakes that earlier releases wrote stay readable, whole, and can be written to."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
from pathlib import Path
from types import ModuleType

import deltalake
import numpy as np
import pytest

import replaylake as rl
from replaylake.cli.main import main
from replaylake.datastore.feedback.join import join_feedback
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.copy.copy import copy
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.serve.client import Client

_FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(params=sorted(path.name for path in _FIXTURES.glob("lake_*") if path.is_dir()))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy: opening a lake may write into it."""
    return Path(shutil.copytree(_FIXTURES / request.param, tmp_path / request.param))


@pytest.fixture
def lake(folder: Path) -> rl.Lake:
    return rl.open(folder)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_lake", _FIXTURES / "make_lake.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_holds_what_it_held(folder: Path, lake: rl.Lake, script: ModuleType) -> None:
    expected = json.loads((_FIXTURES / f"{folder.name}.json").read_text())
    found = json.loads(json.dumps(script.expected(lake), sort_keys=True))
    # Later releases may have more columns and more to say; what was there is there.
    for name, versions in expected["datasets"].items():
        for version, views in versions.items():
            for view, rows in views.items():
                now = found["datasets"][name][version][view]
                kept = [{key: row[key] for key in rows[0]} for row in now] if rows else now
                assert kept == rows, (name, version, view)
    for part in ("feedback", "policies", "quarantine", "sequences"):
        assert found[part] == expected[part], part


def test_it_is_small_and_has_a_part_of_everything(folder: Path, lake: rl.Lake) -> None:
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 400_000
    assert lake.datasets() == ["agents", "events", "live", "robots", "served", "walk"]
    assert [str(tag.name) for tag in lake.tags.list("robots")] == ["first"]
    assert list(folder.rglob("*.checkpoint.parquet"))
    removed = [row for row in lake.dataset("robots").history() if "COMPACT" in row["operation"]]
    assert removed
    for pattern in ("*.tombstones", "checkpoints/*", "_journal/*.jsonl", "priorities/*.npz"):
        assert list(folder.rglob(pattern)), pattern
    kinds = {
        type(space).__name__
        for space in lake.dataset("robots").spec.observation_space.spaces.values()
    }
    assert kinds == {"Box", "Tuple", "Text", "MultiBinary"}


def test_nothing_of_it_is_wrong(lake: rl.Lake) -> None:
    report = fsck(lake, all_versions=True)
    assert report.is_clean
    assert report.num_policies == 3
    assert report.findings == ()


def test_its_tag_replay_and_policy(lake: rl.Lake) -> None:
    assert lake.snapshot("robots@first").num_steps == 6
    assert lake.snapshot("served").replay().num_transitions == 3
    ref = lake.registry.resolve("bc")
    assert (ref.version, ref.selected_by) == (1, "alias champion")
    # Logits of [1, 0] and [-1, 0] under WEIGHTS: (1, -1), (-1, 1).
    act = rl.load_policy(ref.path).act(
        np.array([[1.0, 0.0], [-1.0, 0.0]], np.float32), deterministic=True
    )
    assert act.actions.tolist() == [0, 1]
    # Its logits are its state and minus that, from 0 on.
    policy = rl.load_policy(lake.registry.resolve("counting").path)
    act = policy.act(np.zeros((2, 2), np.float32), policy.initial_state(2))
    np.testing.assert_array_equal(act.state, np.ones((2, 1)))
    assert policy.act(np.zeros((2, 2), np.float32), act.state).actions.tolist() == [0, 0]


def test_what_a_killed_server_had_answered_is_committed(lake: rl.Lake, script: ModuleType) -> None:
    count = "SELECT count(*) FROM live.decisions"
    assert lake.sql(count).to_pylist() == [{"count_star()": 0}]
    join_feedback(lake, "live")
    assert lake.sql(count).to_pylist() == [{"count_star()": script.NUM_JOURNALED}]


def test_a_key_stays_unique_and_a_deleted_person_deleted(
    folder: Path,
    tmp_path: Path,
    script: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later log with a row that is stored, two rows of the deleted person, and a new row."""
    log = tmp_path / "later.csv"
    deleted = script.DELETED_USER
    rows = ["e0,u0,0.0,a,True", f"e2,{deleted},0.25,a,False", f"e77,{deleted},1,b,True"]
    header = "event_id,user_id,hour,shown,clicked,done"
    log.write_text("".join(f"{row},true\n" for row in [*rows, "e78,u7,1,b,True"]))
    log.write_text(f"{header}\n{log.read_text()}")
    monkeypatch.setenv("REPLAYLAKE_LAKE", str(folder))
    mapping = "--map episode_id=event_id --map observation=hour --map action=shown "
    mapping += "--map reward=clicked --map terminated=done"
    assert main(shlex.split(f"ingest {log} --dataset events {mapping} --json")) == 0
    receipt = json.loads(capsys.readouterr().out)
    counts = {"committed": 1, "already_present": 1, "deleted_before": 2, "read": 4, "rejected": 0}
    assert receipt["steps"] == counts
    assert receipt["keys"]["duplicates"] == 1


def test_saved_priorities_are_restored(lake: rl.Lake) -> None:
    view = lake.snapshot("walk").replay()
    restored = view.prioritized(8, seed=0, restore="learner").sample()
    np.testing.assert_array_equal(restored.indices, view.prioritized(8, seed=0).sample().indices)


@pytest.mark.slow
def test_it_is_served(lake: rl.Lake, script: ModuleType, held_port: int) -> None:
    """Over HTTP, by a policy with a state; the journal of the killed server is committed too."""
    options = ("--log-to", "live", "--server", "uvicorn", "--port", held_port)
    server = script._start_command(lake, "serve", "counting", *options)
    try:
        script._wait_for(lambda: script._is_ready(held_port))
        with Client(f"http://127.0.0.1:{held_port}") as client:
            first = client.act([0.0, 0.0], episode_id="visit-2", step=0)
            second = client.act([0.0, 0.0], episode_id="visit-2", step=1, state=first.state)
    finally:
        server.terminate()
        server.wait(120)
    assert second.action == 0
    count = lake.sql("SELECT count(*) AS n FROM live.decisions").to_pylist()
    assert count == [{"n": script.NUM_JOURNALED + 2}]


@pytest.mark.slow
def test_a_killed_run_is_resumed(
    folder: Path, lake: rl.Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLAYLAKE_LAKE", str(folder))
    # A checkout dates the file of now; the run counts as dead an hour after its last heartbeat.
    (heartbeat,) = folder.rglob("heartbeat.json")
    os.utime(heartbeat, (heartbeat.stat().st_mtime - 3600,) * 2)
    (run,) = lake.sql("SELECT run_id, status FROM runs").to_pylist()
    assert run["status"] == "running"
    assert main(["train", "offline", "--resume", run["run_id"]]) == 0
    (run,) = lake.sql("SELECT run_id, status FROM runs").to_pylist()
    assert run["status"] == "done"
    assert lake.registry.resolve("walker").version == 1


def test_it_goes_on(lake: rl.Lake, tmp_path: Path, script: ModuleType) -> None:
    """Write to it, compact it, copy it and join its feedback with the code of today."""
    robots = lake.dataset("robots")
    before = robots.snapshot().num_steps
    commit = robots.append(
        [script._robot_episode("new", "left", extras={"note": ["a", "b", "c"]})],
        producer="p",
        sequence=9,
    )
    assert not commit.already_present
    assert robots.append(
        [script._robot_episode("a", "left")], producer="p", sequence=0
    ).already_present
    compact(lake, "robots", open_s=0.0)
    assert robots.snapshot().num_steps == before + 3
    assert lake.snapshot("robots@first").num_steps == 6
    assert join_feedback(lake, "served", now_s=script.NOW_S + 60).steps == 0
    other = rl.open(tmp_path / "other", create=True)
    copy(lake, "robots", other)
    query = script.QUERIES["steps"]
    assert other.snapshot("robots").sql(query).equals(lake.snapshot("robots").sql(query))
    assert fsck(lake).is_clean


def test_another_engine_reads_it(folder: Path, lake: rl.Lake) -> None:
    for name in ("robots", "served"):
        table = deltalake.DeltaTable(str(folder / name))
        assert table.to_pyarrow_table().num_rows == lake.snapshot(name).num_steps


def _add_commit_of_the_future(log: Path) -> None:
    """Commit what a later version would: a table of a format that is not known yet."""
    texts = [path.read_text() for path in sorted(log.glob("*.json"))]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    metadata = next(line["metaData"] for line in reversed(lines) if "metaData" in line)
    metadata["configuration"] |= {
        "replaylake.format_version": "99",
        "replaylake.written_by": "9.9.0",
    }
    version = int(max(path.stem for path in log.glob("[0-9]*.json"))) + 1
    (log / f"{version:020d}.json").write_text(json.dumps({"metaData": metadata}) + "\n")


@pytest.mark.parametrize("whose", ["_lake", "served"])
@pytest.mark.parametrize(
    "command",
    [
        "show served",
        "sql 'select count(*) from served.steps'",
        "ingest {log} --dataset served",
        "datasets delete served --where 'num_steps > 0' --yes",
        "maintain compact served",
        "feedback join served",
        "train offline served --algorithm bc --policy p",
        "serve bc@champion --log-to served --check",
    ],
)
def test_a_lake_from_the_future_is_refused_and_untouched(
    folder: Path,
    tmp_path: Path,
    whose: str,
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = tmp_path / "log.csv"
    log.write_text("episode_id,observation,action,reward,terminated\na,1,0,1,true\n")
    _add_commit_of_the_future(folder / whose / "_delta_log")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setenv("REPLAYLAKE_LAKE", str(folder))
    assert main(shlex.split(command.format(log=log))) == 1
    said = capsys.readouterr()
    assert "ReplayLake 9.9.0 or later" in said.err + said.out
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
