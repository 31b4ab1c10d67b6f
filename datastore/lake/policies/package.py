"""Policy package: a directory with a policy and all that is known of it.

    policy.onnx           the graph, up to the head's parameters
    manifest.json         format version, spaces, head, algorithm, resolved config, normalization,
                          data and SQL with a content hash, metrics, evaluation; the sha256 of
                          every other file. Its own is in the registry of the lake
    learner.safetensors   for resuming: weights, optimizer and random state (optional)

That of a language model has the files that transformers wrote instead of the graph.

It is saved, checked and loaded here, and holds no pickle. Checking and acting need numpy and
onnxruntime alone: a served policy imports this module.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

# Since 1.31 onnxruntime reports its sessions to its vendor: from inside of a policy server, through
# a database in the home directory, at up to two seconds of each process's end. Read at its import.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime

from replaylake.datastore.episodes.spaces import (
    Array,
)
from replaylake.datastore.errors import (
    AlreadyExistsError,
    ExtraMissingError,
    NotFoundError,
    PackageInvalidError,
    StorageError,
)
from replaylake.datastore.lake.policies.graph_policy import (
    GraphPolicy,
    graph_input_names,
    graph_output_names,
)
from replaylake.datastore.lake.policies.manifest import (
    GRAPH,
    LEARNER,
    MANIFEST,
    Manifest,
    hash_manifest,
    manifest_bytes,
    read_verified,
    verify_package,
)
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage.storage import fsync_folder

# Where a Bento has its package.
_IN_BENTO: Final = Path("src", "policy")


class GraphSession:
    """A policy's graph, run by onnxruntime on numpy arrays; threads may share one."""

    def __init__(self, onnx: bytes, spec: PolicySpec, what: str = GRAPH) -> None:
        """Load the graph.

        Raises: PackageInvalidError if it does not parse or does not fit the spec.
        """
        options = onnxruntime.SessionOptions()
        # One small matrix product a request: a thread pool costs more than it saves, and its
        # spinning workers take the cores from other requests.
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(
                onnx, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's errors share no base class but this
            raise PackageInvalidError(
                f"{what}: onnxruntime {onnxruntime.__version__} cannot load it: {error}. Package "
                "the policy again."
            ) from error
        self._what = what
        self._outputs = list(graph_output_names(spec))
        self._check_names("inputs", self._session.get_inputs(), graph_input_names(spec), what)
        self._check_names("outputs", self._session.get_outputs(), tuple(self._outputs), what)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Map the graph's inputs, each [N, ...], to its outputs by name, each [N, ...].

        Raises: PackageInvalidError if the graph does not take inputs of the spec's shapes.
        """
        try:
            outputs = self._session.run(self._outputs, inputs)
        except Exception as error:  # onnxruntime's errors share no base class but this
            raise PackageInvalidError(
                f"{self._what}: onnxruntime {onnxruntime.__version__} cannot run it: {error}. "
                "Package the policy again."
            ) from error
        return dict(zip(self._outputs, outputs, strict=True))

    @staticmethod
    def _check_names(kind: str, actual: Any, expected: tuple[str, ...], what: str) -> None:
        names = tuple(value.name for value in actual)
        if names != expected:
            raise PackageInvalidError(
                f"{what}: found {kind} {list(names)}, expected {list(expected)} for the spaces and "
                "head that the manifest names. Package the policy again."
            )


class PackagedPolicy(GraphPolicy):
    """A Policy that acts from a package; safe to share between threads."""

    def __init__(self, onnx: bytes, manifest: Manifest, what: str = GRAPH) -> None:
        self.manifest = manifest
        graph = GraphSession(onnx, manifest.spec, what)
        super().__init__(manifest.spec, graph.run)


def save_package(
    directory: Path,
    *,
    onnx: bytes,
    spec: PolicySpec,
    manifest: Mapping[str, Any],
    learner_weights: Mapping[str, Array] | None,
) -> None:
    """Write a package: all of it under a temporary name, fsynced, then renamed to `directory`.

    Args:
        directory: the package to make; its parent exists, it does not.
        onnx: the graph, with the inputs and outputs that `spec` asks for.
        spec: spaces and head.
        manifest: JSON object of what else is to be known (algorithm, config, data, metrics, ...).
        learner_weights: named arrays for resuming, or None to leave them out.

    Raises: AlreadyExistsError if `directory` does, PackageInvalidError if the manifest is no JSON
    or uses a field that is written here, StorageError if the disk refuses.
    """
    directory = Path(directory)
    files = {GRAPH: onnx}
    if learner_weights is not None:
        files[LEARNER] = _safetensors("save")(
            {name: np.asarray(array, order="C") for name, array in learner_weights.items()}
        )
    files[MANIFEST] = manifest_bytes(spec, manifest, files)
    if directory.exists():
        raise AlreadyExistsError(
            f"{directory}: found a file or folder of that name, expected a free name for the "
            "policy package. Choose another; a package is never overwritten."
        )
    temporary = directory.parent / f".{directory.name}.{new_ulid()}"
    try:
        temporary.mkdir()
        for name, data in files.items():
            _write_durably(temporary / name, data)
        fsync_folder(temporary)
        temporary.rename(directory)
        fsync_folder(directory.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise StorageError(
            f"{directory}: {error.strerror or error} while the policy package was written. The "
            "incomplete package was removed; free space or correct the permission, then run it "
            "again."
        ) from error


def check_package(directory: Path, manifest_sha256: str | None = None) -> Manifest:
    """Verify the format version and every sha256, and return the manifest.

    manifest_sha256: of a registered version that of its PolicyRef.
    Raises: NotFoundError if there is no package, FormatTooNewError if a newer ReplayLake wrote it,
    PackageInvalidError naming the file that is missing, altered or unreadable.
    """
    return verify_package(Path(directory), manifest_sha256)


def find_package(path: Path, sha256: str | None = None) -> tuple[Path, Manifest]:
    """Verify the package at a path; return its directory and its manifest.

    path: the package, or a Bento that contains one. sha256: the one that its manifest has to have.
    Raises: as check_package.
    """
    path = Path(path)
    in_bento = path / _IN_BENTO
    directory = path if (path / MANIFEST).exists() or not in_bento.is_dir() else in_bento
    if sha256 is not None and (found := hash_manifest(directory)) != sha256.lower():
        raise PackageInvalidError(
            f"{directory}: found a package of sha256 {found}, expected {sha256.lower()} as "
            "`sha256` gives it. Check where the package comes from.",
            parameter="sha256",
        )
    return directory, check_package(directory, None if sha256 is None else sha256.lower())


def load_policy(directory: Path, manifest_sha256: str | None = None) -> PackagedPolicy:
    """Verify a package and return its policy, which acts as the trained learner does.

    manifest_sha256: as in check_package. Raises: as check_package; also PackageInvalidError if the
    graph does not fit its spec, PolicyKindError if it is a language model.
    """
    directory = Path(directory)
    manifest, files = read_verified(directory, manifest_sha256)
    return PackagedPolicy(files[GRAPH], manifest, str(directory / GRAPH))


def graph_policy(onnx: bytes, spec: PolicySpec, what: str = GRAPH) -> GraphPolicy:
    """Return a policy of a graph alone. Raises: PackageInvalidError if it does not fit the spec."""
    return GraphPolicy(spec, GraphSession(onnx, spec, what).run)


def load_learner_weights(directory: Path, manifest_sha256: str | None = None) -> dict[str, Array]:
    """Return the arrays to resume from, checked.

    Raises: as check_package; NotFoundError if left out.
    """
    directory = Path(directory)
    files = read_verified(directory, manifest_sha256)[1]
    if LEARNER not in files:
        raise NotFoundError(
            f"{directory}: found no {LEARNER}, expected one to resume from. Package the policy "
            "with its learner's weights."
        )
    arrays: dict[str, Array] = _safetensors("load")(files[LEARNER])
    return arrays


def _safetensors(function: str) -> Any:
    try:
        import safetensors.numpy
    except ModuleNotFoundError as error:
        raise ExtraMissingError(
            f"{LEARNER}: found no safetensors library, expected it for learner weights. Run: "
            "pip install 'replaylake[offline]'."
        ) from error
    return getattr(safetensors.numpy, function)


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
