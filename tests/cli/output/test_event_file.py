"""Event files, read back by protobuf's own library through TensorBoard's message."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from replaylake.cli.output.watch import EventFile


def test_scalars_come_back(events_of: Any, tmp_path: Path) -> None:
    with EventFile(tmp_path / "new" / "folder") as events:
        events.add(0, {"critic_loss": 0.5})
        events.add(100, {"critic_loss": 0.25, "evaluation/return": -171.5, "größe": 1.0})
        # What is added is there before the file is closed.
        assert len(events_of.read(events.path)) == 3
        events.add(2**40, {"critic_loss": 0.125})
    first, *rest = events_of.read(events.path)
    assert (first.file_version, first.step) == ("brain.Event:2", 0)
    assert events_of.scalars(rest) == [
        (0, {"critic_loss": 0.5}),
        (100, {"critic_loss": 0.25, "evaluation/return": -171.5, "größe": 1.0}),
        (2**40, {"critic_loss": 0.125}),
    ]
    assert all(event.wall_time > 1.7e9 for event in (first, *rest))
    assert events.path.name.startswith("events.out.tfevents.")


@pytest.mark.parametrize(
    ("value", "read"), [(1e300, math.inf), (-1e300, -math.inf), (math.inf, math.inf), (0.0, 0.0)]
)
def test_numbers_beyond_float32_are_infinite(
    events_of: Any, tmp_path: Path, value: float, read: float
) -> None:
    with EventFile(tmp_path) as events:
        events.add(1, {"loss": value})
    assert events_of.scalars(events_of.read(events.path)) == [(1, {"loss": read})]


def test_nan_stays_nan(events_of: Any, tmp_path: Path) -> None:
    with EventFile(tmp_path) as events:
        events.add(1, {"loss": math.nan})
    ((_, found),) = events_of.scalars(events_of.read(events.path))
    assert math.isnan(found["loss"])


def test_a_resumed_run_says_from_where(events_of: Any, tmp_path: Path) -> None:
    with EventFile(tmp_path, resumed_after=500) as events:
        events.add(600, {"loss": 1.0})
    _, restart, _ = events_of.read(events.path)
    # SessionLog.START: readers drop what other files say from this step on.
    assert (restart.step, restart.session_log.status) == (501, 1)
