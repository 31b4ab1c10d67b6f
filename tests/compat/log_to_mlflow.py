"""A run of `replaylake train` at a real MLflow server, and its policy, loaded and registered there.

python tests/compat/log_to_mlflow.py PYTHON: an interpreter that has mlflow.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_LOG = _ROOT / "examples" / "data" / "rllib_cartpole" / "cartpole-v1_large"
_READ = """
    import json, sys
    from mlflow import MlflowClient
    client = MlflowClient(sys.argv[1])
    experiment = client.get_experiment_by_name("cart poles")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "policy_loss")
    probe = client.get_metric_history(run.info.run_id, "probe")
    print(json.dumps({
        "status": run.info.status,
        "id": run.info.run_id,
        "name": run.info.run_name,
        "params": run.data.params,
        "metrics": run.data.metrics,
        "tags": run.data.tags,
        "steps": [one.step for one in history],
        "probe": [repr(one.value) for one in probe],
    }))
"""
_LOAD = """
    import json, sys
    import mlflow, numpy, pandas
    import importlib.util
    assert importlib.util.find_spec("replaylake") is None, "it is to come from the model"
    model = mlflow.pyfunc.load_model(sys.argv[1])
    rows = numpy.array(json.loads(sys.argv[2]))
    found = model.predict(rows)
    drawn = model.predict(rows, params={"deterministic": False, "temperature": 2.0, "seed": 7})
    frame = model.predict(pandas.DataFrame(rows))
    assert frame["action"].tolist() == found["action"].tolist()
    print(json.dumps({
        "action": found["action"].tolist(),
        "drawn": drawn["action"].tolist(),
        "log_prob": drawn["log_prob"].tolist(),
        "policy": model.metadata.metadata["replaylake"]["policy"],
    }))
"""
_REGISTRY = """
    import json, sys
    from mlflow import MlflowClient
    client = MlflowClient()
    model = client.get_registered_model("cart poles")
    versions = {one.version: one for one in client.search_model_versions("name = 'cart poles'")}
    print(json.dumps({
        "aliases": {alias: str(version) for alias, version in model.aliases.items()},
        "runs": {str(version): one.run_id for version, one in versions.items()},
        "policies": {
            str(version): one.tags["replaylake.version"] for version, one in versions.items()
        },
        "status": sorted({one.status for one in versions.values()}),
    }))
"""
_ACT = """
    import json, sys
    import numpy
    import replaylake as rl
    policy = rl.load_policy(rl.open(sys.argv[1]).registry.resolve("clone").path)
    rows = numpy.array(json.loads(sys.argv[2]), numpy.float32)
    rng = numpy.random.default_rng(7)
    drawn = policy.act(rows, rng=rng, deterministic=False, temperature=2.0)
    print(json.dumps({
        "action": policy.act(rows).actions.tolist(),
        "drawn": drawn.actions.tolist(),
        "log_prob": [float(one) for one in drawn.log_probs],
        "policy": "clone",
    }))
"""
_PROBE = """
    import sys
    from replaylake.cli.output.mlflow_run import MlflowRun
    run = MlflowRun("cart poles", print)
    run.begin(sys.argv[1], {})
    run.log(1, {"probe": float("nan")})
    run.log(2, {"probe": float("inf")})
    run.log(3, {"probe": 0.5})
    run.close()
