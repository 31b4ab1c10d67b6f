"""The Open Inference Protocol, version 2, for the policies that /act serves.

    GET  /v2, /v2/health/live, /v2/health/ready
    GET  /v2/models/{name}[/versions/{version}][/ready]
    POST /v2/models/{name}[/versions/{version}]/infer

https://github.com/kserve/open-inference-protocol. The model of the main policy's name is what /act
serves, canaries included. A version of it, or a reference such as `clone@challenger`, is that
version alone. A model's input has a tensor for each leaf of the observation space.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
import orjson

from replaylake.datastore.episodes.spaces import (
    Array,
    Dict,
    Leaf,
    Space,
    Text,
    Tuple,
    children,
    leaves,
    num_actions,
    value_dtype,
    value_shape,
)
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.version import VERSION
from replaylake.serve.api.act import ActEndpoint
from replaylake.serve.api.act_answer import (
    Group,
    columns_of,
    describe_decisions,
    policy_fields,
)
from replaylake.serve.api.act_options import OPTIONS
from replaylake.serve.api.act_request import ActRequest
from replaylake.serve.api.latency_estimate import LatencyEstimate
from replaylake.serve.api.tensors import (
    InferRequest,
    TensorSpec,
    infer_response,
    read_infer_request,
)
from replaylake.serve.api.values import shorten
from replaylake.serve.messages import (
    JSON,
    Endpoint,
    Request,
    RequestRefusedError,
    Response,
    json_response,
)
from replaylake.serve.serving_state import ServingState
from replaylake.serve.versions.router import Arm, Router, ServedPolicy

PREFIX: Final = "/v2"
MODEL_PATHS: Final = (
    f"{PREFIX}/models/{{name}}",
    f"{PREFIX}/models/{{name}}/versions/{{version}}",
)
OBSERVATION: Final = "observation"
# What a request may have in its parameters: fields of /act. All q-values are an output instead.
PARAMETERS: Final = (
    *(name for name in OPTIONS if name != "q_values"),
    "episode_id",
    "request_id",
    "step",
)
_ROW_INPUTS: Final = (
    TensorSpec("episode_id", None, is_optional=True),
    TensorSpec("request_id", None, is_optional=True),
    TensorSpec("step", np.dtype(np.int64), is_optional=True),
)
_MODEL_PATH: Final = re.compile(
    rf"{PREFIX}/models/(?P<name>[^/]+)(/versions/(?P<version>[^/]+))?(/ready|/infer)?"
)


def encode_error(error: RequestRefusedError, content_type: str) -> Response:
    """Return `{"error": sentence}`, and 400 for what is 422 elsewhere, as the protocol has it."""
    status = 400 if error.status == 422 else error.status
    content = orjson.dumps({"error": f"{error.field}: {error.message}"})
    return Response(status, content, JSON, error.headers)


@dataclass(frozen=True)
class Model:
    """A model that a path names. served: the version that acts; None for those of the router.

    policies: the versions that may act. is_pinned: the path names the version, so that no state of
    another one is continued.
    """

    name: str
    served: ServedPolicy | None
    policies: tuple[ServedPolicy, ...]
    is_pinned: bool = False

    @property
    def spec(self) -> PolicySpec:
        """The spec of one; all have the same spaces and encoding."""
        return self.policies[0].policy.spec

    @property
    def versions(self) -> list[ServedPolicy]:
        """Those that are versions of one policy: a canary may be another policy."""
        return [one for one in self.policies if one.name == self.policies[0].name]

    @cached_property
    def by_version(self) -> dict[str, Model]:
        """The model of each version alone."""
        return {
            str(one.version): Model(self.name, one, (one,), is_pinned=True) for one in self.versions
        }

    @cached_property
    def inputs(self) -> dict[str, TensorSpec]:
        """The inputs by name: the observation's leaves, then the optional ones."""
        found = [
            TensorSpec(name, _dtype_of(leaf), value_shape(leaf))
            for name, leaf in leaves(self.spec.observation_space, OBSERVATION)
        ]
        if (num := num_actions(self.spec.action_space)) is not None:
            found.append(TensorSpec("action_mask", np.dtype(bool), (num,), is_optional=True))
        if any(served.policy.spec.state_size for served in self.policies):
            found.append(TensorSpec("state", None, is_optional=True))
        return {one.name: one for one in (*found, *_ROW_INPUTS)}

    @cached_property
    def outputs(self) -> dict[str, TensorSpec]:
        """The outputs by name."""
        space = self.spec.action_space
        found = [
            *(
                TensorSpec(name, _dtype_of(leaf), value_shape(leaf))
                for name, leaf in leaves(space, "action")
            ),
            TensorSpec("log_prob", np.dtype(np.float64)),
        ]
        specs = [served.policy.spec for served in self.policies]
        num = num_actions(space)
        if num is not None and all(spec.head == "q_values" for spec in specs):
            found.append(TensorSpec("q_values", np.dtype(np.float32), (num,)))
        if any(spec.state_size for spec in specs):
            found.append(TensorSpec("state", None))
        encoding = self.spec.encoding
        if encoding is not None and encoding.action_names is not None:
            found.append(TensorSpec("action_name", None))
        return {one.name: one for one in found}


