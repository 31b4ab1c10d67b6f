"""Releases and the version of today on one lake: each reads or refuses what the other wrote."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import replaylake as rl
from replaylake.datastore.lake.policies.manifest import describe_model
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.version import VERSION

_FIXTURES = Path(__file__).parent / "fixtures"
_WHEELS = sorted((_FIXTURES / "releases").glob("*.whl"))


class Release:
    """A release's own wheel, run in processes of its own beside the libraries of today."""

    def __init__(self, folder: Path) -> None:
        self._environment = {**os.environ, "PYTHONPATH": str(folder)}

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run a command line of the release."""
        code = "import sys; from replaylake.cli.main import main; sys.exit(main(sys.argv[1:]))"
        return self._start(code, *arguments)

    def evaluate(self, code: str, lake: Path) -> Any:
        """Return the value that `code` leaves in `result`, with `lake` and make_lake in scope."""
        scope = (
            "import json, sys; import numpy as np; import replaylake as rl; import make_lake; "
            "lake = rl.open(sys.argv[1]); result = None\n"
        )
        path = f"sys.path.insert(0, {str(_FIXTURES)!r})\n"
        done = self._start(f"import sys\n{path}{scope}{code}\nprint(json.dumps(result))", lake)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def _start(self, code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        return subprocess.run(
            command,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture(scope="module", params=_WHEELS, ids=lambda wheel: wheel.name.split("-")[1])
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Release:
    folder = tmp_path_factory.mktemp("release")
    with zipfile.ZipFile(request.param) as wheel:
        wheel.extractall(folder)
    release = Release(folder)
    version = request.param.name.split("-")[1]
    assert release.run("--version").stdout.splitlines()[0] == f"replaylake {version}"
    return release


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(_FIXTURES))
        yield importlib.import_module("make_lake")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, script: ModuleType) -> rl.Lake:
    """What the version of today writes."""
    lake = rl.open(tmp_path_factory.mktemp("today") / "lake", create=True)
    script.write(lake)
    return lake


def _contents(lake: rl.Lake, script: ModuleType) -> Any:
    return json.loads(json.dumps(script.expected(lake), default=str))


@pytest.mark.slow
def test_a_release_reads_what_today_writes(
    release: Release, written: rl.Lake, script: ModuleType
) -> None:
    found = release.evaluate("result = make_lake.expected(lake)", written.path)
    assert found == _contents(written, script)
    checked = release.run("fsck", "--lake", written.path)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
def test_both_write_to_one_dataset_in_turn(release: Release, tmp_path: Path) -> None:
    lake = rl.open(tmp_path / "lake", create=True)
    counts = lake.dataset("counts")
    counts.create(rl.Box((1,)), rl.Discrete(3))
    episode = (
        "rl.Episode({name!r}, observations=np.full((2, 1), {value}, np.float32), "
        "actions=np.array([{value} % 3, 1]), rewards=np.array([{value}, 0.5]), terminated=True)"
    )
    for turn in range(3):
        mine = episode.format(name=f"today-{turn}", value=2 * turn)
        theirs = episode.format(name=f"release-{turn}", value=2 * turn + 1)
        counts.append([eval(mine)], producer="today", sequence=turn)
        append = f"lake.dataset('counts').append([{theirs}], producer='r', sequence={turn})"
        release.evaluate(append, lake.path)
    # What one wrote, the other knows as written, and merges.
    again = f"result = lake.dataset('counts').append([{theirs}], producer='today', sequence=0)"
    assert release.evaluate(f"{again}.already_present", lake.path) is True
    mine = eval(episode.format(name="release-0", value=1))
    assert counts.append([mine], producer="r", sequence=0).already_present
    rewards = 'SELECT episode_id, "return" FROM counts.episodes ORDER BY "return"'
    expected = [
        {"episode_id": f"{('today', 'release')[n % 2]}-{n // 2}", "return": n + 0.5}
        for n in range(6)
    ]
    assert lake.sql(rewards).to_pylist() == expected
    merged = release.run("maintain", "compact", "counts", "--lake", lake.path)
    assert merged.returncode == 0, merged.stderr
    assert lake.sql(rewards).to_pylist() == expected
    counts.append([eval(episode.format(name="today-3", value=6))], producer="today", sequence=3)
    compact(lake, "counts", open_s=0.0)
    found = release.evaluate(f"result = lake.sql({rewards!r}).to_pylist()", lake.path)
    assert found == [*expected, {"episode_id": "today-3", "return": 6.5}]
    assert fsck(lake, all_versions=True).is_clean


@pytest.mark.slow
def test_a_release_acts_with_a_policy_of_today(release: Release, written: rl.Lake) -> None:
    observations = np.array([[1.0, 0.0], [-1.0, 0.0]], np.float32)
    expected = rl.load_policy(written.registry.resolve("bc").path).act(
        observations, deterministic=True
    )
    found = release.evaluate(
        "act = rl.load_policy(lake.registry.resolve('bc').path)"
        ".act(np.array([[1.0, 0.0], [-1.0, 0.0]], np.float32), deterministic=True)\n"
        "result = [act.actions.tolist(), act.log_probs.tolist()]",
        written.path,
    )
    assert found == [expected.actions.tolist(), expected.log_probs.tolist()]


@pytest.mark.slow
def test_a_release_reads_values_for_each_token(
    release: Release, tmp_path: Path, script: ModuleType
) -> None:
    """They came after 0.1.0, which reads them as columns like all others."""
    lake = rl.open(tmp_path / "lake", create=True)
    script._write_generations(lake)
    labels = pa.table(
        {
            "episode_id": ["task", "task"],
            "agent_id": ["solver", "solver"],
            "step": [0, 1],
            "entropy": [[0.5, 0.25], [0.125, 1.0]],
        }
    )
    key = ["episode_id", "agent_id", "step"]
    rl.annotate(lake, "agents", labels, on=key, add={"action_entropies": "entropy"})
    query = "SELECT agent_id, step, action_entropies FROM agents.steps ORDER BY ALL"
    found = release.evaluate(f"result = lake.sql({query!r}).to_pylist()", lake.path)
    assert found == lake.sql(query).to_pylist()
    assert found[0]["action_entropies"] == [0.5, 0.25]
    checked = release.run("fsck", "--lake", lake.path)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
def test_a_release_refuses_media_of_messages_and_reads_other_datasets(
    release: Release, tmp_path: Path, script: ModuleType
) -> None:
    """They came after 0.1.0, which would take the reference for the image."""
    lake = rl.open(tmp_path / "lake", create=True)
    script._write_generations(lake)
    screen = base64.b64encode(bytes(300)).decode()
    text = json.dumps([{"role": "user", "content": f"data:image/png;base64,{screen}"}])
    one = {"observations": np.array(["?"], object), "actions": np.array(["!"], object)}
    extras = {"prompt_messages": [text]}
    lake.dataset("screens").append([rl.Episode("e", **one, rewards=[0.0], extras=extras)])
    done = release.run("show", "screens", "--lake", lake.path)
    assert done.returncode == 1
    assert "found format version 2, expected at most 1. Install ReplayLake" in done.stderr
    target = tmp_path / "a.jsonl"
    done = release.run("export", "screens", target, "--to", "jsonl", "--lake", lake.path)
    assert done.returncode == 1
    assert not target.exists()
    assert release.run("show", "agents", "--lake", lake.path).returncode == 0


@pytest.mark.slow
def test_a_release_refuses_a_language_model_by_name(release: Release, tmp_path: Path) -> None:
    """They came after 0.1.0, which has no graph to act with."""
    model = tmp_path / "model"
    model.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8}
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in model.iterdir()}
    lake = rl.open(tmp_path / "lake", create=True)
    manifest = describe_model(model, files, {})
    lake.registry.register_model("agent", model, manifest, run_id="", lineage={})
    listed = release.run("policies", "list", "--json", "--lake", lake.path)
    assert json.loads(listed.stdout)["policies"][0]["policy"] == "agent"
    for command in (("policies", "show", "agent"), ("serve", "agent", "--port", "0")):
        done = release.run(*command, "--lake", lake.path)
        assert done.returncode == 1
        assert "found policy package format 3" in done.stderr
        assert f"Install ReplayLake {VERSION} or later" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("sql", "select count(*) from robots.steps"),
        ("datasets", "delete", "robots", "--where", "num_steps > 0", "--yes"),
    ],
)
def test_a_release_refuses_a_later_format_by_name(
    release: Release, tmp_path: Path, command: tuple[str, ...]
) -> None:
    folder = Path(shutil.copytree(_FIXTURES / "lake_0_1", tmp_path / "lake"))
    log = folder / "robots" / "_delta_log"
    texts = [path.read_text() for path in sorted(log.glob("*.json"))]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    metadata = next(line["metaData"] for line in reversed(lines) if "metaData" in line)
    later = {"replaylake.format_version": "2", "replaylake.written_by": "0.9.0"}
    metadata["configuration"] |= later
    version = int(max(path.stem for path in log.glob("[0-9]*.json"))) + 1
    (log / f"{version:020d}.json").write_text(json.dumps({"metaData": metadata}) + "\n")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = release.run(*command, "--lake", folder)
    assert done.returncode == 1
    assert "ReplayLake 0.9.0 or later" in done.stderr
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
