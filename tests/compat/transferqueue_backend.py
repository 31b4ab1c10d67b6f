"""TransferQueue with the backend `ReplayLake`; `make compat ONLY=transferqueue` runs it.

Its environment is not that of the other tests. Its roles are processes that this one forks: they
are killed as in a crash, and start within milliseconds.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import pickletools
import random
import re
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["TQ_LOGGING_LEVEL"] = "CRITICAL"
os.environ["TQ_DATA_UPDATE_RESPONSE_TIMEOUT"] = "5"

import pytest
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue.client import TransferQueueClient
from transfer_queue.controller import TransferQueueController
from transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SequentialSampler,
)
from transfer_queue.utils.zmq_utils import ZMQServerInfo

import replaylake as rl
from replaylake.datastore.errors import ReplayLakeError
from replaylake.online.recorders.transferqueue import controller as durable
from replaylake.online.recorders.transferqueue.backend import NAME
from replaylake.online.recorders.transferqueue.event_log import read_state, write_state

_KILLS = int(os.environ.get("REPLAYLAKE_KILLS", "5"))
_ROWS = 4  # of one put, and of one batch
_Controller = TransferQueueController.__ray_metadata__.modified_class


class Queue:
    """A controller in this process and clients of it, without Ray."""

    def __init__(self, folder: Path, sampler: Any = SequentialSampler, **options: Any) -> None:
        self.folder = folder
        self.controller = _Controller(sampler=sampler, polling_mode=True)
        sync_every = options.get("sync_every_put", False)
        self.restored = durable.install(self.controller, str(folder), sync_every)
        self.options = {
            "path": str(folder),
            "attempt": self.restored["attempt"],
            "sync_every_put": sync_every,
        }
        self.client = connect(self.controller.get_zmq_server_info(), self.options)

    def put(self, partition: str = "p", num: int = 4, start: int = 0, **more: Any) -> Any:
        data = TensorDict(
            {"x": torch.arange(start, start + 2 * num).reshape(num, 2), **more}, [num]
        )
        return self.client.put(data, partition_id=partition)

    def fetch(self, num: int = 2, partition: str = "p", task: str = "t") -> list[list[int]]:
        """Return rows that are handed out to a task, none if there are too few."""
        meta = self.client.get_meta(["x"], num, partition, mode="fetch", task_name=task)
        return [row.tolist() for row in self.client.get_data(meta)["x"]] if meta.size else []

    def close(self) -> None:
        self.client.close()


def connect(server: ZMQServerInfo, options: dict[str, Any]) -> TransferQueueClient:
    client = TransferQueueClient(f"client-{os.getpid()}", server)
    client.initialize_storage_manager(NAME, options)
    # It would start Ray to ask for the number of CPUs.
    client.storage_manager._multi_threads_executor = ThreadPoolExecutor(2)
    return client


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Queue]]:
    """Start a queue on the test's folder; an earlier one is left as its processes were lost."""
    queues: list[Queue] = []

    def start_queue(**options: Any) -> Queue:
        queues.append(Queue(tmp_path / "queue", **options))
        return queues[-1]

    yield start_queue
    for queue in queues:
        queue.close()


def test_all_dtypes_shapes_and_plain_values_come_back_before_and_after_a_restart(
    start: Any,
) -> None:
    queue = start()
    lengths = [3, 1, 5]
    ragged = [torch.arange(n) for n in lengths]
    data = {
        **{
            str(dtype): torch.ones(3, 4, dtype=dtype)
            for dtype in (
                torch.bool,
                torch.uint8,
                torch.int32,
                torch.int64,
                torch.float16,
                torch.bfloat16,
                torch.float32,
                torch.float64,
                torch.complex64,
            )
        },
        "scalars": torch.tensor([1.5, 2.5, -0.0]),
        "matrices": torch.randn(3, 2, 5),
        "jagged": torch.nested.as_nested_tensor(ragged, layout=torch.jagged),
        "strided": torch.nested.as_nested_tensor(ragged, layout=torch.strided),
        "texts": NonTensorStack("a", "b\n", "ü"),
        "messages": NonTensorStack(*[[{"role": "user", "content": str(i)}] for i in range(3)]),
    }
    meta = queue.client.put(TensorDict(data, [3]), partition_id="p")
    for found in (queue.client.get_data(meta), _restart_and_get(start, queue, list(data))):
        for name, expected in data.items():
            if isinstance(expected, torch.Tensor):
                wanted, rows = list(expected.unbind()), list(found[name].unbind())
                assert [row.dtype for row in rows] == [row.dtype for row in wanted], name
                assert all(map(torch.equal, rows, wanted)), name
            else:
                assert found[name].tolist() == expected.tolist(), name


