"""The truth about any log: nothing lost, nothing invented, beside an oracle in plain Python.

The oracle knows a log as a list of rows and the rules of docs/FORMATS.md; it shares no code with
the road that it judges.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylake.datastore.errors import EpisodeInvalidError, SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.formats.tabular.reader import TabularReader
from replaylake.datastore.interchange.ingest.ingest import NothingValidError, ingest
from replaylake.datastore.interchange.ingest.inspection import IngestProgress
from replaylake.datastore.interchange.ingest.receipt import Counts
from replaylake.datastore.lake.lake import Lake, open_lake

Row = dict[str, Any]
Key = tuple[str, str]

_FAULTS = ["drop", "double", "nan", "end", "next", "open", "space", "unknown"]
# The dataset's spaces, where it is there before the log.
_SEED = [
    {
        "episode_id": "seed",
        "step": t,
        "observation": [0.0, float(t)],
        "action": t,
        "reward": 0.0,
        "logged": -1,
    }
    for t in range(2)
]


@dataclass(frozen=True)
class _Log:
    """Rows as they stand in the source's files, the first file first."""

    files: tuple[tuple[Row, ...], ...]

    def rows(self) -> list[tuple[int, int, Row]]:
        """Return each row behind its file's index and its number there."""
        return [(f, i, row) for f, rows in enumerate(self.files) for i, row in enumerate(rows)]


@st.composite
def _logs(draw: st.DrawFn) -> _Log:
    has_agents, has_next = draw(st.booleans()), draw(st.booleans())
    base = draw(st.sampled_from([0, 0, 1]))
    rows: list[Row] = []
    for name in "abcde"[: draw(st.integers(1, 5))]:
        for agent in ("x", "y")[: 1 + (has_agents and draw(st.booleans()))]:
            rows += _episode(draw, name, agent if has_agents else "", base, has_next=has_next)
    # The faults; several may fall upon one episode.
    for _ in range(draw(st.integers(0, 3))):
        row = draw(st.sampled_from(rows))
        kind = draw(st.sampled_from(_FAULTS))
        if kind == "drop" and len(rows) > 1:
            rows.remove(row)
        elif kind == "double":
            rows.append({**row})
        elif kind == "nan":
            row["observation"] = [float("nan"), 0.0]
        elif kind == "space":
            row["action"] = 5
        elif kind == "end":
            row["terminated"] = True
        elif kind == "open":
            row["terminated"] = False
        elif has_next:
            row["next_observation"] = [77.0, 77.0] if kind == "next" else None
    if draw(st.booleans()):
        rows = draw(st.permutations(rows))
    num_files = draw(st.integers(1, 3))
    owners = [draw(st.integers(0, num_files - 1)) for _ in rows]
    # The further column tells equal rows apart, and keeps two files from having the same bytes.
    rows = [{**row, "logged": number} for number, row in enumerate(rows)]
    files = (tuple(r for r, o in zip(rows, owners, strict=True) if o == f) for f in range(3))
    return _Log(tuple(rows for rows in files if rows))


def _episode(draw: st.DrawFn, name: str, agent: str, base: int, *, has_next: bool) -> list[Row]:
    num, seed = draw(st.integers(1, 5)), draw(st.integers(0, 3))
    ends = draw(st.sampled_from(["terminated", "truncated", "open", "both"]))
    rows = []
    for t in range(num):
        row = {
            "episode_id": name,
            "step": base + t,
            "observation": [float(seed), float(t)],
            "action": t % 2,
            "reward": seed + t / 4,
            "terminated": t == num - 1 and ends in ("terminated", "both"),
            "truncated": t == num - 1 and ends in ("truncated", "both"),
        }
        if agent:
            row["agent_id"] = agent
        if has_next:
            row["next_observation"] = [float(seed), t + 1.0]
        rows.append(row)
    return rows


@dataclass(frozen=True)
class _Judged:
    """What the oracle says of one episode and agent; `rows` by step, then as they came."""

    rows: list[tuple[int, int, Row]]
    checks: frozenset[str]
    terminated: bool
    truncated: bool
    lasts: frozenset[int]
    """The steps after which the log knows nothing: the last one of each run."""


def _judge(log: _Log, options: ReadOptions, *, num_actions: int) -> dict[Key, _Judged]:
    placed = log.rows()
    base = 1 if min(row["step"] for _, _, row in placed) == 1 else 0
    by_key: dict[Key, list[tuple[int, int, Row]]] = {}
    for one in placed:
        by_key.setdefault((one[2]["episode_id"], one[2].get("agent_id", "")), []).append(one)
    return {key: _judge_one(rows, options, base, num_actions) for key, rows in by_key.items()}


