"""Streams: whatever way lines are delivered, each step is there once, and every line accounted."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import (
    ConfigInvalidError,
    NotFoundError,
    SourceInvalidError,
    StorageError,
)
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.stream import ingester as follower
from replaylake.datastore.interchange.ingest.stream import writer as pieces
from replaylake.datastore.interchange.ingest.stream.lines import Line, LineReader
from replaylake.datastore.interchange.ingest.stream.receipt import StreamProgress, StreamReceipt
from replaylake.datastore.interchange.ingest.stream.stream import follow
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.purge.purge import purge

_SPACES = (Box((2,), "float32"), Discrete(5))
_CONTENT = (
    "SELECT episode_id, agent_id, step, observation, action, reward, terminated, truncated, "
    "note, next_observation FROM log.transitions ORDER BY ALL"
)


class _Given:
    """Lines that come in these chunks, one a take."""

    name = "given"

    def __init__(self, chunks: Sequence[Sequence[bytes | dict[str, Any]]]) -> None:
        self._chunks = list(chunks)
        self._number = 0

    @property
    def is_over(self) -> bool:
        return not self._chunks

    def take(self, timeout_s: float) -> list[Line]:
        lines = []
        for one in self._chunks.pop(0):
            self._number += 1
            text = one if isinstance(one, bytes) else json.dumps(one).encode()
            lines.append(Line(self._number, text))
        return lines


def _step(episode: str, step: int, length: int = 4, **changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng([ord(episode[0]), step])
    return {
        "episode_id": episode,
        "step": step,
        "observation": rng.normal(size=2).tolist(),
        "action": step % 5,
        "reward": step + 0.5,
        "terminated": step == length - 1,
        "note": f"{episode}{step}",
        **changes,
    }


def _log(lengths: dict[str, int]) -> list[dict[str, Any]]:
    return [_step(e, t, length) for e, length in lengths.items() for t in range(length)]


def _follow(lake: Lake, *chunks: Sequence[bytes | dict[str, Any]], **how: Any) -> StreamReceipt:
    """Flush after every chunk, unless told otherwise."""
    options = {"flush_every_s": 0.0, "wait_s": 3600.0, "spaces": _SPACES, **how}
    receipt = follow(lake, _Given(chunks), "log", **options)
    assert receipt.lines.read == sum(1 for chunk in chunks for one in chunk if one != b"")
    return receipt


def _rows(lake: Lake, text: str = _CONTENT) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = lake.sql(text).to_pylist()
    return rows


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def test_lines_become_episodes_in_pieces(lake: Lake) -> None:
    log = _log({"a": 4, "b": 3})
    receipt = _follow(lake, log[:2], log[2:5], log[5:])
    assert receipt.to_json()["lines"] == {
        "read": 7,
        "committed": 7,
        "rejected": 0,
        "already_present": 0,
    }
    assert receipt.num_commits == 3
    episodes = _rows(lake, "SELECT * FROM log.episodes ORDER BY episode_id")
    assert [(e["episode_id"], e["num_steps"], e["terminated"]) for e in episodes] == [
        ("log/a", 4, True),
        ("log/b", 3, True),
    ]
    assert episodes[0]["source_episode_id"] == "a"
    found = _rows(lake)
    for row, following in pairwise(found[:4]):
        assert row["next_observation"] == following["observation"]


def test_lines_delivered_again_add_nothing(lake: Lake) -> None:
    log = _log({"a": 4, "b": 3})
    _follow(lake, log[:5])
    before = _rows(lake)
    again = _follow(lake, log[:5], log)
    assert (again.lines.committed, again.lines.already_present) == (2, 10)
    assert _rows(lake)[:4] == before[:4]
    assert len(_rows(lake)) == 7
    nothing = _follow(lake, log, log)
    assert (nothing.lines.committed, nothing.lines.already_present) == (0, 14)
    history = lake.dataset("log").history()
    assert sum(one.get("num_already_present_steps", 0) for one in history) == 24


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_step_with_other_content_is_named(lake: Lake, chunks: int) -> None:
    log = _log({"a": 2})
    other = [_step("a", 1, 2, reward=7.0)]
    receipt = _follow(lake, log, other) if chunks == 2 else _follow(lake, [*log, *other])
    assert receipt.lines.rejected == 1
    (reason,) = receipt.reasons
    assert reason.check == "step_twice"
    assert "line 3: found step 1 of episode a with other values" in reason.example
    assert _rows(lake)[1]["reward"] == 1.5
    (row,) = _rows(lake, "SELECT * FROM log.quarantine")
    assert (row["episode_id"], row["checks"]) == ("log/a", ["step_twice"])
    assert json.loads(row["row"])["reward"] == 7.0


@pytest.mark.slow
def test_a_bad_line_lies_in_quarantine_under_all_that_it_tells(lake: Lake) -> None:
    """Else a purge of whom it is of would not find it."""
    log = _log({"a": 2})
    no_step = {**_step("secret-person", 0), "step": None, "policy": "anna"}
    nameless = [
        {**_step("b", t), "episode_id": None, "policy": p} for t, p in ((0, "anna"), (1, "bert"))
    ]
    receipt = _follow(lake, [{**line, "policy": "bert"} for line in log], [no_step, *nameless])
    assert receipt.lines.rejected == 3
    rows = _rows(lake, "SELECT * FROM log.quarantine ORDER BY row->>'$.policy', episode_id")
    first, second, third = [row["source_episode_id"] for row in rows]
    assert "secret-person" in (first, second)
    assert third.startswith("line-5/")
    done = purge(lake, "log", "source_episode_id = 'secret-person'")
    assert (done.num_episodes, done.is_proven) == (1, True)
    done = purge(lake, "log", "policy = 'anna'")
    assert (done.num_episodes, done.is_proven) == (1, True)
    (row,) = _rows(lake, "SELECT * FROM log.quarantine")
    assert row["source_episode_id"] == third


def test_a_late_step_is_waited_for(lake: Lake) -> None:
    log = _log({"a": 4})
    receipt = _follow(lake, [log[2]], [log[0], log[3]], [log[1]])
    assert receipt.lines.committed == 4
    assert len(_rows(lake)) == 4


def test_what_waited_too_long_is_named(lake: Lake) -> None:
    log = _log({"a": 4, "b": 2})
    receipt = _follow(lake, [log[0]], [log[2], log[3]], log[4:], [log[1]], wait_s=0.0)
    assert receipt.lines.committed == 4
    (reason,) = receipt.reasons
    assert (reason.check, reason.num_lines) == ("gap", 2)
    assert "predecessors from 1 on have not come" in reason.example
    # Once they are delivered again, they are no gap any more.
    assert _follow(lake, log).lines.committed == 2


def test_an_episode_may_begin_later_than_0_and_not_before_its_first_commit(lake: Lake) -> None:
    receipt = _follow(lake, [_step("a", 5), _step("a", 6)], [_step("a", 4)])
    assert (receipt.lines.committed, receipt.lines.rejected) == (3, 0)
    receipt = _follow(lake, [_step("a", 2)])
    assert "after 4 and later ones of its episode had been committed" in receipt.reasons[0].example


def test_bad_lines_do_not_stop_it(lake: Lake) -> None:
    log: list[Any] = _log({"a": 4, "b": 2, "c": 2})
    log[2] = {**log[2], "observation": [float("nan"), 0.0]}
    log[5] = {**log[5], "action": 9}
    log[7] = {**log[7], "observation": [1.0, 2.0, 3.0]}
    bad = [
        b"{",
        b"[1]",
        b"",
        b"\xff",
        {**_step("d", 0), "step": 1.5},
        {**_step("e", 0), "step": -1},
    ]
    nameless = {**_step("f", 0), "episode_id": None}
    receipt = _follow(lake, [*bad, *log, nameless, {**_step("g", 0), "reward": "much"}])
    counts = {reason.check: reason.num_lines for reason in receipt.reasons}
    assert counts.pop("malformed") == 3
    assert counts.pop("gap") == 1
    assert counts == {
        "not_finite": 1,
        "space": 1,
        "shape": 1,
        "not_whole": 1,
        "negative_step": 1,
        "missing": 1,
        "dtype": 1,
    }
    examples = {reason.check: reason.example for reason in receipt.reasons}
    assert "given line 9" in examples["not_finite"]
    assert "given line 12" in examples["space"]
    assert receipt.lines.committed == 4
    assert len(_rows(lake, "SELECT * FROM log.quarantine")) == receipt.lines.rejected


def test_steps_after_the_end_are_named(lake: Lake) -> None:
    log = [_step("a", 0, 9), _step("a", 1, 2), _step("a", 2, 9), _step("a", 3, 9)]
    for name, chunks in (("one", [log]), ("two", [log[:2], log[2:]])):
        receipt = _follow(lake, *chunks, stream=name)
        assert receipt.lines.committed == 2
        assert [(r.check, r.num_lines) for r in receipt.reasons] == [("end_inside", 2)]


def test_a_next_observation_has_to_follow(lake: Lake) -> None:
    log = _log({"a": 4})
    for row, following in pairwise(log):
        row["next_observation"] = following["observation"]
    log[-1]["next_observation"] = [0.0, 0.0]
    log[1]["next_observation"] = [9.0, 9.0]
    for name, chunks in (("one", [log]), ("two", [log[:2], log[2:]])):
        receipt = _follow(lake, *chunks, stream=name)
        assert receipt.lines.committed == 2
        counts = {r.check: r.num_lines for r in receipt.reasons}
        assert counts == {"next_observation": 1, "gap": 1}


def test_streams_are_told_apart_by_name(lake: Lake) -> None:
    log = _log({"a": 2})
    _follow(lake, log)
    _follow(lake, log, stream="other")
    ids = [row["episode_id"] for row in _rows(lake, "SELECT DISTINCT episode_id FROM log.steps")]
    assert sorted(ids) == ["log/a", "other/a"]
    with pytest.raises(ConfigInvalidError, match="stream: found"):
        _follow(lake, log, stream="a/b")


def test_agents_are_kept_apart(lake: Lake) -> None:
    log = [{**row, "agent_id": who} for row in _log({"a": 2}) for who in ("x", "y")]
    receipt = _follow(lake, log[:3], log[1:])
    assert (receipt.lines.committed, receipt.lines.already_present) == (4, 2)
    assert _rows(lake, "SELECT num_agents FROM log.games") == [{"num_agents": 2}]


def test_what_cannot_be_followed_is_refused_by_name(lake: Lake) -> None:
    row = _step("a", 0)
    with pytest.raises(SourceInvalidError, match=r"no column for step.*`mapping` step=COLUMN"):
        _follow(lake, [{k: v for k, v in row.items() if k != "step"}])
    with pytest.raises(SourceInvalidError, match="no column for episode_id"):
        _follow(lake, [{k: v for k, v in row.items() if k != "episode_id"}])
    with pytest.raises(ConfigInvalidError, match="gaps: found 'split'"):
        _follow(lake, [row], options=ReadOptions(gaps="split"))
    assert not lake.dataset("log").exists()


def test_columns_are_mapped_and_new_ones_kept(lake: Lake) -> None:
    names = {"episode_id": "who", "step": "n", "reward": "payoff"}
    log = [{names.get(k, k): v for k, v in row.items()} for row in _log({"a": 3})]
    log[2]["mood"] = "good"
    options = ReadOptions(mapping=names)
    assert _follow(lake, log[:1], log[1:], options=options).lines.committed == 3
    assert [row["mood"] for row in _rows(lake, "SELECT mood FROM log.steps ORDER BY step")] == [
        None,
        None,
        "good",
    ]
    assert _follow(lake, log, options=options).lines.already_present == 3


def test_spaces_come_from_the_first_lines_where_nobody_says(lake: Lake) -> None:
    receipt = _follow(lake, _log({"a": 2}), [_step("b", 0), _step("b", 1, action=4)], spaces=None)
    assert "come from the first lines" in receipt.notes[0]
    assert [r.check for r in receipt.reasons] == ["space"]
    assert receipt.lines.committed == 3


def test_another_writer_of_the_stream_doubles_nothing(lake: Lake) -> None:
    log = _log({"a": 4})

    class _Interrupted(_Given):
        def take(self, timeout_s: float) -> list[Line]:
            if len(self._chunks) == 1:
                _follow(lake, log[:3])
            return super().take(timeout_s)

    receipt = follow(
        lake, _Interrupted([log[:2], log[2:]]), "log", spaces=_SPACES, flush_every_s=0.0
    )
    assert (receipt.lines.committed, receipt.lines.already_present) == (3, 1)
    assert len(_rows(lake)) == 4


_ODD = [
    None, True, -1, 1.5, 2**40, 2**70, 1e400, float("nan"), "", "3", "x" * 300, "\0", "\ud800", [],
    [1], [None, 1], ["a", 1], [[1, 2], [3]], {}, {"a": 1}, {"": [{}]}, [0.0, 0.0, 0.0],
]  # fmt: skip


@pytest.mark.parametrize("name", [*_step("a", 0), "further", "", "\0", "\ud800", "agent_id"])
def test_odd_values_are_accepted_or_named_and_stop_nothing(lake: Lake, name: str) -> None:
    odd = [{**_step(f"o{i}", 0), name: value} for i, value in enumerate(_ODD)]
    good = _log({"a": 3})
    receipt = _follow(lake, good[:1], [*odd, good[1]], *(odd[i::3] for i in range(3)), good[2:])
    text = "SELECT step FROM log.steps WHERE source_episode_id = 'a' ORDER BY step"
    # Once there are several agents, a step has to say whose it is.
    expected = 1 if name == "agent_id" else 3
    assert [row["step"] for row in _rows(lake, text)] == [0, 1, 2][:expected]
    assert receipt.lines.committed >= expected


def test_a_commit_whose_answer_was_lost_is_no_second_one(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, failures = Dataset.append, [1, 1]

    def failing(self: Dataset, *episodes: Any, **how: Any) -> Any:
        done = append(self, *episodes, **how)
        if failures:
            failures.pop()
            raise StorageError("the answer was lost")
        return done

    monkeypatch.setattr(Dataset, "append", failing)
    monkeypatch.setattr(pieces, "_FIRST_PAUSE_S", 0.0)
    receipt = _follow(lake, _log({"a": 3}))
    assert (receipt.lines.committed, receipt.lines.already_present) == (3, 0)
    assert len(_rows(lake)) == 3


def test_what_waits_is_bounded_and_the_oldest_is_given_up(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "_WINDOW_BYTES", 2000)
    monkeypatch.setattr(follower, "_WAITING_BYTES", 2000)
    late = [_step("a", step, 99) for step in range(2, 40)]
    most = 0

    def tell(progress: StreamProgress) -> None:
        nonlocal most
        most = max(most, progress.num_waiting)

    receipt = _follow(lake, [_step("a", 0)], *([one] for one in late), on_progress=tell)
    assert 5 < most < 30
    assert (receipt.lines.committed, receipt.lines.rejected) == (1, 38)


_LOG = _log({"a": 5, "b": 1, "c": 3})


@st.composite
def _deliveries(draw: st.DrawFn) -> list[list[list[dict[str, Any]]]]:
    """One or several runs of a stream, each in chunks; the last brings all, in any order."""
    runs = []
    for is_last in [*draw(st.lists(st.just(False), max_size=2)), True]:
        rows = draw(st.lists(st.sampled_from(_LOG), max_size=8))
        if is_last:
            rows = draw(st.permutations([*_LOG, *rows]))
        cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=3)))
        edges = [0, *cuts, len(rows)]
        runs.append([rows[i:j] for i, j in pairwise(edges)])
    return runs


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(_deliveries())
def test_any_delivery_gives_the_same_dataset(
    tmp_path_factory: pytest.TempPathFactory, runs: list[list[list[dict[str, Any]]]]
) -> None:
    lake = open_lake(tmp_path_factory.mktemp("lake"), create=True)
    begins = {}
    for number, chunks in enumerate(runs):
        receipt = _follow(lake, *chunks)
        if number < len(runs) - 1 and lake.dataset("log").exists():
            for row in _rows(lake, "SELECT episode_id, first_step FROM log.episodes"):
                begins[row["episode_id"].removeprefix("log/")] = row["first_step"]
    # An earlier run that ended with the middle of an episode alone made it begin there.
    expected = [row for row in _LOG if row["step"] >= begins.get(row["episode_id"], 0)]
    found = _rows(lake)
    assert [row["note"] for row in found] == [row["note"] for row in expected]
    assert [row["reward"] for row in found] == [row["reward"] for row in expected]
    for row in found:
        assert row["terminated"] == (row["next_observation"] is None)
    assert {reason.check for reason in receipt.reasons} <= {"gap"}


def test_a_pipe_is_read_to_its_end() -> None:
    reading, writing = os.pipe()
    reader = LineReader(reading, "<stdin>")
    assert reader.take(0.01) == []
    os.write(writing, b"one\ntw")
    assert [line.text for line in reader.take(1)] == [b"one"]
    os.write(writing, b"o\nthree")
    assert reader.take(1) == [Line(2, b"two")]
    os.close(writing)
    assert reader.take(1) == [Line(3, b"three")]
    assert reader.is_over
    os.close(reading)


def test_a_growing_file_is_followed_over_rotation(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with pytest.raises(NotFoundError):
        LineReader.from_path(path)
    path.write_bytes(b"1\n2")
    with LineReader.from_path(path) as reader:
        assert [line.text for line in reader.take(0)] == [b"1"]
        assert reader.take(0) == []
        with path.open("ab") as stream:
            stream.write(b"2\n")
        assert [line.text for line in reader.take(0)] == [b"22"]
        path.rename(tmp_path / "log.1")
        assert reader.take(0) == []
        path.write_bytes(b"3\n")
        assert [line.text for _ in range(2) for line in reader.take(0)] == [b"3"]
        path.write_bytes(b"")
        assert [line.text for _ in range(2) for line in reader.take(0)] == []
        path.write_bytes(b"4\n")
        assert [line.text for _ in range(2) for line in reader.take(0)] == [b"4"]
        assert not reader.is_over


def test_it_stops_when_told_and_commits_what_it_holds(lake: Lake) -> None:
    stop = threading.Event()

    class _Endless(_Given):
        is_over = False  # type: ignore[assignment]

        def take(self, timeout_s: float) -> list[Line]:
            if not self._chunks:
                stop.set()
                return []
            return super().take(timeout_s)

    receipt = follow(lake, _Endless([_log({"a": 3})]), "log", spaces=_SPACES, stop=stop)
    assert receipt.lines.committed == 3
