"""POST /act in process: what it answers, in every form of body, and every way it refuses."""

import io
import json

import msgpack
import numpy as np
import orjson
import pytest

from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, MultiDiscrete, Text, Tuple
from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import load_policy
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.lake.policies.uniform import UniformPolicy
from replaylake.serve.app import create_app
from replaylake.serve.recording.decision_log import DecisionLog
from replaylake.serve.serving_state import ServingState
from replaylake.serve.versions.router import Router, ServedPolicy

GOOD = [0.1, 0.2, 0.3, 0.4]
MSGPACK = {"content-type": "application/msgpack"}
NPY = {"content-type": "application/x-npy"}


@pytest.fixture(scope="module")
def client(limited_client):
    return limited_client


def npy(array, **how):
    buffer = io.BytesIO()
    np.save(buffer, array, **how)
    return buffer.getvalue()


def as_map(array):
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": array.tobytes()}


def array_of(found):
    return np.frombuffer(found["data"], found["dtype"]).reshape(found["shape"])


def post_msgpack(client, fields, **headers):
    return client.post("/act", content=msgpack.packb(fields), headers={**MSGPACK, **headers})


def test_one_and_many(client, policy):
    one = client.post("/act", json={"observation": GOOD}).json()
    assert set(one) == {"policy", "version", "action", "log_prob", "decision_id"}
    assert (one["policy"], one["version"], one["log_prob"]) == ("p", 2, 0.0)
    many = client.post("/act", json={"observations": [GOOD, [4, 3, 2, 1]]}).json()
    assert set(many) == {"policy", "version", "actions", "log_probs", "decision_ids"}
    expected = policy.act(np.asarray([GOOD, [4, 3, 2, 1]], np.float32)).actions.tolist()
    assert many["actions"] == expected
    assert one["action"] == expected[0]
    assert len({one["decision_id"], *many["decision_ids"]}) == 3


NUMBERS = [
    ("nan", b"[NaN, 0, 0, 0]", "body"),
    ("infinity", b"[Infinity, 0, 0, 0]", "body"),
    ("huge exponent", b"[1e400, 0, 0, 0]", "body"),
    ("beyond float32", b"[1e39, 0, 0, 0]", "observation"),
    ("beyond float32, integer", b"[1" + b"0" * 60 + b", 0, 0, 0]", "observation"),
    ("boolean", b"[true, 0, 0, 0]", "observation[0]"),
    ("string", b'[0, "1", 0, 0]', "observation[1]"),
    ("null", b"[0, 0, null, 0]", "observation[2]"),
    ("object", b"[0, 0, 0, {}]", "observation[3]"),
    ("nested", b"[0, 0, 0, [0]]", "observation[3]"),
    ("short", b"[0, 0, 0]", "observation"),
    ("long", b"[0, 0, 0, 0, 0]", "observation"),
    ("empty", b"[]", "observation"),
    ("two dimensions more", b"[[[0, 0, 0, 0]], [[0, 0, 0, 0]]]", "observation"),
    ("second row short", b"[[0, 0, 0, 0], [0]]", "observation[1]"),
    ("scalar", b"0", "observation"),
    ("text", b'"0,0,0,0"', "observation"),
    ("none", b"null", "observation"),
    ("mapping", b'{"0": 0}', "observation"),
]


@pytest.mark.parametrize(
    ("raw", "field"), [case[1:] for case in NUMBERS], ids=[c[0] for c in NUMBERS]
)
def test_a_wrong_observation_is_422(client, raw, field, refused):
    refused(client.post("/act", content=b'{"observation": ' + raw + b"}"), 422, field)


