"""`replaylake serve` as a process, then `feedback join` and `lineage --decision` on its log."""

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replaylake.cli.main import main

Tree = Callable[[], dict[str, bytes]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cartpole: Path) -> Path:
    path = str(tmp_path_factory.mktemp("trained") / "lake")
    source = str(cartpole / "small.json")
    assert main(["ingest", source, "--dataset", "cartpole", "--lake", path]) == 0
    arguments = ["train", "offline", "cartpole", "--algorithm", "bc", "--policy", "clone"]
    assert main([*arguments, "--updates", "5", "--set", "hidden_sizes=[8]", "--lake", path]) == 0
    return Path(path)


@pytest.fixture(autouse=True)
def own_lake(trained: Path, lake: Path) -> None:
    # What is derived may still be written while it is copied, and is made again where it is absent.
    shutil.copytree(trained, lake, ignore=shutil.ignore_patterns("_derived"))


def post(port: int, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


@pytest.mark.slow
@pytest.mark.parametrize("log_to", [(), ("--log-to", "live", "--explore", "epsilon=0.1")])
def test_a_port_in_use(run: Any, tree: Tree, log_to: tuple[str, ...]) -> None:
    before = tree()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = run("serve", "clone", "--port", port, *log_to, "--json")
    assert ran.code == 1
    assert ran.err.splitlines()[0] == "policy clone:1 (newest)"
    (line,) = ran.err.splitlines()[1:]
    assert line.startswith(f"error: serve: port {port} on 127.0.0.1: ")
    assert "--port" in line
    assert ran.json["error"]["kind"] == "ServeError"
    assert tree() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("none",), "none"),
        (("clone", "--log-to", "Live"), "Live"),
        (("clone", "--host", "no.such.host.invalid"), "no.such.host.invalid"),
    ],
)
def test_what_is_refused_before_anything_starts(
    run: Any, tree: Tree, arguments: tuple[str, ...], said: str
) -> None:
    before = tree()
    ran = run("serve", *arguments, "--port", "0")
    assert ran.code == 1
    (line,) = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    assert said in line
    assert tree() == before


