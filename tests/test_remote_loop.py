"""The loop on an object store, through real processes: the lake is s3:// all the way round."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from replaylake.datastore.feedback.join import join_feedback
from replaylake.datastore.lake.lake import open_lake

pytestmark = pytest.mark.slow
_COMMAND = Path(sys.executable).with_name("replaylake")
_LOG = Path(__file__).parents[1] / "examples" / "data" / "rllib_cartpole" / "cartpole-v1_large"
_OBSERVATION = [2.25, -0.5, 0.125, 0.75]


@pytest.fixture
def url(bucket, monkeypatch):
    url = f"s3://{bucket}/loop"
    monkeypatch.setenv("REPLAYLAKE_LAKE", url)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return url


@contextmanager
def served(port, *arguments):
    """Serve on a port, in a process group of its own; yields it and a function to post."""
    base = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [_COMMAND, "serve", *arguments, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def post(path, body):
        request = urllib.request.Request(
            base + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    try:
        deadline = time.monotonic() + 90
        while True:
            try:
                with urllib.request.urlopen(f"{base}/readyz", timeout=1):
                    break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield process, post
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(120)


def process_tree(pid):
    """Return a process and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(below for child in children for below in process_tree(int(child)))]


def has_open_files(pid):
    """Whether a process is there still, or a thread of it after its first one."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return len(tasks) > 1 or state != "Z"


def test_the_loop_on_s3(url, answer_of, held_port):
    replaylake = answer_of
    receipt = replaylake("ingest", str(_LOG), "--dataset", "cartpole", "--env", "CartPole-v1")
    assert receipt["steps"]["committed"] == 4137
    (row,) = replaylake("sql", "select count(*) as n from cartpole.steps")["rows"]
    assert row == {"n": 4137}
    train = ("train", "offline", "cartpole", "--algorithm", "bc", "--policy", "clone")
    trained = replaylake(*train, "--updates", "20", "--where", "return >= 150")
    assert trained["version"] == 1
    assert [row["policy"] for row in replaylake("policies", "list")["policies"]] == ["clone"]
    collected = replaylake(
        *("rollout", "--env", "CartPole-v1", "--policy", "clone", "--episodes", "4"),
        *("--workers", "1", "--dataset", "cartpole", "--seed", "0"),
    )
    assert collected["num_episodes"] == 4

    with served(held_port, "clone", "--log-to", "cartpole") as (_, post):
        first = post("/act", {"observation": _OBSERVATION, "episode_id": "visit-1"})
        decided_s = time.time()
        post(
            "/feedback",
            {"decision_id": first["decision_id"], "reward": -3.5, "terminated": True},
        )
    with served(held_port, "clone", "--log-to", "cartpole") as (process, post):
        second = post("/act", {"observation": _OBSERVATION, "episode_id": "visit-2"})
        post(
            "/feedback",
            {"decision_id": second["decision_id"], "reward": 7.0, "terminated": True},
        )
        killed = process_tree(process.pid)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        process.wait(120)
        # A killed worker holds its journal's lock for 30-50 ms more.
        while any(map(has_open_files, killed)):
            time.sleep(0.05)

    lake = open_lake(url)
    # What was decided within a minute waits: another machine's server may hold what came before.
    first_run = join_feedback(lake, "cartpole", now_s=decided_s + 1)
    assert first_run.steps == 0
    joined = join_feedback(lake, "cartpole", now_s=time.time() + 120)
    assert (joined.joined, joined.episodes, joined.steps) == (2, 2, 2)
    # The killed server's two records came from its journals, here.
    assert first_run.recovered + joined.recovered == 2
    rewards = lake.sql("select reward from cartpole.steps where decision_id is not null")
    assert sorted(rewards["reward"].to_pylist()) == [-3.5, 7.0]
    traced = replaylake("lineage", "--decision", second["decision_id"])
    assert traced["decision"]["version"] == 1
    assert traced["datasets"][0]["version"] == receipt["version"]
    # Nothing of the lake is on this machine but copies and journals.
    assert not Path(url.partition("://")[2]).exists()
    assert replaylake(*train, "--updates", "20")["version"] == 2