class OpenInference:
    """The endpoints of the protocol; they act through that of /act."""

    def __init__(
        self,
        serving: Callable[[], ServingState],
        is_ready: Callable[[], bool],
        act: ActEndpoint,
    ) -> None:
        self._serving, self._is_ready, self._act = serving, is_ready, act
        # What is served seldom changes, and specs of tensors take longer to make than an action.
        self._models: tuple[tuple[Arm[ServedPolicy], ...], dict[str, Model]] = ((), {})
        self._latencies = {is_json: LatencyEstimate() for is_json in (True, False)}

    def endpoints(self) -> dict[str, tuple[str, Endpoint]]:
        """Return the method and endpoint of each path."""
        found: dict[str, tuple[str, Endpoint]] = {
            PREFIX: ("GET", self._describe_server),
            f"{PREFIX}/health/live": ("GET", self._report_live),
            f"{PREFIX}/health/ready": ("GET", self._report_ready),
        }
        for path in MODEL_PATHS:
            found[path] = ("GET", self._describe_model)
            found[f"{path}/ready"] = ("GET", self._report_model_ready)
            found[f"{path}/infer"] = ("POST", self._infer)
        return found

    async def _describe_server(self, request: Request) -> Response:
        content = {"name": "replaylake", "version": VERSION, "extensions": ["binary_tensor_data"]}
        return json_response(content)

    async def _report_live(self, request: Request) -> Response:
        return json_response({"live": True})

    async def _report_ready(self, request: Request) -> Response:
        is_ready = self._is_ready()
        return json_response({"ready": is_ready}, 200 if is_ready else 503)

    async def _report_model_ready(self, request: Request) -> Response:
        model = self._find_model(self._serving().router, request.path)
        is_ready = self._is_ready()
        content = {"name": model.name, "ready": is_ready}
        return json_response(content, 200 if is_ready else 503)

    async def _describe_model(self, request: Request) -> Response:
        model = self._find_model(self._serving().router, request.path)
        versions = {one.version for one in model.versions}
        return json_response(
            {
                "name": model.name,
                "versions": [str(version) for version in sorted(versions)],
                "platform": "onnxruntime_onnx",
                "inputs": [one.to_json() for one in model.inputs.values()],
                "outputs": [one.to_json() for one in model.outputs.values()],
            }
        )

    async def _infer(self, request: Request) -> Response:
        """Act on a batch, in a thread if it takes long.

        Raises: RequestRefusedError, StorageError.
        """
        serving = self._serving()
        latency = self._latencies[not request.headers]
        return await latency.run(len(request.body), lambda: self._answer(serving, request))

    def _answer(self, serving: ServingState, request: Request) -> Response:
        model = self._find_model(serving.router, request.path)
        asked = read_infer_request(request, model.inputs, model.outputs)
        fields = _to_act_fields(model.spec.observation_space, asked)
        if "q_values" in asked.is_binary:
            fields["q_values"] = True
        if model.is_pinned:
            _check_states(serving, model, fields.get("state"))
        body, groups = self._act.act_on_batch(serving, fields, model.served)
        return _encode_answer(serving, model, asked, body, groups)

    def _find_model(self, router: Router[ServedPolicy], path: str) -> Model:
        """Return the model that a path names. Raises: RequestRefusedError (404)."""
        arms, models = self._models
        if arms is not router.arms:
            arms = router.arms
            models = find_models(arms)
            self._models = arms, models
        match = _MODEL_PATH.fullmatch(path)
        if match is None:  # Starlette's routes match a path with a newline at its end
            raise RequestRefusedError(
                404, "path", found=shorten(repr(path)), expected="a model's path"
            )
        name, version = match["name"], match["version"]
        model = models.get(name)
        if model is None:
            found, expected = shorten(name), shorten(f"one of {', '.join(models)}")
            raise RequestRefusedError(404, "model", found=found, expected=expected)
        if version is None:
            return model
        if version not in model.by_version:
            found = shorten(version)
            expected = f"a version that {name} serves: {', '.join(model.by_version)}"
            raise RequestRefusedError(404, "version", found=found, expected=expected)
        return model.by_version[version]


