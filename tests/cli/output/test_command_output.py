"""What people read: tables, trees, numbers and progress."""

import io
import json
import math
import time
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from replaylake.cli.output import progress as progress_module
from replaylake.cli.output.command_output import (
    CommandOutput,
    cell_text,
    count,
    data_lines,
    fit_columns,
    number_text,
    one_line,
    size,
    table_lines,
    tree_lines,
)
from replaylake.cli.output.progress import ProgressReport, WaitingReport, amount, time_left


def test_a_table_aligns_numbers_to_the_right() -> None:
    rows = [
        {"name": "cartpole", "n": 4137, "mean": 197.0},
        {"name": "a", "n": 3, "mean": None},
    ]
    assert table_lines(rows, ["name", "n", "mean"]) == [
        "name         n  mean",
        "cartpole  4137   197",
        "a            3",
    ]


def test_an_empty_table_is_its_header() -> None:
    assert table_lines([], ["a", "b"]) == ["a  b"]


def test_a_long_vector_is_cut() -> None:
    text = cell_text([0.123456789] * 100)
    assert len(text) == 44
    assert text.startswith("[0.123457, 0.123457,")
    assert text.endswith("...")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (True, "true"), (b"abc", "3 bytes"), ("a\nb", "a b"), (1.5, "1.5"), ([], "[]")],
)
def test_cells(value: object, text: str) -> None:
    assert cell_text(value) == text


def test_numbers() -> None:
    assert count(1, "step") == "1 step"
    assert count(4137, "step") == "4,137 steps"
    assert [size(n) for n in (0, 999, 1000, 4_100_000)] == [
        "0 bytes",
        "999 bytes",
        "1.0 kB",
        "4.1 MB",
    ]
    assert [number_text(n) for n in (4137, 197.0, 9.349288, None)] == [
        "4,137",
        "197",
        "9.34929",
        "unknown",
    ]


def test_a_tree_leaves_out_what_is_not_there() -> None:
    body = {
        "policy": {"policy": "clone", "aliases": []},
        "datasets": [{"version": 1}, {"where": None}],
    }
    assert tree_lines(body) == ["policy", "  policy  clone", "datasets", "  version  1", "datasets"]


def test_json_is_one_strict_object(capsys: pytest.CaptureFixture[str]) -> None:
    body = {
        "nan": math.nan,
        "numpy": np.float32(0.5),
        "array": np.arange(2),
        "time": datetime(2026, 1, 31, tzinfo=UTC),
        "tuple": (1, math.inf),
    }
    CommandOutput(as_json=True).print_result(body, ["not this"])
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "nan": None,
        "numpy": 0.5,
        "array": [0, 1],
        "time": "2026-01-31T00:00:00+00:00",
        "tuple": [1, None],
    }
    assert captured.err == ""


class Clock:
    """Stands for the `time` module."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_progress_says_nothing_of_what_is_quick(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    with ProgressReport("read", "files") as progress:
        for done in range(20):
            clock.now += 0.09
            progress(done, 20)
    assert capsys.readouterr().err == ""


def test_progress_is_a_line_every_two_seconds_and_the_last_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    with ProgressReport("read", "files") as progress:
        for done in range(1, 51):
            clock.now += 0.125
            progress(done, 50, "3 episodes")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "read 16/50 files, 8 files/s, 4 s left  3 episodes",
        "read 32/50 files, 8 files/s, 2 s left  3 episodes",
        "read 48/50 files, 8 files/s, 1 s left  3 episodes",
        "read 50/50 files, 8 files/s  3 episodes",
    ]


def test_what_has_no_unit_has_a_time_left_too_unless_its_note_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    with ProgressReport("fitting", "") as progress:
        clock.now += 4
        progress(200, 1000)
        clock.now += 4
        progress(400, 1000, "9 s left")
    assert capsys.readouterr().err.splitlines() == [
        "fitting 200/1,000, 16 s left",
        "fitting 400/1,000  9 s left",
    ]


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal: Any = Terminal()
    clock = Clock()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress_module, "time", clock)
    monkeypatch.setattr("sys.stderr", terminal)
    with ProgressReport("read", "files") as progress:
        progress(1, 50)
        assert terminal.getvalue() == ""
        clock.now += 1
        progress(25, 50, "3 episodes")
    assert "25/50" in terminal.getvalue()


def test_each_stage_has_its_own_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    with ProgressReport("read", "steps") as progress:
        progress.stage("hashed", "bytes")
        clock.now += 10
        progress(2_000_000_000, 20_000_000_000)
        progress.stage("read", "rows")
        clock.now += 4
        progress(1_200_000, None, share=0.25)
    assert capsys.readouterr().err.splitlines() == [
        "hashed 2.0/20.0 GB, 200.0 MB/s, 1 min 30 s left",
        "read 1,200,000 rows, 300,000 rows/s, 12 s left",
    ]


def test_amounts_and_times() -> None:
    assert amount(4137, "steps") == "4,137 steps"
    assert amount(5, "", 10) == "5/10"
    assert amount(1_500_000, "bytes", 30_000_000) == "1.5/30.0 MB"
    assert [time_left(s) for s in (0.1, 59.4, 200, 7500)] == [
        "1 s",
        "59 s",
        "3 min 20 s",
        "2 h 5 min",
    ]


def test_what_a_terminal_would_obey_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "a\x1b[31m\x07\x9b2J\u202eb\ud800"
    report = CommandOutput(as_json=False)
    report.print_result({}, [hostile, "two\nlines, Zoë, 名"])
    report.print_message(hostile)
    captured = capsys.readouterr()
    named = "a\\x1b[31m\\x07\\x9b2J\\u202eb\\ud800"
    assert captured.out == f"{named}\ntwo\nlines, Zoë, 名\n"
    assert captured.err == f"{named}\n"
    report.print_result({}, data_lines(["the column `where`"]))
    assert capsys.readouterr().out == "the column `where`\n"
    assert one_line("a\nb\tc") == "a\\nb\\tc"
    CommandOutput(as_json=True).print_result({"x": hostile}, [])
    text = capsys.readouterr().out
    assert text.strip().isprintable()
    assert json.loads(text)["x"].replace("\\ud800", "\ud800") == hostile


def test_waiting_is_said_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_module, "_LINE_INTERVAL_S", 0.02)
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: 7.0))
    out = err = ""
    with WaitingReport("running the query") as waiting:
        while err.count("\n") < 3:
            time.sleep(0.01)
            captured = capsys.readouterr()
            out, err = out + captured.out, err + captured.err
        waiting.end()
    assert out == ""
    assert set(err.splitlines()) == {"running the query, 0 s"}
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_waiting_says_nothing_of_what_is_quick(capsys: pytest.CaptureFixture[str]) -> None:
    with WaitingReport("running the query"):
        pass
    assert capsys.readouterr().err == ""


def test_columns_that_fit_a_terminal():
    rows = [{"a": 1, "b": "xxxx", "c": 2}]
    assert fit_columns(rows, ["a", "b", "c"], 7) == ["a", "b"]
    assert fit_columns(rows, ["a", "b", "c"], 10) == ["a", "b", "c"]
    assert fit_columns(rows, ["b", "a"], 1) == ["b"]