def _restart_and_get(start: Any, queue: Queue, fields: list[str]) -> TensorDict:
    again = start()
    meta = again.client.get_meta(fields, 3, "p", mode="fetch", task_name="t")
    assert sorted(meta.field_names) == sorted(fields)
    return again.client.get_data(meta)


def test_a_restarted_queue_has_all_that_was_acknowledged_and_hands_out_the_rest(start: Any) -> None:
    queue = start()
    queue.put(num=6)
    assert queue.fetch() == [[0, 1], [2, 3]]
    assert queue.fetch(task="other") == [[0, 1], [2, 3]]
    again = start()
    assert again.restored["num_rows"] == 6
    assert again.fetch() == [[4, 5], [6, 7]]
    assert again.fetch(task="other", num=1) == [[4, 5]]
    again.put(num=1, start=100)
    last = start()
    assert last.fetch(num=3) == [[8, 9], [10, 11], [100, 101]]
    assert last.fetch(num=1) == []
    last.client.reset_consumption("p", "t")
    assert start().fetch(num=7)[0] == [0, 1]


def test_keys_tags_clears_and_partitions_come_back(start: Any) -> None:
    queue = start()
    client = queue.client
    meta = client.kv_retrieve_meta(["a", "b", "c"], "p", create=True)
    tags = [{"score": 0.5}, {"pair": (1, "x")}, {3: torch.ones(2, dtype=torch.bfloat16)}]
    meta.update_custom_meta(tags)
    client.put(TensorDict({"x": torch.arange(6).reshape(3, 2)}, [3]), meta)
    queue.put("gone")
    client.clear_partition("gone")
    client.clear_samples(client.kv_retrieve_meta(["b"], "p"))
    again = start()
    assert again.client.get_partition_list() == ["p"]
    assert again.restored["num_rows"] == 2
    found = again.client.kv_list("p")["p"]
    assert list(found) == ["a", "c"]
    assert found["a"] == {"score": 0.5}
    assert torch.equal(found["c"][3], tags[2][3])
    meta = again.client.kv_retrieve_meta(["c", "a"], "p")
    assert torch.stack(list(again.client.get_data(meta)["x"])).tolist() == [[4, 5], [0, 1]]
    # What is put next takes no row that is in use.
    again.put(num=4, start=50)
    assert sorted(again.fetch(num=6)) == [[0, 1], [4, 5], [50, 51], [52, 53], [54, 55], [56, 57]]


def test_fields_that_are_put_later_and_values_that_are_put_again_come_back(start: Any) -> None:
    queue = start()
    meta = queue.put(num=2)
    queue.client.put(TensorDict({"y": torch.ones(2, 3)}, [2]), meta)
    queue.client.put(TensorDict({"x": torch.zeros(2, 2, dtype=torch.int64)}, [2]), meta)
    again = start()
    meta = again.client.get_meta(["x", "y"], 2, "p", mode="fetch", task_name="t")
    found = again.client.get_data(meta)
    assert torch.stack(list(found["x"])).tolist() == [[0, 0], [0, 0]]
    assert torch.stack(list(found["y"])).sum() == 6


def test_rows_whose_put_or_clear_was_not_finished_are_gone_after_a_restart(start: Any) -> None:
    queue = start()
    kept = queue.put(num=2)
    half = queue.put(num=2, start=20)
    queue.client.kv_retrieve_meta(["never put"], "p", create=True)
    queue.client._run_coroutine(queue.client._mark_clearing_in_controller(half))
    again = start()
    counts = {name: again.restored[name] for name in again.restored if name.startswith("num")}
    assert counts == {
        "num_rows": 2,
        "num_unacknowledged": 1,
        "num_clears_finished": 2,
        "num_lost_values": 0,
    }
    assert again.fetch(num=2) == [[0, 1], [2, 3]]
    assert kept.size == 2


