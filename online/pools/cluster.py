"""Cluster: the Ray that a pool's workers run on: of this process's own, or of several nodes."""

from __future__ import annotations

import math
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.errors import ConfigInvalidError, RolloutError, StorageError
from replaylake.datastore.lake.policies.manifest import GRAPH, read_verified
from replaylake.offline.running import local_ray
from replaylake.online.collecting.behavior_policy import (
    BehaviorPolicies,
    BehaviorPolicy,
    GraphBytes,
)
from replaylake.online.collecting.rollout_batch import WorkerSpec
from replaylake.online.pools.nodes import Nodes

_NEEDS: Final = (
    "rollout workers: found no ray, expected it for 1 or more of them. Without Ray the "
    "environments run in this process: see `env_runner`"
)
# A tenth of what Ray takes: what is larger is no code, and each node would wait for it.
MAX_BYTES: Final = 50 << 20
# One pattern a line, of a name or of a path from the folder; `#` begins a comment. Ray's name.
IGNORE_FILE: Final = ".rayignore"
_DERIVED: Final = ("__pycache__", "node_modules", "*.egg-info", "_lake", "_delta_log")
_DATA: Final = (
    "*.parquet", "*.arrow", "*.h5", "*.hdf5", "*.npz", "*.safetensors", "*.pt", "*.ckpt", "*.mp4",
)  # fmt: skip
# Of a lake, a dataset and a virtual environment.
_MARKS: Final = ("_lake", "_delta_log", "pyvenv.cfg")


def import_ray(address: str | None = None) -> Any:
    """Return the module, its environment set before it is first read. Raises: ExtraMissingError.

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
        spec: WorkerSpec,
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
            spec: one of the workers', for the lake and the environment of all.
            size: how many workers there are.
            cpus: that each of them takes up.
            address: of a cluster, as open_ray takes it.
            start_timeout_s: how long a cluster may take to answer.
            should_end: asked while nodes are waited for.

        Raises: ExtraMissingError, RolloutError, StorageError; ConfigInvalidError for CPUs that Ray
        does not give or that the cluster does not have, and for a working folder that is too large;
        KeyboardInterrupt where it should end.
        """
        _check_cpus(cpus)
        self._num_wanted = size * cpus
        folder = None
        module, colon, _ = spec.config.env.partition(":")
        if address is not None and colon and module:
            folder = stack.enter_context(pack_code(Path.cwd()))
        owns_ray = not import_ray(address).is_initialized() and address is None
        self.ray: Any = stack.enter_context(
            local_ray.open_ray(
                _NEEDS,
                math.ceil(self._num_wanted),
                address=address,
                working_folder=folder,
                failure=RolloutError,
                start_timeout_s=start_timeout_s,
            )
        )
        # A Ray of our own runs on this machine, from this process: what that sees, it sees.
        self.nodes = None if owns_ray else Nodes(self.ray, spec.lake, spec.dataset, should_end)
        if self.nodes is not None and not self.has_free_cpus:
            where = "the cluster" if address is None else address
            raise ConfigInvalidError(
                f"Ray at {where}: found {self.nodes.num_cpus():g} CPUs, expected "
                f"{self._num_wanted:g} for {size} workers. Use fewer `workers`, or a smaller "
                "`worker_cpus`."
            )
        if spec.records:
            self.check_new_nodes()

    @property
    def has_free_cpus(self) -> bool:
        """Whether its nodes have the CPUs that all workers together take up."""
        return self.nodes is None or self.nodes.num_cpus() >= self._num_wanted

    @property
    def nodes_with_lake(self) -> frozenset[str] | None:
        """Ray's ids of the nodes that see the lake; None if all are this machine."""
        return None if self.nodes is None else frozenset(self.nodes.with_lake)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Which nodes do not see the lake, and who writes for their workers."""
        return () if self.nodes is None else self.nodes.remarks

    def check_new_nodes(self) -> None:
        """Ask nodes that came since whether they see the lake. Raises: as Nodes.check_new."""
        if self.nodes is not None:
            self.nodes.check_new()

    def embed_graphs(self, policies: BehaviorPolicies) -> BehaviorPolicies:
        """Put a policy's graph in place of its package, where some nodes cannot look it up."""
        if self.nodes is None or not self.nodes.without_lake:
            return policies
        if isinstance(policies, Mapping):
            return {agent: _embed_graph(one) for agent, one in policies.items()}
        return _embed_graph(policies)