BODIES = [
    ("empty", b"", "body"),
    ("no json", b"{", "body"),
    ("list", b"[]", "body"),
    ("number", b"1", "body"),
    ("null", b"null", "body"),
    ("latin-1", b'{"observation": "\xe9"}', "body"),
    ("bom", b"\xef\xbb\xbf{}", "body"),
    ("lone surrogate", b'{"observation": "\\ud800"}', "body"),
    ("deep", b'{"observation": ' + b"[" * 5000 + b"]" * 5000 + b"}", "body"),
    ("nothing", b"{}", "observation"),
    ("both", b'{"observation": [0,0,0,0], "observations": [[0,0,0,0]]}', "observation"),
    ("unknown", b'{"observation": [0,0,0,0], "obs": 1}', "obs"),
    ("mask for many", b'{"observation": [0,0,0,0], "action_masks": [[true,true]]}', "action_masks"),
    ("ids for many", b'{"observation": [0,0,0,0], "episode_ids": ["a"]}', "episode_ids"),
    ("mask for one", b'{"observations": [[0,0,0,0]], "action_mask": [true,true]}', "action_mask"),
    ("requests twice", b'{"observations": [[0,0,0,0]], "request_ids": ["a"], "request_id": "b"}',
     "request_ids"),
    ("request empty", b'{"observations": [[0,0,0,0]], "request_id": ""}', "request_id"),
    ("empty batch", b'{"observations": []}', "observations"),
    ("flat batch", b'{"observations": [0,0,0,0]}', "observations[0]"),
    ("8 numbers", b'{"observations": [[0,0,0,0,0,0,0,0]]}', "observations[0]"),
    ("ragged", b'{"observations": [[0,0,0,0],[0,0,0]]}', "observations[1]"),
    ("bad second", b'{"observations": [[0,0,0,0],[0,0,0,true]]}', "observations[1][3]"),
    ("batch no list", b'{"observations": {"0": [0,0,0,0]}}', "observations"),
    ("deterministic 1", b'{"observation": [0,0,0,0], "deterministic": 1}', "deterministic"),
    ("deterministic text", b'{"observation": [0,0,0,0], "deterministic": "no"}', "deterministic"),
    ("episode number", b'{"observation": [0,0,0,0], "episode_id": 7}', "episode_id"),
    ("episode empty", b'{"observation": [0,0,0,0], "episode_id": ""}', "episode_id"),
    ("long id", b'{"observation": [0,0,0,0], "request_id": "%b"}' % (b"x" * 257), "request_id"),
    ("ids short", b'{"observations": [[0,0,0,0],[0,0,0,0]], "episode_ids": ["a"]}', "episode_ids"),
    ("ids twice", b'{"observations": [[0,0,0,0]], "episode_ids": ["a"], "episode_id": "b"}',
     "episode_ids"),
    ("mask short", b'{"observation": [0,0,0,0], "action_mask": [true]}', "action_mask"),
    ("mask numbers", b'{"observation": [0,0,0,0], "action_mask": [1, 0]}', "action_mask"),
    ("mask nothing", b'{"observation": [0,0,0,0], "action_mask": [false, false]}', "action_mask"),
    ("mask text", b'{"observation": [0,0,0,0], "action_mask": "10"}', "action_mask"),
    ("masks short", b'{"observations": [[0,0,0,0]], "action_masks": []}', "action_masks"),
    ("masks flat", b'{"observations": [[0,0,0,0]], "action_masks": [true]}', "action_masks[0]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "field"), [case[1:] for case in BODIES], ids=[c[0] for c in BODIES]
)
def test_a_wrong_body_is_422(client, body, field, refused):
    refused(client.post("/act", content=body), 422, field)


def test_a_mask_decides(client):
    for allowed in (0, 1):
        mask = [i == allowed for i in range(2)]
        one = client.post("/act", json={"observation": GOOD, "action_mask": mask}).json()
        assert (one["action"], one["log_prob"]) == (allowed, 0.0)
    body = {"observations": [GOOD] * 2, "action_masks": [[True, False], [False, True]]}
    assert client.post("/act", json=body).json()["actions"] == [0, 1]


def test_decisions_are_rows(logged):
    mask = {"action_mask": [False, True]}
    one = {"observation": [0.1, 2, 3, 4], "episode_id": "e", "request_id": "r", **mask}
    first = logged.post("/act", json=one).json()
    many = {"observations": [GOOD] * 2, "episode_ids": ["a", None], "request_ids": ["x", "y"]}
    rest = logged.post("/act", json={**many, "deterministic": False}).json()
    logged.log.decisions.flush()
    rows = logged.lake.sql("select * from d.decisions order by decision_id").to_pylist()
    assert [r["decision_id"] for r in rows] == [first["decision_id"], *rest["decision_ids"]]
    assert [r["action"] for r in rows] == [first["action"], *rest["actions"]]
    assert np.array_equal(
        np.asarray([r["log_prob"] for r in rows], np.float32),
        np.asarray([first["log_prob"], *rest["log_probs"]], np.float32),
    )
    assert [r["deterministic"] for r in rows] == [True, False, False]
    assert [r["episode_id"] for r in rows] == ["e", "a", None]
    assert [r["request_id"] for r in rows] == ["r", "x", "y"]
    assert rows[0]["observation"] == np.asarray([0.1, 2, 3, 4], np.float32).tolist()
    assert [r["action_mask"] for r in rows] == [[False, True], None, None]
    assert {(r["policy"], r["policy_version"]) for r in rows} == {("p", 2)}


@pytest.mark.parametrize("head", ["categorical", "deterministic"])
def test_an_observation_that_the_network_answers_with_nan_is_422(
    app_client, kit, tmp_path, head, serving, refused
):
    # Finite in float32, but a sum of its products is not: inf - inf.
    weights = np.full((4, 2), 1e38, np.float32) * np.array([[1], [1], [-1], [-1]], np.float32)
    space = Discrete(2) if head == "categorical" else Box((2,), low=-1, high=1)
    spec = PolicySpec(Box((4,)), space, head)
    output = "logits" if head == "categorical" else "actions"
    graph = kit.linear_graph(weights, output, 4)
    policy = load_policy(kit.save_policy(tmp_path / "package", spec, graph))
    with app_client(create_app(lambda: serving(policy))) as client:
        error = refused(client.post("/act", json={"observation": [10] * 4}), 422, "observation")
        assert "not finite" in error["message"]
        many = {"observations": [[0, 0, 0, 0], [10] * 4]}
        error = refused(client.post("/act", json=many), 422, "observations")
        assert "observation 1" in error["message"]
        assert client.post("/act", json={"observation": [0, 0, 0, 0]}).status_code == 200


def test_masks_that_the_dataset_cannot_keep_are_refused(
    app_client, policy, tmp_path, serving, refused
):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("d").create(policy.spec.observation_space, policy.spec.action_space)
    log = DecisionLog(lake.dataset("d"), policy.spec, "ab" * 6)
    with app_client(create_app(lambda: serving(policy, log=log))) as client:
        body = {"observation": GOOD, "action_mask": [True, True]}
        refused(client.post("/act", json=body), 422, "action_mask")


def test_continuous_actions_have_their_shape_and_no_log_prob_when_deterministic(
    app_client, kit, tmp_path, serving, refused
):
    spec = PolicySpec(Box((4,)), Box((2,), low=-1, high=1), "deterministic")
    graph = kit.linear_graph(np.full((4, 2), 0.25, np.float32), "actions", 4)
    policy = load_policy(kit.save_policy(tmp_path / "package", spec, graph))
    with app_client(create_app(lambda: serving(policy))) as client:
        answer = client.post("/act", json={"observation": [1, 1, 1, 0]}).json()
        assert (answer["action"], answer["log_prob"]) == ([0.75, 0.75], None)
        refused(
            client.post("/act", json={"observation": GOOD, "action_mask": [True]}),
            422,
            "action_mask",
        )


def test_structured_observations(app_client, serving, refused):
    space = Dict(
        {
            "image": Box((2, 2), "uint8", 0, 255),
            "gear": Discrete(3, start=1),
            "on": MultiDiscrete((2, 2)),
            "note": Text(),
            "pair": Tuple((Box(()), Discrete(2))),
            "flag": Box((1,), "bool", 0, 1),
        }
    )
    good = {"image": [[0, 255], [1, 2]], "gear": 3, "on": [0, 1], "note": "hé", "pair": [0.5, 1],
            "flag": [True]}  # fmt: skip
    wrong = [
        ("image", [[0, 256], [1, 2]], "observation.image"),
        ("image", [[0, -1], [1, 2]], "observation.image"),
        ("image", [[0, 1.0], [1, 2]], "observation.image[0][1]"),
        ("image", [0, 1, 2, 3], "observation.image"),
        ("image", [0, 1], "observation.image[0]"),
        ("gear", 0, "observation.gear"),
        ("gear", 4, "observation.gear"),
        ("gear", 2**63, "observation.gear"),
        ("gear", 1.0, "observation.gear"),
        ("on", [0, 2], "observation.on"),
        ("note", 5, "observation.note"),
        ("pair", [0.5], "observation.pair"),
        ("pair", [0.5, 2], "observation.pair[1]"),
        ("flag", [1], "observation.flag[0]"),
    ]
    app = create_app(lambda: serving(UniformPolicy(space, Discrete(2))))
    with app_client(app) as client:
        body = {"observation": good, "deterministic": False}
        assert client.post("/act", json=body).status_code == 200
        assert client.post("/act", json={"observations": [good] * 3}).status_code == 200
        for key, value, field in wrong:
            body = {"observation": {**good, key: value}}
            response = client.post("/act", content=orjson.dumps(body))
            error = refused(response, 422, field)
            assert len(json.dumps(error)) < 600
        without = {key: value for key, value in good.items() if key != "gear"}
        refused(client.post("/act", json={"observation": without}), 422, "observation")


def test_one_more_dimension_is_a_batch(client, policy, refused):
    """The dimensions decide, never the numbers: nothing is reshaped."""
    rows = [GOOD, [4, 3, 2, 1]]
    many = client.post("/act", json={"observation": rows, "episode_id": "e"}).json()
    expected = policy.act(np.asarray(rows, np.float32)).actions.tolist()
    assert many["actions"] == expected
    assert len(many["decision_ids"]) == 2
    one_row = client.post("/act", json={"observation": [GOOD]}).json()
    assert one_row["actions"] == expected[:1]
    refused(client.post("/act", json={"observation": GOOD * 2}), 422, "observation")
    masked = {"observation": rows, "action_mask": [[True, False], [False, True]]}
    assert client.post("/act", json=masked).json()["actions"] == [0, 1]
    refused(client.post("/act", json={"observation": [GOOD] * 17}), 413, "observation")


BATCHED = [
    (Discrete(3), 1, [1, 2]),
    (MultiDiscrete((2, 3)), [1, 2], [[1, 2], [0, 0]]),
    (Text(), "hé", ["a", "b"]),
    (Dict({"x": Box((2,))}), {"x": [1, 2]}, [{"x": [1, 2]}, {"x": [3, 4]}]),
    (Tuple((Box(()), Discrete(2))), [0.5, 1], [[0.5, 1], [0.25, 0]]),
    (Box((1, 2)), [[1, 2]], [[[1, 2]], [[3, 4]]]),
    (Box((), "uint8"), 7, [7, 8]),
]


@pytest.mark.parametrize(("space", "one", "many"), BATCHED, ids=[str(c[0])[:12] for c in BATCHED])
def test_of_every_space_one_is_told_from_many(app_client, space, one, many, serving):
    app = create_app(lambda: serving(UniformPolicy(space, Discrete(2))))
    with app_client(app) as client:
        assert "action" in client.post("/act", json={"observation": one}).json()
        answer = client.post("/act", json={"observation": many}).json()
        assert len(answer["actions"]) == 2
        assert "action" in post_msgpack(client, {"observation": one}).json()
        assert len(post_msgpack(client, {"observation": many}).json()["actions"]) == 2


def test_bodies_of_every_type_get_the_same_action(client, policy):
    rows = np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32)
    expected = policy.act(rows).actions.tolist()
    bodies = [
        ({"json": {"observation": rows.tolist()}}),
        ({"content": msgpack.packb({"observations": rows.tolist()}), "headers": MSGPACK}),
        ({"content": msgpack.packb({"observation": as_map(rows)}), "headers": MSGPACK}),
        ({"content": msgpack.packb({"observation": as_map(rows.astype(">f8"))}),
          "headers": MSGPACK}),
        ({"content": msgpack.packb({"observations": [as_map(row) for row in rows]}),
          "headers": MSGPACK}),
        ({"content": npy(rows), "headers": NPY}),
        ({"content": npy(np.asfortranarray(rows)), "headers": NPY}),
        ({"content": npy(rows.astype(">f4")), "headers": NPY}),
    ]  # fmt: skip
    for body in bodies:
        answer = client.post("/act", **body)
        assert answer.json()["actions"] == expected, (body, answer.text)
    for row, action in zip(rows, expected, strict=True):
        assert client.post("/act", content=npy(row), headers=NPY).json()["action"] == action
        assert post_msgpack(client, {"observation": as_map(row)}).json()["action"] == action