def test_processes_of_an_earlier_attempt_write_nothing_more(start: Any) -> None:
    zombie = start()
    zombie.put(num=4)
    meta = zombie.client.kv_retrieve_meta(["k"], "p", create=True)
    queue = start()
    size = sum(path.stat().st_size for path in queue.folder.rglob("*.*"))
    with pytest.raises(ReplayLakeError, match="newest attempt is 2"):
        zombie.client.put(TensorDict({"x": torch.ones(1, 2, dtype=torch.int64)}, [1]), meta)
    # Neither does its controller hand out what the newer one hands out, nor clear it.
    with pytest.raises(RuntimeError, match="newest attempt is 2"):
        zombie.fetch()
    with pytest.raises(RuntimeError, match="newest attempt is 2"):
        zombie.client.clear_partition("p")
    # A producer that knows the new controller, but belongs to the earlier attempt.
    stale = connect(queue.controller.get_zmq_server_info(), zombie.options)
    with pytest.raises(ReplayLakeError, match="newest attempt is 2"):
        stale.put(TensorDict({"x": torch.ones(1, 2, dtype=torch.int64)}, [1]), partition_id="p")
    stale.close()
    assert queue.fetch() == [[0, 1], [2, 3]]
    assert sum(path.stat().st_size for path in queue.folder.rglob("*.values")) <= size


def test_a_value_that_cannot_be_stored_is_named_and_its_row_is_not_put(start: Any) -> None:
    queue = start()
    with pytest.raises(ReplayLakeError, match=r"@bad: builtins\.object cannot be stored"):
        queue.put(bad=NonTensorStack(*[object() for _ in range(4)]))
    queue.put(num=1, start=70)
    assert queue.fetch(num=1) == [[70, 71]]
    with pytest.raises(ReplayLakeError, match="dtypes or shapes differ"):
        queue.client.put(TensorDict({"x": torch.ones(1, 2)}, [1]), partition_id="p")
    assert queue.fetch(num=1) == []
    assert start().restored["num_rows"] == 1


@pytest.mark.parametrize("cleared", ["partition", "rows"])
def test_a_late_put_into_rows_that_another_process_has_by_now_is_refused(
    start: Any, cleared: str
) -> None:
    queue = start()
    client, data = queue.client, TensorDict({"x": torch.full((2, 2), 9)}, [2])
    late = client.get_meta(["x"], 2, "q", mode="insert")
    client.put(TensorDict({"y": torch.ones(2, 3)}, [2]), late)
    if cleared == "partition":
        client.clear_partition("q")
    else:
        client.clear_samples(late)
        # The rows are nobody's, and the partition is there.
        with pytest.raises(
            ReplayLakeError, match=r"2 of 2 rows of the partition 'q'.*were cleared"
        ):
            client.put(data, late)
    current = client.get_meta(["x"], 4, "q", mode="insert")
    assert set(late.global_indexes) <= set(current.global_indexes)
    kept = client.put(TensorDict({"x": torch.arange(8).reshape(4, 2)}, [4]), current)
    for metadata in (late, late.select_fields([]), late[:1]):
        with pytest.raises(ReplayLakeError, match="Read the metadata again"):
            client.put(data[: metadata.size], metadata)
    # A clear of other rows leaves these as they are.
    client.clear_samples(queue.put("q", num=1, start=50))
    client.put(TensorDict({"y": torch.ones(3, 3)}, [3]), kept.select_fields(["x"])[:3])
    assert sorted(start().fetch(num=4, partition="q")) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_late_put_into_a_queue_of_a_checkpoint_or_of_a_restart_is_refused(
    start: Any, tmp_path: Path
) -> None:
    queue = start()
    path, data = tmp_path / "state", TensorDict({"x": torch.full((2, 2), 9)}, [2])
    queue.put(num=2)
    queue.client.save_controller_checkpoint(str(path))
    late = queue.client.get_meta(["x"], 2, "p", mode="insert")
    queue.client.load_controller_checkpoint(str(path))
    queue.put(num=2, start=20)
    with pytest.raises(ReplayLakeError, match="a checkpoint was loaded"):
        queue.client.put(data, late)
    again = start()
    with pytest.raises(ReplayLakeError, match="since their metadata was read"):
        again.client.put(data, late)
    assert sorted(again.fetch(num=4)) == [[0, 1], [2, 3], [20, 21], [22, 23]]


