"""Import: convert a policy of another library, check it on logged observations, register it.

The file is converted into the graph of a policy package, so that it is evaluated, promoted and
served like any other version, without the library that trained it. docs/IMPORT.md lists the
formats.
"""

from __future__ import annotations

import hashlib
import io
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final
from zipfile import BadZipFile

import numpy as np

from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Dict,
    Discrete,
    Space,
    Tuple,
    Values,
    as_values,
    num_values,
    take,
    value_dtype,
)
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EmptyReplayError,
    EpisodeInvalidError,
    PackageInvalidError,
    SourceInvalidError,
)
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.logged_steps import LoggedSteps, read_logged_steps
from replaylake.datastore.lake.policies.graph_policy import graph_inputs
from replaylake.datastore.lake.policies.heads import act_from_head
from replaylake.datastore.lake.policies.package import GraphSession, save_package
from replaylake.datastore.lake.policies.policy import HEAD_OUTPUTS, NEXT_STATE, PolicySpec
from replaylake.datastore.lake.policies.registry import PolicyRef
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.names import check_policy_name
from replaylake.offline.importing import xgboost_model
from replaylake.offline.importing.cleanrl import convert_state_dict
from replaylake.offline.importing.d3rlpy_model import convert_model, is_model
from replaylake.offline.importing.networks import Conversion
from replaylake.offline.importing.onnx_model import add_normalization, convert_onnx
from replaylake.offline.importing.stable_baselines3 import convert_archive
from replaylake.offline.importing.torchscript import convert_torchscript
from replaylake.offline.importing.weights import read_entry, read_file
from replaylake.offline.importing.xgboost_model import convert_xgboost
from replaylake.offline.networks.frame_stack import stack_space

AUTO: Final = "auto"
FORMATS: Final = ("sb3", "d3rlpy", "cleanrl", "onnx", "xgboost", "torchscript")
# The formats that an option is for; every format has the others.
_FORMATS_OF_OPTION: Final = {
    "activation": ("cleanrl",),
    "frame_stack": ("sb3", "cleanrl"),
    "head": ("onnx", "torchscript"),
    "outputs": ("onnx",),
}
_MAX_ARRAY_BYTES: Final = 1 << 30
# Raised by numpy.load for damaged files, and for those that claim more than memory holds.
_ARRAY_ERRORS: Final = (
    EOFError,
    MemoryError,
    OSError,
    OverflowError,
    TypeError,
    ValueError,
    BadZipFile,
    zlib.error,
)
# Steps of the dataset on which the policy is tested; more if more actions are to be compared.
_NUM_CHECKED: Final = 1024
# Rows that are also tested one by one, to detect outputs that depend on other rows.
_NUM_SINGLE: Final = 16
_ATOL: Final = 1e-5
_RTOL: Final = 1e-5


@dataclass(frozen=True)
class ImportOptions:
    """How the file of a policy is read.

    format: `auto`, or one of FORMATS. head: what the outputs of an ONNX or TorchScript model are,
    one of `onnx_model.MODEL_HEADS`; outputs: their names in an ONNX model, in the order of the
    head.
    normalization: an `.npz` file with the statistics that observations were normalized by, the
    arrays `mean` and `var` [*obs], and if they are others than 1e-8 and 10, `epsilon` and `clip`.
    frame_stack: on how many observations, one after another, the policy acts. activation: of the
    perceptron of a CleanRL script, one of `networks.ACTIVATIONS`, if it was changed.
    """

    format: str = AUTO
    head: str | None = None
    outputs: tuple[str, ...] = ()
    normalization: str | Path | None = None
    frame_stack: int = 1
    activation: str | None = None


