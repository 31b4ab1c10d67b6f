"""A producer's name on several machines: folders for the state of each, and one object store."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import replaylake as rl
from replaylake.datastore.errors import ConfigInvalidError, StorageError
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.online.recorders import producer


@pytest.fixture
def url(bucket):
    return f"s3://{bucket}/lake"


@pytest.fixture
def open_on(url, tmp_path, monkeypatch):
    """Opens a recorder as on a machine of a name."""

    def open_recorder(machine, name="run", **options):
        monkeypatch.setenv("REPLAYLAKE_STATE", str(tmp_path / machine))
        return rl.record_language(url, "math", producer=name, flush_interval_s=3600, **options)

    return open_recorder


def record(recorder, *numbers, answer="x"):
    for number in numbers:
        recorder.record(sequence=number, prompt=str(number), completion=answer)


def read(url):
    text = "select episode_id, action from math.steps order by episode_id"
    return [(row["episode_id"], row["action"]) for row in rl.open(url).sql(text).to_pylist()]


def test_a_name_moves_to_another_machine_once_it_was_closed(open_on, url):
    for machine in ("one", "two", "one"):
        with open_on(machine) as recorder:
            record(recorder, 0, 1)
            with pytest.raises(ConfigInvalidError, match="which another recorder of dataset math"):
                open_on(machine)
    assert read(url) == [("run/0", "x"), ("run/1", "x")]
    # What tells of earlier holders goes.
    storage = rl.open(url).dataset("math").table.storage
    (file,) = storage.files("math/_recorders")
    assert file.path.endswith("/0000000003.json")
    assert json.loads(storage.get(file.path))["at_ms"] == 0
    assert fsck(rl.open(url)).findings == ()


def test_a_second_machine_is_refused_while_the_first_is_alive(open_on):
    with open_on("one") as recorder:
        record(recorder, 0)
        with pytest.raises(ConfigInvalidError, match="expected one recorder at a time") as refused:
            open_on("two")
        assert refused.value.parameter == "producer"
        assert f"process {os.getpid()} of " in str(refused.value)
        assert "counts as dead after 40 s" in str(refused.value)
        open_on("two", "run/rank1").close()


def test_a_damaged_file_of_who_has_a_name_is_refused_by_its_path(open_on, url):
    open_on("one").close()
    storage = rl.open(url).dataset("math").table.storage
    (file,) = storage.files("math/_recorders")
    storage.put(file.path, storage.get(file.path).replace(b'"pid": ', b'"pid": 9'))
    with pytest.raises(
        StorageError, match=rf"{file.path}: .*, expected the holder of a producer's name"
    ):
        open_on("one")
    storage.delete([file.path])
    open_on("one").close()


def test_of_two_machines_that_open_at_once_one_is_refused(open_on, monkeypatch):
    read_all = producer.Producer._read_all
    monkeypatch.setattr(producer.Producer, "_read_all", lambda self, storage: {})
    with (
        open_on("one") as recorder,
        pytest.raises(ConfigInvalidError, match="which opens at this moment"),
    ):
        open_on("two")
    monkeypatch.setattr(producer.Producer, "_read_all", read_all)
    assert recorder.producer == "run"


def test_a_silent_recorder_that_was_taken_for_dead_records_nothing_more(open_on, url, monkeypatch):
    first = open_on("one")
    record(first, 0)
    first.flush()
    record(first, 1)
    monkeypatch.setattr(producer, "STALE_AFTER_S", 0)
    with open_on("two") as second:
        record(second, 0, 1, 2, answer="x")
        with pytest.raises(StorageError, match="another process ended the journal"):
            first.flush()
        with pytest.raises(StorageError, match="another process ended the journal"):
            record(first, 3)
    with pytest.raises(StorageError, match="1 records were not committed, and are stored in"):
        first.close()
    assert read(url) == [("run/0", "x"), ("run/1", "x"), ("run/2", "x")]


def test_a_recorder_whose_heartbeat_finds_another_says_which(open_on, monkeypatch):
    monkeypatch.setattr(producer, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(producer.Producer.__init__, "__kwdefaults__", {"heartbeat_s": 0.02})
    first = open_on("one")
    monkeypatch.setattr(producer, "STALE_AFTER_S", 0)
    second = open_on("two")
    deadline = time.monotonic() + 60
    while first._producer._taken_by is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(ConfigInvalidError, match=rf"process {os.getpid()} of .* has taken over"):
        record(first, 0)
    second.close()
    first.close()


WORKER = """
import sys
import replaylake as rl
recorder = rl.record_language(sys.argv[1], "math", producer="run", flush_interval_s=3600)
for number in range(3):
    recorder.record(sequence=number, prompt=str(number), completion="first")
    if number == 0:
        recorder.flush()
print("recorded", flush=True)
sys.stdin.read()
"""


def test_a_killed_machine_and_its_successor_count_each_rollout_once(
    open_on, url, tmp_path, monkeypatch
):
    rl.open(url, create=True)
    environment = {**os.environ, "REPLAYLAKE_STATE": str(tmp_path / "one"), "OMP_NUM_THREADS": "1"}
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, url],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with worker:
        assert worker.stdout.readline() == "recorded\n"
        with pytest.raises(ConfigInvalidError, match=f"process {worker.pid} of "):
            open_on("two")
        worker.send_signal(signal.SIGKILL)
    with pytest.raises(ConfigInvalidError, match=f"process {worker.pid} of "):
        open_on("two")  # nobody there can know that it was killed
    monkeypatch.setattr(producer, "STALE_AFTER_S", 0)
    with open_on("two") as successor:
        with pytest.raises(rl.ReplayLakeError, match="was recorded under this sequence"):
            record(successor, 0, answer="second")
        record(successor, 1, 2, answer="second")
    # The first machine is there again: what it had acknowledged is kept, and not counted twice.
    open_on("one", "other").close()
    kept = [path for path in (tmp_path / "one").rglob("*.damaged")]
    assert len(kept) == 1
    assert kept[0].read_bytes().count(b"\n") == 2
    assert read(url) == [("run/0", "first"), ("run/1", "second"), ("run/2", "second")]
