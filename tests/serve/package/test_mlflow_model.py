"""A policy as an MLflow model; tests/compat/log_to_mlflow.py loads one by MLflow itself."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import (
    AlreadyExistsError,
    ConfigInvalidError,
    EpisodeInvalidError,
    NotFoundError,
)
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import load_policy
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.lake.policies.pyfunc import PARAMETERS, load_pyfunc
from replaylake.serve.package.mlflow_model import package_mlflow_model

_ROOT = Path(__file__).parents[3]
OBSERVATIONS = [[0.0, 0.5, -0.25, 1.0], [0.5, 0.0, 1.0, -1.0]]


@pytest.fixture
def ref(package, tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    return lake.registry.register("clone", package, run_id="r", lineage={})


def test_a_model_is_a_folder_with_all_that_loads_it(ref, tmp_path):
    receipt = package_mlflow_model(ref, tmp_path / "model")
    body = json.loads((tmp_path / "model" / "MLmodel").read_text())
    flavor = body["flavors"]["python_function"]
    assert (flavor["loader_module"], flavor["code"]) == ("replaylake_pyfunc", "code")
    assert body["metadata"]["replaylake"]["policy"] == "clone"
    assert body["metadata"]["replaylake"]["version"] == 1
    names = [one["name"] for one in json.loads(body["signature"]["params"])]
    assert names == list(PARAMETERS)
    assert receipt.package_sha256 == ref.manifest_sha256
    pins = (tmp_path / "model" / "requirements.txt").read_text().splitlines()
    assert f"numpy=={np.__version__}" in pins
    files = [path for path in (tmp_path / "model").rglob("*") if path.is_file()]
    assert receipt.num_bytes == sum(path.stat().st_size for path in files)


def test_the_loader_finds_the_code_in_the_wheel_beside_it(ref, tmp_path):
    package_mlflow_model(ref, tmp_path / "model")
    code = f"""
        import sys
        # As where ReplayLake is not installed: its finder and its paths are gone.
        sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in repr(one).lower()]
        sys.path[:] = [one for one in sys.path if not one.startswith({str(_ROOT)!r} + "/src")]
        sys.path.insert(0, {str(tmp_path / "model" / "code")!r})
        import replaylake_pyfunc
        import replaylake
        model = replaylake_pyfunc._load_pyfunc({str(tmp_path / "model" / "data")!r})
        print(replaylake.__file__, model.predict({OBSERVATIONS})["action"].tolist())
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    where, _, actions = ran.stdout.strip().partition(" ")
    assert ".whl/replaylake/" in where
    assert json.loads(actions) == act(ref)["action"].tolist()


def act(ref):
    policy = load_policy(ref.path)
    found = policy.act(np.array(OBSERVATIONS, np.float32))
    return {"action": found.actions, "log_prob": found.log_probs}


@pytest.mark.parametrize(
    "make",
    [
        list,
        np.array,
        lambda rows: np.array(rows, np.float32),
        pd.DataFrame,
        lambda rows: np.array(rows, object),
    ],
)
def test_observations_come_in_any_form(ref, make):
    found = load_pyfunc(str(ref.path)).predict(make(OBSERVATIONS))
    assert found["action"].tolist() == act(ref)["action"].tolist()
    assert found["log_prob"].tolist() == [0.0, 0.0]


def test_parameters_explore(ref):
    model = load_pyfunc(str(ref.path))
    many = [OBSERVATIONS[0]] * 400
    drawn = {"deterministic": False, "temperature": 1.0, "seed": 3}
    first, again = (model.predict(many, drawn) for _ in range(2))
    assert first["action"].tolist() == again["action"].tolist()
    assert len(set(first["action"].tolist())) == 2
    share = np.exp(first["log_prob"][first["action"] == 1][0])
    assert np.mean(first["action"]) == pytest.approx(share, abs=0.1)
    assert len(set(model.predict(many, {"epsilon": 0.9})["action"].tolist())) == 2
    with pytest.raises(ConfigInvalidError, match="params: found 'heat'"):
        model.predict(many, {"heat": 1})


@pytest.mark.parametrize("observations", [[[1.0]], [[float("nan")] * 4], "text"])
def test_observations_of_another_form_are_refused(ref, observations):
    with pytest.raises((EpisodeInvalidError, ValueError)):
        load_pyfunc(str(ref.path)).predict(observations)


def test_what_cannot_be_written_leaves_nothing(ref, kit, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(AlreadyExistsError):
        package_mlflow_model(ref, tmp_path / "there")
    with pytest.raises(NotFoundError):
        package_mlflow_model(ref, tmp_path / "absent" / "model")
    spec = PolicySpec(Box((2,)), Discrete(2), "categorical", state_size=3)
    stateful = kit.save_policy(tmp_path / "stateful", spec, kit.stateful_graph(2, 3))
    lake = open_lake(tmp_path / "lake")
    remembering = lake.registry.register("memory", stateful, run_id="r", lineage={})
    with pytest.raises(ConfigInvalidError, match="found one with a state"):
        package_mlflow_model(remembering, tmp_path / "model")
    assert not list(tmp_path.glob("*model*"))
