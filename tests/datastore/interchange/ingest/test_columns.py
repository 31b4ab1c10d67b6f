"""Many episodes at once: what is committed and refused does not depend on how they are cut."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.formats.generic import jsonl
from replaylake.datastore.interchange.formats.tabular.reader import TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import CachedTables
from replaylake.datastore.interchange.ingest import inspection
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import open_lake

DECISIONS = ReadOptions(
    {
        "observation": "age,spend",
        "action": "shown",
        "reward": "paid",
        "behavior_prob": "chance",
        "episode_id": "event",
    }
)
_MEMORY = """
import resource, sys
from pathlib import Path
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import open_lake
lake = open_lake(Path(sys.argv[2]), create=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read = ReadOptions(eval(sys.argv[3]))
receipt = ingest(lake, [sys.argv[1]], "log", format="bandit", options=read)
assert receipt.episodes.committed == int(sys.argv[4]), receipt.episodes
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def write_decisions(path: Path, num: int, *, is_clean: bool = False) -> Path:
    rng = np.random.default_rng(0)
    with path.open("w") as stream:
        for i in range(num):
            row: dict[str, Any] = {
                "event": f"e{i:06d}",
                "age": int(rng.integers(90)),
                "spend": round(rng.random(), 3),
                "shown": int(rng.integers(5)),
                "paid": float(rng.integers(2)),
                "chance": round(rng.random() * 0.9 + 0.05, 3),
                "note": f"n{i % 7}",
            }
            if not is_clean and i % 23 == 0:
                wrong = [("age", None), ("shown", -1), ("chance", 2.0), ("event", "e000001")]
                row |= [wrong[i // 23 % len(wrong)]]
            stream.write(json.dumps(row) + "\n")
    return path


def in_small_parts(monkeypatch: pytest.MonkeyPatch, keep_bytes: int) -> None:
    monkeypatch.setattr(CachedTables.__init__, "__defaults__", (20_000, None))
    monkeypatch.setattr(TabularReader.__init__, "__kwdefaults__", {"block_bytes": 9_000})
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 5_000)
    monkeypatch.setattr(inspection, "_CHECK_STEPS", 70)
    monkeypatch.setattr(inspection, "_KEEP_BYTES", keep_bytes)


def found(dataset: Dataset, receipt: Any) -> dict[str, Any]:
    told = receipt.to_json()
    of_files = ("bytes", "shards", "version", "rejected_episodes")
    return {
        "rows": dataset.snapshot().sql("SELECT * FROM steps").to_pylist(),
        "told": {name: value for name, value in told.items() if name not in of_files},
        "refused": sorted((one["episode"], *one["reasons"]) for one in told["rejected_episodes"]),
    }


@pytest.mark.parametrize("keep_bytes", [0, 1 << 30], ids=["read twice", "kept"])
def test_decisions_are_the_same_however_they_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_bytes: int
) -> None:
    path = write_decisions(tmp_path / "decisions.jsonl", 900)
    lake = open_lake(tmp_path / "lake", create=True)
    receipt = ingest(lake, [path], "whole", format="bandit", options=DECISIONS)
    whole = found(lake.dataset("whole"), receipt)
    assert (receipt.steps.rejected, receipt.steps.committed) == (41, 859)
    in_small_parts(monkeypatch, keep_bytes)
    receipt = ingest(lake, [path], "parts", format="bandit", options=DECISIONS, commit_steps=100)
    parts = found(lake.dataset("parts"), receipt)
    whole["told"]["dataset"] = "parts"
    assert parts == whole
    versions = [commit["num_steps"] for commit in lake.dataset("parts").history()[1:]]
    assert versions == [100] * 8 + [59]


def test_an_ingest_cut_short_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_decisions(tmp_path / "decisions.jsonl", 500, is_clean=True)
    lake = open_lake(tmp_path / "lake", create=True)
    append, num = Dataset.append, 0

    def fail_after_two(self: Dataset, *args: Any, **named: Any) -> Any:
        nonlocal num
        num += 1
        if num > 2:
            raise KeyboardInterrupt
        return append(self, *args, **named)

    read = {"format": "bandit", "options": DECISIONS, "commit_steps": 100}
    monkeypatch.setattr(Dataset, "append", fail_after_two)
    with pytest.raises(KeyboardInterrupt):
        ingest(lake, [path], "log", **read)  # type: ignore[arg-type]
    monkeypatch.setattr(Dataset, "append", append)
    receipt = ingest(lake, [path], "log", **read)  # type: ignore[arg-type]
    assert (receipt.steps.committed, receipt.steps.already_present) == (300, 200)
    ids = lake.dataset("log").snapshot().sql("SELECT source_episode_id AS id FROM steps")
    assert ids.column("id").to_pylist() == [f"e{i:06d}" for i in range(500)]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_episodes(tmp_path: Path) -> None:
    peaks = []
    for num in (150_000, 600_000):
        path = write_decisions(tmp_path / f"{num}.jsonl", num, is_clean=True)
        command = [sys.executable, "-c", _MEMORY, str(path), str(tmp_path / f"lake{num}")]
        command += [repr(dict(DECISIONS.mapping)), str(num)]
        peaks.append(int(subprocess.run(command, check=True, capture_output=True).stdout) >> 10)
    # 7.5 kB an episode were 3.4 GB more; what is kept of a commit of 1M steps grows up to that.
    assert peaks[1] < 640, peaks
