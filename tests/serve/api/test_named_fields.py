"""Named fields at /act: encoded as ingest encodes the same row, through training and packaging."""

import json
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from replaylake.datastore.episodes.encoding import Encoding
from replaylake.datastore.errors import SchemaMismatchError
from replaylake.datastore.feedback.join import join_feedback
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import load_policy
from replaylake.offline.running.train import TrainConfig, train
from replaylake.serve.app import create_app
from replaylake.serve.config import ServeConfig
from replaylake.serve.loading import check_servable, load_serving

_DEVICES = ("ios", "web", "", "android")
_MAP = {"observation": "user_*,member,device,hour", "action": "item", "reward": "click"}


def _rows() -> list[dict]:
    """Eight decisions; each fourth has no device."""
    return [
        {
            "user_age": 20 + 3 * i,
            "user_score": 0.1 * i,
            "member": i % 2 == 0,
            "device": _DEVICES[i % 4],
            "hour": f"2026-01-{10 + i:02d}T{(5 * i) % 24:02d}:{7 * i:02d}:00Z",
            "item": ("hat", "shoes", "scarf")[i % 3],
            "click": i % 2,
        }
        for i in range(8)
    ]


def _named(row: dict) -> dict:
    """Return the fields that /act takes."""
    fields = ("user_age", "user_score", "member", "device", "hour")
    return {name: row[name] for name in fields if row[name] != ""}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a lake with a dataset from a CSV, and a policy that learned from it."""
    folder = tmp_path_factory.mktemp("named")
    lake = open_lake(folder / "lake", create=True)
    rows = _rows()
    lines = [",".join(rows[0]), *(",".join(str(v) for v in row.values()) for row in rows)]
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    options = ReadOptions(mapping=_MAP, fill={"device": "none"}, timezone="Europe/Berlin")
    ingest(lake, [folder / "log.csv"], "shop", format="bandit", options=options)
    config = TrainConfig(algorithm="bc", updates=3, batch_size=4, options={"hidden_sizes": [4]})
    return lake, train(lake, ["shop"], replace(config, policy="clone")).policy


@pytest.fixture
def client(app_client, made):
    lake, trained = made
    config = ServeConfig(
        package=trained.path,
        policy=trained.name,
        version=trained.version,
        lake=lake.path,
        log_to="served",
    )
    with app_client(create_app(lambda: load_serving(config))) as client:
        yield client


def _logged(lake) -> list[list[float]]:
    rows = lake.sql("select observation from shop.steps order by user_age").column(0)
    return rows.to_pylist()


def test_the_encoding_travels_in_the_package(made):
    lake, trained = made
    encoding = lake.dataset("shop").spec.encoding
    assert isinstance(encoding, Encoding)
    assert encoding.action_names == ("hat", "scarf", "shoes")
    assert load_policy(trained.path).spec.encoding == encoding
    body = json.loads((trained.path / "manifest.json").read_text())
    assert body["policy"]["encoding"] == encoding.to_json()


def test_named_fields_are_the_logged_vectors(client, made):
    lake, _ = made
    vectors = _logged(lake)
    for row, vector in zip(_rows(), vectors, strict=True):
        named = client.post("/act", json={"observation": _named(row)}).json()
        plain = client.post("/act", json={"observation": vector}).json()
        assert named["action"] == plain["action"]
        assert named["action_name"] == ("hat", "scarf", "shoes")[named["action"]]
    encoding = lake.dataset("shop").spec.encoding
    encoded = np.stack([encoding.encode_one(_named(row)) for row in _rows()])
    assert np.array_equal(encoded, np.array(vectors, np.float32))


def test_a_batch_of_both_kinds(client, made):
    vectors = _logged(made[0])
    observations = [_named(_rows()[0]), vectors[1], _named(_rows()[2])]
    answer = client.post("/act", json={"observations": observations}).json()
    plain = client.post("/act", json={"observations": vectors[:3]}).json()
    assert answer["actions"] == plain["actions"]
    assert len(answer["action_names"]) == 3


@pytest.mark.parametrize(
    ("changed", "field", "found", "expected"),
    [
        ({"age": 3}, "age", None, "unknown field; send only the fields user_age"),
        ({"age": None}, "age", None, "unknown field; send only the fields user_age"),
        ({"user_age": None}, "user_age", None, "required field is missing; send a number"),
        ({"user_age": "31"}, "user_age", '"31"', "a number"),
        ({"member": 1}, "member", "1", "true or false"),
        ({"device": ["ios"]}, "device", "a list of 1", "text"),
        ({"hour": "2026-01-31 12:00"}, "hour", '"2026-01-31 12:00"', "a time with a zone"),
    ],
)
def test_a_wrong_field_is_422_and_named(client, changed, field, found, expected):
    observation = {**_named(_rows()[0]), **changed}
    for body, place in (
        ({"observation": observation}, f"observation.{field}"),
        ({"observations": [_named(_rows()[1]), observation]}, f"observations[1].{field}"),
    ):
        response = client.post("/act", json=body)
        assert response.status_code == 422, response.text
        error = response.json()["error"]
        assert error["field"] == place
        assert error.get("found") == found
        assert expected in error["message" if found is None else "expected"]


def test_a_category_that_the_policy_does_not_know_is_named_counted_and_logged(client, caplog):
    known = _named(_rows()[0])
    unknown = {**known, "device": "amiga\n"}
    counted = 'replaylake_unknown_categories_total{field="device"}'
    assert f"{counted} 0.0" in client.get("/metrics").text
    assert "unknown_categories" not in client.post("/act", json={"observation": known}).json()
    one = client.post("/act", json={"observation": unknown}).json()
    assert one["unknown_categories"] == ["device"]
    many = client.post("/act", json={"observations": [known, unknown, {**known, "device": ""}]})
    assert many.json()["unknown_categories"] == [[], ["device"], []]
    packed = client.post(
        "/act",
        content=msgpack.packb({"observation": unknown}),
        headers={"content-type": "application/msgpack", "accept": "application/msgpack"},
    )
    assert msgpack.unpackb(packed.content)["unknown_categories"] == ["device"]
    assert f"{counted} 3.0" in client.get("/metrics").text
    lines = [one.message for one in caplog.records if "vocabulary" in one.message]
    assert lines[0] == (
        "/act: device: found 'amiga\\n', which is not in the vocabulary of the policy; "
        "it is encoded as other"
    )


def test_a_plain_vector_of_the_wrong_length_is_refused(client):
    response = client.post("/act", json={"observation": [1.0, 2.0]})
    assert response.json()["error"]["field"] == "observation"


def test_the_policy_says_its_fields(client, made):
    body = client.get("/policy").json()
    assert body["encoding"] == made[0].dataset("shop").spec.encoding.to_json()


def test_served_decisions_hold_the_vector_and_train_beside_the_log(app_client, made):
    lake, trained = made
    config = ServeConfig(
        package=trained.path, policy="clone", version=1, lake=lake.path, log_to="loop"
    )
    row = _rows()[4]
    with app_client(create_app(lambda: load_serving(config))) as client:
        answer = client.post("/act", json={"observation": _named(row)}).json()
        feedback = {
            "decision_id": answer["decision_id"],
            "reward": 1.0,
            "truncated": True,
            "final_observation": _named(_rows()[5]),
        }
        assert client.post("/feedback", json=feedback).status_code == 200
        wrong = {**feedback, "final_observation": {"user_age": 1}}
        error = client.post("/feedback", json=wrong).json()["error"]
        assert error["field"] == "final_observation.user_score"
    join_feedback(lake, "loop")
    steps = lake.sql("select observation, final_observation from loop.steps").to_pylist()
    vectors = _logged(lake)
    assert steps == [{"observation": vectors[4], "final_observation": vectors[5]}]
    assert lake.dataset("loop").spec.encoding == lake.dataset("shop").spec.encoding
    options = TrainConfig(algorithm="bc", updates=1, batch_size=4, options={"hidden_sizes": [4]})
    both = train(lake, ["shop", "loop"], replace(options, policy="both"))
    assert both.num_steps == 9


def test_a_dataset_that_serving_makes_has_the_encoding(made):
    lake, trained = made
    config = ServeConfig(
        package=trained.path, policy="clone", version=1, lake=lake.path, log_to="fresh"
    )
    check_servable(config)
    assert lake.dataset("fresh").spec.encoding == lake.dataset("shop").spec.encoding


def test_datasets_of_other_encodings_are_not_trained_together(made, tmp_path):
    lake, trained = made
    lines = ["user_age,device,item,click", "31,ios,hat,1", "45,web,shoes,0"]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    mapping = {**_MAP, "observation": "user_age,device"}
    ingest(lake, [tmp_path / "log.csv"], "small", format="bandit",
           options=ReadOptions(mapping=mapping))  # fmt: skip
    other = {"observation": "user_*,device", "action": "item", "reward": "click"}
    rows = ["user_a,user_b,user_c,device,item,click"]
    rows += [f"1,2,3,{d},{i},1" for d, i in (("ios", "hat"), ("web", "shoes"), ("tv", "scarf"))]
    rows += [f"1,2,3,{device},hat,0" for device in "abcde"]
    (tmp_path / "same_width.csv").write_text("\n".join(rows) + "\n")
    ingest(lake, [tmp_path / "same_width.csv"], "same_width", format="bandit",
           options=ReadOptions(mapping=other))  # fmt: skip
    config = TrainConfig(algorithm="bc", updates=1)
    with pytest.raises(SchemaMismatchError, match="observation space"):
        train(lake, ["shop", "small"], replace(config, policy="none"))
    # Three numbers, eight devices and the other ones: as many elements as in `shop`.
    assert lake.dataset("same_width").spec.encoding.width == 12
    with pytest.raises(SchemaMismatchError, match="encoded from differ"):
        train(lake, ["shop", "same_width"], replace(config, policy="none"))
    serving = ServeConfig(
        package=trained.path, policy="clone", version=1, lake=lake.path, log_to="same_width"
    )
    with pytest.raises(SchemaMismatchError, match="encoded from differ"):
        load_serving(serving)
