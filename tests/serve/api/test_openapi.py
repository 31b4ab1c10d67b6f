"""The document is valid OpenAPI, its examples work, and what the server answers is as it says."""

import jsonschema
import numpy as np
import pytest
from openapi_spec_validator import validate

from replaylake.datastore.episodes.encoding import Encoding, Field
from replaylake.datastore.episodes.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Text,
    Tuple,
    as_values,
    gather,
)
from replaylake.datastore.episodes.tokens import TOKEN_TYPES
from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.interchange.formats.generations.rows import EXTRAS
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import load_policy
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.serve.api.episodes import TOKEN_FIELDS, list_episode_fields
from replaylake.serve.api.json_schema import example_of, observation_schema, schema_of
from replaylake.serve.api.openapi import document
from replaylake.serve.app import create_app
from replaylake.serve.recording.decision_log import DecisionLog
from replaylake.serve.safety.tokens import Tokens
from replaylake.serve.serving_state import ServingState
from replaylake.serve.versions.router import Router, ServedPolicy

SPACES = [
    Box((4,)),
    Box((), "float64"),
    Box((2, 3), "uint8", 0, 255),
    Box((2,), "int16"),
    Discrete(3),
    Discrete(3, start=-1),
    MultiDiscrete((2, 3)),
    MultiDiscrete((2, 2)),
    MultiBinary(3),
    Text(),
    Dict({"camera": Box((2, 2), "uint8", 0, 255), "said": Text()}),
    Tuple((Box((2,)), Discrete(2))),
]


class _NoPolicy:
    def __init__(self, spec):
        self.spec = spec


def serving(policy, log=None, tokens=None):
    served = ServedPolicy("p", 2, policy, "p@champion", {})
    return ServingState(
        Router(served), DecisionSigner(b"k" * 32, "d"), log, tokens=tokens or Tokens()
    )


@pytest.fixture(scope="module")
def logged(app_client, package, tmp_path_factory):
    policy = load_policy(package)
    lake = open_lake(tmp_path_factory.mktemp("docs") / "lake", create=True)
    signer = DecisionSigner(lake.signing_key(), "d")
    log = DecisionLog(lake.dataset("d"), policy.spec, signer.worker)
    with app_client(create_app(lambda: serving(policy, log))) as client:
        yield client


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_values_and_their_schema_agree(space):
    schema, value = schema_of(space), example_of(space)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(value, schema)
    as_values(space, gather(space, [value]), "observation", 1)
    for wrong in (None, {}, [[[[1]]]], 2.5 if schema["type"] != "number" else "2.5"):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize(
    ("action_space", "head"), [(Discrete(2), "categorical"), (Box((2,)), "deterministic")], ids=str
)
def test_it_is_openapi_for_any_space(space, action_space, head):
    policy = _NoPolicy(PolicySpec(space, action_space, head))
    validate(document(serving(policy)))


def test_bounds_of_a_dtype_are_in_and_those_of_a_box_are_not():
    assert schema_of(Box((1,), "float32", -1.0, 1.0))["items"]["maximum"] > 1e38
    assert schema_of(Box((1,), "uint8", 0, 9))["items"]["maximum"] == 255


def test_named_fields():
    fields = (
        Field("age", "number"),
        Field("device", "category", ("ios", "web")),
        Field("new", "flag", fill=False),
        Field("hour", "time"),
    )
    encoding = Encoding(fields)
    schema = observation_schema(Box((encoding.width,)), encoding)
    good = {"age": 3, "device": "ios", "hour": "2026-01-31T12:00:00Z", "new": None}
    jsonschema.validate(good, schema)
    jsonschema.validate([0.0] * encoding.width, schema)
    for wrong in ({**good, "age": "3"}, {"age": 3}, {**good, "more": 1}):
        assert encoding.find_mismatch(wrong) is not None
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_every_route_and_no_other_is_in_it(logged):
    answer = logged.get("/docs.json")
    assert answer.status_code == 200
    found = answer.json()
    validate(found)
    routes = {route.path for route in logged._app.routes if ":path" not in route.path}
    assert set(found["paths"]) == routes
    for path, operations in found["paths"].items():
        for method in operations:
            answer = logged.request(method.upper(), _fill(path))
            assert answer.status_code not in (404, 405)


def _fill(path):
    return path.format(name="p", version=2)


def test_examples_work_and_answers_are_as_it_says(logged):
    found = logged.get("/docs.json").json()
    count = 0
    for path, operations in found["paths"].items():
        if (operation := operations.get("post")) is None:
            continue
        for example in operation["requestBody"]["content"]["application/json"]["examples"].values():
            answer = logged.post(_fill(path), json=example["value"])
            assert answer.status_code in (200, 202), (path, example, answer.text)
            _check(found, operation, answer)
            count += 1
    assert count == 9
    for path, operations in found["paths"].items():
        if "get" in operations and path != "/metrics":
            _check(found, operations["get"], logged.get(_fill(path)))


def test_refusals_are_as_it_says(logged):
    found = logged.get("/docs.json").json()
    for path, body in (
        ("/act", {"observation": [1]}),
        ("/feedback", {"decision_id": "d1", "reward": 1}),
        ("/episodes", {"episodes": [{}]}),
        ("/decisions", {"decisions": [{}]}),
        ("/v2/models/{name}/infer", {"inputs": [{}]}),
    ):
        answer = logged.post(_fill(path), json=body)
        assert answer.status_code in (400, 404, 422)
        _check(found, found["paths"][path]["post"], answer)