def test_a_value_that_the_config_refuses_is_wrong_usage(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for role in ("ACT", "FEEDBACK", "ADMIN"):
        monkeypatch.delenv(f"REPLAYLAKE_{role}_TOKEN", raising=False)
    for arguments, option, said in (
        (("--join-every", "60s"), "--join-every", "Name the dataset with --log-to."),
        (("--host", "0.0.0.0"), "--host", "or --act-token-file (and"),
        (("--act-token-file", tmp_path / "none"), "--act-token-file", "No such file"),
        (("--allowed-host", "http://x"), "--allowed-host", "found 'http://x'"),
    ):
        ran = run("serve", "clone", "--port", "0", *arguments)
        assert ran.code == 2, arguments
        assert f"Invalid value for {option}: " in ran.err
        assert said in ran.err


@pytest.mark.parametrize("explore", ["epsilon=2", "luck", "temperature=-1"])
def test_exploration_of_another_form_is_wrong_usage(run: Any, explore: str) -> None:
    ran = run("serve", "clone", "--port", "0", "--explore", explore)
    assert ran.code == 2
    assert "--explore" in ran.err


def test_a_server_of_another_name_is_wrong_usage(run: Any) -> None:
    ran = run("serve", "clone", "--port", "0", "--server", "gunicorn")
    assert ran.code == 2
    assert "--server: found 'gunicorn', expected bentoml or uvicorn" in ran.err


@pytest.mark.slow
@pytest.mark.parametrize("module", ["starlette", "bentoml"])
def test_without_the_extra(lake: Path, module: str) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from replaylake.cli.main import main\n"
        "sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "serve", "clone", "--port", "0", "--lake", str(lake)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    line = ran.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    assert "Traceback" not in ran.stderr
    assert "replaylake[serve]" in line


@pytest.fixture
def package(lake: Path, tmp_path: Path) -> Path:
    """A policy package outside a lake."""
    (source,) = (lake / "_lake" / "policies" / "clone").iterdir()
    return Path(shutil.copytree(source, tmp_path / "elsewhere" / "arm"))


def test_a_package_outside_a_lake_is_served_by_its_sha256(run: Any, package: Path) -> None:
    sha256 = hashlib.sha256((package / "manifest.json").read_bytes()).hexdigest()
    ran = run("serve", package, "--port", "0", "--check")
    assert ran.code == 0, ran.err
    policy, warning = ran.err.splitlines()
    assert policy == "policy clone:1 (path)"
    assert warning.startswith(f"warning: {package} is outside a lake")
    assert f"Give --sha256 {sha256} to refuse any other." in warning
    for text in (sha256, sha256.upper()):
        ran = run("serve", package, "--port", "0", "--check", "--sha256", text)
        assert (ran.code, ran.err.splitlines()) == (0, ["policy clone:1 (path)"])
    assert run("serve", "clone", "--port", "0", "--check", "--sha256", sha256).code == 0


def test_a_package_of_another_sha256_is_refused(run: Any, package: Path) -> None:
    manifest = package / "manifest.json"
    sha256 = hashlib.sha256(manifest.read_bytes()).hexdigest()
    # One that parses, and would act otherwise.
    edited = manifest.read_text().replace('"clone"', '"clona"')
    manifest.write_text(edited)
    found = hashlib.sha256(edited.encode()).hexdigest()
    ran = run("serve", package, "--port", "0", "--check", "--sha256", sha256)
    assert ran.code != 0
    assert f"found a package of sha256 {found}, expected {sha256}" in ran.err
    other = run("serve", "clone", "--port", "0", "--check", "--sha256", found)
    assert other.code != 0
    assert f"expected {found}" in other.err
    ran = run("serve", package, "--port", "0", "--sha256", "abc")
    assert ran.code == 2
    assert "--sha256: found 'abc', expected 64 hexadecimal digits" in ran.err


def test_a_package_without_a_name_is_called_after_its_directory(run: Any, package: Path) -> None:
    manifest = package / "manifest.json"
    body = json.loads(manifest.read_text())
    del body["name"], body["version"]
    manifest.write_text(json.dumps(body))
    assert run("serve", package, "--port", "0", "--check").err.startswith("policy arm:0 (path)")
    bento = package.parent / "Bento!" / "src" / "policy"
    shutil.copytree(package, bento)
    ran = run("serve", bento.parents[1], "--port", "0", "--check")
    assert ran.err.startswith("policy package:0 (path)")
    assert run("serve", package.parent, "--port", "0", "--check").code == 1


@pytest.mark.slow
def test_the_sha256_of_a_package_is_in_the_decision_log(
    run: Any, lake: Path, package: Path
) -> None:
    command = [sys.executable, "-m", "replaylake.cli.main", "serve", str(package), "--json"]
    command += ["--port", "0", "--log-to", "live", "--lake", str(lake), "--server", "uvicorn"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            body = json.loads(process.stdout.readline())
            act = post(body["port"], "/act", {"observation": [0.0] * 4, "episode_id": "e"})
        finally:
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    sha256 = hashlib.sha256((package / "manifest.json").read_bytes()).hexdigest()
    assert body["package_sha256"] == sha256
    (row,) = run("sql", "select package_sha256 from live.decisions", "--json").json["rows"]
    assert row["package_sha256"] == sha256
    traced = run("lineage", "--decision", act["decision_id"], "--json").json
    assert traced["decision"]["package_sha256"] == sha256


@pytest.mark.slow
def test_a_decision_is_served_rewarded_joined_and_traced(run: Any, lake: Path) -> None:
    command = [sys.executable, "-m", "replaylake.cli.main", "serve", "clone", "--json"]
    command += ["--port", "0", "--log-to", "live", "--lake", str(lake)]
    environment = {**os.environ, "REPLAYLAKE_LAKE": ""}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            body = json.loads(process.stdout.readline())  # printed once it is ready
            port = body["port"]
            with urllib.request.urlopen(f"{body['url']}/policy", timeout=60) as response:
                assert json.load(response)["reference"] == "clone"
            act = post(port, "/act", {"observation": [0.0] * 4, "episode_id": "e"})
            decision = act["decision_id"]
            reward = {"decision_id": decision, "reward": 2.5, "terminated": True}
            post(port, "/feedback", reward)
        finally:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out == ""
    assert (body["policy"], body["version"], body["log_to"]) == ("clone", 1, "live")
    assert (body["host"], body["url"]) == ("127.0.0.1", f"http://127.0.0.1:{port}")
    lines = err.splitlines()
    assert lines[0] == "policy clone:1 (newest)"
    assert lines[1].startswith("warning: live is logged without exploration: off-policy evaluation")
    assert "unsupported" in lines[1]

    receipt = run("feedback", "join", "live", "--json").json
    assert (receipt["episodes"], receipt["steps"], receipt["joined"]) == (1, 1, 1)
    assert (
        run("feedback", "join", "live").out.splitlines()[0].endswith(": 0 episodes, 0 steps added")
    )

    traced = run("lineage", "--decision", decision, "--json").json
    assert traced["decision"]["logged"]
    assert traced["decision"]["action"] == act["action"]
    assert traced["decision"]["rewards"] == [
        {"reward": 2.5, "terminated": True, "truncated": False}
    ]
    assert traced["decision"]["step"]["step"] == 0
    assert traced["policy"]["version"] == 1
    (dataset,) = traced["datasets"]
    assert (dataset["dataset"], dataset["num_steps"]) == ("cartpole", 102)
    text = run("lineage", "--decision", decision).out
    assert text.startswith(f"decision {decision}\n  served into live at ")
    assert dataset["ingests"][0]["source"] in text
