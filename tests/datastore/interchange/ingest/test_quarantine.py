"""The quarantine: what the door refused is there, whole, with its reasons, once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import NotFoundError, QueryRefusedError, SourceInvalidError
from replaylake.datastore.interchange.formats.format import Finding, ReadOptions, RejectedEpisode
from replaylake.datastore.interchange.ingest.ingest import NothingValidError, ingest
from replaylake.datastore.interchange.ingest.inspection import IngestProgress
from replaylake.datastore.interchange.ingest.quarantine import quarantine
from replaylake.datastore.interchange.ingest.receipt import Counts
from replaylake.datastore.lake.dataset import REJECTED_SCHEMA, Dataset
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.delete import delete
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.purge.purge import purge
from replaylake.datastore.maintenance.trim import trim
from replaylake.datastore.maintenance.vacuum import vacuum

_HEADER = "episode_id,step,observation,action,reward,terminated,note\n"
_ABSURDLY_LATE_MS = 1 << 43  # all that vacuum looks at is older than this


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _rows(name: str, num: int = 2, reward: str = "1.0") -> str:
    return "".join(f"{name},{t},0.5,1,{reward},{int(t == num - 1)},n{t}\n" for t in range(num))


def _csv(folder: Path, text: str, name: str = "log.csv") -> Path:
    (folder / name).write_text(_HEADER + text)
    return folder / name


def _quarantined(lake: Lake, columns: str = "*") -> list[dict[str, Any]]:
    text = f"select {columns} from log.quarantine order by episode_id, row_number"
    rows: list[dict[str, Any]] = lake.sql(text).to_pylist()
    return rows


def test_a_rejected_episode_is_there_row_by_row_with_its_reasons(
    lake: Lake, tmp_path: Path
) -> None:
    receipt = ingest(lake, [_csv(tmp_path, _rows("a") + _rows("b", reward="nan"))], "log")
    assert receipt.episodes == Counts(committed=1, rejected=1)
    assert receipt.num_quarantined == 2
    first, second = _quarantined(lake)
    assert json.loads(first["row"]) == {
        "episode_id": "b",
        "step": 0,
        "observation": 0.5,
        "action": 1,
        "reward": "NaN",
        "terminated": 0,
        "note": "n0",
    }
    prefix = receipt.content_hash[:16]
    assert second["episode_id"] == f"{prefix}/b"
    assert (second["source_episode_id"], second["agent_id"]) == ("b", "")
    assert (second["row_number"], second["file"], second["file_row"]) == (1, "log.csv", 3)
    assert second["checks"] == ["not_finite"]
    assert "log.csv row 2, column 'reward': found NaN" in second["reasons"][0]
    assert second["producer"] == f"ingest/{receipt.content_hash[:32]}"
    joined = lake.sql(
        "select c.num_rejected, (q.row->>'$.reward')::double as r from log.quarantine q "
        "join commits c using (producer) where row_number = 0"
    )
    assert joined.column("num_rejected").to_pylist() == [1]
    assert np.isnan(joined.column("r").to_pylist()[0])


def test_another_engine_reads_it(lake: Lake, tmp_path: Path) -> None:
    ingest(lake, [_csv(tmp_path, _rows("a") + _rows("b", reward="inf"))], "log")
    table = DeltaTable(str(lake.dataset("log").path / "_rejected")).to_pyarrow_table()
    assert [json.loads(row)["reward"] for row in table.column("row").to_pylist()] == [
        "Infinity"
    ] * 2


def test_nothing_of_a_row_is_lost(lake: Lake, tmp_path: Path) -> None:
    """Nested values, bytes, times, large integers and nulls, as JSON says them."""
    table = pa.table(
        {
            "episode_id": ["a", "b"],
            "observation": [[0.5, 1.0], [float("nan"), -float("inf")]],
            "action": [0, 1],
            "reward": [1.0, 2.0],
            "frame": pa.array([b"\x00\xff", b"\x01"]),
            "info": pa.array([{"k": [1, None]}, {"k": [2**60, 3]}]),
            "at": pa.array([0, 1_700_000_000_123_456_000], pa.timestamp("ns", tz="UTC")),
            "none": pa.array([None, None], pa.string()),
        }
    )
    pq.write_table(table, tmp_path / "log.parquet")
    ingest(lake, [tmp_path / "log.parquet"], "log")
    (found,) = _quarantined(lake)
    row = json.loads(found["row"])
    assert row["observation"] == ["NaN", "-Infinity"]
    assert row["frame"] == {"base64": "AQ=="}
    assert row["info"] == {"k": [2**60, 3]}
    assert row["at"].endswith("123456000Z")
    assert row["none"] is None


def test_what_the_spaces_refuse_is_there_too(lake: Lake, tmp_path: Path) -> None:
    log = _csv(tmp_path, _rows("a") + _rows("b").replace("b,1,0.5", "b,1,1.5"))
    spaces: dict[str, Any] = {
        "observation_space": Box((1,), "float32", 0.0, 1.0),
        "action_space": Discrete(2),
    }
    receipt = ingest(lake, [log], "log", **spaces)
    (check,) = [check for check in receipt.checks if check.outcome == "rejected"]
    assert (check.name, check.num_episodes, check.num_rows) == ("space", 1, 1)
    assert "observation at step 1: found [1.5]" in check.example
    assert "log.csv row 2" in check.example
    _, second = _quarantined(lake)
    assert (second["file"], second["file_row"], second["checks"]) == ("log.csv", 3, ["space"])
    row = json.loads(second["row"])
    assert (row["step"], row["observation"], row["terminated"]) == (1, 1.5, 1)  # as in the log
    assert row["note"] == "n1"


def test_every_row_has_the_names_and_values_of_the_log(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of episodes that were refused as laid out: by their spaces, or read a second time."""
    log = tmp_path / "log.csv"
    header = "user,t,x,y,shown,payoff,last,color\n"
    good = [f"u{i},{t},0.5,0.25,1,1.0,{t},red\n" for i in range(3) for t in range(2)]
    good[2] = "u1,0,0.5,7.5,1,1.0,0,red\n"
    log.write_text(header + "".join(good))
    mapping = {"episode_id": "user", "observation": "x,y", "action": "shown", "reward": "payoff"}
    options = ReadOptions(mapping={**mapping, "terminated": "last"}, gaps="split")
    spaces: dict[str, Any] = {
        "observation_space": Box((2,), "float32", 0.0, 1.0),
        "action_space": Discrete(2),
    }
    expected = [
        dict(user="u1", t=0, x=0.5, y=7.5, shown=1, payoff=1.0, last=0, color="red"),
        dict(user="u1", t=1, x=0.5, y=0.25, shown=1, payoff=1.0, last=1, color="red"),
    ]
    ingest(lake, [log], "log", options=options, **spaces)
    assert [json.loads(row["row"]) for row in _quarantined(lake)] == expected
    monkeypatch.setattr("replaylake.datastore.interchange.ingest.inspection._KEEP_BYTES", 0)
    monkeypatch.setattr("replaylake.datastore.interchange.ingest.inspection._FETCH_ROWS", 1)
    again = open_lake(tmp_path / "again", create=True)
    ingest(again, [log], "log", options=options, **spaces)
    assert [json.loads(row["row"]) for row in _quarantined(again)] == expected