@dataclass(frozen=True)
class PolicyImport:
    """The result of an import.

    policy: the registered version. algorithm: the recognized algorithm. head: the policy's head.
    num_observations: logged observations on which it was tested. agreement: share of these steps
    whose logged action is the policy's best one; None unless actions are Discrete. num_compared:
    expected actions; num_distinct: distinct ones among them. max_difference: largest difference
    between an expected action and the policy's; None if none were given or actions are discrete.
    num_ties: discrete actions that differ because the two best scores are equal. not_carried:
    sentences on what the policy may have had and the package does not.
    """

    policy: PolicyRef
    algorithm: str
    head: str
    num_observations: int
    agreement: float | None
    num_compared: int
    num_distinct: int
    max_difference: float | None
    num_ties: int
    not_carried: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON; the version as `policy` and `version`."""
        body = {key: getattr(self, key) for key in self.__dataclass_fields__ if key != "policy"}
        return {
            "policy": self.policy.name,
            "version": self.policy.version,
            **body,
            "not_carried": list(self.not_carried),
        }


def import_policy(
    lake: Lake,
    dataset: str,
    policy: str,
    path: str | Path,
    *,
    options: ImportOptions | None = None,
    expect: str | Path | Array | None = None,
    observations: str | Path | Array | None = None,
) -> PolicyImport:
    """Convert the file of a policy, check it on logged observations, and register it.

    No pickle is executed, and a TorchScript program only once it was found to be plain computation.
    The policy is tried on the first steps of the dataset, by
    episode id, agent id and step: its outputs have to be finite, and the same for one observation
    as for many.

    Args:
        lake: the lake.
        dataset: `NAME`, `NAME@VERSION` or `NAME@TAG`: its spaces are the policy's.
        policy: the name to register it under, as the next version.
        path: the file.
        options: how to read it.
        expect: best actions [K, *act] according to the original library, or a `.npy` file
            of them, for the first K steps of the dataset, or for `observations`.
        observations: the observations [K, *obs] of `expect`, or a `.npy` file of them.

    Raises: NotFoundError, InvalidNameError; SourceInvalidError if the file is damaged, has code or
    an architecture that is not converted, or if its actions are not those of `expect`;
    SpaceUnsupportedError if its spaces are not those of the dataset; ConfigInvalidError for options
    that do not fit; ExtraMissingError. In each case nothing was registered.
    """
    check_policy_name(policy)
    options = options or ImportOptions()
    path = Path(path)
    if observations is not None and expect is None:
        raise ConfigInvalidError(
            "observations: found observations without actions, expected the policy's "
            "actions for them as well. Give `expect`.",
            parameter="observations",
        )
    snapshot = lake.snapshot(dataset)
    expected = None if expect is None else _read_array(expect, "expect")
    given = None if observations is None else _read_array(observations, "observations")
    data = read_file(path)
    conversion = _convert(data, path, snapshot.spec, options)
    spec = replace(conversion.spec, encoding=snapshot.spec.encoding)
    conversion = replace(conversion, spec=spec)
    acting = _try_policy(conversion, path)
    steps = _read_first_steps(snapshot, 0 if expected is None else len(expected))
    num_tried = min(steps.num_steps, _NUM_CHECKED)
    agreement = _check_logged(acting, steps, num_tried)
    comparison = _Comparison()
    if expected is not None:
        comparison = _compare_actions(acting, steps, expected, given)
    checked = {
        "num_observations": num_tried,
        "agreement": agreement,
        "num_compared": comparison.num,
        "num_distinct": comparison.num_distinct,
        "max_difference": comparison.max_difference,
        "num_ties": comparison.num_ties,
    }
    return PolicyImport(
        policy=_register(lake, policy, path, data, snapshot, conversion, checked),
        algorithm=conversion.algorithm,
        head=spec.head,
        **checked,  # type: ignore[arg-type]
        not_carried=tuple(conversion.not_carried),
    )


@dataclass(frozen=True, eq=False)
class _Acting:
    """A converted policy that can act. what: the file, for errors."""

    conversion: Conversion
    run: Callable[[dict[str, Array]], dict[str, Array]]
    what: str

    def compute_outputs(
        self, observations: Values, starts: Array | None = None
    ) -> dict[str, Array]:
        """Return the head's outputs [N, ...]; starts bool [N]: where an episode begins.

        A policy with a state acts along the rows. Raises: PackageInvalidError, EpisodeInvalidError.
        """
        spec = self.conversion.spec
        rng = np.random.default_rng(0)
        if not spec.state_size:
            return self.run(graph_inputs(spec, observations, rng))
        rows: list[dict[str, Array]] = []
        state = np.zeros((1, spec.state_size), np.float32)
        for number in range(num_values(observations)):
            if starts is None or starts[number]:
                state = np.zeros((1, spec.state_size), np.float32)
            one: Values = take(observations, slice(number, number + 1))
            rows.append(self.run(graph_inputs(spec, one, rng, state)))
            state = rows[-1][NEXT_STATE]
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    def choose_actions(self, outputs: Mapping[str, Array]) -> Array:
        """Return the actions without exploration. Raises: EpisodeInvalidError if not finite."""
        return act_from_head(self.conversion.spec, outputs).actions


@dataclass(frozen=True)
class _Comparison:
    num: int = 0
    num_distinct: int = 0
    max_difference: float | None = None
    num_ties: int = 0


def _convert(data: bytes, path: Path, spec: DatasetSpec, options: ImportOptions) -> Conversion:
    what = str(path)
    observations, actions = spec.observation_space, spec.action_space
    kind = _detect(data, what) if options.format == AUTO else options.format
    _check_options(options, kind)
    frames = options.frame_stack
    stacked = stack_space(observations, frames) if frames > 1 else observations
    if kind == "sb3":
        conversion = convert_archive(data, what, stacked, actions, frames)
    elif kind == "d3rlpy":
        conversion = convert_model(data, what, observations, actions)
    elif kind == "torchscript":
        conversion = convert_torchscript(data, what, observations, actions, head=options.head)
    elif kind == "xgboost":
        conversion = convert_xgboost(data, what, observations, actions)
    elif kind == "cleanrl":
        conversion = convert_state_dict(
            data,
            what,
            stacked,
            actions,
            activation_name=options.activation,
            num_frames=frames,
        )
    else:
        conversion = convert_onnx(
            data, what, observations, actions, head=options.head, outputs=options.outputs
        )
    if options.normalization is not None:
        mean, std, clip = _read_normalization(Path(options.normalization))
        if conversion.spec.frame_stack > 1:
            raise ConfigInvalidError(
                "normalization: found statistics for a policy of stacked frames, expected none: "
                "it is unknown whether they are of one frame or of the stack. Export the policy to "
                "ONNX with its normalization.",
                parameter="normalization",
            )
        conversion = replace(
            conversion,
            onnx=add_normalization(conversion, mean, std, clip),
            not_carried=[note for note in conversion.not_carried if "normalized" not in note],
        )
    return conversion


def _detect(data: bytes, what: str) -> str:
    if is_model(data):
        return "d3rlpy"
    if data[:4] == b"PK\x03\x04":
        if read_entry(data, "_stable_baselines3_version", what) is not None:
            return "sb3"
        if what.endswith(".cleanrl_model"):
            return "cleanrl"
    elif what.endswith(".onnx"):
        return "onnx"
    elif xgboost_model.is_model(data):
        return "xgboost"
    raise SourceInvalidError(
        f"{what}: its format was not recognized, expected one of {', '.join(FORMATS)}. Give "
        "`format`."
    )


def _check_options(options: ImportOptions, kind: str) -> None:
    """Check that the format has the given options. Raises: ConfigInvalidError."""
    if kind not in FORMATS:
        raise ConfigInvalidError(
            f"format: found {kind!r}, expected {AUTO} or one of {', '.join(FORMATS)}.",
            parameter="format",
        )
    if options.frame_stack < 1:
        raise ConfigInvalidError(
            f"frame_stack: found {options.frame_stack}, expected 1 or more.",
            parameter="frame_stack",
        )
    for field in fields(options):
        is_given = getattr(options, field.name) != field.default
        formats = _FORMATS_OF_OPTION.get(field.name)
        if is_given and formats is not None and kind not in formats:
            raise ConfigInvalidError(
                f"{field.name}: found {getattr(options, field.name)!r} for the format {kind}, "
                f"expected it only for {' or '.join(formats)}. Leave it out.",
                parameter=field.name,
            )


def _read_normalization(path: Path) -> tuple[Array, Array, float]:
    """Return mean [*obs], standard deviation [*obs] and the bound of normalized values."""
    try:
        with np.load(io.BytesIO(read_file(path, _MAX_ARRAY_BYTES)), allow_pickle=False) as file:
            num_bytes = sum(info.file_size for info in file.zip.infolist())
            if num_bytes > _MAX_ARRAY_BYTES:
                raise ValueError(f"{num_bytes:,} bytes, expected at most {_MAX_ARRAY_BYTES:,}")
            arrays = {
                name: file[name].astype(np.float64, casting="same_kind")
                for name in ("mean", "var", "epsilon", "clip")
                if name in file.files
            }
        mean, var = arrays["mean"], arrays["var"]
        epsilon, clip = (
            float(arrays.get(name, default))
            for name, default in (("epsilon", 1e-8), ("clip", 10.0))
        )
    except (AttributeError, KeyError, *_ARRAY_ERRORS) as error:
        raise SourceInvalidError(
            f"normalization: {path} cannot be read ({error}), expected an .npz file with the "
            "arrays `mean` and `var`, and optionally `epsilon` and `clip`. Save it with "
            "numpy.savez.",
            parameter="normalization",
        ) from error
    std = np.sqrt(np.where(var + epsilon > 0, var + epsilon, np.nan))
    if not (np.isfinite(mean).all() and np.isfinite(std).all() and clip > 0):
        raise SourceInvalidError(
            f"normalization: found numbers in {path} that are not finite, or variances or a clip "
            "below 0. Save the statistics again.",
            parameter="normalization",
        )
    return mean, std, clip


def _try_policy(conversion: Conversion, path: Path) -> _Acting:
    try:
        session = GraphSession(conversion.onnx, conversion.spec, str(path))
    except PackageInvalidError as error:
        raise SourceInvalidError(f"{error}") from error
    return _Acting(conversion, session.run, str(path))


def _read_first_steps(snapshot: Snapshot, num: int) -> LoggedSteps:
    """Return at least `num` steps, of the first episodes by id; all if there are fewer.

    Raises: EmptyReplayError where there is none.
    """
    num = max(num, _NUM_CHECKED)
    episodes = snapshot.sql(
        "SELECT episode_id, sum(num_steps) OVER (ORDER BY episode_id) AS upto FROM ("
        "SELECT episode_id, sum(num_steps) AS num_steps FROM episodes GROUP BY episode_id) "
        "ORDER BY episode_id"
    )
    if not episodes.num_rows:
        raise EmptyReplayError(
            f"{snapshot.dataset}@{snapshot.version}: found no steps, expected observations to test "
            "the policy on. Ingest a log of its environment."
        )
    upto = episodes["upto"].to_numpy()
    last = min(int(np.searchsorted(upto, num)), episodes.num_rows - 1)
    name = str(episodes["episode_id"][last]).replace("'", "''")
    return read_logged_steps(snapshot, f"episode_id <= '{name}'")


def _check_logged(acting: _Acting, steps: LoggedSteps, num: int) -> float | None:
    """Test the policy on the first `num` logged observations; see PolicyImport.agreement.

    Raises: SourceInvalidError if it cannot act on them, or if outputs for one observation depend on
    others.
    """
    assert steps.observations is not None  # they were read
    observations = take(steps.observations, slice(0, num))
    outputs, actions = _act(acting, observations, _find_starts(steps)[:num])
    _check_rows_independent(acting, observations, outputs)
    if not isinstance(acting.conversion.spec.action_space, Discrete):
        return None
    return float((actions == np.asarray(steps.actions)[:num]).mean())


def _act(acting: _Acting, observations: Values, starts: Array) -> tuple[dict[str, Array], Array]:
    try:
        outputs = acting.compute_outputs(observations, starts)
        return outputs, acting.choose_actions(outputs)
    except (EpisodeInvalidError, PackageInvalidError) as error:
        raise SourceInvalidError(
            f"{acting.what}: the policy cannot act on the dataset's observations: {error}"
        ) from error


def _check_rows_independent(
    acting: _Acting, observations: Values, outputs: Mapping[str, Array]
) -> None:
    """Refuse a graph that was exported for one batch size, or normalizes over the batch."""
    spec = acting.conversion.spec
    if spec.state_size or spec.noise_size:
        return  # with a state, it was run one by one; with noise, outputs differ in each call
    for number in range(min(_NUM_SINGLE, num_values(observations))):
        one, _ = _act(acting, take(observations, slice(number, number + 1)), np.array([True]))
        for name, array in one.items():
            if not np.allclose(array[0], outputs[name][number], rtol=1e-4, atol=1e-5):
                raise SourceInvalidError(
                    f"{acting.what}: its {name} for observation {number} are not the same alone "
                    f"and in a batch of {num_values(observations):,}, expected independent rows. "
                    "Export it in evaluation mode, with a free batch dimension."
                )


def _find_starts(steps: LoggedSteps) -> Array:
    starts = np.zeros(steps.num_steps, np.bool_)
    starts[steps.offsets[:-1]] = True
    return starts


def _compare_actions(
    acting: _Acting, steps: LoggedSteps, expected: Array, given: Array | None
) -> _Comparison:
    """Compare the policy's best actions with the expected ones.

    Raises: SourceInvalidError naming the first that differs; ConfigInvalidError if they cannot be
    compared.
    """
    spec = acting.conversion.spec
    if spec.noise_size:
        raise ConfigInvalidError(
            f"expect: found actions for a policy with the head {spec.head}, expected none: its "
            "actions are random even without exploration. Leave them out.",
            parameter="expect",
        )
    observations, starts = _choose_observations(acting, steps, len(expected), given)
    wanted: Any = _parse_actions(spec.action_space, expected)
    outputs, actions = _act(acting, observations, starts)
    num, num_distinct = len(expected), len(np.unique(wanted, axis=0))
    if isinstance(spec.action_space, Box):
        difference = np.abs(actions.astype(np.float64) - wanted).reshape(num, -1)
        allowed = _ATOL + _RTOL * np.abs(wanted.astype(np.float64)).reshape(num, -1)
        wrong = (difference > allowed).any(axis=1)
        comparison = _Comparison(num, num_distinct, float(difference.max()))
    else:
        wrong = (actions != wanted).reshape(num, -1).any(axis=1)
        ties = wrong & _find_ties(spec, outputs, wanted)
        wrong &= ~ties
        comparison = _Comparison(num, num_distinct, None, int(ties.sum()))
    if wrong.any():
        row = int(wrong.argmax())
        raise SourceInvalidError(
            f"{acting.what}: its action for observation {row} is {actions[row].tolist()}, expected "
            f"{wanted[row].tolist()}; {int(wrong.sum()):,} of {num:,} differ. The file may lack "
            "what its actions depend on: state the normalization and the frame stack of its "
            "training, record actions in its units, and give the observations of these actions."
        )
    return comparison


def _choose_observations(
    acting: _Acting, steps: LoggedSteps, num: int, given: Array | None
) -> tuple[Values, Array]:
    spec = acting.conversion.spec
    if given is None:
        if num > steps.num_steps:
            raise ConfigInvalidError(
                f"expect: found {num:,} actions, expected at most {steps.num_steps:,}, one for "
                "each step of the dataset. Give `observations` as well.",
                parameter="expect",
            )
        assert steps.observations is not None  # they were read
        return take(steps.observations, slice(0, num)), _find_starts(steps)[:num]
    if spec.state_size or isinstance(spec.observation_space, Dict | Tuple):
        raise ConfigInvalidError(
            "observations: found an array for a policy that stacks frames, or whose observations "
            "have parts; expected none. Leave it out: the dataset's observations are used.",
            parameter="observations",
        )
    try:
        values = as_values(
            spec.observation_space, _cast_floats(spec.observation_space, given), "observations", num
        )
    except EpisodeInvalidError as error:
        raise ConfigInvalidError(str(error), parameter="observations") from error
    return values, np.ones(num, np.bool_)


def _parse_actions(space: Space, expected: Array) -> Values:
    try:
        return as_values(space, _cast_floats(space, expected), "expect")
    except EpisodeInvalidError as error:
        raise ConfigInvalidError(str(error), parameter="expect") from error


def _cast_floats(space: Space, values: Array) -> Array:
    """Round floats of another width to the space's, as the policy's own numbers are."""
    if isinstance(space, Box) and value_dtype(space).kind == "f" and values.dtype.kind == "f":
        return values.astype(value_dtype(space))
    return values


def _find_ties(spec: PolicySpec, outputs: Mapping[str, Array], wanted: Array) -> Array:
    """Return where an expected action has the same score as the best one: bool [N]."""
    if not isinstance(spec.action_space, Discrete):
        return np.zeros(len(wanted), np.bool_)
    scores = outputs[HEAD_OUTPUTS[spec.head][0]].astype(np.float64)
    numbers = np.clip(wanted - spec.action_space.start, 0, spec.action_space.n - 1)
    best = scores.max(axis=1)
    ties: Array = best - scores[np.arange(len(scores)), numbers] <= _ATOL + _RTOL * np.abs(best)
    return ties


def _read_array(source: str | Path | Array, name: str) -> Array:
    if isinstance(source, np.ndarray):
        return source
    try:
        array: Array = np.load(
            io.BytesIO(read_file(Path(source), _MAX_ARRAY_BYTES)), allow_pickle=False
        )
        num = len(array)
    except _ARRAY_ERRORS as error:
        raise ConfigInvalidError(
            f"{name}: {source} cannot be read ({error}), expected one array as numpy.save writes.",
            parameter=name,
        ) from error
    if not isinstance(array, np.ndarray) or not num:
        raise ConfigInvalidError(
            f"{name}: found no rows in {source}, expected one for each observation.",
            parameter=name,
        )
    return array


def _register(
    lake: Lake,
    name: str,
    path: Path,
    data: bytes,
    snapshot: Snapshot,
    conversion: Conversion,
    checked: Mapping[str, Any],
) -> PolicyRef:
    origin = {
        "file": path.name,
        "sha256": hashlib.sha256(data).hexdigest(),
        **conversion.facts,
    }
    # Names of files and JSON may have halves of surrogate pairs, which UTF-8 cannot encode.
    origin = {
        key: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for key, value in origin.items()
    }
    discount = conversion.facts.get("gamma")
    manifest = {
        "algorithm": conversion.algorithm,
        "config": {} if discount is None else {"discount": discount},
        "imported": {
            **origin,
            "not_carried": list(conversion.not_carried),
            "checked": {
                "dataset": snapshot.dataset,
                "version": snapshot.version,
                **checked,
            },
        },
    }
    # Without `datasets`: the training data is unknown, and evaluation reports this.
    lineage = {"algorithm": conversion.algorithm, "imported": origin}
    with tempfile.TemporaryDirectory(prefix="replaylake-import-") as scratch:
        package = Path(scratch) / "policy"
        save_package(
            package,
            onnx=conversion.onnx,
            spec=conversion.spec,
            manifest=manifest,
            learner_weights=None,
        )
        return lake.registry.register(name, package, run_id="", lineage=lineage)
