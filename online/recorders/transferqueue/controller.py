"""TransferQueue's controller, made durable: nothing it has acknowledged is lost with its process.

The controller holds the rows of a queue, who has consumed which, and where the values are, in
memory. `install` runs in its process. It restores what earlier attempts acknowledged and then
writes each change to the log before the reply to it is sent:

    written before it is applied    values that were put, tags, clears, resets of the consumption
    written after it is applied     rows that were allocated, batches that were handed out

A batch whose entry cannot be written is not handed out, and its rows can be handed out again.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import torch
from transfer_queue.controller import DataPartitionStatus, FieldMeta
from transfer_queue.sampler import GRPOGroupNSampler, RankAwareSampler, SequentialSampler
from transfer_queue.utils.zmq_utils import ZMQRequestType

from replaylake.datastore.errors import (
    CommitConflictError,
    LogCorruptError,
    ReplayLakeError,
    StorageError,
)
from replaylake.online.recorders.transferqueue.attempts import Attempt
from replaylake.online.recorders.transferqueue.event_log import (
    PART_BYTES,
    EventLog,
    read_log,
    read_state,
    write_state,
)
from replaylake.online.recorders.transferqueue.values import (
    SUFFIX,
    Location,
    ValueReader,
    parse_location,
    values_folder,
)

# Stands beside the locations of a row's fields in metadata. TransferQueue keeps names with `_`
# when fields are selected.
ALLOCATION: Final = "_replaylake_allocation"

_logger = logging.getLogger(__name__)
_NUM_NAMED: Final = 10
_ONE_ENTRY_SAMPLERS: Final = (SequentialSampler, GRPOGroupNSampler, RankAwareSampler)
_PART_RETRIES: Final = 64  # to begin the log anew, in the time that it takes to grow by a part
_DROP_AFTER_S: Final = 60.0  # a put must be acknowledged this long after its values were written
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

Apply = Callable[[], Any]


def install(controller: Any, folder: str, sync_every: bool) -> dict[str, Any]:
    """Restore a controller from a folder, and write its changes there from now on.

    Runs in the controller's process. Returns what `restore` counted, and the `attempt`.
    """
    return DurableController(controller, Path(folder), sync_every=sync_every).restored


class DurableController:
    """Writes the changes of one controller to the log of an attempt that it begins."""

    def __init__(self, controller: Any, folder: Path, *, sync_every: bool) -> None:
        """Begin an attempt, restore the controller, and take over its requests.

        Raises: LogCorruptError, FormatTooNewError, StorageError. Then it has changed nothing but
        the number of the attempt.
        """
        self._controller = controller
        self._folder = folder
        self._attempt = Attempt.begin(folder)
        # Of earlier attempts, nobody writes any more.
        state, events = read_log(folder)
        if state is not None:
            load_state(controller, state)
        for event in events:
            apply_event(controller, event)
        is_rebooted = state is not None and state["boot_id"] != _boot_id()
        self.restored = {
            "attempt": self._attempt.number,
            **reconcile(controller, folder, verify=is_rebooted),
        }
        self._log = EventLog(self._attempt, sync_every=sync_every)
        self._log.start_part(save_state(controller))
        self._next_part_at = PART_BYTES
        self._files = _FileCounts(folder, self._attempt.number)
        self._files.recount(controller)
        self._files.remove_unnamed()
        self._allocations = _Allocations(self._attempt.number)
        self._unwritten: list[dict[str, Any]] = []
        self._mutex = threading.RLock()
        self._apply = controller._handle_request
        self._recorders: dict[Any, Callable[[dict[str, Any], Apply], Any]] = {
            ZMQRequestType.NOTIFY_DATA_UPDATE: self._record_put,
            ZMQRequestType.SET_CUSTOM_META: self._record_tags,
            ZMQRequestType.GET_META: self._record_batch,
            ZMQRequestType.KV_RETRIEVE_META: self._record_keys,
            ZMQRequestType.MARK_CLEARING: self._record_marks,
            ZMQRequestType.CLEAR_META: self._record_clear,
            ZMQRequestType.CLEAR_PARTITION: self._record_clear_partition,
            ZMQRequestType.RESET_CONSUMPTION: self._record_reset,
        }
        controller._handle_request = self._handle_request
        controller.save_checkpoint = self._save_checkpoint
        controller.load_checkpoint = self._load_checkpoint
        if state is not None:
            _logger.info("restored %s: %s", folder, self.restored)

    def _handle_request(self, request: Any, monitor: Any) -> Any:
        with self._mutex:
            record = self._recorders.get(request.request_type)
            if record is None:
                reply = self._apply(request, monitor)
            else:
                self._write_rest()
                # Not after it: what has been applied must not fail any more.
                self._start_part_if_long()
                reply = record(request.body, lambda: self._apply(request, monitor))
            self._allocations.name(None if reply is None else reply.body.get("metadata"))
            return reply

    def _start_part_if_long(self) -> None:
        """Begin the log anew if it is long; if that fails, it goes on, and a later change tries."""
        if self._log.num_bytes < self._next_part_at:
            return
        try:
            self._log.start_part(save_state(self._controller))
        except ReplayLakeError as error:
            self._next_part_at = self._log.num_bytes + PART_BYTES // _PART_RETRIES
            _logger.error("the log was not begun anew, and goes on: %s", error)
        else:
            self._next_part_at = PART_BYTES

    def _record_put(self, body: dict[str, Any], apply: Apply) -> Any:
        locations: dict[int, dict[str, str]] = body["custom_backend_meta"]
        named = {index: fields.pop(ALLOCATION, None) for index, fields in locations.items()}
        event = {
            "event": "put",
            "partition": body["partition_id"],
            "indexes": body["global_indexes"],
            "schema": body["field_schema"],
            "locations": locations,
        }
        self._check_rows(body["partition_id"], body["global_indexes"], named)
        self._files.check(event["locations"])
        replaced = self._locations(event["partition"], event["locations"])
        self._log.append(event)
        reply = apply()
        if not reply.body["success"]:
            # The controller has logged why; its client would report success.
            _unmark_refused(self._controller, event)
            raise StorageError(
                f"the controller refused the fields {sorted(body['field_schema'])}, whose dtypes "
                "or shapes differ from those of stored samples."
            )
        self._files.remove(replaced)
        self._files.add(event["locations"])
        return reply

    def _check_rows(self, partition_id: str, indexes: list[int], named: dict[int, Any]) -> None:
        """Refuse values for rows that are no longer those of their metadata. Raises: StorageError.

        named: the allocation of each row in the metadata.
        """
        partition = self._controller.partitions.get(partition_id)
        if partition is None:
            raise StorageError(
                f"the partition {partition_id!r} was cleared while values were put into it."
            )
        rows = partition.global_indexes
        gone = [i for i in indexes if i not in rows or named.get(i) != self._allocations.current(i)]
        if gone:
            raise StorageError(
                f"{len(gone)} of {len(indexes)} rows of the partition {partition_id!r}, the first "
                f"{gone[0]}, were cleared, or a checkpoint was loaded, since their metadata was "
                "read. Read the metadata again, then put the values again."
            )

    def _record_tags(self, body: dict[str, Any], apply: Apply) -> Any:
        tags = {
            partition: {index: tag for index, tag in rows.items() if tag}
            for partition, rows in body["partition_custom_meta"].items()
        }
        if any(tags.values()):
            self._log.append({"event": "tags", "tags": body["partition_custom_meta"]})
        return apply()

    def _record_batch(self, body: dict[str, Any], apply: Apply) -> Any:
        mode = body.get("mode", "fetch")
        if mode == "insert":
            reply = apply()
            self._write(self._allocation(body["partition_id"], reply.body["metadata"], {}))
            return reply
        if mode != "fetch":
            return apply()
        return self._record_handout(body, apply)

    def _record_handout(self, body: dict[str, Any], apply: Apply) -> Any:
        partition_id, task = body["partition_id"], body.get("task_name")
        sampler = _watch_sampler(self._controller.sampler, body.get("sampling_config") or {})
        before = self._consumption(partition_id, task)
        before = None if before is None else before.clone()
        reply = apply()
        after = self._consumption(partition_id, task)
        if after is None:
            return reply
        is_new = after == 1
        if before is not None:
            is_new[: len(before)] &= before == 0
        changes = sampler.changes()
        if is_new.any() or changes:
            event = {
                "event": "batch",
                "partition": partition_id,
                "task": task,
                "indexes": is_new.nonzero().flatten().tolist(),
                "sampler": changes,
            }
            try:
                self._log.append(event)
            except ReplayLakeError:
                after[is_new] = 0
                sampler.undo()
                raise
        return reply

    def _record_keys(self, body: dict[str, Any], apply: Apply) -> Any:
        partition = self._controller.partitions.get(body["partition_id"])
        known = partition.keys_mapping if partition else {}
        new = [key for key in body["keys"] if key not in known]
        reply = apply()
        if body["create"] and new:
            known = self._controller.partitions[body["partition_id"]].keys_mapping
            keys = {key: known[key] for key in new}
            self._write(self._allocation(body["partition_id"], reply.body["metadata"], keys))
        return reply

    def _record_marks(self, body: dict[str, Any], apply: Apply) -> Any:
        self._log.append({"event": "marks", "rows": _rows(body)})
        return apply()

    def _record_clear(self, body: dict[str, Any], apply: Apply) -> Any:
        rows = _rows(body)
        cleared = [
            location
            for partition, indexes in rows
            for location in self._list_locations(partition, indexes)
        ]
        self._log.append({"event": "clear", "rows": rows})
        for partition_id, indexes in rows:
            partition = self._controller.partitions.get(partition_id)
            # A clear that is repeated names rows that may be another partition's by now.
            self._allocations.end(
                partition.global_indexes.intersection(indexes) if partition else ()
            )
        reply = apply()
        self._files.remove(cleared)
        self._files.drop_empty()
        return reply

    def _record_clear_partition(self, body: dict[str, Any], apply: Apply) -> Any:
        cleared = self._list_locations(body["partition_id"])
        self._log.append({"event": "clear partition", "partition": body["partition_id"]})
        indexes = self._controller.index_manager.get_indexes_for_partition(body["partition_id"])
        self._allocations.end(indexes)
        reply = apply()
        self._files.remove(cleared)
        self._files.drop_empty()
        return reply

    def _record_reset(self, body: dict[str, Any], apply: Apply) -> Any:
        event = {
            "event": "reset",
            "partition": body["partition_id"],
            "task": body.get("task_name"),
        }
        self._log.append(event)
        return apply()

    def _write(self, event: dict[str, Any]) -> None:
        """Write what has been applied already; if that fails, before the next change is applied."""
        self._unwritten.append(event)
        self._write_rest()

    def _write_rest(self) -> None:
        if self._unwritten:
            self._log.append(*self._unwritten)
            self._unwritten.clear()

    def _allocation(self, partition_id: str, metadata: Any, keys: dict[str, int]) -> dict[str, Any]:
        partition = self._controller.partitions[partition_id]
        return {
            "event": "rows",
            "partition": partition_id,
            "indexes": list(metadata.global_indexes),
            "reserved": sorted(partition.pre_allocated_global_indexes),
            "counter": self._controller.index_manager.global_index_counter,
            "keys": keys,
        }

    def _consumption(self, partition_id: str, task: Any) -> torch.Tensor | None:
        partition = self._controller.partitions.get(partition_id)
        return None if partition is None else partition.consumption_status.get(task)

    def _list_locations(self, partition_id: str, indexes: Iterable[int] | None = None) -> list[str]:
        """Return the locations of rows of a partition, all without `indexes`."""
        partition = self._controller.partitions.get(partition_id)
        if partition is None:
            return []
        stored = partition.field_custom_backend_meta
        chosen = stored if indexes is None else indexes
        return [location for index in chosen for location in stored.get(index, {}).values()]

    def _locations(self, partition_id: str, put: dict[int, dict[str, str]]) -> list[str]:
        """Return the locations that a put replaces."""
        stored = self._controller.partitions[partition_id].field_custom_backend_meta
        return [
            stored[index][field]
            for index, fields in put.items()
            for field in fields
            if field in stored.get(index, ())
        ]

    def _save_checkpoint(self, path: str) -> None:
        with self._mutex:
            self._write_rest()
            write_state(Path(path), save_state(self._controller))

    def _load_checkpoint(self, path: str) -> None:
        with self._mutex:
            self._write_rest()
            state = read_state(Path(path))
            _check_files(self._folder, state, path)
            durable = {**state, "boot_id": _boot_id()}
            load_state(self._controller, state, lambda: self._log.start_part(durable))
            self._next_part_at = PART_BYTES
            self._allocations.end_all()
            self._files.recount(self._controller)


def _watch_sampler(sampler: Any, config: dict[str, Any]) -> _SamplerEntry | _SamplerCache:
    """Return what tells how the next batch changes a sampler's cache, and can undo that.

    config: the `sampling_config` of the request.
    """
    if type(sampler) not in _ONE_ENTRY_SAMPLERS:
        return _SamplerCache(sampler)
    names = ("partition_id", "task_name", "dp_rank", "batch_index")
    defaults = ("", "", None, None)  # those of GRPOGroupNSampler; the other has none
    path = [config.get(name, default) for name, default in zip(names, defaults, strict=True)]
    return _SamplerEntry(sampler, ["_states", *path])


class _SamplerEntry:
    """The one entry of a sampler's cache that a batch can add, at a path of keys.

    Cost: that of the path, whereas the cache holds all batches of all partitions.
    """

    def __init__(self, sampler: Any, path: list[Any]) -> None:
        self._cache = sampler.save_checkpoint()
        self._parents: list[Any] = []
        place = self._cache
        for key in path:
            self._parents.append(key)
            if key not in place:
                break
            place = place[key]
        else:
            self._parents.clear()  # it is there already, and so stays as it is

    def changes(self) -> list[list[Any]]:
        """Return the changes since, as `_changes` does."""
        place = self._cache
        for key in self._parents:
            if key not in place:
                return []
            place = place[key]
        return [[self._parents, place]] if self._parents else []

    def undo(self) -> None:
        if self.changes():
            _apply_changes(self._cache, [[self._parents]])


class _SamplerCache:
    """The whole cache of a sampler, of which any part may change."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._before = copy.deepcopy(sampler.save_checkpoint())

    def changes(self) -> list[list[Any]]:
        return _changes(self._before, self._sampler.save_checkpoint())

    def undo(self) -> None:
        self._sampler.load_checkpoint(self._before)