def test_a_source_too_large_to_keep_is_read_again(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replaylake.datastore.interchange.ingest.inspection._KEEP_BYTES", 0)
    spaces: dict[str, Any] = {
        "observation_space": Box((1,), "float32", 0.0, 1.0),
        "action_space": Discrete(2),
    }
    text = _rows("a") + _rows("b", reward="nan") + _rows("c").replace("0.5", "1.5") + _rows("d")
    receipt = ingest(lake, [_csv(tmp_path, text)], "log", **spaces)
    assert receipt.episodes == Counts(committed=2, rejected=2)
    found = _quarantined(lake, "source_episode_id, checks, file_row")
    assert [tuple(row.values()) for row in found] == [
        ("b", ["not_finite"], 2),
        ("b", ["not_finite"], 3),
        ("c", ["space"], 4),
        ("c", ["space"], 5),
    ]


def test_the_same_again_adds_nothing(lake: Lake, tmp_path: Path) -> None:
    log = _csv(tmp_path, _rows("a") + _rows("b", reward="nan"))
    ingest(lake, [log], "log")
    before = _quarantined(lake)
    again = ingest(lake, [log], "log")
    assert (again.num_quarantined, again.version) == (0, None)
    assert _quarantined(lake) == before


def test_an_ingest_cut_at_any_commit_leaves_each_row_once(lake: Lake, tmp_path: Path) -> None:
    class Cut(Exception):
        pass

    good = "".join(_rows(f"e{i}", 3) for i in range(4))
    log = _csv(tmp_path, _rows("bad", reward="nan") + good + _rows("worse", reward="inf"))
    for stop in (6, 12):  # after the first commit, and after the last

        def cut(progress: IngestProgress, stop: int = stop) -> None:
            if progress.stage == "commit" and progress.num_steps == stop:
                raise Cut

        with pytest.raises(Cut):
            ingest(lake, [log], "log", commit_steps=4, on_progress=cut)
        # What is complete has its quarantine: the last commit comes after it.
        assert len(_quarantined(lake)) == (4 if stop == 12 else 0)
    ingest(lake, [log], "log", commit_steps=4)
    assert [row["source_episode_id"] for row in _quarantined(lake)] == ["bad"] * 2 + ["worse"] * 2
    assert lake.dataset("log").snapshot().num_steps == 12


def test_a_cut_between_quarantine_and_last_commit_leaves_each_row_once(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cut(Exception):
        pass

    append, num_appends = Dataset.append, 0

    def cut(*arguments: Any, **named: Any) -> Any:
        nonlocal num_appends
        num_appends += 1
        if num_appends == 2:
            raise Cut
        return append(*arguments, **named)

    log = _csv(tmp_path, _rows("a") + _rows("c") + _rows("b", reward="nan"))
    with monkeypatch.context() as patched:
        patched.setattr("replaylake.datastore.lake.dataset.Dataset.append", cut)
        with pytest.raises(Cut):
            ingest(lake, [log], "log", commit_steps=2)
    assert len(_quarantined(lake)) == 2
    receipt = ingest(lake, [log], "log", commit_steps=2)
    assert (receipt.episodes, receipt.num_quarantined) == (Counts(1, 1, 1), 0)
    assert len(_quarantined(lake)) == 2


def test_a_cut_before_the_first_commit_leaves_each_row_once(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    log = _csv(tmp_path, _rows("a") + _rows("b", reward="nan"))
    with monkeypatch.context() as patched:
        patched.setattr("replaylake.datastore.lake.dataset.Dataset.append", cut)
        with pytest.raises(KeyboardInterrupt):
            ingest(lake, [log], "log")
    assert not lake.dataset("log").exists()
    receipt = ingest(lake, [log], "log")
    assert (receipt.episodes, receipt.num_quarantined) == (Counts(committed=1, rejected=1), 0)
    assert len(_quarantined(lake)) == 2


def test_all_rejected_makes_no_dataset(tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake", create=True)
    before = sorted(path for path in (tmp_path / "lake").rglob("*"))
    with pytest.raises(
        NothingValidError, match=r"no valid episode.*not_finite in 2.*Nothing was"
    ) as e:
        ingest(lake, [_csv(tmp_path, _rows("a", reward="nan") + _rows("b", reward="nan"))], "log")
    assert isinstance(e.value, SourceInvalidError)
    assert [(check.name, check.num_episodes) for check in e.value.checks][:1] == [("not_finite", 2)]
    assert sorted(path for path in (tmp_path / "lake").rglob("*")) == before


def test_all_rejected_into_a_dataset_is_quarantined(lake: Lake, tmp_path: Path) -> None:
    ingest(lake, [_csv(tmp_path, _rows("a"))], "log")
    assert _quarantined(lake) == []
    bad = _csv(tmp_path, _rows("b", reward="nan"), "bad.csv")
    receipt = ingest(lake, [bad], "log")
    assert (receipt.version, receipt.episodes, receipt.num_quarantined) == (
        None,
        Counts(rejected=1),
        2,
    )
    assert any("nothing to commit" in note for note in receipt.notes)
    assert ingest(lake, [bad], "log").num_quarantined == 0
    assert len(_quarantined(lake)) == 2


def test_the_commit_keeps_the_checks_without_ids_or_values(lake: Lake, tmp_path: Path) -> None:
    log = _csv(tmp_path, _rows("anna@example.com") + _rows("secret-person", reward="nan"))
    ingest(lake, [log], "log")
    (commit,) = [c for c in lake.dataset("log").history() if "checks" in c]
    assert commit["checks"][0] == {
        "name": "not_finite",
        "outcome": "rejected",
        "num_episodes": 1,
        "num_rows": 2,
        "example": "log.csv row 2",
        "advice": "",
    }
    assert "secret-person" not in json.dumps(lake.dataset("log").history())
    assert "secret-person" not in json.dumps(lake.dataset("log").rejected.history())


def _with_rejected(lake: Lake, folder: Path) -> None:
    text = _rows("kept-one") + _rows("secret-person", reward="nan") + _rows("other-bad", 3, "inf")
    ingest(lake, [_csv(folder, text)], "log")


@pytest.mark.slow
def test_delete_takes_quarantined_episodes_out(lake: Lake, tmp_path: Path) -> None:
    _with_rejected(lake, tmp_path)
    where = "source_episode_id = 'secret-person'"
    told = delete(lake, "log", where, dry_run=True)
    assert (told.num_episodes, told.num_steps, told.num_rejected) == (1, 0, 2)
    assert len(_quarantined(lake)) == 5
    assert delete(lake, "log", where).num_rejected == 2
    assert {row["source_episode_id"] for row in _quarantined(lake)} == {"other-bad"}
    # What is not known of them selects none: an end, a return.
    assert delete(lake, "log", "not complete", dry_run=True).num_rejected == 0
    assert delete(lake, "log", "num_steps = 3").num_rejected == 3


@pytest.mark.slow
def test_purge_leaves_no_trace_of_a_quarantined_id(lake: Lake, tmp_path: Path) -> None:
    _with_rejected(lake, tmp_path)
    delete(lake, "log", "source_episode_id = 'secret-person'")
    assert _traces(lake, b"secret-person"), "earlier versions keep it"
    done = purge(lake, "log", "source_episode_id = 'secret-person'")
    assert done.is_proven
    assert done.num_episodes == 1
    assert not _traces(lake, b"secret-person")
    assert len(_quarantined(lake)) == 3
    assert lake.dataset("log").snapshot().num_steps == 2


def _lines(name: str, number: int, **fields: Any) -> list[dict[str, Any]]:
    """Two steps; that of the number -1 has a reward that is not there."""
    return [
        {"episode_id": name, "step": t, "observation": [0.5], "action": 1,
         "reward": None if number < 0 else 1.0, "terminated": t == 1, **fields}
        for t in range(2)
    ]  # fmt: skip


def _jsonl(folder: Path, lines: list[dict[str, Any]], name: str = "log.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / name


@pytest.mark.slow
@pytest.mark.parametrize("column", ["policy", "model", 'the "best"/~one'])
def test_a_policy_selects_from_quarantine_whatever_the_log_calls_it(
    lake: Lake, tmp_path: Path, column: str
) -> None:
    lines = [
        *_lines("good-one", 1, **{column: "anna"}),
        *_lines("bad-one", -1, **{column: "anna"}),
        *_lines("bad-two", -1, **{column: "bert"}),
        *_lines("bad-three", -1, **{column: None}),
    ]
    options = ReadOptions({"policy": column} if column != "policy" else {})
    ingest(lake, [_jsonl(tmp_path, lines)], "log", options=options)
    assert json.loads(_quarantined(lake)[0]["mapping"])["policy"] == column
    done = purge(lake, "log", "policy = 'anna'")
    assert (done.num_episodes, done.num_undecided, done.is_proven) == (2, 0, True)
    assert not _traces(lake, b"anna")
    left = {row["source_episode_id"] for row in _quarantined(lake)}
    assert left == {"bad-two", "bad-three"}
    assert delete(lake, "log", "policy IS NULL").num_rejected == 2


@pytest.mark.parametrize(
    ("where", "num_episodes", "num_undecided"),
    [
        ("user_id = 7", 1, 1),
        ("any(user_id = 7)", 1, 1),
        ("all(user_id = 7)", 1, 1),
        ("any(user_id = 7 and source_episode_id = 'bad-two')", 0, 0),
        ("not any(user_id = 7)", 1, 1),
        ("any(user_id = 7) and source_episode_id <> 'bad-three'", 1, 0),
        ("any(user_id = 8) or any(reward > 0)", 1, 2),
        ("user_id in (select user_id from log.steps where user_id = 7)", 1, 1),
    ],
)
def test_the_logs_own_columns_select_from_quarantine(
    lake: Lake, tmp_path: Path, where: str, num_episodes: int, num_undecided: int
) -> None:
    lines = _lines("good-one", 1, user_id=7)
    lines += _lines("bad-one", -1, user_id=7) + _lines("bad-two", -1, user_id=8)
    lines += _lines("bad-three", -1, user_id="seven")  # not a number as in the dataset
    ingest(lake, [_jsonl(tmp_path, lines)], "log")
    where = f"({where}) AND source_episode_id <> 'good-one'"
    told = delete(lake, "log", where, dry_run=True)
    assert (told.num_episodes, told.num_undecided) == (num_episodes, num_undecided)


def test_what_the_spaces_refuse_is_selected_by_its_policy(lake: Lake, tmp_path: Path) -> None:
    lines = _lines("good-one", 1, policy="bert") + _lines("bad-one", 1, policy="anna")
    lines[-1]["action"] = 9
    spaces = {"observation_space": Box((1,)), "action_space": Discrete(2)}
    ingest(lake, [_jsonl(tmp_path, lines)], "log", **spaces)
    assert len(_quarantined(lake)) == 2
    assert purge(lake, "log", "policy = 'anna'").is_proven
    assert _quarantined(lake) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "num_episodes", "num_undecided"),
    [
        ('"return" < 1.5', 0, 2),
        ("policy = 'anna' AND complete", 0, 1),
        ("policy = 'anna' OR complete", 1, 1),
        ("NOT (policy = 'anna' OR terminated)", 0, 1),
        ("policy = 'carl' AND complete", 0, 0),
        ("source_episode_id = 'bad-one' OR ended_at IS NULL AND false", 1, 0),
        ("episodes::VARCHAR LIKE '%anna%'", 0, 2),
    ],
)
def test_what_a_condition_cannot_decide_is_told_and_left(
    lake: Lake, tmp_path: Path, where: str, num_episodes: int, num_undecided: int
) -> None:
    good = _lines("good-one", 1, policy="dora")
    bad = _lines("bad-one", -1, policy="anna") + _lines("bad-two", -1, policy="bert")
    ingest(lake, [_jsonl(tmp_path, good + bad)], "log")
    where = f"({where}) AND source_episode_id <> 'good-one'"
    told = delete(lake, "log", where, dry_run=True)
    assert (told.num_episodes, told.num_undecided) == (num_episodes, num_undecided)
    seen = purge(lake, "log", where, dry_run=True)
    assert (seen.num_episodes, seen.num_undecided) == (num_episodes, num_undecided)
    done = purge(lake, "log", where)
    assert (done.num_episodes, done.num_undecided) == (num_episodes, num_undecided)
    assert done.is_proven == (num_undecided == 0)
    assert len(_quarantined(lake)) == 4 - 2 * num_episodes
    again = delete(lake, "log", where)
    assert (again.num_episodes, again.num_undecided) == (0, num_undecided)


@pytest.mark.slow
def test_an_episode_of_several_policies_is_told(lake: Lake, tmp_path: Path) -> None:
    """Rows without an episode id lie together, whoever they are of."""
    first, second = _lines("bad-one", -1)
    lines = [*_lines("good-one", 1, policy="dora"), {**first, "policy": "anna"}]
    ingest(lake, [_jsonl(tmp_path, [*lines, {**second, "policy": "bert"}])], "log")
    for name in ("anna", "bert"):
        done = purge(lake, "log", f"policy = '{name}'")
        assert (done.num_episodes, done.num_undecided, done.is_proven) == (0, 1, False)
    assert len(_quarantined(lake)) == 2


def test_a_version_that_is_no_number_is_not_known(lake: Lake, tmp_path: Path) -> None:
    ingest(lake, [_csv(tmp_path, _rows("a"))], "log")
    rejected = [
        RejectedEpisode(
            f"version-{value}",
            1,
            (Finding("not_whole", "row 0"),),
            rows=pa.table({"v": [value]}),
            mapping={"policy_version": "v"},
        )
        for value in ("2", "3", "two")
    ]
    quarantine(lake.dataset("log"), rejected, producer="stream/1", sequence=0)
    done = delete(lake, "log", "min_policy_version = 2")
    assert (done.num_rejected, done.num_undecided) == (1, 1)
    left = {row["source_episode_id"] for row in _quarantined(lake)}
    assert left == {"version-3", "version-two"}


@pytest.mark.slow
def test_rows_from_before_the_mapping_was_kept(lake: Lake, tmp_path: Path) -> None:
    """Our own name in the row is believed; where it is not there, nothing is known."""
    ours = _lines("bad-one", -1, policy="anna") + _lines("bad-two", -1, policy="bert")
    theirs = _lines("bad-three", -1, who="anna") + _lines("bad-four", -1, who="bert")
    good = _lines("good-one", 1, policy="dora")
    ingest(lake, [_jsonl(tmp_path, good + ours, "a.jsonl")], "other")
    options = ReadOptions({"policy": "who"})
    ingest(lake, [_jsonl(tmp_path, theirs, "b.jsonl")], "other", options=options)
    ingest(lake, [_jsonl(tmp_path, good, "c.jsonl")], "log")
    older = pa.schema([field for field in REJECTED_SCHEMA if field.name != "mapping"])
    rows = lake.dataset("other").rejected.snapshot().read(older.names)
    table = lake.dataset("log").rejected
    table.create(older)
    table.append(pa.Table.from_arrays(rows.columns, schema=older), producer="old", sequence=0)
    told = delete(lake, "log", "policy = 'anna'", dry_run=True)
    assert (told.num_rejected, told.num_undecided) == (2, 2)
    # The next row gives the table its column.
    ingest(lake, [_jsonl(tmp_path, _lines("bad-five", -1, policy="bert"), "d.jsonl")], "log")
    assert "mapping" in table.snapshot().schema.names
    compact(lake, "log", open_s=0)
    done = purge(lake, "log", "policy = 'anna'")
    assert (done.num_episodes, done.num_undecided, done.is_proven) == (1, 2, False)
    assert len(_quarantined(lake)) == 8


def _traces(lake: Lake, text: bytes) -> list[Path]:
    found = []
    for path in Path(lake.path).rglob("*"):
        if path.suffix == ".parquet":
            rows = pq.ParquetFile(path).read().to_pylist()
            data = json.dumps(rows, default=str).encode()
        else:
            data = path.read_bytes() if path.is_file() else b""
        if text in data:
            found.append(path)
    return found


def test_trim_takes_old_quarantined_rows_out(lake: Lake, tmp_path: Path) -> None:
    _with_rejected(lake, tmp_path)
    assert trim(lake, "log", older_than_s=3600).num_rejected == 0
    dry = trim(lake, "log", older_than_s=1, now_ms=_ABSURDLY_LATE_MS, dry_run=True)
    assert dry.num_rejected == 5
    assert trim(lake, "log", older_than_s=1, now_ms=_ABSURDLY_LATE_MS).num_rejected == 5
    assert _quarantined(lake) == []


def test_maintenance_knows_the_table(lake: Lake, tmp_path: Path) -> None:
    for number in range(3):
        text = _rows(f"a{number}") + _rows(f"b{number}", reward="nan")
        ingest(lake, [_csv(tmp_path, text, f"{number}.csv")], "log")
    before = _quarantined(lake)
    (_, rejected) = compact(lake, "log", open_s=0)
    assert (rejected.shards_before, rejected.shards_after) == (3, 1)
    assert _quarantined(lake) == before
    assert vacuum(lake, ["log"], delete=True, now_ms=_ABSURDLY_LATE_MS).garbage
    assert _quarantined(lake) == before
    assert not fsck(lake).findings
    shard = next((lake.dataset("log").path / "_rejected" / "shards").glob("*.parquet"), None)
    if shard is None:
        (shard,) = (lake.dataset("log").path / "_rejected").rglob("*.parquet")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert {finding.check for finding in fsck(lake).findings} >= {"sha256"}


def test_the_view_has_versions_of_its_own(lake: Lake, tmp_path: Path) -> None:
    _with_rejected(lake, tmp_path)
    with pytest.raises(QueryRefusedError, match="quarantine"):
        lake.sql("select * from log.quarantine", at={"log": 1})
    with pytest.raises(NotFoundError):
        lake.sql("select * from nothing.quarantine")


def test_a_writer_of_other_kinds_can_use_it(lake: Lake, tmp_path: Path) -> None:
    ingest(lake, [_csv(tmp_path, _rows("a"))], "log")
    rejected = [
        RejectedEpisode(
            "x", 3, (Finding("gap", "step 1"), Finding("shape", "of 2")), agent_id="left"
        ),
        RejectedEpisode("y", 1, (Finding("gap", "step 7"),), rows=pa.table({"k": [1]})),
    ]
    handle = lake.dataset("log")
    assert quarantine(handle, rejected, producer="stream/1", sequence=4) == 2
    assert quarantine(handle, rejected, producer="stream/1", sequence=4) == 0
    first, second = _quarantined(lake)
    assert (first["agent_id"], first["row"], first["checks"]) == ("left", None, ["gap", "shape"])
    assert (second["episode_id"], second["row"]) == ("y", '{"k": 1}')


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_wrong_value_is_named_by_its_line_too(lake: Lake, tmp_path: Path, kind: str) -> None:
    """An empty line and a cell of several lines part lines from rows."""
    log = tmp_path / f"log.{kind}"
    if kind == "csv":
        text = _rows("a").replace("n0", '"two\nlines"') + "\n" + _rows("b", reward="nan")
        log.write_text(_HEADER + text)
    else:
        row = {"observation": 0.5, "action": 1, "reward": 1.0}
        rows = [{"episode_id": e, "step": t, **row} for e in "ab" for t in range(2)]
        rows[2]["reward"] = None
        log.write_text("\n\n".join(map(json.dumps, rows)))
    ingest(lake, [log], "log")
    first, _ = _quarantined(lake)
    place = "log.csv row 2" if kind == "csv" else "log.jsonl row 2"
    line = 6 if kind == "csv" else 5
    assert first["reasons"][0].startswith(f"{place}, column 'reward': found")
    assert first["reasons"][0].endswith(f"(line {line})")
    assert first["file_row"] == 2


def test_a_space_is_counted_for_observations_and_actions_each(lake: Lake, tmp_path: Path) -> None:
    text = _rows("a") + _rows("b").replace("b,1,0.5,1", "b,1,7.5,4")
    text += _rows("c").replace("0.5", "9.5") + _rows("d").replace("d,0,0.5,1", "d,0,0.5,3")
    spaces: dict[str, Any] = {
        "observation_space": Box((1,), "float32", 0.0, 1.0),
        "action_space": Discrete(2),
    }
    receipt = ingest(lake, [_csv(tmp_path, text)], "log", **spaces)
    found = {check.column: check for check in receipt.checks if check.name == "space"}
    counts = {name: (one.num_episodes, one.num_rows) for name, one in found.items()}
    assert counts == {"observation": (2, 3), "action": (2, 2)}
    assert "episode b: observation at step 1: found [7.5]" in found["observation"].example
    assert "episode b: action at step 1: found 4" in found["action"].example
    both = [row for row in _quarantined(lake) if row["source_episode_id"] == "b"]
    assert (len(both[0]["reasons"]), both[0]["checks"]) == (2, ["space"])
    assert receipt.episodes == Counts(committed=1, rejected=3)
