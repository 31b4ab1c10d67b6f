"""Cluster: the Ray that a pool's workers run on: of this process's own, or of several nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.errors import ConfigInvalid, RolloutFailed
from replaylake.datastore.lake.policies.manifest import GRAPH, read_checked
from replaylake.offline.running import local_ray
from replaylake.online.collecting.acting import Acting, AgentsActing, GraphBytes
from replaylake.online.collecting.shipment import Order
from replaylake.online.pools.nodes import Nodes
from replaylake.online.pools.working_folder import packed

_NEEDS: Final = (
    "rollout workers: found no ray, expected it for --workers 1 or more, and none for "
    "--env-runner local"
)


def import_ray(address: str | None = None) -> Any:
    """Return the module, its environment set before it is first read. Raises: ExtraMissing.

    address: of the cluster that is to be connected to; None for a Ray of this process's own.
    """
    return local_ray.import_ray(_NEEDS, address)


class Cluster:
    """A Ray that is connected to. ray: the module.

    nodes: those of a cluster, each asked whether it sees the lake; None of a Ray of our own.
    """

    def __init__(
        self,
        stack: ExitStack,
        order: Order,
        size: int,
        cpus: float,
        address: str | None,
        *,
        start_timeout_s: float,
        should_end: Callable[[], bool],
    ) -> None:
        """Start Ray where none runs and none is named, or connect; `stack` is what ends it.

        Args:
            stack: closed when the workers are gone.
            order: one of the workers', for the lake and the environment of all.
            size: how many workers there are.
            cpus: that each of them takes up.
            address: of a cluster, as running_ray takes it.
            start_timeout_s: how long a cluster may take to answer.
            should_end: asked while nodes are waited for.

        Raises: ExtraMissing, RolloutFailed, StorageFailed; ConfigInvalid for CPUs that Ray does not
        give or that the cluster does not have, and for a working folder that is too large;
        KeyboardInterrupt where it should end.
        """
        _check_cpus(cpus)
        self._num_wanted = size * cpus
        folder = None
        module, colon, _ = order.config.env_id.partition(":")
        if address is not None and colon and module:
            folder = stack.enter_context(packed(Path.cwd()))
        owns_ray = not import_ray(address).is_initialized() and address is None
        self.ray: Any = stack.enter_context(
            local_ray.running_ray(
                _NEEDS,
                math.ceil(self._num_wanted),
                address=address,
                working_folder=folder,
                failure=RolloutFailed,
                start_timeout_s=start_timeout_s,
            )
        )
        # A Ray of our own runs on this machine, from this process: what that sees, it sees.
        self.nodes = None if owns_ray else Nodes(self.ray, order.lake, order.dataset, should_end)
        if self.nodes is not None and not self.has_room:
            where = "the cluster" if address is None else address
            raise ConfigInvalid(
                f"Ray at {where}: found {self.nodes.num_cpus():g} CPUs, expected "
                f"{self._num_wanted:g} for {size} workers. Take fewer --workers, or a smaller "
                "--worker-cpus."
            )
        if order.records:
            self.look_at_new_nodes()

    @property
    def has_room(self) -> bool:
        """Whether its nodes have the CPUs that all workers together take up."""
        return self.nodes is None or self.nodes.num_cpus() >= self._num_wanted

    @property
    def seeing(self) -> frozenset[str] | None:
        """Ray's ids of the nodes that see the lake; None if all are this machine."""
        return None if self.nodes is None else frozenset(self.nodes.seeing)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Which nodes do not see the lake, and who writes for their workers."""
        return () if self.nodes is None else self.nodes.remarks

    def look_at_new_nodes(self) -> None:
        """Ask nodes that came since whether they see the lake. Raises: as Nodes.ask_new."""
        if self.nodes is not None:
            self.nodes.ask_new()

    def sendable(self, acting: AgentsActing) -> AgentsActing:
        """Put a policy's graph in place of its package, where some nodes cannot look it up."""
        if self.nodes is None or not self.nodes.blind:
            return acting
        if isinstance(acting, Mapping):
            return {agent: _with_graph(one) for agent, one in acting.items()}
        return _with_graph(acting)


def _with_graph(acting: Acting) -> Acting:
    if not isinstance(acting.source, Path):
        return acting
    manifest, files = read_checked(acting.source, acting.manifest_sha256)
    return replace(acting, source=GraphBytes(files[GRAPH], manifest.spec))


def _check_cpus(cpus: float) -> None:
    if not (0 < cpus <= 1 or (cpus > 1 and cpus == int(cpus))):
        raise ConfigInvalid(
            f"--worker-cpus: found {cpus:g}, expected more than 0, and a whole number above 1: Ray "
            "gives parts of one CPU, or whole ones."
        )
