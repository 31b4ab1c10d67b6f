"""Numbers that outlive the process that counted them, and that others can read."""

import os
import subprocess
import sys

import numpy as np

from replaylake.serve.monitoring.shared_counters import MAX_WIDTH, NUM_COUNTERS, SharedCounters

_COUNTER = """
import sys, time
from pathlib import Path
from replaylake.serve.monitoring.shared_counters import SharedCounters
cells = SharedCounters(Path(sys.argv[1]))
begin = cells.block(("requests", ("/act", "200")))
for _ in range(1000):
    cells.values[begin] += 1
print("counted", flush=True)
time.sleep(60)
"""


def counted(cells):
    return {block.key: (block.values.tolist(), block.is_live) for block in cells.blocks()}


def test_a_block_is_the_same_every_time_and_begins_at_zero():
    cells = SharedCounters()
    one, wide = cells.block(("a", ("x",))), cells.block(("b", ()), 3)
    assert cells.block(("a", ("x",))) == one
    cells.values[one] += 2.5
    cells.values[wide + 2] += 1
    assert counted(cells) == {("a", ("x",)): ([2.5], True), ("b", ()): ([0, 0, 1], True)}


def test_what_is_given_back_is_used_again_empty():
    cells = SharedCounters()
    first = cells.block(("a", ()), 4)
    cells.values[first + 3] = 7
    cells.release(("a", ()))
    cells.release(("never", ()))
    assert cells.block(("b", ()), 4) == first
    assert counted(cells) == {("b", ()): ([0, 0, 0, 0], True)}


def test_without_room_nothing_that_is_counted_is_spoilt():
    cells = SharedCounters()
    begins = {cells.block((str(i), ()), 100) for i in range(200)}
    lost = NUM_COUNTERS - MAX_WIDTH
    assert lost in begins
    assert all(begin + 100 <= lost for begin in begins - {lost})


def test_a_killed_worker_is_still_counted_and_no_longer_alive(tmp_path):
    mine = SharedCounters(tmp_path)
    mine.values[mine.block(("requests", ("/act", "200")))] += 1
    command = [sys.executable, "-c", _COUNTER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout.readline() == "counted\n"
        theirs = [block for block in mine.blocks() if block.values[0] > 1]
        worker.kill()
    assert [(block.values.tolist(), block.is_live) for block in theirs] == [([1000.0], True)]
    assert [(block.values.tolist(), block.is_live) for block in mine.blocks()] == [
        ([1.0], True),
        ([1000.0], False),
    ]


def test_keys_that_are_half_written_or_without_cells_are_left_out(tmp_path):
    other = SharedCounters(tmp_path)
    other.values[other.block(("a", ()))] = 1
    other.block(("gone", ()))
    other.release(("gone", ()))
    (keys,) = tmp_path.glob("*.keys")
    with keys.open("ab") as file:
        file.write(b'[5, 1, ["half')
    (tmp_path / "starting.keys").touch()
    mine = SharedCounters(tmp_path)
    assert counted(mine) == {("a", ()): ([1.0], True)}


def test_others_see_what_is_counted_at_once(tmp_path):
    writer, reader = SharedCounters(tmp_path), SharedCounters(tmp_path)
    begin = writer.block(("a", ()))
    for number in range(1, 4):
        writer.values[begin] += 1
        assert counted(reader) == {("a", ()): ([float(number)], True)}
    assert np.fromfile(next(tmp_path.glob("*.cells")), np.float64).size == NUM_COUNTERS
    assert os.listdir(tmp_path)