class _Allocations:
    """Tells a row from later ones of the same index, which TransferQueue uses again after a clear.

    Metadata names the allocation of its rows, and a put brings that back. It is not in the log:
    the values of an earlier attempt's puts are refused anyway.
    """

    def __init__(self, attempt: int) -> None:
        self._newest = attempt << 40  # metadata of an earlier attempt names a smaller one
        self._all = self._newest
        self._of: dict[int, int] = {}

    def current(self, index: int) -> int:
        return self._of.get(index, self._all)

    def name(self, metadata: Any) -> None:
        """Name the allocations of the rows of metadata, or of None, in it."""
        if metadata is not None:
            for index, fields in zip(
                metadata.global_indexes, metadata._custom_backend_meta, strict=True
            ):
                fields[ALLOCATION] = self.current(index)

    def end(self, indexes: Iterable[int]) -> None:
        """End the allocation of rows that are cleared."""
        self._newest += 1
        for index in indexes:
            self._of[index] = self._newest

    def end_all(self) -> None:
        """End all allocations, as the queue is replaced."""
        self._newest += 1
        self._all = self._newest
        self._of.clear()


class _FileCounts:
    """How many values of each file are in the queue; files without any are removed."""

    def __init__(self, folder: Path, attempt: int) -> None:
        self._folder = values_folder(folder)
        self._attempt = attempt
        self._counts: Counter[str] = Counter()
        self._named_s: dict[str, float] = {}
        self._removed: set[str] = set()

    def recount(self, controller: Any) -> None:
        self._counts.clear()
        for partition in controller.partitions.values():
            self.add(partition.field_custom_backend_meta)

    def add(self, locations: dict[int, dict[str, str]]) -> None:
        now_s = time.monotonic()
        for fields in locations.values():
            for location in fields.values():
                self._counts[_file(location)] += 1
        for name in {
            _file(location) for fields in locations.values() for location in fields.values()
        }:
            self._named_s[name] = now_s

    def remove(self, locations: Iterable[str]) -> None:
        self._counts.subtract(map(_file, locations))

    def check(self, locations: dict[int, dict[str, str]]) -> None:
        """Refuse values of which the file is gone. Raises: CommitConflictError."""
        for name in {
            _file(location) for fields in locations.values() for location in fields.values()
        }:
            if name in self._removed or int(name.split("-")[0]) != self._attempt:
                raise CommitConflictError(
                    f"{self._folder / name}: has been removed since values were written to it, as "
                    f"it was, or belongs to an attempt before {self._attempt}. Put them again."
                )

    def drop_empty(self) -> None:
        """Remove the files without a value that their writer has left for a next one."""
        newest: dict[str, str] = {}
        for name in self._named_s:
            writer = name.rpartition("-")[0]
            newest[writer] = max(name, newest.get(writer, ""))
        due_s = time.monotonic() - _DROP_AFTER_S
        for name in [name for name, count in self._counts.items() if count <= 0]:
            is_left = name != newest.get(name.rpartition("-")[0], "")
            is_old = int(name.split("-")[0]) != self._attempt
            if is_old or (is_left and self._named_s.get(name, 0.0) < due_s):
                (self._folder / name).unlink(missing_ok=True)
                self._removed.add(name)
                del self._counts[name]
                self._named_s.pop(name, None)

    def remove_unnamed(self) -> None:
        """Remove the files of earlier attempts without a value in the queue."""
        for path in self._folder.glob(f"*{SUFFIX}"):
            is_old = int(path.name.split("-")[0]) < self._attempt
            if is_old and self._counts[path.name] <= 0:
                path.unlink(missing_ok=True)