"""
_PROMOTE = ("promote", "clone:1", "--to", "champion", "--mlflow", "cart poles")


def main(python: str) -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        home = Path(folder)
        command = [python, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--backend-store-uri", f"sqlite:///{home / 'mlflow.db'}"]
        command += ["--artifacts-destination", str(home / "artifacts"), "--workers", "1"]
        uri = f"http://127.0.0.1:{port}"
        with _serve(command, uri, home):
            trained = _check(python, uri, home)
        # While it is down, a promotion is made here alone.
        ran = _run(uri, home, *_PROMOTE)
        assert ran.returncode == 1, ran
        assert "cart poles@champion is not set" in ran.stderr, ran
        assert "clone@champion is clone:1" in ran.stdout, ran
        with _serve(command, uri, home):
            _check_registry(python, uri, home, trained)


@contextmanager
def _serve(command: list[str], uri: str, home: Path) -> Iterator[None]:
    with (home / "server.log").open("w") as log:
        # A group of its own: the server starts workers.
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=home, start_new_session=True)
    try:
        _await(uri, server, home / "server.log")
        yield
    finally:
        os.killpg(server.pid, 15)
        server.wait(30)


def _await(uri: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{uri}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    sys.exit(f"no MLflow server:\n{log.read_text()[-4000:]}")


def _run(uri: str, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MLFLOW_TRACKING_URI": uri, "REPLAYLAKE_LAKE": str(home / "lake")}
    command = [str(Path(sys.executable).with_name("replaylake")), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def _check(python: str, uri: str, home: Path) -> str:
    """Check a run and its policy; return MLflow's id of the run."""
    ours = Path(sys.executable)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        ran = _run(uri, home, *words)
        if ran.returncode:
            sys.exit(ran.stderr)
        return ran

    run("ingest", str(_LOG), "--dataset", "cartpole")
    options = ("--algorithm", "bc", "--policy", "clone", "--updates", "40")
    options += ("--set", "log_updates=10")
    trained = run("train", "offline", "cartpole", *options, "--mlflow", "cart poles", "--json")
    run_id = json.loads(trained.stdout)["run_id"]
    assert f"at MLflow: {uri}/#/experiments/" in trained.stderr, trained.stderr
    probe = [str(ours), "-c", textwrap.dedent(_PROBE), run_id]
    subprocess.run(probe, env={**os.environ, "MLFLOW_TRACKING_URI": uri}, check=True)
    read = [python, "-c", textwrap.dedent(_READ), uri]
    found = json.loads(subprocess.run(read, check=True, capture_output=True, text=True).stdout)
    assert (found["status"], found["name"]) == ("FINISHED", run_id), found
    assert found["tags"]["replaylake.run_id"] == run_id
    assert found["params"]["config.algorithm"] == "bc", found["params"]
    assert found["steps"] == [10, 20, 30, 40], found
    # Its database has no infinity.
    assert found["probe"] == ["nan", "1.7976931348623157e+308", "0.5"], found
    run("policies", "package", "clone", "--format", "mlflow", "--output", str(home / "model"))
    _compare_actions(python, str(home / "model"), uri, home)
    version = subprocess.run(
        [python, "-c", "import mlflow; print(mlflow.__version__)"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    names = ", ".join(sorted(found["metrics"])[:6])
    print(f"MLflow {version}: {len(found['params'])} parameters; {names}; probe {found['probe']}")
    print(f"MLflow {version}: the policy as a pyfunc acts as it does here")
    return str(found["id"])


def _compare_actions(python: str, model: str, uri: str, home: Path) -> None:
    """Compare the actions of a model that MLflow loads with those of the lake's policy."""
    rows = json.dumps([[0.0, 0.1, 0.02, -0.1], [0.0, -0.4, -0.1, 0.5]] * 10)
    answers = []
    for program in (
        [python, "-c", textwrap.dedent(_LOAD), model],
        [sys.executable, "-c", textwrap.dedent(_ACT), str(home / "lake")],
    ):
        environment = {**os.environ, "MLFLOW_TRACKING_URI": uri}
        ran = subprocess.run(
            [*program, rows], capture_output=True, text=True, cwd=home, env=environment
        )
        if ran.returncode:
            sys.exit(ran.stderr)
        answers.append(json.loads(ran.stdout.splitlines()[-1]))
    assert answers[0] == answers[1], answers


def _check_registry(python: str, uri: str, home: Path, trained: str) -> None:
    def read() -> dict[str, dict[str, str]]:
        ran = subprocess.run(
            [python, "-c", textwrap.dedent(_REGISTRY)],
            capture_output=True,
            text=True,
            env={**os.environ, "MLFLOW_TRACKING_URI": uri},
        )
        if ran.returncode:
            sys.exit(ran.stderr)
        found: dict[str, dict[str, str]] = json.loads(ran.stdout)
        return found

    for _ in range(2):  # the same command again changes nothing
        ran = _run(uri, home, *_PROMOTE)
        assert ran.returncode == 0, ran
        assert "clone@champion is clone:1 already" in ran.stdout, ran
        assert read() == {
            "aliases": {"champion": "1"},
            "runs": {"1": trained},
            "policies": {"1": "1"},
            "status": ["READY"],
        }
    _compare_actions(python, "models:/cart poles@champion", uri, home)
    options = ("--algorithm", "bc", "--policy", "clone", "--updates", "10", "--seed", "2")
    for words in (
        ("train", "offline", "cartpole", *options),
        ("promote", "clone:2", *_PROMOTE[2:]),
        ("promote", "clone:2", "--to", "stable", *_PROMOTE[4:]),
        ("rollback", "clone", *_PROMOTE[4:]),
    ):
        ran = _run(uri, home, *words)
        assert ran.returncode == 0, ran
    found = read()
    assert found["aliases"] == {"champion": "1", "stable": "2"}, found
    assert found["policies"] == {"1": "1", "2": "2"}, found
    print("MLflow: its registry has the aliases of the lake, and loads the policy by one")


if __name__ == "__main__":
    main(sys.argv[1])