@pytest.fixture
def post_episode(app_client, package, tmp_path):
    """Opens a server that logs to a dataset with some columns; posts an episode there."""

    def open_one(extras):
        policy = load_policy(package)
        lake = open_lake(tmp_path / "lake", create=True)
        dataset = lake.dataset("d")
        dataset.create(policy.spec.observation_space, policy.spec.action_space, extras=extras)
        signer = DecisionSigner(lake.signing_key(), "d")
        log = DecisionLog(dataset, policy.spec, signer.worker)
        found = document(serving(policy, log))
        validate(found)

        def post(episode):
            with app_client(create_app(lambda: serving(policy, log))) as client:
                return client.post("/episodes", json={"episodes": [episode]})

        return found, dataset.spec, post

    return open_one


TOKENS = {
    "observation_tokens": [[1, 2], [3]],
    "action_tokens": [[4], [5]],
    "action_log_probs": [[-0.5], None],
    "parent_agent_id": [None, "other"],
    "parent_step": [None, 3],
    "is_continuation": [None, True],
    "is_trainable": [True, False],
}
EPISODE = {
    "episode_id": "e",
    "observations": [[0.0] * 4] * 2,
    "actions": [0, 1],
    "rewards": [0.0, 1.0],
}


def test_each_field_of_an_episode_that_is_accepted_is_in_it(post_episode):
    assert set(TOKENS) == set(TOKEN_FIELDS)
    found, spec, post = post_episode({name: TOKEN_TYPES[name] for name in TOKENS})
    schema = found["components"]["schemas"]["Episode"]
    assert set(schema["properties"]) == set(list_episode_fields(spec)) >= set(TOKENS)
    whole = {**schema, "components": found["components"]}
    answer = post({**EPISODE, **TOKENS})
    assert answer.status_code == 202, answer.text
    jsonschema.validate({**EPISODE, **TOKENS}, whole)
    for name, wrong in (
        ("action_tokens", [[-1], None]),
        ("action_log_probs", [[0.5], None]),
        ("is_trainable", [2, None]),
        ("parent_step", None),
        ("more", 1),
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**EPISODE, **TOKENS, name: wrong}, whole)


def test_token_fields_are_in_it_only_for_a_dataset_that_has_them(post_episode):
    found, _, post = post_episode({})
    assert not set(TOKENS) & set(found["components"]["schemas"]["Episode"]["properties"])
    answer = post({**EPISODE, **TOKENS})
    assert (answer.status_code, answer.json()["error"]["field"]) == (
        422,
        "episodes[0].observation_tokens",
    )


def test_a_dialogue_is_in_it_for_a_dataset_that_takes_dialogues(post_episode):
    found, _, _ = post_episode({**EXTRAS, "is_trainable": TOKEN_TYPES["is_trainable"]})
    episode = {**found["components"]["schemas"]["Episode"], "components": found["components"]}
    dialogue = {"episode_id": "e", "messages": [{"role": "assistant", "content": "hi"}]}
    for one in (EPISODE, dialogue, {**dialogue, "is_trainable": [False]}):
        jsonschema.validate(one, episode)
    for one in ({**dialogue, "is_trainable": 1}, {"messages": []}, {**EPISODE, "messages": []}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(one, episode)


def _check(found, operation, answer):
    content = operation["responses"][str(answer.status_code)]["content"]
    schema = content[answer.headers["content-type"]]["schema"]
    jsonschema.validate(answer.json(), {**schema, "components": found["components"]})


def test_tokens_are_asked_for_where_there_are_some():
    policy = _NoPolicy(PolicySpec(Box((4,)), Discrete(2), "categorical"))
    tokens = Tokens(((b"a" * 20, "act"), (b"b" * 20, "admin")))
    found = document(serving(policy, tokens=tokens))
    validate(found)
    assert set(found["components"]["securitySchemes"]) == {"act", "feedback", "admin"}
    assert found["paths"]["/act"]["post"]["security"] == [{"act": []}]
    assert "401" in found["paths"]["/policy"]["get"]["responses"]
    assert "security" not in found["paths"]["/livez"]["get"]
    open_to_all = document(serving(policy))
    assert "securitySchemes" not in open_to_all["components"]
    assert "401" not in open_to_all["paths"]["/act"]["post"]["responses"]


def test_what_the_schema_refuses_the_server_refuses(logged):
    rng = np.random.default_rng(0)
    found = logged.get("/docs.json").json()
    schema = found["paths"]["/act"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**schema, "components": found["components"]})
    good = {"observation": [0.0] * 4, "episode_id": "e", "step": 3, "action_mask": [True, False]}
    odd = [None, 7, "x", [], {}, [1.5], True, [[0.0] * 4], -1, "", 0.5]
    for _ in range(300):
        name = rng.choice([*good, "temperature", "epsilon", "seed", "states", "more"])
        body = {**good, str(name): odd[rng.integers(len(odd))]}
        answer = logged.post("/act", json=body)
        if answer.status_code == 200:
            assert validator.is_valid(body), body
