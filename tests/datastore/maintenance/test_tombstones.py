"""What was deleted stays deleted, whichever way it is sent again, unless it is readmitted."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import (
    EmptyReplayError,
    EpisodeInvalidError,
    QueryRefusedError,
    StorageError,
)
from replaylake.datastore.feedback.decisions import decisions_encoder, ensure_feedback_tables
from replaylake.datastore.feedback.join import join_feedback
from replaylake.datastore.feedback.journal import Journal
from replaylake.datastore.feedback.received_table import (
    encode_received,
    ensure_received_table,
    make_received_piece,
)
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.ingest.stream.lines import LineReader
from replaylake.datastore.interchange.ingest.stream.stream import follow
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.columns import rename_column
from replaylake.datastore.maintenance.copy.copy import copy
from replaylake.datastore.maintenance.delete import delete, readmit
from replaylake.datastore.maintenance.episode_condition import condition_of_ids, find_unknown_ids
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.merge import merge
from replaylake.datastore.maintenance.purge.purge import purge
from replaylake.datastore.maintenance.split import split_by_condition

ANNA, BERT, CARL = "anna-4711-berlin", "bert-0815-bonn", "carl-2020-kiel"
Remove = Callable[[Lake, str], Any]


def _delete(lake: Lake, person: str) -> Any:
    return delete(lake, "d", f"source_episode_id = '{person}'")


def _purge(lake: Lake, person: str) -> Any:
    return purge(lake, "d", f"source_episode_id = '{person}'")


def _episode(name: str, source: str | None = None, **more: Any) -> Episode:
    return Episode(
        name,
        np.zeros((2, 2), np.float32),
        np.zeros(2, np.int64),
        np.ones(2),
        terminated=True,
        source_episode_id=source,
        **more,
    )


def _log(path: Path, people: Sequence[str], **more: Any) -> Path:
    rows = [
        {"episode_id": one, "step": step, "observation": [0.5, step], "action": step % 2,
         "reward": 1.0, "terminated": step == 1, **more}
        for one in people
        for step in range(2)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _people(dataset: Dataset) -> list[str]:
    rows = dataset.snapshot().sql("select distinct source_episode_id as p from steps order by p")
    return [str(name) for name in rows["p"].to_pylist()]


def _stream(lake: Lake, log: Path, **more: Any) -> Any:
    with LineReader(os.open(log, os.O_RDONLY), "-") as lines:
        return follow(lake, lines, "d", flush_every_s=0.0, **more)


@pytest.mark.parametrize("remove", [_delete, _purge])
def test_a_cumulative_file(lake: Lake, tmp_path: Path, remove: Remove) -> None:
    ingest(lake, [_log(tmp_path / "1.jsonl", [ANNA, BERT])], "d")
    dataset = lake.dataset("d")
    assert remove(lake, ANNA).num_tombstones == 2
    second = _log(tmp_path / "2.jsonl", [ANNA, BERT, CARL])
    receipt = ingest(lake, [second], "d")
    assert receipt.episodes.to_json() == {
        "read": 3, "committed": 2, "rejected": 0, "already_present": 0, "deleted_before": 1,
    }  # fmt: skip
    assert (receipt.steps.committed, receipt.steps.deleted_before) == (4, 2)
    assert "readmit" in receipt.notes[-1]
    info = dataset.commit_info(receipt.version or 0)
    assert (info["num_episodes"], info["num_rejected"], info["num_produced"]) == (2, 1, 3)
    assert _people(dataset) == [BERT, CARL]
    assert ingest(lake, [second], "d").version is None
    # Somebody says so: then she is there, and is sent as anybody is.
    assert ingest(lake, [second], "d", readmit=True).steps.committed == 2
    assert _people(dataset) == [ANNA, BERT, CARL]
    third = ingest(lake, [_log(tmp_path / "3.jsonl", [ANNA, "dora-1999-jena"])], "d")
    assert third.episodes.committed == 2


def test_a_stream(lake: Lake, tmp_path: Path) -> None:
    log = _log(tmp_path / "log.jsonl", [ANNA, BERT])
    _stream(lake, log)
    _delete(lake, ANNA)
    again = _stream(lake, log)
    assert again.lines.to_json() == {
        "read": 4, "committed": 0, "rejected": 0, "already_present": 2, "deleted_before": 2,
    }  # fmt: skip
    # Under another name nothing of it is known but who is in it.
    other = _stream(lake, log, stream="other")
    assert (other.lines.committed, other.lines.deleted_before) == (2, 2)
    assert _people(lake.dataset("d")) == [BERT]
    assert _stream(lake, log, readmit=True).lines.committed == 2
    assert _people(lake.dataset("d")) == [ANNA, BERT]


@pytest.mark.slow
def test_received_steps(lake: Lake) -> None:
    dataset = lake.dataset("d")
    ensure_feedback_tables(dataset, Box((2,)), Discrete(3))
    ensure_received_table(dataset)

    def receive(worker: str) -> None:
        journal = Journal(dataset.received, encode_received, worker=worker)
        for one in (ANNA, BERT):
            journal.append([make_received_piece(_episode(one), dataset.spec, 0).record])
        journal.close()
        join_feedback(lake, "d")

    receive("a")
    assert _people(dataset) == [ANNA, BERT]
    _purge(lake, ANNA)
    receive("b")
    assert _people(dataset) == [BERT]
    # Nor are they at rest in the table that they come through.
    assert set(dataset.received.snapshot().read()["source_episode_id"].to_pylist()) == {BERT}
    assert readmit(lake, "d", f"source_episode_id = '{ANNA}'") == 1
    assert readmit(lake, "d", f"episode_id = 'received/{ANNA}'") == 1
    receive("c")
    assert _people(dataset) == [ANNA, BERT]


@pytest.mark.slow
def test_a_decision_for_someone_deleted_is_not_logged(served: Any) -> None:
    for client in (ANNA, BERT):
        key = served.decide(0, client)
        served.reward(key, 1, ends=True)
    served.run(10)
    _purge(served.lake, ANNA)
    dataset = served.dataset
    rows = dataset.decisions.snapshot().read()
    assert set(rows["episode_id"].to_pylist()) == {BERT}
    records = [
        json.dumps({"decision_id": served.signer.issue("bc", 1, 1)[0], "request_id": None,
                    "episode_id": client, "timestamp": 1, "policy": "bc", "policy_version": 1,
                    "observation": [0.0, 0.5], "action": 1, "log_prob": -0.25,
                    "deterministic": False}).encode()
        for client in (ANNA, BERT)
    ]  # fmt: skip
    journal = Journal(dataset.decisions, decisions_encoder(dataset), worker="w")
    journal.append(records)
    journal.close()
    after = dataset.decisions.snapshot().read()
    assert set(after["episode_id"].to_pylist()) == {BERT}
    assert after.num_rows == rows.num_rows + 1


def test_a_replayed_producer(lake: Lake) -> None:
    dataset = lake.dataset("d")
    episodes = [_episode(ANNA, agent_id="anna"), _episode(BERT, agent_id="bert")]
    dataset.append(episodes)
    assert delete(lake, "d", "agent_id = 'anna'").num_tombstones == 2
    again = dataset.append(episodes, producer="p", sequence=0)
    assert (again.num_episodes, again.num_steps) == (1, 2)
    assert (again.num_deleted_before, again.num_deleted_before_steps) == (1, 2)
    # All the agents of an episode go with one of them.
    pair = [_episode("pair-of-two", agent_id=name) for name in ("anna", "bert")]
    assert dataset.append(pair).num_deleted_before_steps == 4
    with pytest.raises(EpisodeInvalidError, match="deleted by its agent_id") as error:
        dataset.write(pair)
    assert "anna" not in str(error.value)
    assert dataset.append(pair, readmit=True).num_steps == 4
    assert dataset.append([_episode("other-one", agent_id="anna")]).num_steps == 2


@pytest.mark.slow
def test_which_conditions_keep_out(lake: Lake) -> None:
    """Only what is asked for by its value, and no short number that another log counts to."""
    dataset = lake.dataset("d")
    names = ["a", "b", "12", ANNA]
    dataset.append([_episode(f"x/{name}", name) for name in names])
    for condition in ("episode_id = 'x/a'", "source_episode_id = 'a' AND num_steps = 2"):
        delete(lake, "d", condition)
        assert len(dataset.tombstones) == 0
    assert delete(lake, "d", "'b' = source_episode_id").num_tombstones == 2
    assert purge(lake, "d", "source_episode_id LIKE '1%'").num_tombstones == 1  # x/12
    assert dataset.append([_episode(f"y/{name}", name) for name in names]).num_steps == 6
    with pytest.raises(QueryRefusedError, match="found 'num_steps > 1'"):
        readmit(lake, "d", "num_steps > 1")


@pytest.mark.parametrize("by_file", [False, True], ids=["any", "file of ids"])
def test_a_value_that_some_steps_have_keeps_out(lake: Lake, by_file: bool) -> None:
    dataset = lake.dataset("d")
    users = [_episode(f"e/{user}", extras={"user_id": [user] * 2}) for user in (ANNA, BERT)]
    dataset.append(users)
    where: Any = f"any(user_id = '{ANNA}')"
    delete(lake, "d", condition_of_ids(lake, "d", [ANNA], "user_id") if by_file else where)
    again = [_episode(f"f/{user}", extras={"user_id": [user] * 2}) for user in (ANNA, CARL)]
    assert dataset.append(again).num_deleted_before == 1
    rows = dataset.snapshot().sql("select distinct user_id as u from steps order by u")
    assert rows["u"].to_pylist() == [BERT, CARL]


def test_rows_for_quarantine(lake: Lake, tmp_path: Path) -> None:
    """By the names that the log has, too."""
    ingest(lake, [_log(tmp_path / "1.jsonl", [ANNA, BERT], who="anna")], "d",
           options=ReadOptions({"policy": "who"}))  # fmt: skip
    purge(lake, "d", "policy = 'anna'")
    bad = _log(tmp_path / "2.jsonl", [CARL], who="anna", action=7)
    other = _log(tmp_path / "3.jsonl", ["dora-1"], who="dora", action=7)
    bad.write_text(bad.read_text() + other.read_text())
    receipt = ingest(lake, [bad], "d", options=ReadOptions({"policy": "who"}))
    assert (receipt.episodes.rejected, receipt.num_quarantined) == (2, 2)
    rows = lake.sql("select distinct source_episode_id as p from d.quarantine")["p"].to_pylist()
    assert rows == ["dora-1"]


@pytest.mark.slow
def test_a_backup_from_before(lake: Lake, tmp_path: Path) -> None:
    """Copied back it brings nobody, and learns itself who was deleted."""
    ingest(lake, [_log(tmp_path / "1.jsonl", [ANNA, BERT])], "d")
    backup = open_lake(tmp_path / "backup", create=True)
    copy(lake, "d", backup)
    _purge(lake, ANNA)
    back = copy(backup, "d", lake)
    assert (back.num_steps, back.num_deleted_before_steps) == (0, 2)
    assert _people(lake.dataset("d")) == [BERT]
    assert copy(backup, "d", lake, as_name="e").num_steps == 4  # another dataset is another matter

    noted = copy(lake, "d", backup)
    assert "datasets delete d --again" in noted.notes[-1]
    assert delete(backup, "d", None, dry_run=True).num_steps == 2
    assert delete(backup, "d", None).num_steps == 2
    assert _people(backup.dataset("d")) == [BERT]
    # What has only ever seen the backup knows it, too.
    third = open_lake(tmp_path / "third", create=True)
    old = copy(backup, "d@1", third)
    assert (old.num_steps, old.num_deleted_before_steps) == (2, 2)
    assert third.dataset("d").append([_episode("x", ANNA)]).num_deleted_before == 1
    assert copy(backup, "d@1", third, as_name="whole", readmit=True).num_steps == 4


def test_a_backup_that_is_restored_file_by_file(lake: Lake, tmp_path: Path) -> None:
    ingest(lake, [_log(tmp_path / "1.jsonl", [ANNA, BERT])], "d")
    shutil.copytree(lake.path, tmp_path / "backup")
    _purge(lake, ANNA)
    restored = tmp_path / "restored"
    shutil.copytree(tmp_path / "backup", restored)
    for kept in ("d/_tombstones", "_lake/keys"):
        shutil.copytree(lake.path / kept, restored / kept, dirs_exist_ok=True)
    again = open_lake(restored)
    assert _people(again.dataset("d")) == [ANNA, BERT]
    assert delete(again, "d", None).num_steps == 2
    done = purge(again, "d", None)
    assert (done.num_episodes, done.is_proven, done.num_tombstones) == (1, True, 0)
    assert _people(again.dataset("d")) == [BERT]
    for path in restored.rglob("*"):
        assert path.is_dir() or ANNA.encode() not in path.read_bytes()
    assert purge(again, "d", None).num_episodes == 0


def test_what_is_damaged_lets_nobody_in(lake: Lake) -> None:
    dataset = lake.dataset("d")
    dataset.append([_episode("x", ANNA)])
    _delete(lake, ANNA)
    (file,) = (lake.path / "d/_tombstones").iterdir()
    (key,) = (lake.path / "_lake/keys").iterdir()
    assert key.stat().st_mode & 0o077 == 0
    data = file.read_bytes()
    assert ANNA.encode() not in data
    for path, damaged in ((file, data[:-1]), (file, b"x" + data), (key, b"")):
        whole = path.read_bytes()
        path.write_bytes(damaged)
        with pytest.raises(StorageError, match=path.name):
            open_lake(lake.path).dataset("d").append([_episode("y", ANNA)])
        path.write_bytes(whole)
    assert open_lake(lake.path).dataset("d").append([_episode("y", ANNA)]).num_steps == 0


def test_names_of_files_and_values_that_fill(lake: Lake, tmp_path: Path) -> None:
    """A purge takes them out of the commits, whose effect stays what it was."""
    fill = ReadOptions(fill={"agent_id": "anna"})
    ingest(
        lake,
        [_log(tmp_path / f"{ANNA}_june.jsonl", [ANNA, f"{ANNA}-2"], agent_id=None)],
        "d",
        options=fill,
    )
    ingest(lake, [_log(tmp_path / "others.jsonl", [BERT])], "d")
    dataset = lake.dataset("d")
    before = dataset.commit_info(1)
    assert before["source_names"] == [f"{ANNA}_june.jsonl"]
    done = purge(lake, "d", "agent_id = 'anna'")
    assert (done.num_episodes, done.is_proven) == (2, True)
    after = dataset.commit_info(1)
    assert after.pop("source_names") == ["<deleted>"]
    assert "<deleted>" in [check["example"] for check in after.pop("checks")]
    assert after.pop("read_as")["fill"] == {"agent_id": "<deleted>"}
    assert after.items() <= {**before, "sha256": after["sha256"]}.items()
    assert dataset.commit_info(2)["source_names"] == ["others.jsonl"]
    for path in lake.path.rglob("*"):
        if path.is_file():
            assert ANNA.encode() not in path.read_bytes()
            assert path.suffix == ".parquet" or b"anna" not in path.read_bytes(), path
    assert fsck(lake).is_clean
    assert _people(open_lake(lake.path).dataset("d")) == [BERT]


@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize("remove", [_delete, _purge])
def test_a_deletion_while_an_append_is_in_flight(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, remove: Remove, unique: bool
) -> None:
    dataset = lake.dataset("d")
    dataset.append([_episode(name, name, extras={"key": [name, f"{name}/1"]})
                    for name in (ANNA, BERT)])  # fmt: skip
    if unique:
        dataset.set_unique(["key"])
    real = dataset.table.commit

    def commit(*args: Any, **named: Any) -> Any:
        monkeypatch.setattr(dataset.table, "commit", real)
        assert remove(open_lake(lake.path), ANNA).num_episodes == 1
        return real(*args, **named)

    monkeypatch.setattr(dataset.table, "commit", commit)
    more = [_episode(f"x-{name}", name, extras={"key": [f"x-{name}", f"x-{name}/1"]})
            for name in (ANNA, CARL)]  # fmt: skip
    done = dataset.append(more)
    assert (done.num_steps, done.num_deleted_before, done.num_deleted_before_steps) == (2, 1, 2)
    assert _people(dataset) == [BERT, CARL]
    assert fsck(lake).is_clean


@pytest.mark.parametrize("unique", [False, True])
def test_a_deletion_between_write_and_commit(lake: Lake, unique: bool) -> None:
    dataset = lake.dataset("d")
    dataset.append([_episode(name, name, extras={"key": [name, f"{name}/1"]})
                    for name in (ANNA, BERT)])  # fmt: skip
    if unique:
        dataset.set_unique(["key"])
    anna, carl = (
        dataset.write([_episode(f"x-{name}", name, extras={"key": [f"x-{name}", f"x-{name}/1"]})])
        for name in (ANNA, CARL)
    )
    _delete(lake, ANNA)
    with pytest.raises(EpisodeInvalidError, match="deleted by its episode_id, source"):
        dataset.commit([anna, carl], producer="p", sequence=0)
    assert dataset.commit([carl], producer="p", sequence=0).num_steps == 2
    assert dataset.commit([carl], producer="p", sequence=0).already_present
    assert _people(dataset) == [BERT, CARL]


def test_a_deletion_in_the_target_of_a_copy_in_flight(lake: Lake, tmp_path: Path) -> None:
    lake.dataset("d").append([_episode(name, name) for name in (ANNA, BERT)])
    target = open_lake(tmp_path / "target", create=True)
    copy(lake, "d", target)
    lake.dataset("d").append([_episode(f"x-{name}", name) for name in (ANNA, CARL)])
    done = copy(lake, "d", target, on_progress=lambda *_: _delete(open_lake(target.path), ANNA))
    assert (done.num_steps, done.num_deleted_before_steps) == (2, 2)
    assert _people(target.dataset("d")) == [BERT, CARL]


@pytest.mark.slow
def test_what_merge_and_split_make_refuses_the_same(lake: Lake) -> None:
    lake.dataset("d").append([_episode(name, name) for name in (ANNA, BERT)])
    lake.dataset("e").append([_episode(name, name) for name in (CARL, f"{CARL}-2")])
    _delete(lake, ANNA)
    merged = merge(lake, ["d@1", "e"], "m")
    assert (merged.num_episodes, merged.num_steps) == (3, 6)
    assert [one.num_deleted_before_steps for one in merged.sources] == [2, 0]
    split_by_condition(lake, "m", f"source_episode_id = '{BERT}'", ["p", "q"])
    for name in "mpq":
        done = lake.dataset(name).append([_episode("x", ANNA), _episode("y", "dora-1999-jena")])
        assert (done.num_steps, done.num_deleted_before) == (2, 1)
    assert fsck(lake).is_clean
    # Of an older version, too: it has no row for the first part.
    with pytest.raises(EmptyReplayError):
        split_by_condition(lake, "d@1", f"source_episode_id = '{ANNA}'", ["r", "s"])


@pytest.mark.parametrize(
    ("stored", "where"),
    [
        ([4711.0, None], "person = 4711"),
        ([4711.0, 0.5], ["4711"]),
        ([4711, 12], "person = '04711'"),
    ],
)
def test_a_number_stays_deleted(
    lake: Lake, tmp_path: Path, stored: list[Any], where: str | list[str]
) -> None:
    logs = [
        _log(tmp_path / f"{name}.jsonl", [name], person=value)
        for name, value in zip((ANNA, BERT), stored, strict=True)
    ]
    ingest(lake, logs, "d")
    by = where if isinstance(where, str) else condition_of_ids(lake, "d", where, "person")
    done = delete(lake, "d", by)
    assert (done.num_episodes, done.num_tombstones) == (1, 3)  # the value and two ids
    again = ingest(lake, [_log(tmp_path / "again.jsonl", [CARL], person=stored[0])], "d")
    assert (again.episodes.committed, again.episodes.deleted_before) == (0, 1)
    assert _people(lake.dataset("d")) == [BERT]
    assert find_unknown_ids(lake, "d", ["0.5", "9"], "person") == (
        ["9"] if stored[1] == 0.5 else ["0.5", "9"]
    )


def _of_user(name: str, column: str, user: str) -> Episode:
    return _episode(name, extras={column: np.array([user, user], object)})


def test_a_deletion_by_a_column_holds_under_all_names_of_the_column(lake: Lake) -> None:
    dataset = lake.dataset("d")
    dataset.append([_of_user("a", "user_id", ANNA), _of_user("b", "user_id", BERT)])
    delete(lake, "d", f"user_id = '{ANNA}'")
    rename_column(lake, "d", "user_id", "person")
    rename_column(lake, "d", "person", "customer")
    assert dataset.append([_of_user("c", "customer", ANNA)]).num_steps == 0
    # Logs may go on to use an old name, also where the deletion is by the new one.
    delete(lake, "d", f"customer = '{BERT}'")
    for number, (column, person) in enumerate([("user_id", ANNA), ("user_id", BERT)]):
        assert dataset.append([_of_user(f"d{number}", column, person)]).num_steps == 0
    assert dataset.append([_of_user("e", "user_id", CARL)]).num_steps == 2
    # A copy knows it too.
    other = open_lake(lake.path.parent / "other", create=True)
    copy(lake, "d", other)
    assert other.dataset("d").append([_of_user("f", "user_id", BERT)]).num_steps == 0
    # Somebody says so: then they come in under every name.
    assert dataset.append([_of_user("g", "customer", ANNA)], readmit=True).num_steps == 2
    assert dataset.append([_of_user("h", "user_id", ANNA)]).num_steps == 2
    assert dataset.append([_of_user("i", "user_id", BERT)]).num_steps == 0


def test_a_damaged_renaming_lets_nobody_in(lake: Lake) -> None:
    dataset = lake.dataset("d")
    dataset.append([_of_user("a", "user_id", ANNA)])
    rename_column(lake, "d", "user_id", "person")
    (file,) = (lake.path / "d/_tombstones").iterdir()
    whole = file.read_bytes()
    for damaged in (whole.replace(b"person", b"persom"), whole[:-1], b""):
        file.write_bytes(damaged)
        with pytest.raises(StorageError, match=file.name):
            open_lake(lake.path).dataset("d").append([_of_user("b", "person", BERT)])
