"""TransferQueue's storage backend `ReplayLake`; importing this module registers it.

    ray.init(runtime_env={"worker_process_setup_hook":
             "replaylake.online.recorders.transferqueue.backend.register"})
    tq.init(OmegaConf.create({"backend": {
        "storage_backend": "ReplayLake",
        "ReplayLake": {"path": "/data/queue", "sync_every_put": False},
    }}))

Each process that puts writes the values itself, into files of its own in the folder; each that gets
reads them there. There is no process in between that could be lost. The controller, which decides
what is put, handed out and cleared, writes a log in the same folder (controller.py).
"""

from __future__ import annotations

import os
import shutil
from contextvars import ContextVar
from enum import Enum
from pathlib import Path
from typing import Any, Final

import ray
from transfer_queue.interface import close
from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
from transfer_queue.storage.clients.base import StorageClientFactory, StorageKVClient
from transfer_queue.storage.managers.base import KVStorageManager, StorageManagerFactory
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType, ZMQServerInfo

from replaylake.datastore.errors import ConfigInvalidError, NotFoundError, StorageError
from replaylake.datastore.storage.storage import fsync_folder, make_folder
from replaylake.online.recorders.transferqueue.attempts import Attempt
from replaylake.online.recorders.transferqueue.controller import ALLOCATION, install, state_files
from replaylake.online.recorders.transferqueue.event_log import read_state
from replaylake.online.recorders.transferqueue.values import ValueReader, ValueWriter, values_folder

NAME: Final = "ReplayLake"
_CLIENT: Final = "ReplayLakeClient"
_CHECKPOINT_STATE: Final = "controller_state.pkl"  # TransferQueue's name; its content is JSON
_TIMEOUT_S: Final = int(os.environ.get("TQ_DATA_UPDATE_RESPONSE_TIMEOUT", "30"))
# Of the rows of the put of this task: TransferQueue's `put_data` does not pass metadata on.
_ALLOCATIONS: Final[ContextVar[dict[int, Any]]] = ContextVar("allocations")
_OPTIONS: Final = {"path", "sync_every_put"}


class Registration(Enum):
    """Stands in the configuration that TransferQueue sends to its processes.

    Who unpickles it imports this module, and has the backend registered.
    """

    DONE = "done"


def register() -> None:
    """Do nothing, as the import has registered the backend: a worker_process_setup_hook of Ray."""


@StorageBootstrapProvider.register_provider(NAME)  # type: ignore[untyped-decorator]
def start_storage(config: Any) -> dict[str, Any]:
    """Begin an attempt: restore the controller from the folder, and have it write there.

    `tq.init` calls this once, after it has made the controller. It sets `attempt` and `restored`,
    the counts of `controller.reconcile`, in `config.backend.ReplayLake`.
    Raises: ConfigInvalidError for an unknown option or a missing path; what `install` raises. The
    queue is then closed, so that `tq.init` can be called again.
    """
    controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    try:
        options = config.backend[NAME]
        folder, sync_every = _read_options(dict(options))
        run: Any = controller.__ray_call__
        restored: Any = ray.get(run.remote(install, str(folder), sync_every))
    except BaseException:
        # It has set its globals, which a next `tq.init` would take for those of a whole queue.
        close()
        raise
    options.path = str(folder)
    options.sync_every_put = sync_every
    options.attempt = restored["attempt"]
    options.restored = restored
    options.registration = Registration.DONE
    return {}