def find_models(arms: tuple[Arm[ServedPolicy], ...]) -> dict[str, Model]:
    """Return the models of a server by name, the one that is shared with canaries first."""
    every = tuple(arm.served for arm in arms)
    main = every[0]
    found = {main.name: Model(main.name, None, every)}
    references = [(served.reference, served) for served in every]
    # The name of another policy that is a canary means that canary.
    for name, served in (*references, *((served.name, served) for served in every)):
        found.setdefault(name, Model(name, served, (served,)))
    return found


def _dtype_of(leaf: Leaf) -> np.dtype[Any] | None:
    return None if isinstance(leaf, Text) else value_dtype(leaf)


def _to_act_fields(space: Space, asked: InferRequest) -> dict[str, Any]:
    """Return the fields that /act has for a request. Raises: RequestRefusedError."""
    fields: dict[str, Any] = dict(asked.parameters)
    for name in fields:
        if name not in PARAMETERS:
            message = f"unknown parameter; use {', '.join(sorted(PARAMETERS))}"
            raise RequestRefusedError(400, shorten(f"parameters.{name}"), message)
    sizes = {name: len(values) for name, values in asked.tensors.items()}
    num = next(size for name, size in sizes.items() if _is_leaf(name))
    for name, size in sizes.items():
        if size != num:
            expected = f"{num}, as the other inputs have"
            raise RequestRefusedError(400, f"{name}.shape", found=f"{size} rows", expected=expected)
    for name, values in asked.tensors.items():
        if _is_leaf(name):
            continue
        if fields.get(name) is not None:
            message = "is both an input and a parameter; send one of them"
            raise RequestRefusedError(400, name, message)
        fields[name] = values if name == "action_mask" else _to_list(values)
    if "state" in fields:
        # A string is the only value that a row without a state can have here.
        fields["state"] = [token or None for token in fields["state"]]
    fields[OBSERVATION] = _join_leaves(space, OBSERVATION, asked.tensors)
    return fields


def _is_leaf(name: str) -> bool:
    return name.partition(".")[0] == OBSERVATION


def _to_list(values: Array | list[str]) -> list[Any]:
    return values if isinstance(values, list) else values.tolist()


def _join_leaves(
    space: Space, name: str, tensors: Mapping[str, Array | list[str]]
) -> Sequence[Any] | Array:
    """Return the rows of a space's values, as /act has them, from the columns of its leaves."""
    if isinstance(space, Dict | Tuple):
        subs = children(space)
        columns = [_join_leaves(sub, f"{name}.{key}", tensors) for key, sub in subs.items()]
        rows = zip(*columns, strict=True)
        if isinstance(space, Tuple):
            return [list(row) for row in rows]
        return [dict(zip(subs, row, strict=True)) for row in rows]
    values = tensors[name]
    # An element of a flat array is a number of numpy's, which no value of a space may be.
    return values if isinstance(values, list) or values.ndim > 1 else values.tolist()


def _check_states(serving: ServingState, model: Model, tokens: Sequence[str | None] | None) -> None:
    """Refuse the state of another version than the path names. Raises: RequestRefusedError."""
    version = model.policies[0].version
    for row, token in enumerate(tokens or ()):
        state = None if token is None else serving.states.read(token)
        if state is not None and state.version != version:
            found, expected = f"a state of version {state.version}", f"one of version {version}"
            raise RequestRefusedError(400, f"state[{row}]", found=found, expected=expected)


def _encode_answer(
    serving: ServingState,
    model: Model,
    asked: InferRequest,
    body: ActRequest,
    groups: Sequence[Group],
) -> Response:
    columns = columns_of(body, groups, serving.states, as_arrays=True)
    ids = columns["decision_id"]
    parameters: dict[str, Any] = {
        # A parameter is a string, a number or a boolean: lists are joined.
        name: ",".join(map(str, value)) if isinstance(value, list) else value
        for name, value in policy_fields(groups).items()
    }
    parameters["decision_id" if len(ids) == 1 else "decision_ids"] = ",".join(ids)
    head: dict[str, Any] = {"model_name": model.name}
    if "version" in parameters:
        head["model_version"] = str(parameters["version"])
    if asked.request_id is not None:
        head["id"] = asked.request_id
    head["parameters"] = parameters
    outputs = model.outputs
    tensors = []
    for name in asked.is_binary:
        spec = outputs[name]
        tensors.append((spec, _output_values(spec, columns)))
    response = infer_response(head, tensors, asked.is_binary)
    response.describe = partial(describe_decisions, groups)
    return response


def _output_values(spec: TensorSpec, columns: Mapping[str, Any]) -> Array | list[str]:
    column = columns.get(spec.name, ())
    if spec.dtype is None:
        # Rows of a version without states, or actions without a name.
        return [text or "" for text in column] or [""] * len(columns["decision_id"])
    if spec.name == "log_prob":
        return np.array(column, np.float64)  # None becomes NaN
    return np.asarray(column)
