"""Repair: quarantined rows are listed, read again, committed once, and gone from the quarantine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ConfigInvalidError, NotFoundError, QueryRefusedError
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest import repair as module
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.ingest.quarantine_rows import (
    QuarantineSelection,
    clear_quarantine,
    list_quarantine,
    read_quarantine,
)
from replaylake.datastore.interchange.ingest.repair import repair
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake, open_lake

_MAPPING = {
    "episode_id": "user",
    "step": "t",
    "observation": "age,hour",
    "action": "shown",
    "reward": "click",
}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _log(path: Path, num: int = 40, wrong: int = 4, **changed: Any) -> Path:
    """Two rows an episode; of each tenth episode the last click is the text NaN."""
    with path.open("w") as stream:
        for i in range(num):
            for t in range(2):
                row = {"user": f"u{i}", "t": t, "age": 30 + i, "hour": 9.5, "shown": t, "click": 1}
                row |= {"terminated": t == 1, "at": "2026-01-31 12:00:00"}
                if i % (num // wrong) == 1 and t == 1:
                    row |= {"click": "NaN", **changed}
                stream.write(json.dumps(row) + "\n")
    return path


def _ingest(lake: Lake, log: Path, **options: Any) -> Dataset:
    ingest(lake, [log], "log", options=ReadOptions(**{"mapping": _MAPPING, **options}))
    return lake.dataset("log")


def _num_rows(dataset: Dataset) -> int:
    return list_quarantine(dataset).num_rows


def test_a_fix_moves_what_passes_and_leaves_the_rest_once(lake: Lake, tmp_path: Path) -> None:
    dataset = _ingest(lake, _log(tmp_path / "log.jsonl"))
    contents = list_quarantine(dataset)
    assert (contents.num_episodes, contents.num_rows) == (4, 8)
    (reason,) = contents.reasons
    assert (reason.reason, reason.source, reason.num_files) == ("dtype", "log.jsonl", 1)
    assert (reason.num_episodes, reason.num_rows, reason.row) == (4, 8, 2)
    assert "log.jsonl line 4, column 'click': found 'NaN'" in reason.example
    for _ in range(3):  # unchanged, they fail again, and stay once
        receipt = repair(dataset)
        assert (receipt.num_repaired_episodes, receipt.num_failed_rows) == (0, 8)
        assert (receipt.version, receipt.checks[0].name) == (None, "dtype")
        assert _num_rows(dataset) == 8
    fix = (
        "SELECT * REPLACE (CASE WHEN click = 'NaN' THEN '0' ELSE click END::INT AS click) "
        "FROM quarantine WHERE \"user\" <> 'u31'"
    )
    would = repair(dataset, fix=fix, dry_run=True)
    assert (would.num_repaired_episodes, would.num_repaired_rows, would.version) == (3, 6, None)
    assert _num_rows(dataset) == 8
    receipt = repair(dataset, fix=fix)
    assert (receipt.num_repaired_episodes, receipt.num_repaired_rows) == (3, 6)
    assert (receipt.num_failed_episodes, receipt.num_left_rows) == (1, 2)
    assert receipt.version == dataset.snapshot().version
    rows = lake.sql(
        'SELECT source_episode_id AS id, reward, observation, "at", terminated, episode_id '
        "FROM log.steps WHERE source_episode_id IN ('u1', 'u2') ORDER BY id, step"
    ).to_pylist()
    assert [row["reward"] for row in rows] == [1, 0, 1, 1]
    assert rows[1]["observation"] == [31.0, 9.5]
    assert (rows[1]["at"], rows[1]["terminated"]) == ("2026-01-31 12:00:00", True)
    assert rows[1]["episode_id"].partition("/")[0] == rows[2]["episode_id"].partition("/")[0]
    (left,) = {row.source_episode_id for row in read_quarantine(dataset)}
    assert left == "u31"
    again = ingest(lake, [tmp_path / "log.jsonl"], "log", options=ReadOptions(mapping=_MAPPING))
    assert (again.version, again.num_quarantined, _num_rows(dataset)) == (None, 0, 2)


def test_rows_that_a_fix_leaves_alone_keep_their_types(lake: Lake, tmp_path: Path) -> None:
    """One wrong cell makes its column text for SQL; the other rows' cells stay numbers."""
    log = _log(tmp_path / "log.jsonl", age="?")
    dataset = _ingest(lake, log)
    fix = (
        "SELECT * REPLACE (CASE WHEN age = '?' AND \"user\" = 'u1' THEN '50' ELSE age END AS age, "
        "CASE WHEN click = 'NaN' THEN '0' ELSE click END AS click) FROM quarantine"
    )
    assert repair(dataset, fix=fix).num_repaired_episodes == 0  # texts are not taken for numbers
    fix = (
        "SELECT * REPLACE (CASE WHEN \"user\" = 'u1' AND t = 1 THEN 50 "
        "ELSE TRY_CAST(age AS INT) END AS age, TRY_CAST(click AS INT) AS click) FROM quarantine"
    )
    receipt = repair(dataset, fix=fix, options=ReadOptions(fill={"click": "0"}))
    assert (receipt.num_repaired_episodes, receipt.num_failed_episodes) == (1, 3)
    assert receipt.checks[0].name == "missing"


