"""The Python of docs/REPLAY.md runs, block by block, over a small lake with what it names."""

import re
import subprocess
import sys
from pathlib import Path

_DOCS = Path(__file__).parents[1] / "docs" / "REPLAY.md"

# What the examples take for granted: datasets, and a learner.
_BEFORE = """
import types
import numpy as np
import replaylake as rl

lake = rl.open("lake", create=True)
for name in ("cartpole", "cartpole_old"):
    lake.dataset(name).append([
        rl.Episode(
            episode_id=f"{name}/{i}",
            observations=np.random.default_rng(i).random((200, 4)).astype(np.float32),
            actions=np.arange(200) % 2,
            rewards=np.ones(200),
            terminated=True,
            policy_versions=np.full(200, 4),
            extras={"energy": np.linspace(0, 1, 200)},
        )
        for i in range(4)
    ])
positions = np.random.default_rng(9).random((50, 2)).astype(np.float32)
lake.dataset("reach").append([
    rl.Episode(
        episode_id="reach/0",
        observations={
            "observation": positions,
            "achieved_goal": positions,
            "desired_goal": np.full((50, 2), 0.5, np.float32),
        },
        actions=np.arange(50) % 4,
        rewards=-np.ones(50),
        terminated=True,
    )
])
dataset = lake.dataset("cartpole")
newer_view = offline = online = lake.snapshot("cartpole").replay()
learner = types.SimpleNamespace(version=4, update=lambda batch: None)
td_errors = np.ones(256)
rank, num_ranks = 0, 1
"""
# Each section speaks of a view of one dataset, whatever the one before made.
_EACH = "\nview = newer_view\n"


def test_python_blocks_run(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", _DOCS.read_text(), re.DOTALL)
    assert len(blocks) >= 12
    # Fewer epochs show as much, and torch warns of more workers than there are processors.
    program = (
        _EACH.join([_BEFORE, *blocks])
        .replace("range(10)", "range(2)")
        .replace("num_workers=2", "num_workers=1")
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
