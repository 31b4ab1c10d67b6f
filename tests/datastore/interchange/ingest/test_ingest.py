from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EpisodeInvalidError,
    InvalidNameError,
    NotFoundError,
    SchemaMismatchError,
    SourceInvalidError,
)
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import NothingValidError, ingest
from replaylake.datastore.interchange.ingest.inspection import IngestProgress
from replaylake.datastore.interchange.ingest.receipt import Counts
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.storage.storage import LocalStorage

_DATA = Path(__file__).parents[4] / "examples" / "data" / "rllib_cartpole"
_LARGE = _DATA / "cartpole-v1_large"
_HEADER = "episode_id,step,observation,action,reward,terminated\n"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


_SWAPPED = {"observation": "reward", "reward": "observation"}


def _csv(folder: Path, text: str, name: str = "log.csv") -> Path:
    (folder / name).write_text(_HEADER + text)
    return folder / name


def _episode(name: str, num: int = 2, action: int = 1) -> str:
    rows = (f"{name},{t},0.5,{action},1.0,{int(t == num - 1)}\n" for t in range(num))
    return "".join(rows)


@pytest.mark.slow
def test_the_large_log_has_its_published_counts_and_comes_once(lake: Lake) -> None:
    first = ingest(lake, [_LARGE], "cartpole")
    assert first.episodes == Counts(committed=21)
    assert first.steps == Counts(committed=4137)
    assert first.version == 1
    assert (first.format, first.num_files, first.num_shards) == ("rllib", 200, 1)
    described = lake.dataset("cartpole").snapshot().describe()
    assert described["mean_return"] == 197.0
    assert described["num_steps"] == 4137
    assert described["num_episodes"] == 21

    again = ingest(lake, [_LARGE], "cartpole")
    assert again.version is None
    assert again.episodes == Counts(already_present=21)
    assert again.steps == Counts(already_present=4137)
    assert (again.num_shards, again.num_bytes) == (0, 0)
    assert any("already ingested" in note for note in again.notes)
    assert lake.dataset("cartpole").snapshot().num_steps == 4137


def test_the_logged_head_and_propensities_are_kept(lake: Lake) -> None:
    ingest(lake, [_LARGE], "cartpole")
    spec = lake.dataset("cartpole").spec
    assert spec.observation_space == Box((4,), "float64")
    assert spec.action_space == Discrete(2)
    found = lake.sql(
        "select avg(exp(behavior_log_prob)) as p, avg(action_prob) as q from cartpole.steps"
    )
    assert found.to_pylist()[0]["p"] == pytest.approx(0.6419769, abs=1e-6)
    assert found.to_pylist()[0]["q"] == pytest.approx(0.6419769, abs=1e-6)


def test_another_reader_sees_exactly_our_rows(lake: Lake) -> None:
    receipt = ingest(lake, [_LARGE], "cartpole")
    rows = DeltaTable(str(lake.dataset("cartpole").path)).to_pyarrow_table()
    assert rows.num_rows == 4137
    prefix = receipt.content_hash[:16]
    assert {name.split("/")[0] for name in rows.column("episode_id").to_pylist()} == {prefix}
    foreign = {name.split("/")[1] for name in rows.column("episode_id").to_pylist()}
    assert foreign == set(rows.column("source_episode_id").to_pylist())


@pytest.mark.slow
def test_the_same_content_elsewhere_is_still_the_same(lake: Lake, tmp_path: Path) -> None:
    ingest(lake, [_DATA / "small.json"], "small")
    shutil.copy(_DATA / "small.json", tmp_path / "renamed.jsonl")
    assert ingest(lake, [tmp_path / "renamed.jsonl"], "small").version is None
    files = sorted(_LARGE.iterdir(), reverse=True)
    first = ingest(lake, files, "listed")
    assert first.steps.committed == 4137
    assert ingest(lake, [_LARGE], "listed").steps == Counts(already_present=4137)


def test_batches_and_rows_of_one_log_give_the_same_steps(lake: Lake) -> None:
    ingest(lake, [_DATA / "small.json"], "batches")
    ingest(lake, [_DATA / "cartpole-v1.jsonl"], "rows")
    columns = "source_episode_id, step, action, reward, terminated"
    first, second = (
        lake.sql(f"select {columns} from {name}.steps order by all") for name in ("batches", "rows")
    )
    assert first.num_rows == 102
    assert first.equals(second)