@StorageClientFactory.register(_CLIENT)
class ReplayLakeClient(StorageKVClient):  # type: ignore[misc]
    """Writes and reads the values of one process."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        folder = Path(config["path"])
        self._writer: ValueWriter | None = None
        self._attempt = Attempt(folder, config["attempt"])
        self._sync_every = config["sync_every_put"]
        self._reader = ValueReader(folder)

    def put(self, keys: list[str], values: list[Any]) -> list[str]:
        """Write values and return their locations. Raises: as `ValueWriter.put`."""
        if self._writer is None:
            self._writer = ValueWriter(self._attempt, sync_every=self._sync_every)
        return self._writer.put(keys, values)

    def get(
        self,
        keys: list[str],
        shapes: Any = None,
        dtypes: Any = None,
        custom_backend_meta: list[str | None] | None = None,
    ) -> list[Any]:
        """Read values at their locations, which metadata of the controller has.

        Raises: NotFoundError for a key without one; as `ValueReader.get`.
        """
        locations = custom_backend_meta or [None] * len(keys)
        if missing := [key for key, place in zip(keys, locations, strict=True) if not place]:
            raise NotFoundError(
                f"{len(missing)} of {len(keys)} values were not put when their metadata was read, "
                f"the first {missing[0]} (row@field). Read the metadata again."
            )
        return self._reader.get(keys, [str(place) for place in locations])

    def clear(self, keys: list[str], custom_backend_meta: Any = None) -> None:
        """Do nothing: the controller writes the clear, and removes files without values."""

    def close(self) -> None:
        self._reader.close()
        if self._writer is not None:
            self._writer.close()


@StorageManagerFactory.register(NAME)
class ReplayLakeManager(KVStorageManager):  # type: ignore[misc]
    """Puts and gets samples of one process, by way of `ReplayLakeClient`."""

    def __init__(
        self,
        controller_info: ZMQServerInfo,
        config: dict[str, Any],
        zmq_context: Any = None,
    ) -> None:
        super().__init__(controller_info, {**config, "client_name": _CLIENT}, zmq_context)

    async def put_data(self, data: Any, metadata: Any, data_parser: Any = None) -> None:
        """Put values, with the allocations of their rows that the metadata names.

        Raises: StorageError if rows were cleared since the metadata was read; as `ValueWriter.put`.
        """
        rows = zip(metadata.global_indexes, metadata._custom_backend_meta, strict=True)
        token = _ALLOCATIONS.set({index: fields.get(ALLOCATION) for index, fields in rows})
        try:
            await super().put_data(data, metadata, data_parser)
        finally:
            _ALLOCATIONS.reset(token)

    async def notify_data_update(
        self,
        partition_id: str,
        global_indexes: list[int],
        field_schema: dict[str, dict[str, Any]],
        custom_backend_meta: dict[int, dict[str, Any]] | None = None,
    ) -> None:
        """Tell the controller of a put. Raises: StorageError."""
        allocations, locations = _ALLOCATIONS.get(), custom_backend_meta or {}
        rows = {
            index: {**locations.get(index, {}), ALLOCATION: allocations.get(index)}
            for index in global_indexes
        }
        await super().notify_data_update(partition_id, global_indexes, field_schema, rows)

    async def clear_data(self, metadata: Any) -> None:
        """Do nothing: the controller writes the clear, and removes files without values."""

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Link the files of the values that the controller's state names into a checkpoint.

        Raises: StorageError.
        """
        target = values_folder(Path(checkpoint_dir))
        make_folder(target)
        state = read_state(Path(checkpoint_dir) / _CHECKPOINT_STATE)
        for name in state_files(state):
            _link(values_folder(Path(self.config["path"])) / name, target / name)
        fsync_folder(target)

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Link the files of a checkpoint back into the folder. Raises: StorageError."""
        target = values_folder(Path(self.config["path"]))
        make_folder(target)
        for path in values_folder(Path(checkpoint_dir)).iterdir():
            if not (target / path.name).exists():
                _link(path, target / path.name)
        fsync_folder(target)

    def close(self) -> None:
        super().close()
        if hasattr(self, "storage_client"):
            self.storage_client.close()

    async def _notify_and_wait(self, request_msg: list[Any]) -> None:
        """Tell the controller of a put, and wait until it has written that to its log.

        TransferQueue's own only logs a failure, and the put would count as acknowledged.
        Raises: StorageError.
        """
        async with self.notify_pool.alease(self.controller_info) as socket:
            try:
                await socket.send_multipart(request_msg)
                if not await socket.poll(_TIMEOUT_S * 1_000):
                    raise StorageError(
                        f"the controller {self.controller_info.id} did not acknowledge a put "
                        f"within {_TIMEOUT_S} s; whether it is stored is unknown. Put it again."
                    )
                reply = ZMQMessage.deserialize(await socket.recv_multipart(copy=False))
            except BaseException:
                # A late reply would be taken for that to the next request.
                socket.close(linger=0)
                raise
        if reply.request_type != ZMQRequestType.NOTIFY_DATA_UPDATE_ACK:
            raise StorageError(f"put refused: {reply.body.get('message')}")


def _read_options(options: dict[str, Any]) -> tuple[Path, bool]:
    path, sync_every = options.get("path"), options.get("sync_every_put", False)
    if unknown := sorted(set(options) - _OPTIONS):
        raise ConfigInvalidError(
            f"backend.{NAME}: unknown option {unknown[0]!r}, expected {sorted(_OPTIONS)}."
        )
    if not isinstance(path, str) or not path:
        raise ConfigInvalidError(
            f"backend.{NAME}.path: found {path!r}, expected the folder of the queue.",
            parameter="path",
        )
    if not isinstance(sync_every, bool):
        raise ConfigInvalidError(
            f"backend.{NAME}.sync_every_put: found {sync_every!r}, expected true or false.",
            parameter="sync_every_put",
        )
    return Path(path).expanduser().resolve(), sync_every


def _link(source: Path, target: Path) -> None:
    """Give a durable file a second name, or copy it to another file system."""
    try:
        with source.open("rb") as stream:
            os.fsync(stream.fileno())
        try:
            os.link(source, target)
        except OSError:
            temporary = target.with_name(f".{target.name}")
            shutil.copyfile(source, temporary)
            with temporary.open("rb") as stream:
                os.fsync(stream.fileno())
            os.replace(temporary, target)
    except OSError as error:
        raise StorageError(
            f"{source}: {error.strerror or error}, expected to link it to {target}. Samples were "
            "cleared meanwhile, or the disk is full: repeat it."
        ) from error