def test_an_npy_body_has_its_options_in_the_query(client, refused):
    body = npy(np.asarray(GOOD))
    query = "deterministic=false&temperature=0.5&epsilon=0.1&seed=3&episode_id=e%2F1&step=4"
    answer = client.post(f"/act?{query}&request_id=r", content=body, headers=NPY).json()
    fields = {"temperature": 0.5, "epsilon": 0.1, "seed": 3, "observation": GOOD}
    same = client.post("/act", json=fields).json()
    assert (answer["action"], answer["log_prob"]) == (same["action"], same["log_prob"])
    for query, field in [
        ("deterministic=1", "deterministic"), ("temperature=x", "temperature"),
        ("temperature=nan", "temperature"), ("seed=1.5", "seed"), ("seed=" + "9" * 5000, "seed"),
        ("obs=1", "obs"), ("seed", "query"), ("seed=1&seed=2", "seed"), ("observation=1",
        "observation"), ("episode_id=%ff", "query"), ("step=-1", "step"),
    ]:  # fmt: skip
        refused(client.post(f"/act?{query}", content=body, headers=NPY), 422, field)
    twice = client.post("/act?seed=1", json={"observation": GOOD, "seed": 1})
    refused(twice, 422, "seed")


def test_other_types_of_body_are_415(client, refused):
    for kind in (
        "application/x-pickle",
        "application/octet-stream",
        "application/x-npz",
        "multipart/form-data; boundary=x",
        "text/plain",
    ):
        response = client.post("/act", content=b"x", headers={"content-type": kind})
        error = refused(response, 415, "content-type")
        assert "application/x-npy" in error["expected"]
    with_charset = {"content-type": "Application/JSON; charset=utf-8"}
    body = json.dumps({"observation": GOOD}).encode()
    assert client.post("/act", content=body, headers=with_charset).status_code == 200