def test_time_limits_become_truncations(lake: Lake) -> None:
    ingest(lake, [_LARGE], "cartpole", options=ReadOptions(time_limit=200))
    found = lake.sql(
        "select terminated, truncated, count(*) as n, bool_and(final_observation is not null) as f "
        "from cartpole.steps where terminated or truncated group by all order by n"
    )
    assert found.to_pylist() == [
        {"terminated": True, "truncated": False, "n": 1, "f": True},
        {"terminated": False, "truncated": True, "n": 20, "f": True},
    ]


def test_a_receipt_is_json_and_adds_up(lake: Lake, tmp_path: Path) -> None:
    log = _csv(tmp_path, _episode("a") + _episode("b").replace("1.0", "nan") + _episode("c", 3))
    receipt = ingest(lake, [log], "log", on_invalid="reject")
    body = json.loads(json.dumps(receipt.to_json()))
    assert body["dataset"] == "log"
    assert body["version"] == 1
    assert body["format"] == "csv"
    assert body["source"]["paths"] == [str(log)]
    assert body["episodes"] == {"read": 3, "committed": 2, "rejected": 1, "already_present": 0}
    assert body["steps"] == {"read": 7, "committed": 5, "rejected": 2, "already_present": 0}
    rejection = body["checks"][0]
    assert (rejection["name"], rejection["outcome"]) == ("not_finite", "rejected")
    assert (rejection["num_episodes"], rejection["num_rows"]) == (1, 2)
    assert body["quarantined_rows"] == 2
    assert "episode b: log.csv row 2, column 'reward'" in rejection["example"]
    assert body["rejected_episodes"][0]["episode"] == "b"
    assert body["bytes"] > 0

    again = ingest(lake, [log], "log", on_invalid="reject")
    assert again.episodes == Counts(rejected=1, already_present=2)
    assert again.steps == Counts(rejected=2, already_present=5)
    assert again.version is None


_ABORT: dict[str, Any] = {"on_invalid": "abort"}


def _torn(folder: Path) -> Path:
    path = folder / "torn.parquet"
    data = next(iter(sorted(_LARGE.iterdir()))).read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (_torn, {}, SourceInvalidError, r"torn\.parquet.*damaged"),
        (
            lambda d: _csv(d, _episode("a")),
            {"options": ReadOptions({"reward": "gain"})},
            SourceInvalidError,
            "'gain'",
        ),
        (
            lambda d: _csv(d, _episode("a") + _episode("b").replace("1.0", "nan")),
            _ABORT,
            EpisodeInvalidError,
            r"episode b: log\.csv row 2, column 'reward': found NaN.*`on_invalid` reject",
        ),
        (
            lambda d: _csv(d, _episode("a").replace("a,1,", "a,2,")),
            _ABORT,
            EpisodeInvalidError,
            "gap",
        ),
        (
            lambda d: _csv(d, _episode("a").replace("a,1,", "a,0,")),
            _ABORT,
            EpisodeInvalidError,
            "same",
        ),
        (lambda d: d / "nowhere.csv", {}, NotFoundError, "nowhere"),
        (lambda d: _csv(d, ""), {}, SourceInvalidError, "no rows"),
        (lambda d: _csv(d, _episode("a")), {"format": "xml"}, ConfigInvalidError, "xml"),
        (lambda d: _csv(d, _episode("a")), {"on_invalid": "skip"}, ConfigInvalidError, "skip"),
    ],
)
def test_bad_input_is_one_clear_line_and_changes_nothing(
    lake: Lake, tmp_path: Path, make: Any, options: dict[str, Any], error: type, message: str
) -> None:
    before = _csv(tmp_path, _episode("kept"), "before.csv")
    ingest(lake, [before], "present")
    for name in ("absent", "present"):
        with pytest.raises(error, match=message) as caught:
            ingest(lake, [make(tmp_path)], name, **options)
        assert "\n" not in str(caught.value)
    assert lake.datasets() == ["present"]
    assert lake.dataset("present").snapshot().version == 1


def test_a_wrong_dataset_name_is_refused_before_anything_is_read(lake: Lake) -> None:
    with pytest.raises(InvalidNameError):
        ingest(lake, [Path("nowhere")], "No Name")


