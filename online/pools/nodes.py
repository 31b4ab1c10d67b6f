"""Nodes: which machines of a Ray cluster see the very lake that this process sees.

The driver writes a nonce into the lake; on every node a process opens the lake by the same name,
reads the nonce and the dataset's newest version, and writes an answer beside it, which the driver
reads. A lake of the same name on another machine's disk has no such nonce, and is not written to.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from replaylake.datastore.errors import ReplayLakeError, RolloutError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage.locations import open_storage
from replaylake.datastore.version import VERSION

# Where nonces and answers lie while nodes are asked.
_FOLDER: Final = "_lake/nodes"
# A process of Ray starts in a second; on a node that has unpacked nothing yet, in some more.
_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.25


@dataclass(frozen=True)
class _NodeCheck:
    """What one node found: nothing missing, or what; which ReplayLake runs there."""

    missing: str | None
    replaylake: str


@dataclass
class Nodes:
    """The nodes of a Ray that were asked, by Ray's id of each.

    should_end: asked while they are waited for. with_lake: those that see the lake. without_lake:
    those that do not see the lake, with what people call the node and what it found.
    """

    ray: Any
    lake: str
    dataset: str
    should_end: Callable[[], bool] = lambda: False
    with_lake: set[str] = field(default_factory=set)
    without_lake: dict[str, str] = field(default_factory=dict)

    def check_new(self) -> None:
        """Ask the nodes that are there and were not asked yet, side by side.

        Raises: StorageError if the lake cannot be written; RolloutError if this process's own
        node does not see the lake, or for a node without this version of ReplayLake;
        KeyboardInterrupt where it should end.
        """
        new = {
            node["NodeID"]: node
            for node in self.ray.nodes()
            if node["Alive"] and node["NodeID"] not in self.with_lake | self.without_lake.keys()
        }
        if new:
            self._check_nodes(new)
        if (own := current_node()) in self.without_lake:
            raise RolloutError(
                f"{self.without_lake[own]}; expected at least this process's own node to access "
                "it, whose workers write for the others. Start Ray there with the same folders and "
                "variables."
            )

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the user should know of the nodes: a line for each that does not see the lake."""
        return tuple(
            f"{remark}: its workers send what they collect to this node, which writes it"
            for remark in self.without_lake.values()
        )

    def num_cpus(self) -> float:
        """Return the CPUs of the nodes that are alive, given away or not."""
        alive = [node for node in self.ray.nodes() if node["Alive"]]
        return float(sum(node["Resources"].get("CPU", 0) for node in alive))

    def _check_nodes(self, nodes: Mapping[str, Mapping[str, Any]]) -> None:
        handle = Lake(open_storage(self.lake))
        folder, nonce = f"{_FOLDER}/{new_ulid()}", secrets.token_bytes(16)
        version = handle.dataset(self.dataset).snapshot().version
        handle.storage.put(_nonce_path(folder), nonce)
        try:
            arguments = (self.lake, self.dataset, folder, nonce, version)
            task = self.ray.remote(num_cpus=0, max_retries=0)(_check_lake_visible)
            checks = {
                task.options(scheduling_strategy=pin_to_node(node)).remote(*arguments, node): node
                for node in nodes
            }
            ready = self._wait_for(list(checks))
            for reference, node in checks.items():
                name = f"node {nodes[node]['NodeManagerAddress']} ({node[:8]})"
                missing: str | None = f"found no answer in {_TIMEOUT_S:.0f} s"
                if reference in ready:
                    missing = self._missing_reason(reference, name)
                answer = handle.storage.get(_answer_path(folder, node))
                if missing is None and answer != nonce:
                    missing = "found what it wrote not to arrive here"
                if missing is None:
                    self.with_lake.add(node)
                else:
                    self.without_lake[node] = f"{name} does not see the lake {self.lake}: {missing}"
        finally:
            answers = [_answer_path(folder, node) for node in nodes]
            handle.storage.delete([_nonce_path(folder), *answers])

    def _wait_for(self, references: Sequence[Any]) -> list[Any]:
        """Wait for all of them, and return those that were answered in time."""
        until = time.monotonic() + _TIMEOUT_S
        while True:
            ready: list[Any]
            ready, pending = self.ray.wait(
                references, num_returns=len(references), timeout=_POLL_S, fetch_local=False
            )
            if not pending or time.monotonic() > until:
                return ready
            if self.should_end():
                raise KeyboardInterrupt

    def _missing_reason(self, reference: Any, name: str) -> str | None:
        exceptions = self.ray.exceptions
        try:
            sight: _NodeCheck = self.ray.get(reference)
        except exceptions.RayTaskError as error:
            raise RolloutError(
                f"{name}: found {type(error.cause).__name__}: {error.cause}, expected ReplayLake "
                f"{VERSION} with its extra `online`. Install it on every node."
            ) from error
        except exceptions.RayError as error:
            return f"found {type(error).__name__}"
        if sight.replaylake != VERSION:
            raise RolloutError(
                f"{name}: found ReplayLake {sight.replaylake}, expected {VERSION} as in this "
                "process. Install the same version on every node."
            )
        return sight.missing


def pin_to_node(node: str) -> Any:
    """Return how Ray is told to run something on a node and nowhere else."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


def current_node() -> str:
    """Return Ray's id of the node that this process runs on."""
    import ray

    node: str = ray.get_runtime_context().get_node_id()
    return node


def _check_lake_visible(
    lake: str, dataset: str, folder: str, nonce: bytes, version: int, node: str
) -> _NodeCheck:
    """Run on the node: say what is missing there; only where nothing is, answer in the lake."""
    try:
        storage = open_storage(lake)
        if storage.get(_nonce_path(folder)) != nonce:
            return _NodeCheck("found nothing of this run there", VERSION)
        newest = Lake(storage).dataset(dataset).snapshot().version
        if newest < version:
            return _NodeCheck(f"found {dataset}@{newest}, behind {dataset}@{version}", VERSION)
        storage.put(_answer_path(folder, node), nonce)
    except (ReplayLakeError, OSError) as error:
        return _NodeCheck(f"found {type(error).__name__}: {error}", VERSION)
    return _NodeCheck(None, VERSION)


def _nonce_path(folder: str) -> str:
    return f"{folder}/nonce"


def _answer_path(folder: str, node: str) -> str:
    return f"{folder}/{node}"