def _embed_graph(policy: BehaviorPolicy) -> BehaviorPolicy:
    if not isinstance(policy.source, Path):
        return policy
    manifest, files = read_verified(policy.source, policy.manifest_sha256)
    return replace(policy, source=GraphBytes(files[GRAPH], manifest.spec))


def _check_cpus(cpus: float) -> None:
    if not (0 < cpus <= 1 or (cpus > 1 and cpus == int(cpus))):
        raise ConfigInvalidError(
            f"worker_cpus: found {cpus:g}, expected more than 0, and a whole number above 1: Ray "
            "assigns a fraction of one CPU, or whole CPUs.",
            parameter="worker_cpus",
        )


@contextmanager
def pack_code(folder: Path, most_bytes: int = MAX_BYTES) -> Iterator[Path]:
    """Yield a zip file of what travels of a folder; it is removed with the block.

    Raises: ConfigInvalidError naming the largest files where it is more than `most_bytes` before
    compression; StorageError where it cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="replaylake-code-") as temporary:
        target = Path(temporary) / "code.zip"
        with _translate_os_errors(folder):
            _pack(folder, target, most_bytes)
        yield target


def _pack(folder: Path, target: Path, most_bytes: int) -> None:
    sizes: dict[str, int] = {}
    total = 0
    for path in _files(folder):
        sizes[path] = (folder / path).stat().st_size
        # Found out before everything was looked at: the folder may be somebody's home.
        if (total := total + sizes[path]) > most_bytes:
            raise _too_large_error(folder, sizes, most_bytes)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for path in sizes:
            archive.write(folder / path, path)


def _files(folder: Path) -> Iterator[str]:
    """Yield the files that travel, as paths from the folder, in order."""
    patterns = (*_DERIVED, *_DATA, *_read_ignore_patterns(folder / IGNORE_FILE))
    for parent, folders, names in os.walk(folder, onerror=_raise_walk_error):
        at = os.path.relpath(parent, folder)
        folders[:] = sorted(
            name
            for name in folders
            if _travels(os.path.normpath(os.path.join(at, name)), patterns)
            and not any(os.path.exists(os.path.join(parent, name, mark)) for mark in _MARKS)
        )
        for name in sorted(names):
            path = os.path.normpath(os.path.join(at, name))
            # Neither pipes and sockets nor links that lead nowhere.
            if _travels(path, patterns) and os.path.isfile(os.path.join(parent, name)):
                yield path


def _raise_walk_error(error: OSError) -> None:
    raise error


def _travels(path: str, patterns: tuple[str, ...]) -> bool:
    name = os.path.basename(path)
    ignored = any(fnmatch(name, one) or fnmatch(path, one) for one in patterns)
    return not name.startswith(".") and not ignored


def _read_ignore_patterns(file: Path) -> list[str]:
    if not file.is_file():
        return []
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    return [line.strip("/") for line in lines if line and not line.startswith("#")]


@contextmanager
def _translate_os_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{folder}: {error.strerror or error} ({error.filename}), expected to send its code to "
            f"the nodes. Correct the permission, or name it in {IGNORE_FILE}."
        ) from error


def _too_large_error(folder: Path, sizes: dict[str, int], most_bytes: int) -> ConfigInvalidError:
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
    listed = ", ".join(f"{path} ({sizes[path] / 1e6:.1f} MB)" for path in largest)
    return ConfigInvalidError(
        f"{folder}: found more than {most_bytes / 1e6:.0f} MB to send to the nodes of `address`, "
        f"of which the largest are {listed}, expected only the environment's code. List the "
        f"files that nodes do not need in {IGNORE_FILE}, or start from the folder of the code."
    )
