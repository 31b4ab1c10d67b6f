"""A Bento holds the model, the wheel, the lock and a Dockerfile, and two builds are the same."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import (
    AlreadyExistsError,
    NotFoundError,
    PackageInvalidError,
)
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import load_policy
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.serve.config import ServeConfig
from replaylake.serve.loading import load_serving
from replaylake.serve.package.bento import package_bento
from replaylake.serve.package.dockerfile import VARIABLES
from replaylake.serve.package.lock import NOT_SERVED, lock


@pytest.fixture
def ref(package, tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    return lake.registry.register("by_hand", package, run_id="run", lineage={})


@pytest.fixture(scope="module")
def built(package, tmp_path_factory):
    """A receipt, its folder, and a second build of the same with other variables set."""
    folder = tmp_path_factory.mktemp("bento")
    lake = open_lake(folder / "lake", create=True)
    ref = lake.registry.register("by_hand", package, run_id="run", lineage={})
    first = package_bento(ref, folder / "first")
    with pytest.MonkeyPatch.context() as patch:
        # Set for a server of the caller's own, and none of the Bento's business.
        patch.setenv("REPLAYLAKE_SERVE_WORKERS", "7")
        patch.setenv("REPLAYLAKE_SERVE_HOST", "0.0.0.0")
        patch.setenv("BENTOML_API_WORKERS", "7")
        patch.setenv("PYTHONHASHSEED", "3")
        package_bento(ref, folder / "second")
    return first, folder / "first", folder / "second"


def contents(folder):
    """Return each file's bytes and mode, but for the time of the build."""
    found = {}
    for path in sorted(folder.rglob("*")):
        data = b"" if path.is_dir() else path.read_bytes()
        if path.name == "bento.yaml":
            data, number = re.subn(rb"(?m)^creation_time: .*\n", b"", data)
            assert number == 1
        found[path.relative_to(folder).as_posix()] = (path.stat().st_mode & 0o777, data)
    return found


@pytest.mark.slow
def test_two_builds_are_the_same(built):
    _, first, second = built
    assert contents(first) == contents(second)


def test_it_is_all_there_and_small(built):
    receipt, folder, _ = built
    assert (receipt.tag, receipt.policy, receipt.version) == ("by_hand:1", "by_hand", 1)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert receipt.num_bytes == sum(path.stat().st_size for path in files) < 3_000_000
    assert 200_000_000 < receipt.installed_bytes < 600_000_000
    assert [path.name for path in (folder / "env/python/wheels").iterdir()] == [receipt.wheel]
    assert load_policy(folder / "src" / "policy").manifest.sha256 == receipt.package_sha256
    # The container's user is not who built it.
    for path in (folder, *folder.rglob("*")):
        mode = path.stat().st_mode & 0o777
        assert mode == (0o755 if path.is_dir() or path.name == "entrypoint.sh" else 0o644), path
    assert json.loads(json.dumps(receipt.to_json()))["requirements"][0]["name"]


def test_its_requirements_are_the_lock_and_the_wheel(built):
    receipt, folder, _ = built
    expected = {f"./wheels/{receipt.wheel}", *map(str, lock(["serve", "remote"]))}
    for name in ("requirements.txt", "requirements.lock.txt"):
        lines = (folder / "env" / "python" / name).read_text().splitlines()
        required = [line for line in lines if line and not line.startswith("#")]
        assert len(required) == len(set(required))
        assert set(required) == expected
    assert set(map(str, receipt.requirements)) == expected - {f"./wheels/{receipt.wheel}"}
    assert not {pin.name for pin in receipt.requirements} & set(NOT_SERVED)
    # BentoML's own tools go by these.
    described = (folder / "bento.yaml").read_text()
    assert f"./wheels/{receipt.wheel}" in described
    assert re.search(r"(?m)^\s*bentoml==", described)


def test_what_the_dockerfile_copies_is_there(built):
    receipt, folder, _ = built
    text = (folder / "env" / "docker" / "Dockerfile").read_text()
    assert receipt.dockerfile == str(folder / "env" / "docker" / "Dockerfile")
    sources = [
        source for copy in re.findall(r"(?m)^COPY (.*)$", text) for source in copy.split()[:-1]
    ]
    assert sources == ["env/python", "bento.yaml", "README.md", "apis", "src"]
    for source in sources:
        assert (folder / source).exists(), source
    assert "by_hand:1" in text
    for name in VARIABLES:
        assert name in text
        assert name in (folder / "README.md").read_text()


def test_it_listens_on_loopback_unless_told(built):
    described = built[1].joinpath("bento.yaml").read_text()
    assert re.search(r"host: 127\.0\.0\.1\n\s+port: 3000\n", described)
    assert "workers: 1\n" in described


@pytest.mark.slow
def test_its_service_knows_the_hash_of_its_package(built, tmp_path):
    receipt, first, _ = built
    folder = shutil.copytree(first, tmp_path / "bento")
    code = (
        "from replaylake_bento import *; from replaylake.serve.processes.worker import load; load()"
    )
    command = [sys.executable, "-c", code]
    mine = {k: v for k, v in os.environ.items() if not k.startswith("REPLAYLAKE_SERVE_")}

    def start(**variables):
        environment = {**mine, **variables, "BENTOML_HOME": str(tmp_path / "home")}
        return subprocess.run(
            command, cwd=folder / "src", env=environment, capture_output=True, text=True, timeout=60
        )

    assert start().returncode == 0
    refused = start(REPLAYLAKE_SERVE_MANIFEST_SHA256="00" * 32).stderr
    assert f"found sha256 {receipt.package_sha256[:16]}, expected {'00' * 8}" in refused
    manifest = folder / "src" / "policy" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"by_hand"', b'"by-hand"'))
    assert f"expected {receipt.package_sha256[:16]}" in start().stderr


def test_what_cannot_be_packaged_is_refused(ref, tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(AlreadyExistsError, match="taken"):
        package_bento(ref, tmp_path / "taken")
    with pytest.raises(NotFoundError, match="nowhere"):
        package_bento(ref, tmp_path / "nowhere" / "bento")
    (ref.path / "policy.onnx").write_bytes(b"altered")
    with pytest.raises(PackageInvalidError, match="sha256"):
        package_bento(ref, tmp_path / "bento")
    assert not (tmp_path / "bento").exists()


@pytest.mark.slow
def test_a_policy_that_remembers_is_packaged_too(tmp_path, kit):
    spec = PolicySpec(Box((4,)), Discrete(2), "categorical", state_size=3)
    package = kit.save_policy(tmp_path / "package", spec, kit.stateful_graph(4, 3))
    lake = open_lake(tmp_path / "lake", create=True)
    ref = lake.registry.register("recurrent", package, run_id="run", lineage={})
    receipt = package_bento(ref, tmp_path / "bento")
    assert receipt.tag == "recurrent:1"
    config = ServeConfig(
        package=tmp_path / "bento" / "src" / "policy", policy="recurrent", version=1
    )
    assert load_serving(config).router.one.policy.spec.state_size == 3