def test_answers_are_msgpack_where_that_is_accepted(app_client, client, kit, tmp_path, serving):
    accept = {"accept": "application/msgpack"}
    one = client.post("/act", json={"observation": GOOD}, headers=accept)
    assert one.headers["content-type"] == "application/msgpack"
    found = msgpack.unpackb(one.content)
    assert (found["action"], found["log_prob"], found["version"]) == (0, 0.0, 2)
    many = post_msgpack(client, {"observation": [GOOD] * 3}, **accept)
    found = msgpack.unpackb(many.content)
    assert np.array_equal(array_of(found["actions"]), np.zeros(3, np.int64))
    spec = PolicySpec(Box((4,)), Box((2,), low=-1, high=1), "deterministic")
    graph = kit.linear_graph(np.full((4, 2), 0.25, np.float32), "actions", 4)
    continuous = load_policy(kit.save_policy(tmp_path / "package", spec, graph))
    with app_client(create_app(lambda: serving(continuous))) as other:
        found = msgpack.unpackb(
            post_msgpack(other, {"observation": [1, 1, 1, 0]}, **accept).content
        )
        assert found["action"]["dtype"] == "float32"
        assert array_of(found["action"]).tolist() == [0.75, 0.75]
        assert found["log_prob"] is None


def test_numbers_of_arrays_are_cast_only_where_that_is_exact(app_client, serving, refused):
    space = Dict({"image": Box((2, 2), "uint8", 0, 255), "gear": Discrete(3)})
    app = create_app(lambda: serving(UniformPolicy(space, Discrete(2))))
    image = np.array([[0, 255], [1, 2]], np.uint8)
    with app_client(app) as client:
        for found in (image, image.astype(np.int64), image.tolist()):
            value = as_map(found) if type(found) is np.ndarray else found
            body = {"observation": {"image": value, "gear": 2}}
            assert post_msgpack(client, body).status_code == 200
        for found in (image.astype(np.int64) * 2, image.astype(np.float32), image.T[:1],
                      image.astype(bool)):  # fmt: skip
            body = {"observation": {"image": as_map(np.ascontiguousarray(found)), "gear": 2}}
            refused(post_msgpack(client, body), 422, "observation.image")
        body = {"observation": {"image": as_map(image), "gear": as_map(np.array([5]))}}
        refused(post_msgpack(client, body), 422, "observation.gear")


