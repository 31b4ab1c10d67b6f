"""Policy package: a directory with a policy and all that is known of it.

    policy.onnx           the graph, up to the head's parameters
    manifest.json         format version, spaces, head, algorithm, resolved config, normalisation,
                          data and SQL with a content hash, metrics, evaluation; the sha256 of
                          every other file
    learner.safetensors   for resuming: weights, optimizer and random state (optional)

It is saved, checked and loaded here, and holds no pickle. Checking and acting need numpy and
onnxruntime alone: a served policy imports this module.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from replaylake.datastore.errors import (
    AlreadyExists,
    EpisodeInvalid,
    ExtraMissing,
    NotFound,
    PackageInvalid,
    StorageFailed,
)
from replaylake.datastore.names import new_ulid
from replaylake.datastore.policies.heads import act_from_head
from replaylake.datastore.policies.log_probs import (
    action_probs_of,
    check_has_density,
    log_probs_of,
)
from replaylake.datastore.policies.manifest import (
    GRAPH,
    LEARNER,
    MANIFEST,
    Manifest,
    manifest_bytes,
    read_checked,
)
from replaylake.datastore.policies.policy import HEAD_OUTPUTS, Act, PolicySpec
from replaylake.datastore.spaces import (
    Array,
    Space,
    Values,
    as_values,
    children,
    num_values,
)
from replaylake.datastore.spaces import Dict as DictSpace
from replaylake.datastore.spaces import Tuple as TupleSpace
from replaylake.datastore.storage import fsync_folder


class GraphSession:
    """A policy's graph, run by onnxruntime on numpy arrays; threads may share one."""

    def __init__(self, onnx: bytes, spec: PolicySpec, what: str = GRAPH) -> None:
        """Load the graph. Raises: PackageInvalid if it does not parse or does not fit the spec."""
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
            raise PackageInvalid(
                f"{what}: onnxruntime {onnxruntime.__version__} cannot load it: {error}. Package "
                "the policy again."
            ) from error
        self._outputs = list(HEAD_OUTPUTS[spec.head])
        self._check_names("inputs", self._session.get_inputs(), graph_input_names(spec), what)
        self._check_names("outputs", self._session.get_outputs(), tuple(self._outputs), what)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Map the graph's inputs, each [N, ...], to the head's parameters, each [N, ...]."""
        return dict(zip(self._outputs, self._session.run(self._outputs, inputs), strict=True))

    @staticmethod
    def _check_names(kind: str, found: Any, expected: tuple[str, ...], what: str) -> None:
        names = tuple(value.name for value in found)
        if names != expected:
            raise PackageInvalid(
                f"{what}: found {kind} {list(names)}, expected {list(expected)} for the spaces and "
                "head that the manifest names. Package the policy again."
            )


class PackagedPolicy:
    """A Policy that acts from a package; stateless, and safe to share between threads."""

    def __init__(self, onnx: bytes, manifest: Manifest, what: str = GRAPH) -> None:
        self.manifest = manifest
        self._spec = manifest.spec
        self._graph = GraphSession(onnx, manifest.spec, what)

    @property
    def spec(self) -> PolicySpec:
        """Spaces and head."""
        return self._spec

    def initial_state(self, n: int) -> Any:
        """Return None: stateless."""
        return None

    def act(
        self,
        observations: Values,
        state: Any = None,
        *,
        rng: np.random.Generator | None = None,
        deterministic: bool = True,
        temperature: float = 1.0,
        epsilon: float = 0.0,
        action_mask: Array | None = None,
    ) -> Act:
        """Choose actions; see Policy.act."""
        inputs = graph_inputs(self._spec, observations, rng)
        return act_from_head(
            self._spec,
            self._graph.run(inputs),
            rng,
            deterministic=deterministic,
            temperature=temperature,
            epsilon=epsilon,
            mask=action_mask,
        )

    def action_probs(
        self,
        observations: Values,
        state: Any = None,
        *,
        deterministic: bool = True,
        temperature: float = 1.0,
        epsilon: float = 0.0,
        action_mask: Array | None = None,
    ) -> Array:
        """Return the probability of each action; see Policy.action_probs."""
        return action_probs_of(
            self.spec,
            self._graph.run(graph_inputs(self._spec, observations)),
            deterministic=deterministic,
            temperature=temperature,
            epsilon=epsilon,
            mask=action_mask,
        )

    def log_probs(
        self,
        observations: Values,
        actions: Values,
        state: Any = None,
        *,
        deterministic: bool = True,
        temperature: float = 1.0,
        epsilon: float = 0.0,
        action_mask: Array | None = None,
    ) -> Array:
        """Return log-probabilities of given actions; see Policy.log_probs."""
        # Before the graph is run, whose noise nobody has drawn.
        check_has_density(self.spec, deterministic=deterministic, temperature=temperature)
        return log_probs_of(
            self.spec,
            self._graph.run(graph_inputs(self._spec, observations)),
            actions,
            deterministic=deterministic,
            temperature=temperature,
            epsilon=epsilon,
            mask=action_mask,
        )

    def observe(self, state: Any, rewards: Array) -> Any:
        """Return the state unchanged."""
        return state


def graph_input_names(spec: PolicySpec) -> tuple[str, ...]:
    """Return the graph's inputs: `observations`, or one `observations.<leaf>` a leaf; `noise`."""
    names = tuple(_leaf_values(spec.observation_space, None, "observations"))
    return (*names, "noise") if spec.noise_size else names


