"""Mappings: what `--map` says is followed or refused by name, and no column is lost, in any format.

Each format reads a log of its own here, with one column more than it knows.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from replaylake.datastore.errors import ConfigInvalidError, ReplayLakeError, SourceInvalidError
from replaylake.datastore.interchange.formats.catalog import FORMATS
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.formats.tabular.fields import ALIASES
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.ingest.receipt import IngestReceipt
from replaylake.datastore.interchange.ingest.stream.lines import Line
from replaylake.datastore.interchange.ingest.stream.stream import follow
from replaylake.datastore.lake.lake import Lake, open_lake

_FIXTURES = Path(__file__).parents[3] / "fixtures"
# Four episodes of three steps.
_NUM = 12
_PROBE = [0.25 * i for i in range(_NUM)]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _columns() -> dict[str, list[Any]]:
    return {
        "episode_id": [f"e{i // 3}" for i in range(_NUM)],
        "step": [i % 3 for i in range(_NUM)],
        "observation": [0.5 * i for i in range(_NUM)],
        "action": [i % 2 for i in range(_NUM)],
        "reward": [1.0 * i for i in range(_NUM)],
        "terminated": [i % 3 == 2 for i in range(_NUM)],
    }


def _decisions() -> dict[str, list[Any]]:
    columns = _columns()
    return {name: columns[name] for name in ("observation", "action", "reward")}


def _rows(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def _write_csv(path: Path, columns: dict[str, list[Any]]) -> Path:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    for row in _rows(columns):
        writer.writerow(
            {n: json.dumps(v) if isinstance(v, list | bool) else v for n, v in row.items()}
        )
    path.write_text(text.getvalue())
    return path


def _write_jsonl(path: Path, columns: dict[str, list[Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in _rows(columns)))
    return path


def _write_parquet(path: Path, columns: dict[str, list[Any]]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def _write_arrow(path: Path, columns: dict[str, list[Any]]) -> Path:
    feather.write_feather(pa.table(columns), path)
    return path


def _csv_log(path: Path) -> Path:
    return _write_csv(path / "log.csv", {**_columns(), "probe": _PROBE})


def _jsonl_log(path: Path) -> Path:
    return _write_jsonl(path / "log.jsonl", {**_columns(), "probe": _PROBE})


def _parquet_log(path: Path) -> Path:
    return _write_parquet(path / "log.parquet", {**_columns(), "probe": _PROBE})


def _arrow_log(path: Path) -> Path:
    return _write_arrow(path / "log.arrow", {**_columns(), "probe": _PROBE})


def _bandit_log(path: Path) -> Path:
    return _write_csv(path / "log.csv", {**_decisions(), "probe": _PROBE})


def _rllib_log(path: Path) -> Path:
    renamed = {"episode_id": "eps_id", "step": "t", "observation": "obs", "action": "actions"}
    columns = {renamed.get(name, name): cells for name, cells in _columns().items()}
    return _write_parquet(path / "log.parquet", {**columns, "probe": _PROBE})


def _rllib_batches(path: Path) -> Path:
    columns = _columns()
    batch = {
        "type": "SampleBatch",
        "eps_id": [i // 3 for i in range(_NUM)],
        "obs": [[x] for x in columns["observation"]],
        "actions": columns["action"],
        "rewards": columns["reward"],
        "dones": columns["terminated"],
        "probe": _PROBE,
    }
    (path / "log.json").write_text(json.dumps(batch) + "\n")
    return path / "log.json"


def _rllib_episodes(path: Path) -> Path:
    return _FIXTURES / "rllib_episodes" / "episodes.parquet"


def _minari_log(path: Path) -> Path:
    with h5py.File(path / "main_data.hdf5", "w") as file:
        for number in range(4):
            group = file.create_group(f"episode_{number}")
            group["observations"] = np.arange(4.0).reshape(4, 1)
            group["actions"] = np.array([0, 1, 0])
            group["rewards"] = np.ones(3)
            group["terminations"] = np.array([False, False, True])
            group["truncations"] = np.zeros(3, bool)
            group["probe"] = np.array(_PROBE[3 * number : 3 * number + 3])
    return path / "main_data.hdf5"


def _d4rl_log(path: Path) -> Path:
    columns = _columns()
    with h5py.File(path / "log.hdf5", "w") as file:
        file["observations"] = np.array(columns["observation"])[:, None]
        file["actions"] = np.array(columns["action"])
        file["rewards"] = np.array(columns["reward"])
        file["terminals"] = np.array(columns["terminated"])
        file["timeouts"] = np.zeros(_NUM, bool)
        file["probe"] = np.array(_PROBE)
    return path / "log.hdf5"


def _d3rlpy_log(path: Path) -> Path:
    with h5py.File(path / "log.h5", "w") as file:
        for number in range(4):
            file[f"observations_{number}"] = np.arange(3.0)[:, None]
            file[f"actions_{number}"] = np.array([[0], [1], [0]])
            file[f"rewards_{number}"] = np.ones((3, 1))
            file[f"terminated_{number}"] = True
            file[f"infos_{number}/probe"] = np.array(_PROBE[3 * number : 3 * number + 3])
        file["columns"] = ["observations", "actions", "rewards", "terminated"]
        file["num_episodes"] = 4
        file["version"] = "2.1"
        file["notes"] = "by hand"
    return path / "log.h5"


def _lerobot_log(path: Path) -> Path:
    folder = path / "arm"
    shutil.copytree(_FIXTURES / "lerobot" / "v3_0" / "arm", folder)
    for file in (folder / "data").rglob("*.parquet"):
        table = pq.read_table(file)
        probe = pa.array([0.25 * i for i in range(table.num_rows)])
        pq.write_table(table.append_column("probe", probe), file)
    return folder


def _rlds_log(path: Path) -> Path:
    return _FIXTURES / "rlds" / "arm"


def _npz_log(path: Path) -> Path:
    columns = {name: np.array(cells) for name, cells in _columns().items()}
    np.savez(path / "log.npz", **{**columns, "probe": np.array(_PROBE)})
    return path / "log.npz"


def _reagent_log(path: Path) -> Path:
    rows = [
        {
            "mdp_id": f"e{i // 3}",
            "sequence_number": i % 3 + 1,
            "state_features": {"0": 0.5 * i},
            "next_state_features": {"0": 0.5 * (i + 1)} if i % 3 < 2 else {},
            "action": str(i % 2),
            "possible_actions": ["0", "1"],
            "reward": 1.0,
            "probe": _PROBE[i],
        }
        for i in range(_NUM)
    ]
    (path / "log.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path / "log.json"


def _areal_log(path: Path) -> Path:
    record = {"task_id": 1, "seqlen": 2, "tail_version": 3, "reward": 1.0}
    texts = {"prompt": "1+1?", "completion": "2"}
    records = [
        {**record, **texts, "sample_idx": i, "probe": value} for i, value in enumerate(_PROBE)
    ]
    (path / "1.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return path / "1.jsonl"


def _dsjson_log(path: Path) -> Path:
    context = {"_multi": [{"f": 1}, {"f": 2}]}
    event = {"_label_cost": 0.5, "_label_Action": 1, "_labelIndex": 0, "a": [1, 2], "c": context}
    events = [{**event, "probe": value} for value in _PROBE]
    (path / "log.dsjson").write_text("".join(json.dumps(one) + "\n" for one in events))
    return path / "log.dsjson"


def _easyr1_log(path: Path) -> Path:
    block = "[prompt] 1+1?\n[output] 2\n[ground_truth] 2\n[score] {}\n\n"
    (path / "generations.log").write_text("".join(map(block.format, _PROBE)))
    return path / "generations.log"


def _skyrl_log(path: Path) -> Path:
    record = {"input_prompt": "1+1?", "output_response": "2", "score": 1.0}
    kinds = {"env_class": "math", "data_source": "sums"}
    records = [{**record, **kinds, "probe": value} for value in _PROBE]
    (path / "sums.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return path / "sums.jsonl"


def _art_log(path: Path) -> Path:
    said = {"role": "assistant", "content": "a", "tool_calls": None, "trainable": True}
    rows = [{"group_index": i, "reward": 1.0, "messages": [said] * 3} for i in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), path / "log.parquet")
    return path / "log.parquet"


def _atif_log(path: Path) -> Path:
    def write(number: int) -> str:
        agent = {"name": "a", "version": "1"}
        steps = [{"step_id": i + 1, "source": "agent", "message": "x"} for i in range(3)]
        extra = {"probe": _PROBE[number]}
        document = {"schema_version": "ATIF-v1.8", "agent": agent, "steps": steps, "extra": extra}
        return json.dumps(document) + "\n"

    (path / "log.jsonl").write_text("".join(map(write, range(4))))
    return path / "log.jsonl"


def _nemorl_log(path: Path) -> Path:
    record = {
        "input_lengths": [2],
        "token_ids": [[1, 2, 0]],
        "token_loss_mask": [[0, 1, 0]],
        "rewards": [1.0],
    }
    records = [{**record, "probe": value, "idx": i} for i, value in enumerate(_PROBE)]
    file = path / "train_data_step1.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in records))
    return file


def _otlp_log(path: Path) -> Path:
    return _FIXTURES / "otlp" / "agents.jsonl"


def _roll_log(path: Path) -> Path:
    texts = [f"{i}" for i in range(_NUM)]
    columns = {"prompt": texts, "responses": texts, "scores": _PROBE, "global_step": [1] * _NUM}
    (path / "1.jsonl").write_text(json.dumps({**columns, "probe": _PROBE}) + "\n")
    return path / "1.jsonl"


def _slime_log(path: Path) -> Path:
    torch = pytest.importorskip("torch")
    sample = {"tokens": [1, 2], "response_length": 1, "reward": 1.0, "prompt": "1+1?"}
    samples = [{**sample, "probe": value, "index": i} for i, value in enumerate(_PROBE)]
    torch.save({"rollout_id": 1, "samples": samples}, path / "1.pt")
    return path / "1.pt"


def _tinker_log(path: Path) -> Path:
    return _FIXTURES / "tinker" / "capture.db"


def _transcripts_log(path: Path) -> Path:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    records = [{"messages": turns, "probe": value} for value in _PROBE]
    (path / "log.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return path / "log.jsonl"


def _trl_log(path: Path) -> Path:
    texts = [f"{i}" for i in range(_NUM)]
    columns = {"step": [1] * _NUM, "prompt": texts, "completion": texts, "advantage": _PROBE}
    return _write_parquet(path / "log.parquet", {**columns, "probe": [*range(_NUM)]})


def _verifiers_log(path: Path) -> Path:
    nodes = [{"message": {"role": "user", "content": "Hi"}}]
    for i in range(3):
        message = {"role": "assistant", "content": "Hello"}
        nodes.append({"parent": i, "message": message, "sampled": True})
    task = {"type": "t", "data": {}}
    records = [
        {"task": task, "traces": [{"nodes": nodes, "task": task, "probe": value}]}
        for value in _PROBE[:4]
    ]
    (path / "log.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return path / "log.jsonl"


def _verl_log(path: Path) -> Path:
    record = {"input": "1+1?", "output": "2", "gts": "2", "score": 1.0, "step": 1}
    records = [
        {**record, "probe": value, "uid": f"u_{i // 3}_{i % 3}"} for i, value in enumerate(_PROBE)
    ]
    (path / "1.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return path / "1.jsonl"


_LOGS: dict[str, Callable[[Path], Path]] = {
    "arrow": _arrow_log,
    "areal": _areal_log,
    "art": _art_log,
    "atif": _atif_log,
    "bandit": _bandit_log,
    "csv": _csv_log,
    "d3rlpy": _d3rlpy_log,
    "d4rl": _d4rl_log,
    "dsjson": _dsjson_log,
    "easyr1log": _easyr1_log,
    "jsonl": _jsonl_log,
    "lerobot": _lerobot_log,
    "minari": _minari_log,
    "nemorl": _nemorl_log,
    "npz": _npz_log,
    "otlp": _otlp_log,
    "parquet": _parquet_log,
    "reagent": _reagent_log,
    "rlds": _rlds_log,
    "rllib": _rllib_log,
    "rllib batches": _rllib_batches,
    "rllib episodes": _rllib_episodes,
    "roll": _roll_log,
    "skyrl": _skyrl_log,
    "slime": _slime_log,
    "tinker": _tinker_log,
    "transcripts": _transcripts_log,
    "trl": _trl_log,
    "verifiers": _verifiers_log,
    "verl": _verl_log,
}
# What a format's further column is called where it does not stand by itself.
_PATHS = {
    "d3rlpy": "infos/probe",
    "rlds": "language_instruction",
    "rllib episodes": "t",
    "areal": "metadata",
    "art": "role",
    "atif": "role",
    "dsjson": "dsjson",
    "easyr1log": "metadata",
    "nemorl": "metadata",
    "otlp": "metadata",
    "roll": "metadata",
    "skyrl": "metadata",
    "slime": "metadata",
    "tinker": "metadata",
    "transcripts": "metadata",
    "trl": "metadata",
    "verifiers": "metadata",
    "verl": "metadata",
}


def _ingest(lake: Lake, tmp_path: Path, log: str, **options: Any) -> IngestReceipt:
    (tmp_path / "log").mkdir(exist_ok=True)
    source = _LOGS[log](tmp_path / "log")
    form = log.partition(" ")[0]
    return ingest(lake, [source], "log", format=form, options=ReadOptions(**options))


def test_there_is_a_log_of_each_format() -> None:
    assert {name.partition(" ")[0] for name in _LOGS} == {known.name for known in FORMATS}


@pytest.mark.parametrize("log", _LOGS)
@pytest.mark.parametrize("ours", ["reward", "region"])
def test_a_mapping_of_no_column_is_refused_by_name(
    lake: Lake, tmp_path: Path, log: str, ours: str
) -> None:
    with pytest.raises(SourceInvalidError, match=r"found the (columns|datasets).*no_such_column"):
        _ingest(lake, tmp_path, log, mapping={ours: "no_such_column"})
    assert not lake.dataset("log").exists()


@pytest.mark.parametrize("log", _LOGS)
def test_a_further_column_is_stored(lake: Lake, tmp_path: Path, log: str) -> None:
    receipt = _ingest(lake, tmp_path, log)
    assert receipt.episodes.rejected == 0
    theirs = _PATHS.get(log, "probe")
    ours = "step" if theirs == "t" else receipt.renames.get(theirs, theirs)
    found = lake.sql(f"select {ours} as value from log.steps order by 1").column("value")
    assert found.null_count == 0
    if theirs == "probe" and log != "lerobot":
        assert found.to_pylist() == _PROBE


@pytest.mark.parametrize("log", _LOGS)
def test_a_further_column_may_be_renamed(lake: Lake, tmp_path: Path, log: str) -> None:
    theirs = _PATHS.get(log, "probe")
    receipt = _ingest(lake, tmp_path, log, mapping={"region": theirs})
    assert receipt.renames[theirs] == "region"
    # Also where it is a field as well, as the step of RLlib's episodes is.
    assert lake.sql("select region from log.steps").column(0).null_count == 0


@pytest.mark.parametrize("log", _LOGS)
def test_a_column_has_one_further_name(lake: Lake, tmp_path: Path, log: str) -> None:
    theirs = _PATHS.get(log, "probe")
    with pytest.raises(ConfigInvalidError, match=f"mapping area={theirs}.*region"):
        _ingest(lake, tmp_path, log, mapping={"region": theirs, "area": theirs})


# What each field may hold, and how it is stored.
_VALUES: dict[str, tuple[list[Any], str]] = {
    "observation": (_PROBE, "observation[1]"),
    "action": ([(i + 1) % 2 for i in range(_NUM)], "action"),
    "reward": (_PROBE, "reward"),
    "terminated": ([i % 3 == 2 for i in range(_NUM)], "terminated"),
    "truncated": ([i % 3 == 2 for i in range(_NUM)], "truncated"),
    "episode_id": ([f"key-{i:02}" for i in range(_NUM)], "source_episode_id"),
    "step": ([i % 3 + 5 for i in range(_NUM)], "step"),
    "env_step": ([10 * i for i in range(_NUM)], "env_step"),
    "agent_id": ([f"agent-{i // 3}" for i in range(_NUM)], "agent_id"),
    "final_observation": ([0.125] * _NUM, "final_observation[1]"),
    "next_observation": ([0.5 * (i + 1) for i in range(_NUM)], "final_observation[1]"),
    "behavior_log_prob": ([-0.5] * _NUM, "behavior_log_prob"),
    "behavior_prob": ([0.5] * _NUM, "round(exp(behavior_log_prob), 6)"),
    "policy": ([f"p{i % 2}" for i in range(_NUM)], "policy"),
    "policy_version": ([i // 3 for i in range(_NUM)], "policy_version"),
    "action_mask": ([[True, True]] * _NUM, "action_mask"),
    "timestamp": (
        [f"2026-01-{i + 1:02}T00:00:00Z" for i in range(_NUM)],
        "strftime(timestamp at time zone 'UTC', '%Y-%m-%dT%H:%M:%SZ')",
    ),
}
_WRITERS = {
    "csv": _write_csv,
    "jsonl": _write_jsonl,
    "parquet": _write_parquet,
    "arrow": _write_arrow,
}


def test_every_field_is_tried() -> None:
    assert {*_VALUES} == {*ALIASES}


@pytest.mark.parametrize("ours", _VALUES)
@pytest.mark.parametrize("log", [*_WRITERS, "bandit csv", "bandit jsonl", "bandit parquet"])
def test_a_field_that_is_mapped_is_stored_or_refused(
    lake: Lake, tmp_path: Path, log: str, ours: str
) -> None:
    values, stored = _VALUES[ours]
    form, _, written_as = log.partition(" ")
    columns = _columns() if form != "bandit" else _decisions()
    columns.pop(ours, None)
    write = _WRITERS[written_as or form]
    source = write(tmp_path / "log", {**columns, "theirs": values})
    options = ReadOptions(mapping={ours: "theirs"})
    if form == "bandit" and ours in ("terminated", "truncated"):
        refused = f"mapping {ours}=theirs: cannot be mapped with format bandit.*logged_{ours}"
        with pytest.raises(ConfigInvalidError, match=refused):
            ingest(lake, [source], "log", format=form, options=options)
        return
    if ours == "episode_id" and form != "bandit":
        values = [f"key-{i // 3:02}" for i in range(_NUM)]
        source = write(tmp_path / "log", {**columns, "theirs": values})
    if ours == "truncated":
        del columns["terminated"]
        source = write(tmp_path / "log", {**columns, "theirs": values})
    receipt = ingest(lake, [source], "log", format=form, options=options)
    assert receipt.steps.committed == _NUM, receipt.checks
    found = lake.sql(f"select {stored} as v from log.steps where v is not null order by 1")
    expected = values
    if ours in ("final_observation", "next_observation") and form != "bandit":
        expected = values[2::3]
    assert found.column("v").to_pylist() == sorted(expected)


@pytest.mark.parametrize(
    ("mapping", "options"),
    [
        ({"behavior_prob": "p", "behavior_log_prob": "q"}, {}),
        ({"episode_id": "p"}, {"episode_by": ("q",)}),
    ],
)
def test_mappings_of_which_one_would_do_nothing_are_refused(
    lake: Lake, tmp_path: Path, mapping: dict[str, str], options: dict[str, Any]
) -> None:
    log = _write_jsonl(tmp_path / "log", {**_columns(), "p": [0.5] * _NUM, "q": [-0.5] * _NUM})
    with pytest.raises(
        ConfigInvalidError,
        match=f"mapping {next(iter(mapping))}=p: (cannot be combined|has the same meaning)",
    ):
        ingest(lake, [log], "log", options=ReadOptions(mapping=mapping, **options))


@pytest.mark.parametrize(
    ("ours", "meant"), [("obs", "observation"), ("t", "step"), ("propensity", "behavior_prob")]
)
def test_a_name_that_logs_give_to_a_field_is_refused_with_the_name_of_the_field(
    lake: Lake, tmp_path: Path, ours: str, meant: str
) -> None:
    log = _write_jsonl(tmp_path / "log", {**_columns(), "p": [0.5] * _NUM})
    with pytest.raises(ConfigInvalidError, match=rf"mapping {ours}=p: .* Write {meant}=p;"):
        ingest(lake, [log], "log", options=ReadOptions(mapping={ours: "p"}))


def test_a_probability_that_is_named_wins_over_a_logarithm_that_is_found(
    lake: Lake, tmp_path: Path
) -> None:
    columns = {**_columns(), "chance": [0.5] * _NUM, "action_logp": [-9.0] * _NUM}
    log = _write_jsonl(tmp_path / "log", columns)
    ingest(lake, [log], "log", options=ReadOptions(mapping={"behavior_prob": "chance"}))
    rows = lake.sql("select distinct exp(behavior_log_prob) as p, action_logp from log.steps")
    assert rows.to_pylist() == [{"p": pytest.approx(0.5), "action_logp": -9.0}]


def test_a_decision_log_is_keyed_by_the_column_that_is_named(lake: Lake, tmp_path: Path) -> None:
    keys = [f"event-{i}" for i in range(_NUM)]
    log = _write_csv(tmp_path / "log", {"event_id": keys, **_decisions()})
    mapping = {"episode_id": "event_id"}
    receipt = ingest(lake, [log], "log", format="bandit", options=ReadOptions(mapping=mapping))
    rows = lake.sql("select source_episode_id as key, reward from log.steps").to_pylist()
    assert {row["key"]: row["reward"] for row in rows} == dict(
        zip(keys, _columns()["reward"], strict=True)
    )
    again = ingest(lake, [log], "log", format="bandit", options=ReadOptions(mapping=mapping))
    assert (receipt.episodes.committed, again.episodes.already_present) == (_NUM, _NUM)


def test_a_key_of_two_decisions_rejects_both(lake: Lake, tmp_path: Path) -> None:
    keys = [f"event-{i}" for i in range(_NUM - 1)] + ["event-3"]
    log = _write_csv(tmp_path / "log.csv", {"event_id": keys, **_decisions()})
    mapping = {"episode_id": "event_id"}
    receipt = ingest(lake, [log], "log", format="bandit", options=ReadOptions(mapping=mapping))
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (_NUM - 2, 2)
    found = lake.sql("select file_row, checks, reasons from log.quarantine order by 1").to_pylist()
    assert [row["file_row"] for row in found] == [3, _NUM - 1]
    assert found[0]["checks"] == ["id_reused"]
    assert found[0]["reasons"] == [
        "log.csv row 3, column 'event_id': found 'event-3' in several rows, expected an id of each "
        "decision's own"
    ]


def test_a_session_that_is_called_as_an_id_is_no_key(lake: Lake, tmp_path: Path) -> None:
    columns = _columns()
    del columns["step"]
    log = _write_jsonl(tmp_path / "log", columns)
    receipt = ingest(lake, [log], "log", format="bandit")
    assert receipt.episodes.committed == _NUM
    assert any("'episode_id'" in note and "logged_episode_id" in note for note in receipt.notes)
    rows = lake.sql(
        "select logged_episode_id, logged_terminated from log.steps order by reward"
    ).to_pylist()
    assert [row["logged_episode_id"] for row in rows] == columns["episode_id"]
    assert [row["logged_terminated"] for row in rows] == columns["terminated"]


@pytest.mark.parametrize("log", ["minari", "d3rlpy", "rlds", "rllib episodes", "reagent"])
def test_finals_of_another_observation_are_further_columns(
    lake: Lake, tmp_path: Path, log: str
) -> None:
    other = {"rlds": "language_embedding", "rllib episodes": "action_logp", "reagent": "probe"}
    theirs = other.get(log, _PATHS.get(log, "probe"))
    mapping = {"observation": theirs}
    if log == "rlds":
        mapping["seen"] = "observation"  # whose name is taken
    receipt = _ingest(lake, tmp_path, log, mapping=mapping)
    assert receipt.episodes.rejected == 0
    assert receipt.episodes.committed > 0
    if log != "d3rlpy":  # which has no finals here
        assert any(f"and not of {theirs}: kept as" in note for note in receipt.notes)


def test_a_lerobot_feature_may_be_named_by_its_own_name(lake: Lake, tmp_path: Path) -> None:
    receipt = _ingest(lake, tmp_path, "lerobot", mapping={"observation": "observation.state"})
    assert receipt.episodes.rejected == 0
    assert receipt.episodes.committed > 0


def test_members_that_hold_nothing_are_named(lake: Lake, tmp_path: Path) -> None:
    info = [{"seen": i, "never": None} for i in range(_NUM)]
    log = _write_jsonl(tmp_path / "log", {**_columns(), "info": info, "gone": [None] * _NUM})
    notes = ingest(lake, [log], "log").notes
    assert "columns that hold nothing, left out: gone, info.never" in notes


def test_datasets_that_d3rlpy_does_not_have_are_named(lake: Lake, tmp_path: Path) -> None:
    receipt = _ingest(lake, tmp_path, "d3rlpy")
    assert any(note.endswith("left out: notes") for note in receipt.notes)


class _Lines:
    """All lines of a log at once."""

    name = "given"
    is_over = False

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def take(self, timeout_s: float) -> list[Line]:
        self.is_over = True
        return [Line(i + 1, json.dumps(row).encode()) for i, row in enumerate(self._rows)]


@pytest.mark.parametrize("ours", _VALUES)
def test_a_stream_follows_mappings_too(lake: Lake, ours: str) -> None:
    values, stored = _VALUES[ours]
    if ours == "episode_id":
        values = [f"key-{i // 3:02}" for i in range(_NUM)]
    if ours == "step":
        values = [i % 3 for i in range(_NUM)]  # those after a gap would wait for it
    columns = _columns()
    columns.pop(ours, None)
    if ours == "truncated":
        del columns["terminated"]
    rows = _rows({**columns, "theirs": values, "probe": _PROBE})
    options = ReadOptions(mapping={ours: "theirs", "kept": "theirs"})
    receipt = follow(lake, _Lines(rows), "log", options=options, flush_every_s=0.0)
    assert receipt.lines.committed == _NUM, receipt.reasons
    found = lake.sql(f"select {stored} as v from log.steps where v is not null order by 1")
    expected = values[2::3] if ours in ("final_observation", "next_observation") else values
    assert found.column("v").to_pylist() == sorted(expected)
    assert lake.sql("select probe from log.steps order by 1").column(0).to_pylist() == _PROBE
    assert lake.sql("select kept from log.steps").column(0).null_count == 0


def test_a_stream_refuses_a_mapping_of_no_column(lake: Lake) -> None:
    options = ReadOptions(mapping={"reward": "no_such_column"})
    with pytest.raises(ReplayLakeError, match="no_such_column"):
        follow(lake, _Lines(_rows(_columns())), "log", options=options, flush_every_s=0.0)
