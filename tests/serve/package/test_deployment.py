"""A Bento where nothing of ours is: a fresh environment made from what it says, then served.

Needs a package index, as deploying does; without one the fixture fails with pip's words.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from replaylake.datastore.episodes.spaces import Box
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.serve.app import create_app
from replaylake.serve.config import ServeConfig
from replaylake.serve.loading import load_serving
from replaylake.serve.package.bento import package_bento
from replaylake.serve.package.lock import NOT_SERVED

pytestmark = pytest.mark.slow

ARM = PolicySpec(Box((4,)), Box((3,), low=-1.0, high=1.0), "squashed_gaussian")
OBSERVATIONS = np.random.default_rng(1).normal(size=(50, 4)).astype(np.float32).tolist()
# Of the whole tree, shared pages counted once.
MAX_MEMORY_MB = 350
MAX_INSTALLED_MB = 600
MAX_READY_S = 30  # 2 on an idle machine, 10 where every core is taken several times over


@dataclass
class Deployment:
    """A Bento of a policy, and the environment that its Dockerfile would install it into."""

    folder: Path
    bento: Path
    venv: Path
    package: Path
    receipt: object
    dockerfile: str

    def environment(self, **variables):
        return {
            "PATH": f"{self.venv / 'bin'}:/usr/bin:/bin",
            "HOME": str(self.folder / "home"),
            "BENTOML_HOME": str(self.folder / "home" / "bentoml"),
            **variables,
        }

    def python(self, code, *arguments):
        done = subprocess.run(
            [self.venv / "bin" / "python", "-c", code, *map(str, arguments)],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextmanager
    def served(self, kit, port, **variables):
        """Run the Dockerfile's CMD on a port; yields a client, the process and seconds."""
        (command,) = re.findall(r"(?m)^CMD (.*)$", self.dockerfile)
        command = [word.replace("/bento", str(self.bento)) for word in json.loads(command)]
        began = time.monotonic()
        process = subprocess.Popen(
            [str(self.venv / "bin" / command[0]), *command[1:]],
            cwd=self.folder / "home",
            env=self.environment(REPLAYLAKE_SERVE_PORT=str(port), **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
                await_ready(client, process)
                yield client, process, time.monotonic() - began
            processes = kit.process_tree(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)
            process.stdout.close()
        assert not any(kit.is_running(pid) for pid in processes)

    def is_healthy(self, port):
        """Run the Dockerfile's HEALTHCHECK."""
        (command,) = re.findall(r"(?m)^HEALTHCHECK .*\\\n\s*CMD (.*)$", self.dockerfile)
        words = json.loads(command)
        environment = self.environment(
            REPLAYLAKE_SERVE_PORT=str(port), http_proxy="http://127.0.0.1:9"
        )
        done = subprocess.run(
            [self.venv / "bin" / words[0], *words[1:]],
            env=environment,
            capture_output=True,
            check=False,
        )
        return done.returncode == 0


def await_ready(client, process):
    deadline = time.monotonic() + 60
    while True:
        try:
            if client.get("/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory, kit):
    folder = tmp_path_factory.mktemp("deployment")
    weights = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    package = kit.save_policy(folder / "package", ARM, arm_graph(weights))
    lake = open_lake(folder / "lake", create=True)
    ref = lake.registry.register("arm", package, run_id="run", lineage={})
    receipt = package_bento(ref, folder / "built")
    # It needs neither the lake nor the folder in which it was built.
    bento = (folder / "built").rename(folder / "bento")
    (folder / "lake").rename(folder / "away")
    (folder / "home").mkdir()
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    text = (bento / "env" / "docker" / "Dockerfile").read_text()
    install(text, bento, venv)
    return Deployment(folder, bento, venv, package, receipt, text)


def arm_graph(weights):
    """Means and log standard deviations, each of three numbers."""
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["observations", "w"], ["hidden"]),
            helper.make_node("Tanh", ["hidden"], ["squashed"]),
            helper.make_node("Split", ["squashed"], ["means", "log_stds"], axis=1),
        ],
        "arm",
        [helper.make_tensor_value_info("observations", TensorProto.FLOAT, ["n", 4])],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3])
            for name in ("means", "log_stds")
        ],
        [numpy_helper.from_array(weights, "w")],
    )
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString()


