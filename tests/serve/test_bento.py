"""A Bento starts with `bentoml serve` and answers, from a folder that holds its model."""

import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest

from replaylake.datastore.errors import (
    AlreadyExists,
    NotFound,
    PackageInvalid,
    SpaceUnsupported,
)
from replaylake.datastore.lake import open_lake
from replaylake.datastore.policies.package import load_policy
from replaylake.datastore.policies.policy import PolicySpec
from replaylake.datastore.spaces import Box, Discrete
from replaylake.serve.bento import package_bento
from replaylake.serve.config import ServeConfig
from replaylake.serve.loading import check_servable, load_serving


@pytest.fixture
def ref(package, tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    return lake.registry.register("by_hand", package, run_id="run", lineage={})


@pytest.mark.slow
def test_bentoml_serve_starts_it(ref, package, tmp_path, kit):
    receipt = package_bento(ref, tmp_path / "bento")
    assert (receipt.tag, receipt.policy, receipt.version) == ("by_hand:1", "by_hand", 1)
    assert receipt.num_bytes > 0
    # It needs neither the lake nor the folder in which it was built.
    moved = (tmp_path / "bento").rename(tmp_path / "elsewhere")
    for path in sorted((tmp_path / "lake").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home = tmp_path / "home"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "bentoml",
            "serve",
            str(moved),
            "--host",
            "127.0.0.1",
            "-p",
            str(port),
        ],
        cwd=tmp_path,
        env={**os.environ, "BENTOML_HOME": str(home), "BENTOML_DO_NOT_TRACK": "True"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                if httpx.get(f"{url}/readyz").status_code == 200:
                    break
            except httpx.TransportError:
                assert process.poll() is None, process.stdout.read()
                assert time.monotonic() < deadline
                time.sleep(0.1)
        observations = np.random.default_rng(1).normal(size=(20, 4)).astype(np.float32)
        answer = httpx.post(f"{url}/act", json={"observations": observations.tolist()}).json()
        assert answer["actions"] == load_policy(package).act(observations).actions.tolist()
        assert (answer["policy"], answer["version"]) == ("by_hand", 1)
        processes = kit.process_tree(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        process.stdout.close()
    assert not any(kit.is_running(pid) for pid in processes)


def test_what_cannot_be_packaged_is_refused(ref, tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(AlreadyExists, match="taken"):
        package_bento(ref, tmp_path / "taken")
    with pytest.raises(NotFound, match="nowhere"):
        package_bento(ref, tmp_path / "nowhere" / "bento")
    (ref.path / "policy.onnx").write_bytes(b"altered")
    with pytest.raises(PackageInvalid, match="sha256"):
        package_bento(ref, tmp_path / "bento")
    assert not (tmp_path / "bento").exists()


def test_a_policy_that_remembers_is_neither_packaged_nor_served(tmp_path, kit):
    spec = PolicySpec(Box((4,)), Discrete(2), "categorical", state_size=3)
    package = kit.save_policy(tmp_path / "package", spec, kit.stateful_graph(4, 3))
    lake = open_lake(tmp_path / "lake", create=True)
    ref = lake.registry.register("recurrent", package, run_id="run", lineage={})
    config = ServeConfig(package=package, policy="recurrent", version=1)
    for serve in (check_servable, load_serving):
        with pytest.raises(SpaceUnsupported, match=r"recurrent:1: found a state of 3 numbers"):
            serve(config)
    with pytest.raises(SpaceUnsupported, match=r"recurrent:1: found a state"):
        package_bento(ref, tmp_path / "bento")
    assert not (tmp_path / "bento").exists()
