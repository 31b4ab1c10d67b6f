"""docs/SQL.md: every query in it runs on a small lake, and gives the rows that stand below it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaylake.cli.output.command_output import table_lines
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.interchange.formats.checks import Finding, RowLocations
from replaylake.datastore.interchange.formats.format import RejectedEpisode
from replaylake.datastore.interchange.ingest.quarantine import quarantine
from replaylake.datastore.lake.commit import DropCounts
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.policies.manifest import GRAPH, MANIFEST, manifest_bytes
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.lake.runs.metrics import MetricsLog

_TEXT = (Path(__file__).parents[1] / "docs" / "SQL.md").read_text()
_HOUR_US = 3_600_000_000
_BLOCK = re.compile(r"```sql\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
# The paragraph before a query, the query, and the rows.
_BLOCKS = [
    (_TEXT[: match.start()].rstrip().rsplit("\n\n", 1)[-1], match[1], match[2] or "")
    for match in _BLOCK.finditer(_TEXT)
]


def _episode(name: str, rewards: list[float], version: int, hour: int, **fields: Any) -> Episode:
    steps = np.arange(len(rewards))
    given = {
        "observations": np.stack([steps / 10, steps, -steps, 0 * steps], axis=1).astype(np.float32),
        "actions": steps % 2,
        "rewards": np.array(rewards),
        "behavior_log_probs": np.log(np.where(steps % 2, 0.25, 0.75)),
        "policies": ["ppo"] * len(rewards),
        "policy_versions": [version] * len(rewards),
        "timestamps": hour * _HOUR_US + steps * 60_000_000,
        "final_observation": np.zeros(4, np.float32),
        "terminated": True,
    }
    return Episode(f"rollout/{name}", **(given | fields))


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    folder = tmp_path_factory.mktemp("cookbook")
    lake = open_lake(folder / "lake", create=True)
    cartpole = lake.dataset("cartpole")
    cartpole.append(
        [
            _episode("a1", [1, 1, 1, 1], 1, 0),
            _episode("a2", [1, 1], 1, 1),
            _episode("a3", [1, 1, 1], 2, 1, terminated=False, truncated=True),
        ],
        producer="rollout/a",
        sequence=0,
        drops=DropCounts(num_rejected=1, num_rejected_steps=2),
    )
    lake.tags.set("cartpole", "paper", 1)
    quarantine(cartpole, _refused(), producer="ingest/1f", sequence=0)
    cartpole.append(
        [_episode("b1", [1, 1, 1, 1, 1], 2, 2), _episode("b2", [1], 2, 2)],
        producer="rollout/b",
        sequence=0,
        drops=DropCounts(num_already_present=2, num_already_present_steps=7),
    )
    lake.dataset("duel").append(
        [
            _episode(name, rewards, 1, 3, agent_id=agent, terminated=ended, truncated=not ended)
            for name, agent, rewards, ended in [
                ("g1", "left", [0.0, 1.0], True),
                ("g1", "right", [0.0, -1.0], True),
                ("g2", "left", [0.0, 0.0, -2.0], False),
                ("g2", "right", [0.0, 0.0, 2.0], True),
            ]
        ],
        producer="league",
        sequence=0,
    )
    _register(lake, folder)
    return lake


def _refused() -> list[RejectedEpisode]:
    def places(first: int, num: int) -> RowLocations:
        rows = np.arange(first, first + num)
        return RowLocations(rows, lambda found: (["log.csv"] * len(found), found.tolist()))

    payoffs = pa.table({"user": ["u7", "u7"], "payoff": [1.0, float("nan")]})
    finding = Finding("not_finite", "log.csv row 5, column 'payoff': found NaN or infinity")
    faults = (Finding("gap", "log.csv row 12"), Finding("shape", "log.csv row 12"))
    return [
        RejectedEpisode("u7", 2, (finding,), rows=payoffs, places=places(4, 2)),
        RejectedEpisode("u9", 1, faults, rows=payoffs.slice(0, 1), places=places(12, 1)),
    ]


def _register(lake: Lake, folder: Path) -> None:
    package = folder / "package"
    package.mkdir()
    files = {GRAPH: b"graph"}
    spec = PolicySpec(Box((4,)), Discrete(2), "categorical")
    for name, data in {**files, MANIFEST: manifest_bytes(spec, {}, files)}.items():
        (package / name).write_bytes(data)
    lineage = {"algorithm": "bc", "datasets": [{"dataset": "cartpole", "version": 1}]}
    lake.registry.register("clone", package, run_id="r1", lineage=lineage)
    _record_runs(lake)


def _record_runs(lake: Lake) -> None:
    for run_id, algorithm, status, version in [
        ("r1", "bc", "done", 1),
        ("r2", "cql", "running", 2),
    ]:
        datasets = [{"dataset": "cartpole", "version": version}]
        record = {"algorithm": algorithm, "status": status, "datasets": datasets}
        lake.registry.record_run(run_id, record)
    with MetricsLog(lake.storage, "r1") as log:
        log.add(100, {"policy_loss": 0.5, "evaluation/return": 150.0}, 0.0)
        log.add(200, {"policy_loss": 0.3, "evaluation/return": 187.0}, 1.0)
    with MetricsLog(lake.storage, "r2") as log:
        log.add(100, {"policy_loss": 1.1}, 0.0)


@pytest.fixture
def labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "labels.csv").write_text("episode_id,judged\nrollout/a1,good\nrollout/b2,bad\n")
    table = {"episode_id": ["rollout/a1", "rollout/a2", "rollout/b1"], "quality": [1, 2, 1]}
    pq.write_table(pa.table(table), tmp_path / "labels.parquet")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("question", "query", "answer"), _BLOCKS, ids=[block[0] for block in _BLOCKS]
)
@pytest.mark.usefixtures("labels")
def test_the_answers_of_the_cookbook(lake: Lake, question: str, query: str, answer: str) -> None:
    at = dict(pair.split("=") for pair in re.findall(r"`--at (\S+)`:", question))
    rows = lake.sql(query, at=at)
    values = rows.to_pylist(maps_as_pydicts="lossy")
    assert "\n".join(table_lines(values, rows.column_names)) == answer.strip("\n")


def test_every_query_of_the_page_is_found() -> None:
    assert len(_BLOCKS) == _TEXT.count("```sql") > 10