def graph_inputs(
    spec: PolicySpec, observations: Values, rng: np.random.Generator | None = None
) -> dict[str, Array]:
    """Check observations [N, *obs] against the spec; returns the graph's inputs by name, in order.

    Floats become float32, as replay decodes them for learning; other dtypes stay. Raises:
    EpisodeInvalid if a shape or dtype differs or a number is not finite: nothing is reshaped.
    """
    checked = as_values(spec.observation_space, observations, "observation")
    inputs = {
        name: array.astype(np.float32) if array.dtype.kind == "f" else array
        for name, array in _leaf_values(spec.observation_space, checked, "observations").items()
    }
    if spec.noise_size:
        if rng is None:
            raise EpisodeInvalid(
                f"act: found no rng, expected a numpy Generator: head {spec.head} draws noise."
            )
        noise = rng.standard_normal((num_values(checked), spec.noise_size))
        inputs["noise"] = noise.astype(np.float32)
    return inputs


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

    Raises: AlreadyExists if `directory` does, PackageInvalid if the manifest is no JSON or uses a
    field that is written here, StorageFailed if the disk refuses.
    """
    directory = Path(directory)
    files = {GRAPH: onnx}
    if learner_weights is not None:
        files[LEARNER] = _safetensors("save")(
            {name: np.asarray(array, order="C") for name, array in learner_weights.items()}
        )
    files[MANIFEST] = manifest_bytes(spec, manifest, files)
    if directory.exists():
        raise AlreadyExists(
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
        raise StorageFailed(
            f"{directory}: {error.strerror or error} while the policy package was written. Nothing "
            "of it was kept; make room or mend the permission and run it again."
        ) from error


def check_package(directory: Path) -> Manifest:
    """Verify the format version and every sha256, and return the manifest.

    Raises: NotFound if there is no package, FormatTooNew if a newer ReplayLake wrote it,
    PackageInvalid naming the file that is missing, altered or unreadable.
    """
    return read_checked(Path(directory))[0]


def load_policy(directory: Path) -> PackagedPolicy:
    """Check a package and return its policy, which acts as the trained learner does.

    Raises: as check_package; PackageInvalid too if the graph does not fit its spec.
    """
    directory = Path(directory)
    manifest, files = read_checked(directory)
    return PackagedPolicy(files[GRAPH], manifest, str(directory / GRAPH))


def load_learner_weights(directory: Path) -> dict[str, Array]:
    """Return the arrays to resume from, checked. Raises: as check_package; NotFound if left out."""
    directory = Path(directory)
    files = read_checked(directory)[1]
    if LEARNER not in files:
        raise NotFound(
            f"{directory}: found no {LEARNER}, expected one to resume from. Package the policy "
            "with its learner's weights."
        )
    arrays: dict[str, Array] = _safetensors("load")(files[LEARNER])
    return arrays


def _leaf_values(space: Space, values: Any, name: str) -> dict[str, Any]:
    """Return a Dict's or Tuple's leaves by dotted name, depth first; values may be None."""
    if not isinstance(space, DictSpace | TupleSpace):
        return {name: values}
    found: dict[str, Any] = {}
    for key, sub in children(space).items():
        found |= _leaf_values(sub, None if values is None else values[key], f"{name}.{key}")
    return found


def _safetensors(function: str) -> Any:
    try:
        import safetensors.numpy
    except ModuleNotFoundError as error:
        raise ExtraMissing(
            f"{LEARNER}: found no safetensors library, expected it for learner weights. Install "
            "replaylake[offline]."
        ) from error
    return getattr(safetensors.numpy, function)


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