def apply_event(controller: Any, event: dict[str, Any]) -> None:
    """Repeat a change on a controller. Raises: LogCorruptError for an unknown one."""
    match event["event"]:
        case "put":
            if not controller.update_production_status(
                event["partition"], event["indexes"], event["schema"], event["locations"]
            ):
                _unmark_refused(controller, event)
        case "tags":
            controller.set_custom_meta(event["tags"])
        case "rows":
            _allocate(controller, event)
        case "batch":
            partition = controller.partitions[event["partition"]]
            partition.mark_consumed(event["task"], event["indexes"])
            if event["sampler"]:
                cache = controller.sampler.save_checkpoint()
                _apply_changes(cache, event["sampler"])
                controller.sampler.load_checkpoint(cache)
        case "marks":
            for partition_id, indexes in event["rows"]:
                controller.mark_clearing(indexes, [partition_id] * len(indexes))
        case "clear":
            for partition_id, indexes in event["rows"]:
                controller.clear_meta(indexes, [partition_id] * len(indexes))
        case "clear partition":
            controller.clear_partition(event["partition"])
        case "reset":
            controller.reset_consumption(event["partition"], event["task"])
        case unknown:
            raise LogCorruptError(f"found the event {unknown!r}, which this version does not read.")


def reconcile(controller: Any, folder: Path, *, verify: bool) -> dict[str, Any]:
    """Make a restored controller consistent: no process that was at work on it is left.

    Rows that were allocated, but never put, go, as do rows whose clear had begun. Values that are
    missing count as not put, their rows without any go. verify: read all values too, as after a
    restart of the machine, which may have lost the last milliseconds.

    Returns the counts `num_rows`, `num_unacknowledged`, `num_clears_finished` and
    `num_lost_values`, and in `lost_values` the keys of the first of them.
    """
    lost = _forget_lost(controller, folder, verify=verify)
    num_unacknowledged = num_cleared = 0
    for partition_id, partition in controller.partitions.items():
        stored = partition.field_custom_backend_meta
        is_put = partition.production_status.any(dim=1)
        size = len(is_put)
        gone = [i for i in partition.global_indexes if not (i < size and bool(is_put[i]))]
        cleared = [i for i in gone if stored.get(i)]
        untouched = [i for i in gone if not stored.get(i) and not partition.custom_meta.get(i)]
        for indexes in (cleared, untouched):
            if indexes:
                controller.clear_meta(indexes, [partition_id] * len(indexes))
        num_cleared += len(cleared)
        num_unacknowledged += len(untouched)
    if lost:
        _logger.error("%d values are missing, the first %s", len(lost), lost[:_NUM_NAMED])
    return {
        "num_rows": sum(
            len(partition.global_indexes) for partition in controller.partitions.values()
        ),
        "num_unacknowledged": num_unacknowledged,
        "num_clears_finished": num_cleared,
        "num_lost_values": len(lost),
        "lost_values": lost[:_NUM_NAMED],
    }


