"""`serve --check`: what would go wrong is said, nothing is left behind."""

import socket

import numpy as np
import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.lake import open_lake
from replaylake.serve.config import ServeConfig
from replaylake.serve.processes.check import check_server
from replaylake.serve.safety.limits import Safety


@pytest.fixture
def lake(package, tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    for _ in range(2):
        lake.registry.register("clone", package, run_id="01", lineage={})
    return lake


def config(lake, **fields):
    ref = lake.registry.resolve("clone:1")
    known = {"package": ref.path, "policy": "clone", "version": 1, "lake": lake.path, "port": 0}
    return ServeConfig(**{**known, "reference": "clone@champion", **fields})


def found(checks):
    return {one.what: (one.is_ok, one.found) for one in checks}


def files(lake):
    return sorted(str(path) for path in lake.path.rglob("*"))


def test_all_is_well_and_nothing_is_written(lake):
    lake.registry.set_alias("clone", "champion", 2)
    lake.dataset("kept").create(Box((4,)), Discrete(2))
    before = files(lake)
    for log_to in ("live", "kept"):
        asked = config(lake, log_to=log_to, explore="epsilon=0.1", canary=("clone:2=0.25",))
        checks = found(check_server(asked))
        assert [is_ok for is_ok, _ in checks.values()] == [True] * len(checks)
    assert files(lake) == before
    assert checks["versions"][1] == "clone@champion is followed, and is version 2"
    assert checks["canary clone:2=0.25"][1].startswith("clone:2, 25% of the episodes")
    assert "not measured" in checks["drift"][1]
    assert "one observation" in checks["speed"][1]


@pytest.mark.slow
def test_each_failure_is_a_line_of_its_own(kit, lake, tmp_path, monkeypatch):
    lake.dataset("other").create(Box((7,)), Discrete(2))
    spec = kit.PolicySpec(Box((4,)), Box((1,), low=-1, high=1), "deterministic")
    graph = kit.linear_graph(np.ones((4, 1), np.float32), "actions", 4)
    continuous = kit.save_policy(tmp_path / "c", spec, graph)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cases = {
            "log": ({"log_to": "other"}, "Box float32[7]"),
            "exploration": ({"package": continuous, "explore": "epsilon=0.1"}, "found epsilon"),
            "port": ({"port": port}, "in use"),
            "canary clone:9=0.1": ({"canary": ("clone:9=0.1",)}, "version 9 is not there"),
            "canary clone:2=0.1": (
                {"package": continuous, "canary": ("clone:2=0.1",)}, "action space",
            ),
            "package": ({"package": tmp_path / "none"}, "found no manifest.json"),
            "tokens": ({"safety": Safety(act_token_file=tmp_path / "no")}, "act_token_file: "),
        }  # fmt: skip
        for what, (fields, text) in cases.items():
            checks = found(check_server(config(lake, **fields)))
            is_ok, said = checks[what]
            assert not is_ok, what
            assert text in said


def test_a_policy_that_answers_nan_is_found(kit, lake, tmp_path):
    graph = kit.linear_graph(np.full((4, 2), np.nan, np.float32), "logits", 4)
    nan = kit.save_policy(tmp_path / "nan", kit.CARTPOLE, graph)
    is_ok, said = found(check_server(config(lake, package=nan)))["policy"]
    assert (is_ok, "cannot act on samples" in said) == (False, True)