def _judge_one(
    as_read: list[tuple[int, int, Row]], options: ReadOptions, base: int, num_actions: int
) -> _Judged:
    rows = sorted(as_read, key=lambda one: one[2]["step"])
    checks = set()
    pairs = [(a[2], b[2]) for a, b in pairwise(rows)]
    reused = _is_begun_again(as_read, rows[0][2]["step"])
    if reused:
        checks.add("id_reused")
    elif any(a["step"] == b["step"] for a, b in pairs):
        checks.add("step_twice")
    if options.gaps != "split" and any(b["step"] - a["step"] > 1 for a, b in pairs):
        checks.add("gap")
    if not reused and any(a["terminated"] or a["truncated"] for a, _ in pairs):
        checks.add("end_inside")
    if any(row["observation"][0] != row["observation"][0] for _, _, row in rows):
        checks.add("not_finite")
    if any(
        a["next_observation"] != b["observation"]
        for a, b in pairs
        if a.get("next_observation") is not None
        and b["step"] - a["step"] == 1
        and not (a["terminated"] or a["truncated"])
    ):
        checks.add("next_observation")
    if not checks and any(row["action"] >= num_actions for _, _, row in rows):
        checks.add("space")  # the spaces are asked last
    last = rows[-1][2]
    terminated, truncated = last["terminated"], last["truncated"]
    if terminated and not truncated and last["step"] + 1 - base == options.time_limit:
        terminated, truncated = False, True
    if options.open_ends == "truncated" and not terminated:
        truncated = True
    steps = [row["step"] for _, _, row in rows]
    lasts = frozenset(step for step in steps if step + 1 not in steps)
    return _Judged(rows, frozenset(checks), terminated, truncated, lasts)


def _is_begun_again(as_read: list[tuple[int, int, Row]], first_step: int) -> bool:
    return any(
        b["step"] == first_step
        and (a["terminated"] or a["truncated"] or file_a != file_b)
        and first_step in [row["step"] for _, _, row in as_read[: i + 1]]
        for i, ((file_a, _, a), (file_b, _, b)) in enumerate(pairwise(as_read))
    )