def save_state(controller: Any) -> dict[str, Any]:
    """Return all that a controller knows of its queue, as plain values."""
    indexes = controller.index_manager
    return {
        "boot_id": _boot_id(),
        "counter": indexes.global_index_counter,
        "reusable": list(indexes.reusable_indexes),
        "allocated": sorted(indexes.allocated_indexes),
        "partitions": {
            name: {
                "allocated": sorted(indexes.partition_to_indexes.get(name, ())),
                **_save_partition(partition),
            }
            for name, partition in controller.partitions.items()
        },
        "sampler": controller.sampler.save_checkpoint(),
    }


def load_state(
    controller: Any, state: dict[str, Any], make_durable: Callable[[], None] | None = None
) -> None:
    """Replace what a controller knows of its queue, all of it or, if an error is raised, nothing.

    make_durable: called once the state is known to be whole, before the controller has it.
    Raises: LogCorruptError, and what `make_durable` raises.
    """
    sampler = controller.sampler
    before = copy.deepcopy(sampler.save_checkpoint())
    try:
        partitions = {name: _load_partition(name, p) for name, p in state["partitions"].items()}
        allocated = {name: set(p["allocated"]) for name, p in state["partitions"].items()}
        counter = state["counter"]
        reusable, taken = list(state["reusable"]), set(state["allocated"])
        # The last of them, since only this one is undone: a sampler is not ours.
        sampler.load_checkpoint(state["sampler"])
        if make_durable is not None:
            make_durable()
    except BaseException as error:
        sampler.load_checkpoint(before)
        if isinstance(error, LookupError | TypeError):
            raise LogCorruptError(f"a state of the queue lacks or misstates {error}.") from error
        raise
    indexes = controller.index_manager
    indexes.global_index_counter = counter
    indexes.reusable_indexes, indexes.allocated_indexes = reusable, taken
    indexes.partition_to_indexes.clear()
    indexes.partition_to_indexes.update(allocated)
    controller.partitions = partitions


