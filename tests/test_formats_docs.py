"""The commands of docs/FORMATS.md run as they are written, on files such as they name."""

import bz2
import json
import re
import shlex
import sys
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaylake.cli.main import main

_ROOT = Path(__file__).parents[1]
_TEXT = (_ROOT / "docs" / "FORMATS.md").read_text(encoding="utf-8")
_BLOCKS = re.findall(r"(?m)(?:^    .*\n)+", _TEXT)
# It goes on until it is told to end: tests/cli/commands/test_ingest_stream.py does so.
_ENDLESS = "replaylake ingest app.jsonl --dataset app --follow"


def _lines(block: str) -> list[str]:
    """Return a block's lines, those that end in a backslash joined with the next."""
    return [line[4:] for line in block.replace("\\\n        ", "").splitlines()]


def _commands() -> list[str]:
    lines = [line for block in _BLOCKS for line in _lines(block)]
    return [line for line in lines if line.startswith(("replaylake ", "tail "))]


def _sample(first: str) -> str:
    """Return the lines of the documented file that begins with `first`."""
    (block,) = [block for block in _BLOCKS if block.startswith(f"    {first}")]
    return "\n".join(_lines(block)) + "\n"


@pytest.fixture
def work(tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with every file that the commands name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REPLAYLAKE_LAKE", str(tmp_path / "lake"))
    (tmp_path / "decisions.csv").write_text(_sample("user,age,"))
    (tmp_path / "clicks.csv").write_text(_sample("user,session,"))
    (tmp_path / "visits.jsonl").write_text(_sample('{"user": "u1"'))
    links = {
        "pendulum-v1_enormous": shared_data / "rllib_pendulum" / "pendulum-v1_enormous",
        "cartpole-hdf5-v0": shared_data / "minari" / "lab" / "cartpole-hdf5-v0",
        "cartpole_0_final.npz": shared_data / "imitation" / "cartpole_0_final.npz",
        "dqn_workflow.zip": shared_data / "reagent" / "dqn_workflow.zip",
        "obd": shared_data / "obd",
        "examples": _ROOT / "examples",
        "lerobot/pusht": _ROOT / "tests" / "fixtures" / "lerobot" / "v3_0" / "arm",
        "open_x/bridge/0.1.0": _ROOT / "tests" / "fixtures" / "rlds" / "arm",
    }
    for name, target in links.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(target)
    plain = (shared_data / "reagent" / "cartpole_training_data.json").read_bytes()
    (tmp_path / "cartpole_training_data.json.bz2").write_bytes(bz2.compress(plain))
    pq.write_table(
        pa.table(
            {
                "age": [31, 25, 40],
                "segment": ["a", "b", "a"],
                "hour": [1, 2, 3],
                "banner": ["x", "y", "x"],
                "paid": [0.0, 1.0, 0.0],
                "chance": [0.5, 0.25, 0.5],
            }
        ),
        tmp_path / "ads.parquet",
    )
    step = {"episode_id": "a", "step": 0, "obs": [0.0] * 4, "action": 1, "reward": 1.0}
    ends = {"terminated": True, "truncated": False}
    (tmp_path / "app.jsonl").write_text(json.dumps({**step, **ends}) + "\n")
    with h5py.File(tmp_path / "hopper-medium-v2.hdf5", "w") as file:
        file["observations"] = np.zeros((4, 11), np.float32)
        file["actions"] = np.zeros((4, 3), np.float32)
        file["rewards"] = np.ones(4)
        file["terminals"] = np.array([False, True, False, True])
        file["timeouts"] = np.zeros(4, bool)
    with h5py.File(tmp_path / "buffer.h5", "w") as file:
        for key, value in {
            "observations_0": np.zeros((2, 4), np.float32),
            "actions_0": np.zeros((2, 1), np.float32),
            "rewards_0": np.zeros((2, 1), np.float32),
            "terminated_0": True,
            "columns": ["observations", "actions", "rewards", "terminated"],
            "num_episodes": 1,
            "version": "2.1",
        }.items():
            file[key] = value
    sample = {
        "content": ["What is it? It is 4."],
        "rewards": [1.0],
        "input_lengths": [4],
        "token_ids": [[11, 12, 21, 22]],
        "token_loss_mask": [[0.0, 0.0, 1.0, 1.0]],
        "sample_loss_mask": [1.0],
        "advantages": [[0.5] * 4],
        "generation_logprobs": [[0.0, 0.0, -0.1, -0.2]],
        "prev_logprobs": [[0.0, 0.0, -0.2, -0.3]],
        "idx": 0,
    }
    (tmp_path / "logs" / "exp_001").mkdir(parents=True)
    (tmp_path / "logs" / "exp_001" / "train_data_step1.jsonl").write_text(json.dumps(sample) + "\n")
    (tmp_path / "exported").mkdir()
    return tmp_path


@pytest.mark.slow
def test_every_command_runs_as_written(
    work: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    commands = _commands()
    assert len(commands) > 15
    # Exports and reports are of what other commands ingest.
    commands.sort(key=lambda line: " export " in line or " show " in line or " sql " in line)
    said = []
    for line in commands:
        if line.startswith(_ENDLESS):
            continue
        line = re.sub(r" {3,}# .*", "", line)
        with (work / "app.jsonl").open() as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            code = main(shlex.split(line.rpartition(" | ")[2])[1:])
        captured = capfd.readouterr()
        assert code == 0, (line, captured.err)
        said.append(captured.out)
    # What the text says that the Pendulum log's receipt says.
    alignment = [
        f"  {line}" for block in _BLOCKS for line in _lines(block) if "alignment: " in line
    ]
    assert len(alignment) == 3
    assert "\n".join(alignment) in "".join(said)
    assert "agrees with 2,048 of 2,048 sampled" in "".join(said)
    for name in ("good.csv", "cartpole.parquet", "first.jsonl", "shop.html", "pairs.jsonl"):
        assert (work / name).stat().st_size > 0


def test_the_mapping_file_is_one(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (work / "shop.toml").write_text(
        "".join("\n".join(_lines(b)) + "\n" for b in _BLOCKS if re.match(r" {4}(episode_by|\[)", b))
    )
    assert main(["ingest", "clicks.csv", "--dataset", "d", "--mapping", "shop.toml"]) == 0
    capfd.readouterr()
    assert main(["sql", 'select sum("return") as r, count(*) as n from d.episodes', "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["rows"] == [{"r": 1.0, "n": 2}]