@pytest.mark.parametrize("cut", ["append", "removal"])
def test_a_repair_that_is_killed_is_there_once(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    class Cut(Exception):
        pass

    def stop(*_: Any, **__: Any) -> None:
        raise Cut

    dataset = _ingest(lake, _log(tmp_path / "log.jsonl"))
    fix = "SELECT * REPLACE (t AS click) FROM quarantine"
    with monkeypatch.context() as patched:
        if cut == "append":
            patched.setattr(Dataset, "append", stop)
        else:
            patched.setattr(module, "remove_rows", stop)
        with pytest.raises(Cut):
            repair(dataset, fix=fix)
    assert _num_rows(dataset) == 8
    receipt = repair(dataset, fix=fix)
    assert receipt.num_repaired_episodes == (4 if cut == "append" else 0)
    assert (receipt.num_failed_rows, _num_rows(dataset)) == (0, 0)
    assert lake.sql("SELECT count(*) AS n FROM log.steps").column("n").to_pylist() == [80]


def test_another_mapping_repairs_too(lake: Lake, tmp_path: Path) -> None:
    """Ids that begin again are of several episodes; of decisions each row is one."""
    rows = [f"u{i % 5},{t},{i},0.5,1,{t}" for i in range(6) for t in range(2)]
    log = tmp_path / "log.csv"
    log.write_text("user,t,visit,observation,action,last\n" + "\n".join(rows))
    mapping = {"episode_id": "user", "step": "t", "terminated": "last", "reward": "t"}
    dataset = _ingest(lake, log, mapping=mapping)
    assert list_quarantine(dataset).reasons[0].reason == "id_reused"
    assert repair(dataset).num_failed_episodes == 1
    with pytest.raises(ConfigInvalidError, match="episode_by"):
        repair(
            dataset,
            options=ReadOptions(mapping={"episode_id": "visit"}, episode_by=("user", "visit")),
        )
    receipt = repair(dataset, options=ReadOptions(mapping={"episode_id": "visit"}))
    assert (receipt.num_repaired_episodes, receipt.num_repaired_rows) == (1, 4)
    assert _num_rows(dataset) == 0
    assert lake.sql("SELECT count(*) AS n FROM log.episodes").column("n").to_pylist() == [6]


def test_logs_without_ids_keep_those_that_they_were_given(lake: Lake, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    bad = {3: "nan", 7: "inf"}
    rows = [f"0.5,1,{bad.get(i, i)},{t}" for i in range(9) for t in range(2)]
    log.write_text("observation,action,reward,terminated\n" + "\n".join(rows))
    dataset = _ingest(lake, log, mapping={})
    fix = "SELECT * REPLACE (if(isfinite(reward), reward, -1) AS reward) FROM quarantine"
    assert repair(dataset, fix=fix).num_repaired_episodes == 2
    found = lake.sql('SELECT source_episode_id AS id FROM log.episodes WHERE "return" < 0')
    assert sorted(found.column("id").to_pylist()) == ["3", "7"]


def test_decisions_and_what_an_environment_refused(lake: Lake, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    rows = [f"{0.25 if i % 5 else 7.5},{i % 2},{i},0.5" for i in range(10)]
    log.write_text("context,action,reward,propensity\n" + "\n".join(rows))
    spaces = (Box((1,), "float32", 0.0, 1.0), Discrete(2))
    ingest(
        lake,
        [log],
        "log",
        format="bandit",
        observation_space=spaces[0],
        action_space=spaces[1],
    )
    dataset = lake.dataset("log")
    assert (_num_rows(dataset), list_quarantine(dataset).reasons[0].reason) == (2, "space")
    assert repair(dataset).num_repaired_episodes == 0  # the dataset's bounds hold without `env`
    fix = "SELECT * REPLACE (context / 10 AS context) FROM quarantine"
    assert repair(dataset, fix=fix).num_repaired_episodes == 2
    found = lake.sql("SELECT terminated, behavior_log_prob AS p FROM log.steps ORDER BY reward")
    assert found.column("terminated").to_pylist() == [True] * 10
    assert found.column("p").to_pylist()[0] == pytest.approx(-0.6931, abs=1e-4)


def test_a_fix_that_loses_its_rows_is_refused(lake: Lake, tmp_path: Path) -> None:
    dataset = _ingest(lake, _log(tmp_path / "log.jsonl"))
    for fix, said in (
        ("SELECT click FROM quarantine", "quarantine_id"),
        ("SELECT * FROM quarantine UNION ALL SELECT * FROM quarantine", "several rows"),
        ("SELECT * REPLACE (-1 AS quarantine_id) FROM quarantine", "none of the rows'"),
    ):
        with pytest.raises(ConfigInvalidError, match=said) as error:
            repair(dataset, fix=fix)
        assert error.value.parameter == "fix"
    with pytest.raises(QueryRefusedError):
        repair(dataset, fix="DROP TABLE quarantine")
    assert _num_rows(dataset) == 8


def test_clear_removes_what_is_selected(lake: Lake, tmp_path: Path) -> None:
    dataset = _ingest(lake, _log(tmp_path / "log.jsonl"))
    _ingest(lake, _log(tmp_path / "b.jsonl", num=20, shown=0.5))
    assert {(one.source, one.num_rows) for one in list_quarantine(dataset).reasons} == {
        ("log.jsonl", 8),
        ("b.jsonl", 8),
    }
    chosen = QuarantineSelection(files=("b.jsonl",), episodes=("u1",))
    (first, second) = read_quarantine(dataset, chosen)
    assert (first.file_row, second.file_row, second.row) == (
        2,
        3,
        {
            "user": "u1",
            "t": 1,
            "age": 31,
            "hour": 9.5,
            "shown": 0.5,
            "click": "NaN",
            "terminated": True,
            "at": "2026-01-31 12:00:00",
        },
    )
    assert clear_quarantine(dataset, chosen).num_rows == 2
    assert _num_rows(dataset) == 16
    done = clear_quarantine(dataset, chosen, dry_run=False)
    assert (done.num_episodes, done.num_rows, done.num_left) == (1, 2, 14)
    assert _num_rows(dataset) == 14
    with pytest.raises(ConfigInvalidError, match=r"reasons: found gap, expected .* dtype"):
        clear_quarantine(dataset, QuarantineSelection(reasons=("gap",)), dry_run=False)
    with pytest.raises(NotFoundError, match="u999"):
        read_quarantine(dataset, QuarantineSelection(episodes=("u999",)))
    assert clear_quarantine(dataset, dry_run=False).num_rows == 14
    assert list_quarantine(dataset).reasons == ()
    assert repair(dataset).num_left_rows == 0


def test_a_large_quarantine_is_repaired_part_by_part(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PART_CHARACTERS", 1)
    dataset = _ingest(lake, _log(tmp_path / "log.jsonl"))
    _ingest(lake, _log(tmp_path / "b.jsonl", num=20, wrong=2))
    before = dataset.snapshot().version
    receipt = repair(dataset, fix="SELECT * REPLACE (t AS click) FROM quarantine")
    assert (receipt.num_repaired_episodes, receipt.num_left_rows) == (6, 0)
    assert receipt.version == before + 6  # a commit for each episode
    assert lake.sql("SELECT count(*) AS n FROM log.steps").column("n").to_pylist() == [120]


def test_two_repairs_at_once_store_each_episode_once(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = _ingest(lake, _log(tmp_path / "log.jsonl"))
    fix = "SELECT * REPLACE (0 AS click) FROM quarantine"
    append = Dataset.append
    others: list[Any] = []

    def interrupted(self: Dataset, *given: Any, **named: Any) -> Any:
        monkeypatch.setattr(Dataset, "append", append)
        others.append(repair(open_lake(lake.path).dataset("log"), fix=fix))
        return append(self, *given, **named)

    monkeypatch.setattr(Dataset, "append", interrupted)
    first = repair(dataset, fix=fix)
    assert (others[0].num_repaired_episodes, first.num_repaired_episodes) == (4, 0)
    assert first.notes == ("another repair has committed these rows meanwhile",)
    counts = lake.sql("select count(*) as n, count(distinct episode_id) as e from log.steps")
    assert counts.to_pylist() == [{"n": 80, "e": 40}]


def test_who_was_deleted_is_not_counted_as_repaired(lake: Lake, tmp_path: Path) -> None:
    dataset = _ingest(lake, _log(tmp_path / "log.jsonl"))
    dataset.tombstones.add({"source_episode_id": ["u1"]})
    done = repair(dataset, fix="SELECT * REPLACE (0 AS click) FROM quarantine")
    assert (done.num_repaired_episodes, done.num_left_rows) == (3, 0)
    assert done.notes[0].startswith("1 of these episodes were deleted before")
    rows = lake.sql("select count(*) as n from log.steps where source_episode_id = 'u1'")
    assert rows["n"].to_pylist() == [0]