def state_files(state: dict[str, Any]) -> set[str]:
    """Return the names of the files whose values a state names."""
    return {
        _file(location)
        for partition in state["partitions"].values()
        for fields in partition["locations"].values()
        for location in fields.values()
    }


def _save_partition(partition: Any) -> dict[str, Any]:
    produced = partition.production_status
    return {
        "created_at": partition.created_at,
        "indexes": sorted(partition.global_indexes),
        "reserved": sorted(partition.pre_allocated_global_indexes),
        "fields": {
            name: produced[:, column].nonzero().flatten().tolist()
            for name, column in partition.field_name_mapping.items()
        },
        "consumed": {
            task: status.nonzero().flatten().tolist()
            for task, status in partition.consumption_status.items()
        },
        "schema": {name: dict(vars(meta)) for name, meta in partition.field_metadata.items()},
        "locations": partition.field_custom_backend_meta,
        "tags": partition.custom_meta,
        "keys": partition.keys_mapping,
    }


def _load_partition(name: str, saved: dict[str, Any]) -> Any:
    partition = DataPartitionStatus(partition_id=name, created_at=saved["created_at"])
    partition.global_indexes = set(saved["indexes"])
    partition.pre_allocated_global_indexes = set(saved["reserved"])
    consumed = saved["consumed"]
    known = [*saved["indexes"], *saved["reserved"]]
    marked = [i for indexes in (*saved["fields"].values(), *consumed.values()) for i in indexes]
    partition.ensure_samples_capacity(max([*known, *marked], default=-1) + 1)
    partition.field_name_mapping = {field: column for column, field in enumerate(saved["fields"])}
    partition.ensure_fields_capacity(len(saved["fields"]))
    for column, indexes in enumerate(saved["fields"].values()):
        partition.production_status[indexes, column] = 1
    for task, indexes in consumed.items():
        partition.get_consumption_status(task)
        partition.mark_consumed(task, indexes)
    partition.field_metadata = {field: FieldMeta(**meta) for field, meta in saved["schema"].items()}
    partition.field_custom_backend_meta = saved["locations"]
    partition.custom_meta = saved["tags"]
    partition.keys_mapping = dict(saved["keys"])
    partition.revert_keys_mapping = {index: key for key, index in saved["keys"].items()}
    return partition