_OPTIONS = st.builds(
    ReadOptions,
    gaps=st.sampled_from(["reject", "split"]),
    open_ends=st.sampled_from(["open", "truncated"]),
    time_limit=st.sampled_from([None, None, 2, 3, 4]),
)


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(_logs(), _OPTIONS, st.booleans(), st.booleans(), st.booleans())
def test_any_log_is_told_truly(
    log: _Log, options: ReadOptions, is_seeded: bool, aborts: bool, is_streamed: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if is_streamed:
            _make_all_tiny(patch)
        lake = open_lake(Path(folder) / "lake", create=True)
        paths = _written(log, Path(folder))
        if is_seeded:
            ingest(lake, [_file(Path(folder) / "seed.jsonl", _SEED)], "log")
        judged = _judge(log, options, num_actions=2 if is_seeded else 99)
        kept = {key: one for key, one in judged.items() if not one.checks}
        if aborts and len(kept) < len(judged):
            with pytest.raises(EpisodeInvalidError):
                ingest(lake, paths, "log", options=options, on_invalid="abort")
        elif not kept and not is_seeded:
            with pytest.raises(NothingValidError):
                ingest(lake, paths, "log", options=options)
        else:
            _check_told(lake, paths, options, judged)
            return
        assert lake.dataset("log").exists() == is_seeded
        if is_seeded:
            assert _steps(lake) == _quarantined(lake) == {}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_episode_of_which_one_run_is_refused_is_refused_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    """Half of it in the dataset and half in quarantine would be counted as two episodes."""
    if is_streamed:
        _make_all_tiny(monkeypatch)
    rows = [
        {
            "episode_id": name,
            "step": t,
            "observation": [0.0, float(t)],
            "action": 5 if name == "b" and t in (4, 7) else 0,
            "reward": 0.0,
            "terminated": t == 7,
            "truncated": False,
            "logged": t,
        }
        for name in ("a", "b", "c")
        for t in (0, 1, 4, 5, 7)
    ]
    lake = open_lake(tmp_path / "lake", create=True)
    ingest(lake, [_file(tmp_path / "seed.jsonl", _SEED)], "log")
    log, options = _Log((tuple(rows),)), ReadOptions(gaps="split")
    paths = _written(log, tmp_path)
    _check_told(lake, paths, options, _judge(log, options, num_actions=2))
    found = lake.sql("select * from log.quarantine order by row_number").to_pylist()
    assert [row["row_number"] for row in found] == [0, 1, 2, 3, 4]
    assert all("log0.jsonl row 7" in row["reasons"][0] for row in found)


def _plain(names: Sequence[str], first: int = 0, num: int = 3, **other: Any) -> list[Row]:
    return [
        {
            "episode_id": name,
            "step": t,
            "observation": [float(i), float(t)],
            "action": t % 2,
            "reward": 1.0,
            "terminated": t == first + num - 1,
            **other,
        }
        for i, name in enumerate(names)
        for t in range(first, first + num)
    ]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_time_limit_where_steps_are_counted_from_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    if is_streamed:
        _make_all_tiny(monkeypatch)
    # The last begins at 3: its first two steps are not in the log, and it ends at the limit too.
    rows = [*_plain("ab", 1, 4), *_plain("c", 1, 3), *_plain("d", 3, 2)]
    path = _file(tmp_path / "log.jsonl", rows)
    noted = ingest(open_lake(tmp_path / "a", create=True), [path], "log")
    (likely,) = [check for check in noted.checks if check.name == "time_limit"]
    assert likely.num_episodes == 3
    assert likely.advice.endswith("`time_limit` 4")
    lake = open_lake(tmp_path / "b", create=True)
    ingest(lake, [path], "log", options=ReadOptions(time_limit=4))
    rows = _steps(lake, "terminated, truncated")
    assert {name: row[-1][-2:] for (name, _), row in rows.items()} == {
        "a": (False, True),
        "b": (False, True),
        "c": (True, False),
        "d": (False, True),
    }


def test_a_log_of_one_row_with_its_next_observation(tmp_path: Path) -> None:
    row = {**_plain("a", num=1)[0], "next_observation": [5.0, 5.0]}
    lake = open_lake(tmp_path / "lake", create=True)
    ingest(lake, [_file(tmp_path / "log.jsonl", [row])], "log")
    assert _steps(lake, "next_observation") == {("a", ""): [(0, [5.0, 5.0])]}


def test_a_step_twice_out_of_order_is_no_id_that_begins_again(tmp_path: Path) -> None:
    """The first step is there once; it comes after a row of another file, which is in no order."""
    first, second, third = _plain("b")
    files = [[*_plain("a"), second], [first, {**second, "reward": 2.0}, third]]
    paths = [_file(tmp_path / f"{i}.jsonl", rows) for i, rows in enumerate(files)]
    receipt = ingest(open_lake(tmp_path / "lake", create=True), paths, "log")
    assert _counted(receipt.checks, "rejected") == {"step_twice": 1}


def test_whole_floats_are_actions_of_a_countable_space(tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake", create=True)
    ingest(lake, [_file(tmp_path / "seed.jsonl", _SEED)], "log")
    rows = [{**row, "action": float(row["action"]), "logged": 0} for row in _plain("abc")]
    rows[4]["action"] = 0.5
    receipt = ingest(lake, [_file(tmp_path / "log.jsonl", rows)], "log")
    assert receipt.episodes == Counts(committed=2, rejected=1)
    assert _counted(receipt.checks, "rejected") == {"dtype": 1}
    assert {row[1] for rows in _steps(lake, "action").values() for row in rows} == {0, 1}


def test_what_was_cut_short_is_not_continued_under_other_options(tmp_path: Path) -> None:
    """What one reading puts into quarantine, the other might commit."""

    class Cut(Exception):
        pass

    def cut(progress: IngestProgress) -> None:
        if progress.stage == "commit":
            raise Cut

    rows = [row for row in _plain("abcd") if (row["episode_id"], row["step"]) != ("d", 1)]
    lake, paths = open_lake(tmp_path / "lake", create=True), [_file(tmp_path / "l.jsonl", rows)]
    with pytest.raises(Cut):
        ingest(lake, paths, "log", commit_steps=3, on_progress=cut)
    with pytest.raises(SourceInvalidError, match="was cut short"):
        ingest(lake, paths, "log", options=ReadOptions(gaps="split"))
    assert ingest(lake, paths, "log").episodes == Counts(2, 1, 1)
    assert set(_quarantined(lake)) == {("d", "")}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_many_rejected_episodes_of_one_row_are_each_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    """Tables of one row take kilobytes each, so they are neither kept nor written one by one."""
    if is_streamed:
        _make_all_tiny(monkeypatch)
    monkeypatch.setattr(
        "replaylake.datastore.interchange.ingest.quarantine._FLUSH_CHARACTERS", 5_000
    )
    rows = _plain([f"e{i}" for i in range(100)], num=1)
    for row in rows[1:]:
        row["reward"] = float("nan")
    lake = open_lake(tmp_path / "lake", create=True)
    ingest(lake, [_file(tmp_path / "log.jsonl", rows)], "log")
    assert _quarantined(lake) == {
        (f"e{i}", ""): [("log.jsonl", i, "not_finite")] for i in range(1, 100)
    }
    num_files = len(lake.dataset("log").rejected.snapshot().files)
    assert 2 <= num_files <= 20


def _check_told(
    lake: Lake, paths: Sequence[Path], options: ReadOptions, judged: dict[Key, _Judged]
) -> None:
    kept = {key: one for key, one in judged.items() if not one.checks}
    refused = {key: one for key, one in judged.items() if one.checks}
    receipt = ingest(lake, paths, "log", options=options, commit_steps=4)
    assert receipt.episodes == Counts(len(kept), len(refused))
    assert receipt.steps == Counts(_num_rows(kept), _num_rows(refused))
    assert receipt.num_quarantined == _num_rows(refused)
    assert _counted(receipt.checks, "rejected") == {
        check: sum(check in one.checks for one in refused.values())
        for check in {check for one in refused.values() for check in one.checks}
    }
    # Putting in order comes before the spaces are asked.
    assert _counted(receipt.checks, "corrected").get("unordered", 0) == sum(
        one.rows != sorted(one.rows, key=lambda row: row[:2])
        for one in judged.values()
        if one.checks <= {"space"}
    )
    if options.gaps != "split" and all(agent == "" for _, agent in kept):
        assert _counted(receipt.checks, "noted").get("duplicate", 0) == _num_doubled(kept)
    steps, quarantined = _steps(lake), _quarantined(lake)
    assert steps == {key: _expected(one) for key, one in kept.items()}
    assert quarantined == {
        key: sorted((f"log{f}.jsonl", i, *sorted(one.checks)) for f, i, _ in one.rows)
        for key, one in refused.items()
    }
    again = ingest(lake, paths, "log", options=options)
    assert again.episodes == Counts(0, len(refused), len(kept))
    assert again.steps == Counts(0, _num_rows(refused), _num_rows(kept))
    assert (again.version, again.num_quarantined) == (None, 0)
    assert (_steps(lake), _quarantined(lake)) == (steps, quarantined)


def _num_doubled(kept: dict[Key, _Judged]) -> int:
    """Count the episodes of two steps or more whose content an earlier one has."""
    contents = [
        str([(r["observation"], r["action"], r["reward"]) for _, _, r in one.rows])
        for one in kept.values()
        if len(one.rows) > 1
    ]
    return len(contents) - len(set(contents))


def _expected(one: _Judged) -> list[tuple[Any, ...]]:
    """Return the transitions that an episode is, by step."""
    rows = [row for _, _, row in one.rows]
    following = {row["step"] - 1: row["observation"] for row in rows}
    return [
        (
            row["step"],
            row["observation"],
            row["action"],
            row["reward"],
            row is rows[-1] and one.terminated,
            row is rows[-1] and one.truncated,
            row.get("next_observation") if row["step"] in one.lasts else following[row["step"]],
            row["logged"],
        )
        for row in rows
    ]


_COLUMNS = "observation, action, reward, terminated, truncated, next_observation, logged"


def _steps(lake: Lake, columns: str = _COLUMNS) -> dict[Key, list[tuple[Any, ...]]]:
    rows = lake.sql(
        f"select source_episode_id, agent_id, step, {columns} from log.transitions "
        "where source_episode_id <> 'seed' order by 1, 2, 3"
    )
    return _by_key([tuple(row.values()) for row in rows.to_pylist()])


def _quarantined(lake: Lake) -> dict[Key, list[tuple[Any, ...]]]:
    rows = lake.sql(
        "select source_episode_id, agent_id, file, file_row, checks from log.quarantine "
        "order by 1, 2, 3, 4"
    )
    return _by_key([(*list(r.values())[:4], *sorted(r["checks"])) for r in rows.to_pylist()])


def _by_key(rows: list[tuple[Any, ...]]) -> dict[Key, list[tuple[Any, ...]]]:
    groups = groupby(rows, key=lambda row: (row[0], row[1]))
    return {key: [row[2:] for row in group] for key, group in groups}


def _counted(checks: Sequence[Any], outcome: str) -> dict[str, int]:
    return {check.name: check.num_episodes for check in checks if check.outcome == outcome}


def _num_rows(judged: dict[Key, _Judged]) -> int:
    return sum(len(one.rows) for one in judged.values())


def _written(log: _Log, folder: Path) -> list[Path]:
    return [_file(folder / f"log{i}.jsonl", rows) for i, rows in enumerate(log.files)]


def _file(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _make_all_tiny(patch: pytest.MonkeyPatch) -> None:
    """Let nothing stay in memory: parsed rows spool, episodes are carried and read twice."""
    tabular = "replaylake.datastore.interchange.formats.tabular"
    patch.setattr(f"{tabular}.tables.CachedTables.__init__.__defaults__", (300, None))
    patch.setitem(TabularReader.__init__.__kwdefaults__, "block_bytes", 300)
    patch.setattr("replaylake.datastore.interchange.formats.generic.jsonl._BLOCK_BYTES", 300)
    patch.setattr("replaylake.datastore.interchange.ingest.inspection._KEEP_BYTES", 0)
    patch.setattr("replaylake.datastore.interchange.ingest.inspection._CHECK_STEPS", 3)
