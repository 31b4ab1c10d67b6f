"""Decoding needs no memory in proportion to the tokens, in a process whose memory is looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.lake.lake import Lake

# 320 MB of arrays, in one row group.
NUM_SEQUENCES, NUM_TOKENS = 60, 600_000

DECODE = """
import json, sys
from replaylake.datastore.lake.lake import open_lake

def anonymous():
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("RssAnon")).split()[1]) * 1024

lake = open_lake(sys.argv[1])
lake.snapshot("small").token_sequences(cache=False).padded(1, seed=0).sample()
before = anonymous()

import threading
largest, stop = before, threading.Event()
def watch():
    global largest
    while not stop.wait(0.005):
        largest = max(largest, anonymous())
thread = threading.Thread(target=watch)
thread.start()
sequences = lake.snapshot("large").token_sequences()
sampler = sequences.packed(700_000, seed=0)
total = sum(int(sampler.sample().token_ids.sum()) for _ in range(60))
stop.set()
thread.join()
print(json.dumps([sequences.num_tokens, largest - before, total]))
"""


@pytest.mark.slow
def test_sequences_larger_than_the_memory_for_them(
    lake: Lake, tmp_path: Path, make_dialogue: Callable[..., Episode]
) -> None:
    expected = 0
    for name, num, length in (("small", 1, 10), ("large", NUM_SEQUENCES, NUM_TOKENS)):
        episodes = []
        for number in range(num):
            ids = np.arange(length, dtype=np.int32) % 1000 + number
            expected += int(ids.sum()) if name == "large" else 0
            extras = {
                "observation_tokens": [ids[: length // 2]],
                "action_tokens": [ids[length // 2 :]],
                "action_log_probs": [np.full(length - length // 2, -0.5, np.float32)],
            }
            episodes.append(make_dialogue(f"e{number}", 1, extras=extras))
        lake.dataset(name).append(episodes)
    command = [sys.executable, "-c", DECODE, str(tmp_path / "lake")]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    num_tokens, largest, total = json.loads(found.stdout)
    assert (num_tokens, total) == (NUM_SEQUENCES * NUM_TOKENS, expected)
    # A batch of one sequence takes 5 MB, and a piece that is decoded some times 4 MB.
    assert largest < 9 * num_tokens / 2