def _allocate(controller: Any, event: dict[str, Any]) -> None:
    name, indexes = event["partition"], controller.index_manager
    partition = controller.partitions.get(name)
    if partition is None:
        partition = controller.partitions[name] = DataPartitionStatus(partition_id=name)
    taken = {*event["indexes"], *event["reserved"]}
    indexes.partition_to_indexes[name] |= taken
    indexes.reusable_indexes = [i for i in indexes.reusable_indexes if i not in taken]
    indexes.allocated_indexes.update(i for i in taken if i >= indexes.global_index_counter)
    indexes.global_index_counter = event["counter"]
    partition.global_indexes.update(event["indexes"])
    partition.pre_allocated_global_indexes = set(event["reserved"])
    partition.keys_mapping.update(event["keys"])
    partition.revert_keys_mapping.update({index: key for key, index in event["keys"].items()})
    partition.ensure_samples_capacity(max(taken) + 1)


def _unmark_refused(controller: Any, event: dict[str, Any]) -> None:
    """Mark what a refused put did not store as not put: the controller marks before it checks."""
    partition = controller.partitions[event["partition"]]
    stored = partition.field_custom_backend_meta
    for index in event["indexes"]:
        for field in event["schema"]:
            if field not in stored.get(index, ()):
                partition.production_status[index, partition.field_name_mapping[field]] = 0