def install(dockerfile, bento, venv):
    """Run the Dockerfile's own pip commands, on the fresh environment."""
    (run,) = re.findall(r"(?m)^RUN (cd env/python (?:[^\\\n]|\\\n)*)$", dockerfile)
    change, *commands = (part.strip() for part in run.replace("\\\n", " ").split("&&"))
    assert change == "cd env/python"
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command.replace("--no-cache-dir ", ""))  # another run finds them here
        assert words[:3] == ["python", "-m", "pip"]
        pip = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python"]
        done = subprocess.run(
            [*pip, *words[3:]],
            cwd=bento / "env" / "python",
            # A path of ours would make pip find a ReplayLake there and install none. What the
            # server imports it compiles itself; pip would compile everything.
            env={
                **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
                "PIP_NO_COMPILE": "1",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            pytest.fail(f"{command}, which needs a package index: {done.stdout}{done.stderr}")


def test_the_environment_holds_what_the_lock_names_and_nothing_of_training(deployment):
    code = (
        "import importlib.metadata as m, importlib.util as u, json, sys;"
        "print(json.dumps([{d.name.lower().replace('_', '-').replace('.', '-'): d.version"
        " for d in m.distributions()}, [n for n in sys.argv[1:] if u.find_spec(n)]]))"
    )
    installed, importable = json.loads(deployment.python(code, *NOT_SERVED, "pip", "setuptools"))
    version = installed.pop("replaylake")
    assert deployment.receipt.wheel == f"replaylake-{version}-py3-none-any.whl"
    assert installed == {pin.name: pin.version for pin in deployment.receipt.requirements}
    assert importable == []
    files = [path for path in deployment.venv.rglob("*") if path.is_file()]
    size_mb = sum(path.stat().st_size for path in files if path.suffix != ".pyc") / 1e6
    print(f"installed: {size_mb:.0f} MB, {len(installed)} libraries")
    assert deployment.receipt.installed_bytes / 1e6 == pytest.approx(size_mb, rel=0.05)
    assert size_mb < MAX_INSTALLED_MB


def answers(client):
    """Return what a server says to a few requests, but for the ids of its decisions."""
    got = []
    for body in (
        {"observation": OBSERVATIONS[0]},
        {"observations": OBSERVATIONS},
        {"observation": [1, 2]},
    ):
        answer = client.post("/act", json=body)
        fields = answer.json()
        fields.pop("decision_id", None)
        fields.pop("decision_ids", None)
        got.append((answer.status_code, fields))
    return got


def test_every_start_gives_our_answers_within_bounds(deployment, kit, app_client, held_port):
    config = ServeConfig(deployment.package, "arm", 1)
    with app_client(create_app(lambda: load_serving(config))) as ours:
        expected = answers(ours)
    assert [status for status, _ in expected] == [200, 200, 422]
    assert len(expected[1][1]["actions"]) == len(OBSERVATIONS)
    for _ in range(2):
        with deployment.served(kit, held_port) as (client, process, ready_s):
            assert answers(client) == expected
            tree = kit.process_tree(process.pid)
            memory_mb = sum(map(proportional_set_mb, tree))
            assert deployment.is_healthy(client.base_url.port)
            listening = addresses_of(client.base_url.port)
        print(f"ready after {ready_s:.1f} s, {memory_mb:.0f} MB in {len(tree)} processes")
        assert memory_mb < MAX_MEMORY_MB
        began = time.monotonic()
        deployment.python("import bentoml, onnxruntime, uvicorn")
        # A machine that others use takes long for the libraries alone.
        assert ready_s < max(MAX_READY_S, 10 * (time.monotonic() - began))
        assert listening == {"0100007F"}  # 127.0.0.1 alone
        assert not deployment.is_healthy(client.base_url.port)


def proportional_set_mb(pid):
    (kb,) = re.findall(r"(?m)^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text())
    return int(kb) / 1024


def addresses_of(port):
    """Return the local addresses, as the kernel writes them, that somebody listens on."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    wanted = f"{port:04X}"
    return {
        address
        for address, _, found in (line[1].partition(":") for line in lines if line[3] == "0A")
        if found == wanted
    }


def test_as_in_the_container_it_wants_a_token(deployment, kit, tmp_path, held_port):
    """With the Dockerfile's own variables: every address, and the folders of the container."""
    (text,) = re.findall(r"(?m)^ENV ((?:[^\\\n]|\\\n)*)$", deployment.dockerfile)
    variables = dict(word.split("=", 1) for word in text.replace("\\\n", " ").split())
    for name in ("BENTOML_HOME", "REPLAYLAKE_STATE"):
        variables[name] = str(tmp_path / name)
    port = variables.pop("REPLAYLAKE_SERVE_PORT")
    assert f"EXPOSE {port}" in deployment.dockerfile
    refused = subprocess.run(
        [deployment.venv / "bin" / "bentoml", "serve", deployment.bento],
        cwd=deployment.folder / "home",
        env=deployment.environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert refused.returncode != 0
    assert "host: found 0.0.0.0" in refused.stderr + refused.stdout
    assert "REPLAYLAKE_ACT_TOKEN" in refused.stderr + refused.stdout
    token = "a-token-of-some-length"
    variables["REPLAYLAKE_ACT_TOKEN"] = token
    with deployment.served(kit, held_port, **variables) as (client, _, _):
        body = {"observation": OBSERVATIONS[0]}
        assert client.post("/act", json=body).status_code == 401
        allowed = client.post("/act", json=body, headers={"authorization": f"Bearer {token}"})
        assert allowed.status_code == 200
        assert addresses_of(client.base_url.port) == {"00000000"}
        assert deployment.is_healthy(client.base_url.port)


def test_decisions_and_rewards_reach_a_mounted_lake(deployment, kit, tmp_path, held_port):
    lake = open_lake(tmp_path / "lake", create=True)
    variables = {
        "REPLAYLAKE_SERVE_LAKE": str(lake.path),
        "REPLAYLAKE_SERVE_LOG_TO": "live",
        "REPLAYLAKE_SERVE_EXPLORE": "temperature=1",
        "REPLAYLAKE_SERVE_WORKERS": "2",
    }
    with deployment.served(kit, held_port, **variables) as (client, _, _):
        answer = client.post("/act", json={"observation": OBSERVATIONS[0], "episode_id": "e"})
        assert answer.status_code == 200, answer.text
        decision = answer.json()
        told = {"decision_id": decision["decision_id"], "reward": 2.5, "terminated": True}
        assert client.post("/feedback", json=told).status_code in (200, 202)
    table = open_lake(lake.path).sql(
        "select decision_id, action, log_prob, policy, policy_version from live.decisions"
    )
    (row,) = table.to_pylist()
    assert (row["decision_id"], row["policy"], row["policy_version"]) == (
        decision["decision_id"],
        "arm",
        1,
    )
    assert row["action"] == pytest.approx(decision["action"])
    assert row["log_prob"] == pytest.approx(decision["log_prob"])


def test_packaged_again_from_the_installed_wheel_it_is_the_same(deployment):
    """No checkout: the wheel is written anew from what is installed there."""
    code = (
        "import json, sys; from pathlib import Path;"
        "from replaylake.datastore.lake.lake import open_lake;"
        "from replaylake.serve.package.bento import package_bento;"
        "ref = open_lake(sys.argv[1]).registry.resolve('arm');"
        "print(json.dumps(package_bento(ref, Path(sys.argv[2])).to_json()))"
    )
    again = json.loads(deployment.python(code, deployment.folder / "away", deployment.folder / "b"))
    assert again["wheel_sha256"] == deployment.receipt.wheel_sha256
    assert [(pin["name"], pin["version"]) for pin in again["requirements"]] == [
        (pin.name, pin.version) for pin in deployment.receipt.requirements
    ]
