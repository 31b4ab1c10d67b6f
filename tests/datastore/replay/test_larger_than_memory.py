"""A view larger than its memory budget, in a process of its own whose memory is looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.lake.lake import Lake, open_lake

# 160 MB of records: 200 episodes of 1,000 steps of 200 floats.
NUM_EPISODES, NUM_STEPS, SIZE = 200, 1000, 200
BUDGET = 40 << 20

TRAIN = """
import json, sys
import numpy as np
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.replay.items.transitions import Transitions

def anonymous():
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("RssAnon")).split()[1]) * 1024

snapshot = open_lake(sys.argv[1]).snapshot("d")
sampler = open_lake(sys.argv[1]).snapshot("small").replay().uniform(256, seed=0)
for _ in range(5000):
    sampler.sample()
before = anonymous()
seen = [before]
view = snapshot.replay(
    memory_budget_bytes=int(sys.argv[2]), on_progress=lambda done, of: seen.append(anonymous())
)
largest, total = max(*seen, anonymous()) - before, 0.0
sampler = view.uniform(256, seed=0)
for _ in range(200):
    for _ in range(10):
        batch = sampler.sample()
    total += float(batch.rewards.sum())
    largest = max(largest, anonymous() - before)
print(json.dumps([view.packed.records.words.nbytes, largest, total]))
"""


@pytest.fixture
def large(tmp_path: Path) -> Lake:
    lake = open_lake(tmp_path / "lake", create=True)
    rng = np.random.default_rng(0)
    for name, num in (("d", NUM_EPISODES), ("small", 2)):
        for start in range(0, num, 20):
            lake.dataset(name).append(
                [
                    Episode(
                        f"{name}{number}",
                        rng.standard_normal((NUM_STEPS, SIZE), np.float32),
                        np.zeros(NUM_STEPS, np.int64),
                        np.full(NUM_STEPS, float(number)),
                        terminated=True,
                    )
                    for number in range(start, min(num, start + 20))
                ]
            )
    return lake


@pytest.mark.slow
def test_decoding_and_training_stay_within_a_quarter_of_the_view(large: Lake) -> None:
    totals = []
    for _ in ("decoded", "reopened"):
        done = subprocess.run(
            [sys.executable, "-c", TRAIN, large.url, str(BUDGET)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        size, largest, total = json.loads(done.stdout)
        assert size > 3.9 * BUDGET
        assert largest < BUDGET
        totals.append(total)
    assert totals[0] == totals[1]
    in_memory = large.snapshot("d").replay(cache=False)
    assert in_memory.packed.records.words.nbytes == size