def _forget_lost(controller: Any, folder: Path, *, verify: bool) -> list[str]:
    """Mark values that are missing or damaged as not put, and return their keys."""
    reader, sizes, lost = ValueReader(folder), {}, []
    for partition in controller.partitions.values():
        for index, fields in partition.field_custom_backend_meta.items():
            for field, text in list(fields.items()):
                key, location = f"{index}@{field}", parse_location(text)
                if location.file not in sizes:
                    path = values_folder(folder) / location.file
                    sizes[location.file] = path.stat().st_size if path.exists() else -1
                if _is_stored(reader, sizes, key, location, verify):
                    continue
                lost.append(key)
                del fields[field]
                partition.production_status[index, partition.field_name_mapping[field]] = 0
    reader.close()
    return lost


def _is_stored(
    reader: ValueReader, sizes: dict[str, int], key: str, location: Location, verify: bool
) -> bool:
    if location.offset + location.num_bytes > sizes[location.file]:
        return False
    if verify:
        try:
            reader.get([key], [str(location)])
        except ReplayLakeError as error:
            _logger.error("%s", error)
            return False
    return True


def _check_files(folder: Path, state: dict[str, Any], path: str) -> None:
    present = {found.name for found in values_folder(folder).glob(f"*{SUFFIX}")}
    if missing := sorted(state_files(state) - present):
        raise StorageError(
            f"{path}: names {len(missing)} files of values that {folder} lacks, the first "
            f"{missing[0]}. They were removed when their samples were cleared: save checkpoints "
            "with `include_storage`."
        )


def _rows(body: dict[str, Any]) -> list[list[Any]]:
    """Return the rows of a request, grouped by partition."""
    rows: dict[str, list[int]] = {}
    for partition, index in zip(body["partition_ids"], body["global_indexes"], strict=True):
        rows.setdefault(partition, []).append(index)
    return [[partition, indexes] for partition, indexes in rows.items()]


def _file(location: str) -> str:
    return location.partition(":")[0]


def _changes(before: Any, after: Any) -> list[list[Any]]:
    """Return what to set, [path, value], and to remove, [path], to get from one dict to another."""
    changes: list[list[Any]] = []
    for key in [key for key in before if key not in after]:
        changes.append([[key]])
    for key, value in after.items():
        old = before.get(key, _changes)
        if isinstance(value, dict) and isinstance(old, dict):
            changes += [[[key, *change[0]], *change[1:]] for change in _changes(old, value)]
        elif old is _changes or old != value:
            changes.append([[key], value])
    return changes


def _apply_changes(target: Any, changes: list[list[Any]]) -> None:
    for (*parents, key), *value in changes:
        place = target
        for parent in parents:
            place = place[parent]
        if value:
            place[key] = value[0]
        else:
            place.pop(key, None)


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