def test_spaces_of_an_environment_are_kept_and_checked(lake: Lake, tmp_path: Path) -> None:
    spaces: dict[str, Any] = {
        "observation_space": Box((1,), "float32", 0.0, 1.0),
        "action_space": Discrete(4),
    }
    log = _csv(tmp_path, _episode("a"))
    ingest(lake, [log], "good", **spaces)
    spec = lake.dataset("good").spec
    assert (spec.observation_space, spec.action_space) == tuple(spaces.values())

    high = _csv(tmp_path, _episode("a") + _episode("b").replace("0.5", "1.5"), "high.csv")
    with pytest.raises(
        EpisodeInvalidError, match=r"episode b: observation at step 0: found \[1\.5\]"
    ):
        ingest(lake, [high], "high", on_invalid="abort", **spaces)
    receipt = ingest(lake, [high], "high", on_invalid="reject", **spaces)
    assert receipt.episodes == Counts(committed=1, rejected=1)

    wrong = _csv(tmp_path, _episode("a", action=4), "wrong.csv")
    with pytest.raises(EpisodeInvalidError, match="action"):
        ingest(lake, [wrong], "wrong", on_invalid="abort", **spaces)
    inexact = _csv(tmp_path, _episode("a").replace(",1,1.0", ",1.5,1.0"), "inexact.csv")
    with pytest.raises(EpisodeInvalidError, match="action"):
        ingest(lake, [inexact], "inexact", on_invalid="abort", **spaces)
    assert lake.datasets() == ["good", "high"]


def test_what_does_not_fit_the_dataset_is_refused(lake: Lake, tmp_path: Path) -> None:
    ingest(lake, [_csv(tmp_path, _episode("a"))], "log")
    other = _csv(tmp_path, _episode("b", action=7), "other.csv")
    with pytest.raises(EpisodeInvalidError, match="episode b: action at step 0: found 7"):
        ingest(lake, [other], "log", on_invalid="abort")
    receipt = ingest(
        lake,
        [_csv(tmp_path, _episode("b", action=7) + _episode("c", 3), "more.csv")],
        "log",
        on_invalid="reject",
    )
    assert receipt.episodes == Counts(committed=1, rejected=1)
    assert receipt.version == 2


def test_files_of_an_earlier_ingest_are_not_doubled(lake: Lake, tmp_path: Path) -> None:
    folder = tmp_path / "days"
    folder.mkdir()
    _csv(folder, _episode("a"), "day-1.csv")
    ingest(lake, [folder], "log")
    _csv(folder, _episode("b"), "day-2.csv")
    with pytest.raises(
        SourceInvalidError, match=r"1 of 2 files are in dataset 'log'.*\(day-2\.csv\)"
    ):
        ingest(lake, [folder], "log")
    assert ingest(lake, [folder / "day-2.csv"], "log").steps == Counts(committed=2)
    assert lake.dataset("log").snapshot().num_steps == 4


def test_another_reading_of_the_same_content_is_refused_by_name(lake: Lake, tmp_path: Path) -> None:
    log = _csv(tmp_path, _episode("a"))
    ingest(lake, [log], "log")
    swapped = ReadOptions({"observation": "reward", "reward": "observation"})
    with pytest.raises(SourceInvalidError, match=r"'log' has them \(version 1\).*new dataset"):
        ingest(lake, [log], "log", options=swapped)
    assert lake.dataset("log").snapshot().version == 1
    assert ingest(lake, [log], "log").steps == Counts(already_present=2)


def test_commits_come_in_chunks_of_whole_episodes(lake: Lake, tmp_path: Path) -> None:
    log = _csv(tmp_path, "".join(_episode(f"e{i}", 3) for i in range(10)))
    seen: list[IngestProgress] = []
    receipt = ingest(lake, [log], "log", commit_steps=7, on_progress=seen.append)
    # 9, 9, 9 and the 3 that are left.
    commits = [p for p in seen if p.stage == "commit"]
    assert [p.num_steps for p in commits] == [9, 18, 27, 30]
    assert [p.version for p in commits] == [1, 2, 3, 4]
    assert commits[0].total_steps == 30
    assert receipt.version == 4
    assert receipt.num_shards == 4
    history = lake.dataset("log").history()
    assert [c.get("sequence") for c in history[1:]] == [0, 1, 2, 3]


