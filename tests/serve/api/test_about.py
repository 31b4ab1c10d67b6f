"""GET /policy: which versions answer, what they came from, and how following goes."""

import json
import threading
import time

import numpy as np
import pytest

from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import save_package
from replaylake.serve.app import create_app
from replaylake.serve.config import ServeConfig
from replaylake.serve.loading import load_serving
from replaylake.serve.recording.feedback_join_process import FeedbackJoinProcess

DATASET = {
    "dataset": "cartpole", "version": 7, "named": "cartpole", "where": "num_steps > 10",
    "reward": None, "where_steps": None, "num_episodes": 12, "num_steps": 900,
    "content_hash": "ab" * 16,
}  # fmt: skip
MANIFEST = {
    "algorithm": "bc",
    "run_id": "01abc",
    "datasets": [DATASET],
    "evaluation": {"mean_return": 200.0},
}


@pytest.fixture
def lake(kit, tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    for number in range(3):
        nan = np.nan if number == 2 else 1.0
        graph = kit.linear_graph(kit.WEIGHTS * np.float32(nan), "logits", 4)
        folder = tmp_path / f"p{number}"
        save_package(folder, onnx=graph, spec=kit.CARTPOLE, manifest=MANIFEST, learner_weights=None)
        lake.registry.register("clone", folder, run_id="01abc", lineage={})
    return lake


def test_a_server_that_joins_is_loaded_from_its_environment(lake):
    ref = lake.registry.resolve("clone:1")
    config = ServeConfig(ref.path, "clone", 1, lake.path, log_to="live", join_every_s=60.0)
    state = load_serving(ServeConfig.from_environment(config.to_environment()))
    assert state.feedback_join is not None
    state.close()


def test_what_a_server_says_of_itself(app_client, lake):
    registry = lake.registry
    registry.set_alias("clone", "champion", 1)
    registry.set_alias("clone", "challenger", 2)
    config = ServeConfig(
        registry.resolve("clone:1").path,
        "clone",
        1,
        lake.path,
        reference="clone@champion",
        canary=("clone@challenger=0.25",),
        follow_s=0.05,
    )
    began_ms = time.time() * 1000
    with app_client(create_app(lambda: load_serving(config))) as client:
        said = client.get("/policy").json()
        assert (said["policy"], said["version"], said["reference"]) == (
            "clone", 1, "clone@champion",
        )  # fmt: skip
        main, canary = said["versions"]
        assert (main["weight"], canary["weight"]) == (0.75, 0.25)
        assert (canary["version"], canary["reference"]) == (2, "clone@challenger")
        assert main["snapshot"] == [DATASET]
        assert main["evaluation"] == {"mean_return": 200.0}
        assert (main["algorithm"], main["run_id"], main["ope"]) == ("bc", "01abc", None)
        assert began_ms - 1 <= main["since_ms"] <= time.time() * 1000
        assert main["promotion"]["alias"] == "champion"
        assert said["observation_space"]["type"] == "box"
        following = said["following"]
        assert [one["alias"] for one in following] == ["champion", "challenger"]
        assert following[0]["last_reload"] is following[0]["refused"] is None
        assert following[0]["interval_s"] == 0.05

        gate = {"verdict": "better", "difference": [0.1, 3.0]}
        registry.aliases.move("clone", "champion", 2, kind="promote", by="ada", gate=gate)
        said = eventually(client, lambda said: said["version"] == 2)
        assert said["versions"][0]["ope"] == gate
        assert said["versions"][0]["promotion"]["by"] == "ada"
        moved = said["following"][0]["last_reload"]
        assert (moved["from_version"], moved["to_version"]) == (1, 2)
        assert {"policy": "clone", "version": 1} in said["held"]

        registry.set_alias("clone", "champion", 3)
        said = eventually(client, lambda said: said["following"][0]["refused"])
        assert (said["version"], said["following"][0]["refused"]["version"]) == (2, 3)
        assert "cannot act" in said["following"][0]["refused"]["reason"]
        assert client.post("/act", json={"observation": [0, 0, 0, 0]}).status_code == 200
        text = client.get("/metrics").text
        assert 'replaylake_refused_version{alias="champion",policy="clone"} 3.0' in text
        assert json.dumps(said)


def eventually(client, is_so):
    deadline = time.monotonic() + 60
    while not is_so(said := client.get("/policy").json()):
        assert time.monotonic() < deadline, said
        time.sleep(0.02)
    return said


@pytest.mark.slow
def test_a_join_that_fails_is_counted_and_told_and_the_server_stays_ready(logged, tmp_path):
    key = logged.post("/act", json={"observation": [1, 2, 3, 4]}).json()["decision_id"]
    logged.post("/feedback", json={"decision_id": key, "reward": 1, "terminated": True})
    logged.log.decisions.flush()
    logged.log.rewards.flush()
    (shard,) = (logged.lake.path / "d/_rewards/shards").iterdir()
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    join = FeedbackJoinProcess(logged.lake.dataset("d"), tmp_path / "lake", 0.2, 60.0)
    failed, joined = threading.Event(), threading.Event()
    join.on_failure = failed.set
    join.on_round = lambda *counts: joined.set()
    logged.serving.feedback_join = join
    join.start()
    try:
        assert failed.wait(120)
        answer = logged.get("/readyz")
        assert (answer.status_code, answer.json()["degraded"]) == (200, ["feedback-join"])
        assert logged.post("/act", json={"observation": [1, 2, 3, 4]}).status_code == 200
        shard.write_bytes(whole)
        assert joined.wait(120)
        assert logged.get("/readyz").json() == {"ready": True, "degraded": []}
    finally:
        logged.serving.feedback_join = None
        join.stop()