def test_arrays_are_logged_as_the_space_has_them(logged):
    rows = np.asarray([GOOD, [1, 2, 3, 4]], ">f8")
    logged.post("/act?episode_id=e&step=3", content=npy(np.asfortranarray(rows)), headers=NPY)
    post_msgpack(logged, {"observation": as_map(rows[0])})
    logged.log.decisions.flush()
    found = logged.lake.sql("select observation from d.decisions order by decision_id").column(0)
    expected = np.asarray([*rows, rows[0]], np.float32)
    assert np.array_equal(np.asarray(found.to_pylist(), np.float32), expected)


def test_a_canary_takes_its_rows_of_a_batch(app_client, kit, policy, tmp_path):
    other = load_policy(
        kit.save_policy(tmp_path / "q", graph=kit.linear_graph(-kit.WEIGHTS, "logits", 4))
    )
    main = ServedPolicy("p", 2, policy, "p@champion")
    router = Router(main, [(ServedPolicy("p", 3, other, "p@challenger"), 0.5)])
    lake = open_lake(tmp_path / "lake", create=True)
    signer = DecisionSigner(lake.signing_key(), "d")
    log = DecisionLog(lake.dataset("d"), policy.spec, signer.worker)
    rows = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
    episodes = [f"e{i}" for i in range(40)]
    with app_client(create_app(lambda: ServingState(router, signer, log))) as client:
        body = {"observations": rows.tolist(), "episode_ids": episodes}
        answer = client.post("/act", json=body).json()
        packed = post_msgpack(client, body, accept="application/msgpack").content
        one = client.post("/act", json={"observation": GOOD, "episode_id": "e0"}).json()
        log.decisions.flush()
        unnamed = {"observations": rows.tolist(), "temperature": 1, "seed": 7}
        first, again = (client.post("/act", json=unnamed).json() for _ in range(2))
    assert set(first["versions"]) == {2, 3}
    assert all(first[name] == again[name] for name in ("versions", "actions", "log_probs"))
    versions = answer["versions"]
    assert set(versions) == {2, 3}
    assert "version" not in answer
    assert answer["policy"] == "p"
    assert one["version"] == versions[0]
    chosen = {2: policy.act(rows).actions, 3: other.act(rows).actions}
    assert answer["actions"] == [int(chosen[v][i]) for i, v in enumerate(versions)]
    assert array_of(msgpack.unpackb(packed)["actions"]).tolist() == answer["actions"]
    found = lake.sql("select decision_id, episode_id, policy_version, action from d.decisions")
    by_id = {row["decision_id"]: row for row in found.to_pylist()}
    for key, episode, version, action in zip(
        answer["decision_ids"], episodes, versions, answer["actions"], strict=True
    ):
        row = by_id[key]
        assert (row["episode_id"], row["policy_version"], row["action"]) == (
            episode, version, action
        )  # fmt: skip