def test_an_ingest_that_was_cut_short_is_continued(lake: Lake, tmp_path: Path) -> None:
    class Cut(Exception):
        pass

    def cut(progress: IngestProgress) -> None:
        if progress.num_steps == 18:
            raise Cut

    log = _csv(tmp_path, "".join(_episode(f"e{i}", 3) for i in range(10)))
    with pytest.raises(Cut):
        ingest(lake, [log], "log", commit_steps=7, on_progress=cut)
    assert lake.dataset("log").snapshot().num_steps == 18
    # The size of the chunks may differ by then.
    receipt = ingest(lake, [log], "log", commit_steps=5)
    assert receipt.episodes == Counts(committed=4, already_present=6)
    assert receipt.steps == Counts(committed=12, already_present=18)
    assert any("continued" in note for note in receipt.notes)
    rows = lake.sql("select count(*) as n, count(distinct (episode_id, step)) as d from log.steps")
    assert rows.to_pylist() == [{"n": 30, "d": 30}]
    assert ingest(lake, [log], "log").steps == Counts(already_present=30)


def test_agents_of_one_episode_are_kept_apart(lake: Lake, tmp_path: Path) -> None:
    table = pa.table(
        {
            "episode_id": ["g"] * 4,
            "agent_id": ["x", "y", "x", "y"],
            "step": [0, 0, 1, 1],
            "observation": [0.5, 1.5, 2.5, 3.5],
            "action": [0, 1, 1, 0],
            "reward": [1.0, 2.0, 3.0, 4.0],
            "terminated": [False, False, True, True],
        }
    )
    pq.write_table(table, tmp_path / "log.parquet")
    receipt = ingest(lake, [tmp_path / "log.parquet"], "duel")
    assert receipt.episodes == Counts(committed=2)
    found = lake.sql("select agent_id, sum(reward) as r from duel.steps group by all order by all")
    assert found.to_pylist() == [{"agent_id": "x", "r": 4.0}, {"agent_id": "y", "r": 6.0}]


def test_masks_have_one_width(lake: Lake, tmp_path: Path) -> None:
    def write(name: str, width: int) -> Path:
        row = {
            "episode_id": [name],
            "observation": [0.5],
            "action": [1],
            "reward": [1.0],
            "terminated": [True],
            "action_mask": [[True] * width],
        }
        pq.write_table(pa.table(row), tmp_path / f"{name}.parquet")
        return tmp_path / f"{name}.parquet"

    ingest(lake, [write("a", 3)], "masked")
    spec = lake.dataset("masked").spec
    assert (spec.action_space, spec.mask_size) == (Discrete(3), 3)
    with pytest.raises(EpisodeInvalidError, match="action_mask"):
        ingest(lake, [write("b", 4)], "masked")
    ingest(lake, [_csv(tmp_path, _episode("c"))], "bare")
    with pytest.raises(EpisodeInvalidError, match="expected none"):
        ingest(lake, [write("d", 3)], "bare")


def test_a_further_column_of_another_type_is_refused(lake: Lake, tmp_path: Path) -> None:
    for name, value in (("a", 1.5), ("b", "text")):
        row = {"episode_id": name, "observation": 0.5, "action": 1, "reward": 1.0, "extra": value}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    ingest(lake, [tmp_path / "a.jsonl"], "log")
    with pytest.raises(SchemaMismatchError, match="extra"):
        ingest(lake, [tmp_path / "b.jsonl"], "log")
    assert lake.dataset("log").snapshot().version == 1


def test_many_short_episodes(lake: Lake, tmp_path: Path) -> None:
    num = 3_000
    table = pa.table(
        {
            "episode_id": np.arange(num),
            "x": np.linspace(0, 1, num),
            "y": np.linspace(1, 2, num),
            "action": np.arange(num) % 5,
            "reward": np.ones(num),
            "terminated": np.ones(num, bool),
            "pscore": np.full(num, 0.2),
        }
    )
    pq.write_table(table, tmp_path / "log.parquet")
    receipt = ingest(
        lake, [tmp_path / "log.parquet"], "bandit", options=ReadOptions({"observation": "x,y"})
    )
    assert receipt.episodes == Counts(committed=num)
    # One step is no time limit.
    assert receipt.notes == ()
    assert lake.dataset("bandit").spec.action_space == Discrete(5)