def test_a_flipped_byte_of_a_value_is_named_and_never_returned(start: Any) -> None:
    queue = start()
    queue.put(num=2)
    (path,) = queue.folder.glob("values/*")
    data = bytearray(path.read_bytes())
    data[64] ^= 4
    path.write_bytes(data)
    assert queue.fetch(num=1) == [[0, 1]]
    with pytest.raises(ReplayLakeError, match=r"\.values: the 16 bytes of 1@x at 64 are not"):
        queue.fetch(num=1)


def test_values_that_a_power_cut_took_are_named_and_their_rows_not_handed_out(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = start()
    queue.put(num=3)
    (path,) = queue.folder.glob("values/*")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size - 64] + bytes(64))
    monkeypatch.setattr(durable, "_boot_id", lambda: "another")
    again = start()
    assert (again.restored["num_lost_values"], again.restored["num_rows"]) == (1, 2)
    assert len(again.restored["lost_values"]) == 1
    assert again.fetch(num=2) == [[0, 1], [2, 3]]
    assert again.fetch(num=1) == []


def test_a_full_disk_refuses_a_put_or_a_batch_and_nothing_is_half_done(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = start()
    queue.put(num=4)
    write = os.writev

    def refuse(file: int, buffers: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", refuse)
        for act in (queue.put, queue.fetch):
            with pytest.raises((ReplayLakeError, RuntimeError), match="No space left"):
                act()
    # The values are written, but not what the controller has to log of them.
    files = []

    def refuse_logs(file: int, buffers: Any) -> int:
        if os.readlink(f"/proc/self/fd/{file}").endswith(".events"):
            files.append(file)
            return refuse(file, buffers)
        return write(file, buffers)

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", refuse_logs)
        with pytest.raises((ReplayLakeError, RuntimeError), match="No space left"):
            queue.put(start=90)
    assert files
    assert queue.fetch(num=4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    queue.put(num=1, start=30)
    assert start().fetch(num=1) == [[30, 31]]


def test_a_log_that_cannot_be_begun_anew_goes_on_and_no_batch_is_lost(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "PART_BYTES", 2_000)
    queue = start()
    with monkeypatch.context() as patch:
        _refuse_new_files(patch, ".events")
        for i in range(20):
            queue.put(num=4, start=100 * i)
            assert queue.fetch(num=2) == [[100 * i, 100 * i + 1], [100 * i + 2, 100 * i + 3]]
            queue.fetch(num=2)
        parts = {path.name for path in queue.folder.glob("log/*.events")}
        (size,) = {path.stat().st_size for path in queue.folder.glob("log/*.events")}
        assert size > 4_000
    # Once there is space, the log is begun anew.
    for i in range(20, 25):
        queue.put(num=4, start=100 * i)
    assert not parts & {path.name for path in queue.folder.glob("log/*.events")}
    rows = start().fetch(num=20)
    assert [row[0] for row in rows] == [100 * i + 2 * j for i in range(20, 25) for j in range(4)]


def _refuse_new_files(monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """Have the disk full for new files of a suffix."""
    open_file = os.open

    def refuse(path: Any, flags: int, *mode: int) -> int:
        if str(path).endswith(suffix) and flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device")
        return open_file(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)


def test_a_checkpoint_holds_the_queue_without_pickle_and_brings_it_back(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = start()
    queue.put(num=4)
    queue.fetch(num=2)
    monkeypatch.setattr(tq.interface, "_TQ_CONTROLLER", queue.controller)
    monkeypatch.setattr(tq.interface, "_TQ_CLIENT", queue.client)
    tq.save_checkpoint(tmp_path / "checkpoint", metadata={"step": 3})
    for path in (tmp_path / "checkpoint").rglob("*.*"):
        with pytest.raises(Exception, match=r"pickle|opcode|exhausted"):
            list(pickletools.genops(path.read_bytes()))
    state = tmp_path / "checkpoint" / "controller_state.pkl"
    assert json.loads(state.read_bytes())["format"] == 1
    assert queue.fetch(num=2) == [[4, 5], [6, 7]]
    queue.client.clear_partition("p")

    other = start()
    assert other.restored["num_rows"] == 0
    assert not list(other.folder.glob("values/*"))
    monkeypatch.setattr(tq.interface, "_TQ_CONTROLLER", other.controller)
    monkeypatch.setattr(tq.interface, "_TQ_CLIENT", other.client)
    tq.load_checkpoint(tmp_path / "checkpoint")
    assert other.fetch(num=1) == [[4, 5]]  # handed out after the checkpoint, and so again
    assert start().fetch(num=1) == [[6, 7]]  # durable once it is loaded

    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(data)
    last = start()
    with pytest.raises(RuntimeError, match="is not what was written"):
        last.client.load_controller_checkpoint(str(state))
    assert last.restored["num_rows"] == 4


@pytest.mark.parametrize("failing", [".events", ".state.json", "sampler", "partition"])
def test_a_checkpoint_that_cannot_be_loaded_changes_nothing(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    queue = start()
    path = tmp_path / "state"
    queue.put(num=2)
    queue.client.save_controller_checkpoint(str(path))
    queue.put(num=2, start=20)
    queue.fetch(num=1)
    if failing in ("sampler", "partition"):
        state = read_state(path)
        if failing == "sampler":
            state["sampler"] = {}
        else:
            del state["partitions"]["p"]["keys"]
        write_state(path, state)
    before = durable.save_state(queue.controller)
    with monkeypatch.context() as patch:
        _refuse_new_files(patch, ".events")
        replace = os.replace

        def refuse(source: Any, target: Any) -> None:
            if failing == ".state.json" and str(target).endswith(failing):
                raise OSError(errno.ENOSPC, "No space left on device")
            replace(source, target)

        patch.setattr(os, "replace", refuse)
        with pytest.raises(
            RuntimeError, match=r"No space left|lacks or misstates '(_states|keys)'"
        ):
            queue.client.load_controller_checkpoint(str(path))
    assert durable.save_state(queue.controller) == before
    queue.put(num=1, start=40)
    assert start().fetch(num=4) == [[2, 3], [20, 21], [22, 23], [40, 41]]


def test_a_checkpoint_of_the_controller_alone_is_refused_once_its_values_are_gone(
    start: Any, tmp_path: Path
) -> None:
    queue = start()
    queue.put(num=2)
    queue.client.save_controller_checkpoint(str(tmp_path / "state"))
    assert read_state(tmp_path / "state")["partitions"]["p"]["indexes"] == [0, 1]
    queue.client.clear_partition("p")
    again = start()
    with pytest.raises(RuntimeError, match=r"lacks, the first 00000001-.*include_storage"):
        again.client.load_controller_checkpoint(str(tmp_path / "state"))


def test_what_a_sampler_has_promised_to_other_ranks_comes_back(start: Any) -> None:
    def fetch(queue: Queue, rank: int, batch: int) -> list[int]:
        config = {"dp_rank": rank, "batch_index": batch, "task_name": "t", "partition_id": "p"}
        meta = queue.client.get_meta(
            ["x"], 2, "p", mode="fetch", task_name="t", sampling_config=config
        )
        return list(meta.global_indexes)

    queue = start(sampler=RankAwareSampler)
    queue.put(num=6)
    first, second = fetch(queue, 0, 0), fetch(queue, 0, 1)
    again = start(sampler=RankAwareSampler)
    assert fetch(again, 0, 0) == first
    assert fetch(again, 0, 1) == second
    assert not {*fetch(again, 0, 2)} & {*first, *second}


@pytest.mark.parametrize("kind", [GRPOGroupNSampler, RankAwareSampler, SequentialSampler])
def test_a_batch_adds_one_entry_to_the_cache_of_a_known_sampler(kind: type[BaseSampler]) -> None:
    sampler, choose = kind(), random.Random(kind.__name__)
    for number in range(300):
        config = {
            "partition_id": choose.choice("pq"),
            "task_name": choose.choice("tu"),
            "dp_rank": choose.randrange(3),
            "batch_index": choose.randrange(40),
        }
        if kind is not RankAwareSampler and number % 5 == 0:
            del config[choose.choice(list(config))]
        entry, whole = durable._watch_sampler(sampler, config), durable._SamplerCache(sampler)
        before = copy.deepcopy(sampler.save_checkpoint())
        ready = list(range(number, number + choose.randrange(8)))
        sampler(ready, 4, **config)
        assert entry.changes() == whole.changes()
        if number % 3 == 0:
            entry.undo()
            assert sampler.save_checkpoint() == before
        if number % 50 == 49:
            sampler.clear_cache("p")
    assert isinstance(entry, durable._SamplerEntry)


def test_a_handout_copies_no_other_batches_and_a_refused_one_promises_nothing(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(queue: Queue, batch: int) -> list[int]:
        config = {"dp_rank": 0, "batch_index": batch, "task_name": "t", "partition_id": "p"}
        meta = queue.client.get_meta(
            ["x"], 2, "p", mode="fetch", task_name="t", sampling_config=config
        )
        return list(meta.global_indexes)

    class Batch(list[int]):
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("copied")

    queue = start(sampler=GRPOGroupNSampler(n_samples_per_prompt=2))
    queue.put(num=6)
    first = fetch(queue, 0)
    states = queue.controller.sampler._states["p"]["t"][0]
    states[0] = tuple(map(Batch, states[0]))
    second = fetch(queue, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", _refuse_write)
        with pytest.raises(RuntimeError, match="No space left"):
            fetch(queue, 2)
    assert sorted(states) == [0, 1]
    again = start(sampler=GRPOGroupNSampler(n_samples_per_prompt=2))
    assert [fetch(again, 0), fetch(again, 1)] == [first, second]
    assert fetch(again, 2) == [4, 5]


def _refuse_write(file: int, buffers: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_log_is_begun_anew_when_it_is_long_and_files_without_values_go(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "PART_BYTES", 2_000)
    monkeypatch.setattr(durable, "_DROP_AFTER_S", 0.0)
    queue = start()
    writer = queue.client.storage_manager.storage_client
    queue.put(num=4)
    writer._writer._file_bytes = 300
    for i in range(1, 30):
        meta = queue.put(num=4, start=100 * i)
        if i % 3:
            queue.client.clear_samples(meta)
    assert len(list(queue.folder.glob("log/*"))) == 2
    num_files = len(list(queue.folder.glob("values/*")))
    assert 10 <= num_files < 25, num_files
    again = start()
    rows = again.fetch(num=40)
    assert sorted(row[0] for row in rows) == sorted(
        [0, 2, 4, 6] + [100 * i + 2 * j for i in range(3, 30, 3) for j in range(4)]
    )


# ---- roles as processes, and their kills


class Role:
    """A forked process that runs a function."""

    def __init__(self, run: Callable[..., None], *arguments: Any) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            try:
                run(*arguments)
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
            os._exit(1)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _run_controller(folder: Path, told: Path) -> None:
    controller = _Controller(polling_mode=True)
    restored = durable.install(controller, str(folder), False)
    server = controller.get_zmq_server_info()
    text = json.dumps([server.id, server.ip, server.ports, restored])
    told.with_suffix(".tmp").write_text(text)
    told.with_suffix(".tmp").rename(told)
    time.sleep(3_600)


def _connect_to(told: Path, folder: Path) -> TransferQueueClient:
    from transfer_queue.utils.enum_utils import Role as ServerRole

    while not told.exists():
        time.sleep(0.005)
    name, ip, ports, restored = json.loads(told.read_text())
    server = ZMQServerInfo(ServerRole.CONTROLLER, name, ip, ports)
    options = {"path": str(folder), "attempt": restored["attempt"], "sync_every_put": False}
    return connect(server, options)


def _sample(number: int) -> torch.Tensor:
    return torch.arange(number, number + 50 + number % 37)


def _produce(told: Path, folder: Path, acknowledged: Path, first: int) -> None:
    client = _connect_to(told, folder)
    with acknowledged.open("ab", 0) as ledger:
        for start in range(first, sys.maxsize, _ROWS):
            numbers = list(range(start, start + _ROWS))
            values = [_sample(number) for number in numbers]
            rows = {
                "number": torch.tensor(numbers)[:, None],
                "tokens": torch.nested.as_nested_tensor(values, layout=torch.jagged),
            }
            client.put(TensorDict(rows, [_ROWS]), partition_id="p")
            ledger.write(b"".join(b"%d\n" % number for number in numbers))


def _consume(told: Path, folder: Path, handed_out: Path) -> None:
    client = _connect_to(told, folder)
    with handed_out.open("ab", 0) as ledger:
        while True:
            meta = client.get_meta(["number", "tokens"], _ROWS, "p", task_name="t", mode="fetch")
            if not meta.size:
                time.sleep(0.002)
                continue
            found = client.get_data(meta)
            numbers = [int(number) for number in found["number"]]
            for number, tokens in zip(numbers, found["tokens"].unbind(), strict=True):
                assert torch.equal(tokens, _sample(number))
            ledger.write(b"".join(b"%d\n" % number for number in numbers))


@pytest.mark.parametrize("killed", ["producer", "controller", "consumer"])
def test_kills_lose_nothing_acknowledged_and_hand_out_nothing_twice(
    tmp_path: Path, killed: str
) -> None:
    """There is no storage unit to kill: the controller and the files are what it was."""
    random_ = random.Random(killed)
    folder, ledgers = tmp_path / "queue", [tmp_path / "acknowledged", tmp_path / "handed out"]
    for ledger in ledgers:
        ledger.touch()
    num_started = {"controller": 0, "producer": 0, "consumer": 0}
    roles: dict[str, Role] = {}

    def begin(role: str) -> None:
        num_started[role] += 1
        told = tmp_path / f"controller-{num_started['controller']}"
        if role == "controller":
            roles[role] = Role(_run_controller, folder, told)
        elif role == "producer":
            first = 1_000_000 * sum(num_started.values())
            roles[role] = Role(_produce, told, folder, ledgers[0], first)
        else:
            roles[role] = Role(_consume, told, folder, ledgers[1])

    for role in num_started:
        begin(role)
    for _ in range(_KILLS):
        sizes = [ledger.stat().st_size for ledger in ledgers]
        deadline = time.monotonic() + 120
        while any(
            ledger.stat().st_size <= size for ledger, size in zip(ledgers, sizes, strict=True)
        ):
            assert time.monotonic() < deadline, "no progress within 120 s"
            time.sleep(0.002)
        time.sleep(random_.uniform(0, 0.1))
        roles[killed].kill()
        if killed == "controller":
            # Its clients are of its attempt, as in a job that is started again; they outlive the
            # start of the next one, and what they write then is refused.
            old = [roles["producer"], roles["consumer"]]
            for role in num_started:
                begin(role)
            time.sleep(random_.uniform(0, 0.1))
            for process in old:
                process.kill()
        else:
            begin(killed)
    for process in roles.values():
        process.kill()

    acknowledged, handed_out = (list(map(int, ledger.read_text().split())) for ledger in ledgers)
    queue = Queue(folder)
    partition = queue.controller.partitions["p"]
    meta = queue.client.get_meta(["number", "tokens"], 1, "p", mode="force_fetch")
    stored = queue.client.get_data(meta)
    by_index = dict(zip(meta.global_indexes, map(int, stored["number"]), strict=True))
    for number, tokens in zip(stored["number"], stored["tokens"].unbind(), strict=True):
        assert torch.equal(tokens, _sample(int(number)))
    consumed = {by_index[i] for i in partition.consumption_status["t"].nonzero().flatten().tolist()}
    twice = [number for number, count in Counter(handed_out).items() if count > 1]
    lost = set(acknowledged) - set(by_index.values())
    unused = consumed - set(handed_out)
    print(
        f"{_KILLS} kills of the {killed}: {len(acknowledged)} rows acknowledged, {len(handed_out)} "
        f"handed out and read, {len(lost)} lost, {len(twice)} handed out twice, {len(unused)} "
        "handed out to a process that was killed"
    )
    assert not twice
    assert not lost
    assert len(set(by_index.values())) == len(by_index)
    assert set(handed_out) <= consumed
    # A killed consumer takes one batch with it; the rows stay stored.
    assert len(unused) <= _ROWS * (num_started["consumer"])
    queue.close()


# ---- what the documentation shows


def _programs() -> list[str]:
    page = Path(__file__).parents[2] / "docs/TRANSFERQUEUE.md"
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def test_samples_become_episodes_of_a_dataset_once(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = start()
    monkeypatch.setattr(tq.interface, "_TQ_CLIENT", queue.client)
    monkeypatch.chdir(tmp_path)
    _, program = _programs()
    for _ in range(2):
        exec(program, {"tq": tq, "torch": torch, "TensorDict": TensorDict})
    query = """
        SELECT episode_id, observation_tokens, action_tokens,
            round(behavior_log_prob::DOUBLE, 3), reward
        FROM math.steps ORDER BY 1
    """
    assert list(zip(*rl.open("lake").sql(query).to_pydict().values(), strict=True)) == [
        ("verl-1/task-1", [1, 2, 3], [7, 2], -0.8, 1.0),
        ("verl-1/task-2", [1, 2, 4], [8, 2], -0.6, 0.0),
    ]


# ---- with Ray, as a user has it


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Start Ray, and return its address. On a busy machine it may exceed its own limit of 30 s."""
    for num_left in range(4, -1, -1):
        try:
            context = ray.init(num_cpus=4, include_dashboard=False, logging_level="error")
            break
        except Exception:
            ray.shutdown()
            if not num_left:
                raise
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_an_unchanged_program_runs_with_this_backend_and_goes_on_after_a_restart(
    tmp_path: Path,
) -> None:
    config = OmegaConf.create(
        {"backend": {"storage_backend": NAME, NAME: {"path": str(tmp_path / "queue")}}}
    )

    @ray.remote
    def double(keys: list[str]) -> None:
        tq.init()  # the backend is registered by the configuration that it gets
        tokens = tq.kv_batch_get(keys, "train", "tokens")["tokens"]
        doubled = torch.nested.as_nested_tensor(
            [2 * row for row in tokens.unbind()], layout=torch.jagged
        )
        tq.kv_batch_put(keys, "train", TensorDict({"doubled": doubled}, [len(keys)]))

    with pytest.raises(ReplayLakeError, match="unknown option 'pth', expected"):
        tq.init(OmegaConf.merge(config, {"backend": {NAME: {"pth": "x"}}}))
    tq.init(config)
    tq.kv_batch_put(
        ["a", "b"],
        "train",
        TensorDict({"tokens": torch.arange(6).reshape(2, 3)}, [2]),
        tags=[{"score": 1.0}, {"score": 2.0}],
    )
    ray.get(double.remote(["a", "b"]))
    ray.kill(ray.get_actor("TransferQueueController", namespace="transfer_queue"))
    tq.close()
    found = tq.init(config)
    assert found.backend[NAME].restored.num_rows == 2
    data = tq.kv_batch_get(["b", "a"], "train")
    assert [row.tolist() for row in data["doubled"].unbind()] == [[6, 8, 10], [0, 2, 4]]
    assert tq.kv_list("train") == {"train": {"a": {"score": 1.0}, "b": {"score": 2.0}}}
    tq.kv_clear(["a"], "train")
    assert list(tq.kv_list("train")["train"]) == ["b"]
    tq.close()


def test_the_program_of_the_documentation_runs(tmp_path: Path, cluster: str) -> None:
    program, _ = _programs()
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": cluster},
        capture_output=True,
        text=True,
    )
    assert found.stdout.endswith("2 tensor([3, 4, 5])\n"), found.stderr


if __name__ == "__main__":
    options = ["-q", "-rP", "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider"]
    sys.exit(pytest.main([__file__, *options, *sys.argv[1:]]))
