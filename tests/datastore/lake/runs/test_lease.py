import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from replaylake.datastore.errors import CommitConflictError, StorageError
from replaylake.datastore.lake.runs import lease as lease_module
from replaylake.datastore.lake.runs.lease import (
    RunLease,
    find_damaged_heartbeats,
    is_active,
    last_heartbeat,
)
from replaylake.datastore.storage.locations import open_storage
from replaylake.datastore.storage.storage import LocalStorage

BLOB = "_lake/runs/r1/heartbeat.json"

HOLDER = """
import sys, time
from replaylake.datastore.storage.locations import open_storage
from replaylake.datastore.lake.runs.lease import RunLease
with RunLease(open_storage(sys.argv[1]), "r1"):
    print("held", flush=True)
    time.sleep(3600)
"""


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path)


def hold(lake):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lake)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    return holder


def from_elsewhere(storage, age_s):
    """Write a heartbeat as a process of another machine would."""
    at_ms = round((time.time() - age_s) * 1000)
    body = {"owner": "o", "host": "far", "pid": 7, "lock": "boot/1/2", "at_ms": at_ms}
    storage.put(BLOB, json.dumps(body).encode())


def test_one_process_at_a_time(storage):
    with RunLease(storage, "r1") as lease:
        lease.confirm()
        assert is_active(storage, "r1")
        with (
            pytest.raises(CommitConflictError, match=rf"process {os.getpid()} .*at work"),
            RunLease(storage, "r1"),
        ):
            pass
        with RunLease(storage, "r2"):
            pass
    assert not is_active(storage, "r1")
    assert last_heartbeat(storage, "r1") is None
    with RunLease(storage, "r1"):
        pass


def test_a_killed_process_lets_go_at_once(tmp_path, storage):
    holder = hold(tmp_path)
    with pytest.raises(CommitConflictError), RunLease(storage, "r1"):
        pass
    assert is_active(storage, "r1")
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert last_heartbeat(storage, "r1").pid == holder.pid
    assert not is_active(storage, "r1")
    with RunLease(storage, "r1") as lease:
        lease.confirm()


def test_a_remote_lake_has_its_lock_on_this_machine(bucket):
    lake = f"s3://{bucket}/lake"
    holder = hold(lake)
    with pytest.raises(CommitConflictError), RunLease(open_storage(lake), "r1"):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    with RunLease(open_storage(lake), "r1"):
        pass


def test_another_machine_counts_as_dead_after_a_silence(storage, monkeypatch):
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)
    from_elsewhere(storage, 20)
    assert is_active(storage, "r1")
    with (
        pytest.raises(
            CommitConflictError, match="process 7 of far at work on it, last heard of 20 s"
        ),
        RunLease(storage, "r1"),
    ):
        pass
    from_elsewhere(storage, lease_module.STALE_AFTER_S + 1)
    at_s = time.time() - lease_module.STALE_AFTER_S - 1
    os.utime(storage.local(BLOB), (at_s, at_s))
    assert not is_active(storage, "r1")
    with RunLease(storage, "r1"):
        assert last_heartbeat(storage, "r1").pid == os.getpid()


def test_another_machine_whose_clock_was_set_back_is_not_taken_for_dead(storage):
    """Its heartbeats tell of an hour ago, but the storage has just got one."""
    from_elsewhere(storage, 3600)
    assert is_active(storage, "r1")
    with pytest.raises(CommitConflictError, match="process 7 of far"), RunLease(storage, "r1"):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("offset_s", [-3600, 3600])
def test_a_clock_that_is_set_meanwhile_moves_no_lease(tmp_path, storage, monkeypatch, offset_s):
    real = time.time
    with RunLease(storage, "r1", heartbeat_s=0.01) as lease:
        monkeypatch.setattr(time, "time", lambda: real() + offset_s)
        first = last_heartbeat(storage, "r1").at_ms
        deadline = time.monotonic() + 60
        while last_heartbeat(storage, "r1").at_ms == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        lease.confirm()
        monkeypatch.setattr(time, "time", real)
        assert is_active(storage, "r1")
        with pytest.raises(CommitConflictError, match="at work"), RunLease(storage, "r1"):
            pass
    holder = hold(tmp_path)
    monkeypatch.setattr(time, "time", lambda: real() + offset_s)
    with pytest.raises(CommitConflictError, match="at work"), RunLease(storage, "r1"):
        pass
    holder.kill()
    holder.wait()
    holder.stdout.close()
    # Its lock is gone, whatever the clock says of its heartbeat.
    with RunLease(storage, "r1"):
        pass


def test_the_heartbeat_goes_on(storage):
    with RunLease(storage, "r1", heartbeat_s=0.01):
        first = last_heartbeat(storage, "r1").at_ms
        deadline = time.monotonic() + 60
        while last_heartbeat(storage, "r1").at_ms == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_who_was_taken_over_gives_up_and_leaves_the_other_alone(storage):
    with RunLease(storage, "r1") as lease:
        from_elsewhere(storage, 0)
        with pytest.raises(CommitConflictError, match="process 7 of far goes on with it"):
            lease.confirm()
        with pytest.raises(CommitConflictError):
            lease.check()
    assert last_heartbeat(storage, "r1").host == "far"


def test_a_heartbeat_of_another_version_is_as_good_as_none(storage):
    storage.put(BLOB, b'{"owner": 1}')
    with RunLease(storage, "r1"):
        assert last_heartbeat(storage, "r1").pid == os.getpid()


def test_those_that_wait_get_it_one_by_one(storage):
    inside, most = [], []

    def work():
        for _ in range(5):
            try:
                with RunLease(storage, "r1"):
                    inside.append(1)
                    most.append(len(inside))
                    inside.pop()
            except CommitConflictError:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1


def test_a_damaged_heartbeat_is_named_and_written_again(storage):
    with RunLease(storage, "r1", heartbeat_s=0.01):
        whole = storage.get(BLOB)
        storage.put(BLOB, whole.replace(b'"pid": ', b'"pid": 1'))
        deadline = time.monotonic() + 60
        while list(find_damaged_heartbeats(storage)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert last_heartbeat(storage, "r1").pid == os.getpid()
    for place in range(0, 8 * len(whole), 3):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        storage.put(BLOB, bytes(data))
        if not list(find_damaged_heartbeats(storage)):
            assert last_heartbeat(storage, "r1").pid == os.getpid(), place
            continue
        with (
            pytest.raises(StorageError, match="again within 15 s; where none is, remove the file"),
            RunLease(storage, "r1"),
        ):
            pass