def test_another_ingest_of_the_source_at_the_same_time_loses_nothing(
    lake: Lake, tmp_path: Path
) -> None:
    """The other takes our next sequence for other episodes, in chunks of its own size."""
    log = _csv(tmp_path, "".join(_episode(f"e{i}", 3) for i in range(10)))

    class Cut(Exception):
        pass

    def cut(progress: IngestProgress) -> None:
        if progress.num_steps == 24:
            raise Cut

    def meet(progress: IngestProgress) -> None:
        if progress.stage == "commit" and progress.num_steps == 9:
            with pytest.raises(Cut):
                ingest(lake, [log], "log", commit_steps=15, on_progress=cut)

    receipt = ingest(lake, [log], "log", commit_steps=7, on_progress=meet)
    assert receipt.steps == Counts(committed=15, already_present=15)
    rows = lake.sql("select count(*) as n, count(distinct (episode_id, step)) as d from log.steps")
    assert rows.to_pylist() == [{"n": 30, "d": 30}]
    assert ingest(lake, [log], "log").steps == Counts(already_present=30)


@pytest.mark.parametrize("has_ids", [True, False])
def test_a_second_file_of_the_same_bytes_is_read_and_already_present(
    lake: Lake, tmp_path: Path, has_ids: bool
) -> None:
    text = "observation,action,reward,done\n0.5,0,1,0\n1.5,1,1,1\n2.5,1,1,1\n"
    for name in ("a.csv", "b.csv"):
        if has_ids:
            _csv(tmp_path, _episode("x") + _episode("y", 1), name)
        else:
            (tmp_path / name).write_text(text)
    receipt = ingest(lake, [tmp_path / "a.csv", tmp_path / "b.csv"], "log")
    assert receipt.episodes == Counts(committed=2, already_present=2)
    assert receipt.steps == Counts(committed=3, already_present=3)
    assert (receipt.steps.read, receipt.num_files) == (6, 2)
    assert any("same bytes as a.csv" in note for note in receipt.notes)
    again = ingest(lake, [tmp_path / "b.csv", tmp_path / "a.csv"], "log")
    assert again.steps == Counts(already_present=6)


def test_what_is_rejected_is_rejected_in_each_of_two_equal_files(
    lake: Lake, tmp_path: Path
) -> None:
    for name in ("a.csv", "b.csv"):
        _csv(tmp_path, _episode("x") + "y,0,0.5,1,nan,1\n", name)
    receipt = ingest(lake, [tmp_path / "a.csv", tmp_path / "b.csv"], "log", on_invalid="reject")
    assert receipt.episodes == Counts(committed=1, already_present=1, rejected=2)
    assert [check.num_episodes for check in receipt.checks if check.outcome == "rejected"] == [2]
    assert receipt.num_quarantined == 1, "the second file has nothing new"


def test_each_commit_accounts_for_what_was_read(lake: Lake, tmp_path: Path) -> None:
    """Two files of the same bytes, two commits each, one episode refused: nothing is lost."""
    for name in ("a.csv", "b.csv"):
        _csv(tmp_path, _episode("x") + _episode("z") + "y,0,0.5,1,nan,1\n", name)
    receipt = ingest(
        lake,
        [tmp_path / "a.csv", tmp_path / "b.csv"],
        "log",
        on_invalid="reject",
        commit_steps=1,
    )
    commits = [c for c in lake.dataset("log").history() if "num_produced" in c]
    assert len(commits) == 2
    for unit, counts in (("", receipt.episodes), ("_steps", receipt.steps)):
        sums = {
            name: sum(commit[f"num_{name}{unit}"] for commit in commits)
            for name in ("produced", "rejected", "already_present")
        }
        committed = sum(c["num_steps" if unit else "num_episodes"] for c in commits)
        assert counts == Counts(committed, sums["rejected"], sums["already_present"])
        assert sums["produced"] == counts.read
    version = lake.snapshot("log").version
    ingest(lake, [tmp_path / "a.csv"], "log", on_invalid="reject")
    assert lake.snapshot("log").version == version, "only the receipt tells of it"


def test_a_log_that_has_grown_is_noted(lake: Lake, tmp_path: Path) -> None:
    ingest(lake, [_csv(tmp_path, _episode("x"))], "log")
    receipt = ingest(lake, [_csv(tmp_path, _episode("x") + _episode("y"))], "log")
    (note,) = [note for note in receipt.notes if "log.csv" in note]
    assert "since version 1" in note
    assert "twice" in note
    assert ingest(lake, [_csv(tmp_path, _episode("z"), "new.csv")], "log").notes == ()


