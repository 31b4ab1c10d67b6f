"""One observation travels the whole way round, through real processes and a real socket."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from replaylake.datastore.lake.lake import open_lake

_COMMAND = Path(sys.executable).with_name("replaylake")
_LOG = Path(__file__).parents[1] / "examples" / "data" / "rllib_cartpole" / "cartpole-v1_large"
# Nothing like it is in the log, and float32 holds it exactly.
_OBSERVATION = [2.25, -0.5, 0.125, 0.75]
_FINAL = [2.5, -0.5, 0.25, 0.75]


@pytest.fixture
def replaylake(answer_of, tmp_path, monkeypatch):
    monkeypatch.setenv("REPLAYLAKE_LAKE", str(tmp_path / "lake"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return answer_of


@contextmanager
def served(port, *arguments):
    """Serve on a port; yields a function that posts JSON."""
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [_COMMAND, "serve", *arguments, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def post(path, body):
        request = urllib.request.Request(
            url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"{url}/readyz", timeout=1):
                    break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield post
    finally:
        process.terminate()
        process.wait(120)


@pytest.mark.slow
def test_one_observation_goes_round(replaylake, tmp_path, held_port):
    receipt = replaylake("ingest", str(_LOG), "--dataset", "cartpole", "--env", "CartPole-v1")
    assert receipt["steps"]["committed"] == 4137
    train = ["train", "offline", "cartpole", "--algorithm", "bc", "--policy", "clone"]
    first = replaylake(*train, "--updates", "50", "--where", "return >= 150")

    measured = replaylake(
        "evaluate", "clone", "--env", "CartPole-v1", "--episodes", "2", "--seed", "0"
    )
    assert len(measured["returns"]) == 2
    bento = replaylake("policies", "package", "clone", "--output", str(tmp_path / "bento"))
    assert (Path(bento["output"]) / "bento.yaml").is_file()

    with served(held_port, "clone", "--log-to", "cartpole", "--explore", "epsilon=0.5") as post:
        answer = post("/act", {"observation": _OBSERVATION, "episode_id": "visit-1"})
        post(
            "/feedback",
            {
                "decision_id": answer["decision_id"],
                "reward": -3.5,
                "terminated": True,
                "final_observation": _FINAL,
            },
        )
    assert (answer["policy"], answer["version"]) == ("clone", first["version"])

    joined = replaylake("feedback", "join", "cartpole")
    assert (joined["joined"], joined["episodes"], joined["steps"]) == (1, 1, 1)
    assert replaylake("feedback", "join", "cartpole")["episodes"] == 0

    lake = open_lake(os.environ["REPLAYLAKE_LAKE"])
    (step,) = lake.sql(
        "select * from cartpole.transitions where decision_id = $id", {"id": answer["decision_id"]}
    ).to_pylist()
    assert step["observation"] == _OBSERVATION
    assert step["next_observation"] == _FINAL
    assert step["action"] == answer["action"]
    assert step["reward"] == -3.5
    assert step["terminated"]
    assert not step["truncated"]
    assert step["behavior_log_prob"] == pytest.approx(answer["log_prob"], abs=1e-6)
    assert (step["policy"], step["policy_version"]) == ("clone", 1)

    view = lake.dataset("cartpole").snapshot().replay(where="policy = 'clone'")
    batch = view.uniform(4, seed=0).sample()
    assert (batch.observations == np.float32(_OBSERVATION)).all()
    assert (batch.next_observations == np.float32(_FINAL)).all()
    assert (batch.discounts == 0).all()

    second = replaylake(*train, "--updates", "50")
    assert second["version"] == 2
    trained_on = replaylake("lineage", "--policy", "clone:2")["datasets"][0]
    assert trained_on["num_steps"] == 4138

    lineage = replaylake("lineage", "--decision", answer["decision_id"])
    assert (lineage["decision"]["policy"], lineage["decision"]["version"]) == ("clone", 1)
    (selection,) = lineage["datasets"]
    assert (selection["dataset"], selection["version"]) == ("cartpole", receipt["version"])
    assert "150" in selection["where"]
    assert selection["num_steps"] == 4000
    assert len(selection["content_hash"]) == 64