def test_a_column_that_differs_by_case_alone_is_refused_before_any_commit(
    lake: Lake, tmp_path: Path
) -> None:
    def write(column: str) -> Path:
        rows = "".join(f"e{i},0.5,0,1,{i}\n" for i in range(3))
        log = tmp_path / f"{column}.csv"
        log.write_text(f"episode_id,observation,action,reward,{column}\n{rows}")
        return log

    ingest(lake, [write("worker")], "log")
    with pytest.raises(SchemaMismatchError, match=r"(?i)'worker'"):
        ingest(lake, [write("Worker")], "log", commit_steps=1)
    assert lake.dataset("log").snapshot().version == 1


def test_a_spec_that_no_table_holds_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    lake = Lake(LocalStorage(tmp_path / "lake"))
    row = {
        "episode_id": ["e"],
        "observation": pa.array([2**63], pa.uint64()),
        "action": [0],
        "reward": [1.0],
    }
    pq.write_table(pa.table(row), tmp_path / "log.parquet")
    with pytest.raises(NothingValidError, match=f"found {2**63}, expected a whole number"):
        ingest(lake, [tmp_path / "log.parquet"], "log")
    assert not (tmp_path / "lake").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"env_step": 3_000_000_000}, "env_step"),
        ({"step": 2**31}, "step"),
        ({"action_mask": [True, False]}, "action_mask"),
    ],
)
def test_what_the_writer_would_refuse_is_refused_before_anything_is_made(
    lake: Lake, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    row = {"episode_id": "e", "observation": [0.5], "action": 1, "reward": 1.0, **change}
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(row) + "\n")
    with pytest.raises(EpisodeInvalidError, match=said):
        ingest(lake, [log], "log", on_invalid="abort")
    assert not lake.dataset("log").exists()


def test_final_observations_of_another_kind_are_refused(lake: Lake, tmp_path: Path) -> None:
    step = {"episode_id": "e", "observation": {"speed": 0.5}, "action": 1, "reward": 1.0}
    log = tmp_path / "log.jsonl"
    end = {"terminated": True, "final_observation": [0.0]}
    log.write_text(json.dumps({**step, **end}) + "\n")
    with pytest.raises(EpisodeInvalidError, match=r"both structs \(fields speed\) and arrays"):
        ingest(lake, [log], "log")
    assert not lake.dataset("log").exists()


def test_a_probability_a_little_over_one_is_one(lake: Lake, tmp_path: Path) -> None:
    """As a softmax in float32 gives it."""
    text = "episode_id,observation,action,reward,action_logp\ne,0.5,0,1,0.00001\n"
    (tmp_path / "log.csv").write_text(text)
    ingest(lake, [tmp_path / "log.csv"], "log")
    found = lake.sql("select behavior_log_prob as p from log.steps").to_pylist()
    assert found == [{"p": 0.0}]


def test_a_wrong_environment_is_said_by_the_observation(lake: Lake) -> None:
    spaces = {"observation_space": Box((3,)), "action_space": Discrete(2)}
    with pytest.raises(EpisodeInvalidError) as caught:
        ingest(lake, [_LARGE], "cartpole", on_invalid="abort", **spaces)
    message = str(caught.value)
    assert "observation: found shape [4] a step, expected [3]" in message
    assert "final_observation" not in message
    assert "Correct `env` or the log" in message
    assert ".." not in message


def test_a_part_of_what_is_there_adds_nothing(tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    header = "episode_id,step,obs,action,reward,terminated\n"
    for name in ("a", "b", "c"):
        rows = f"{name},0,0.5,0,1.0,false\n{name},1,0.75,1,1.0,true\n"
        (tmp_path / f"{name}.csv").write_text(header + rows)
    ingest(lake, [tmp_path / "a.csv", tmp_path / "b.csv"], "d")
    receipt = ingest(lake, [tmp_path / "b.csv"], "d").to_json()
    assert receipt["version"] is None
    assert receipt["episodes"] == {"read": 1, "committed": 0, "rejected": 0, "already_present": 1}
    assert receipt["steps"]["already_present"] == receipt["steps"]["read"] == 2
    with pytest.raises(SourceInvalidError, match=r"Ingest only the new ones \(c.csv\)"):
        ingest(lake, [tmp_path / "b.csv", tmp_path / "c.csv"], "d")
    assert lake.dataset("d").snapshot().num_steps == 4
