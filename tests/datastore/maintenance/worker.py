"""A process of the fault tests: `worker.py ROLE LAKE ...`. Says `ready` first, then what it did."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from replaylake.datastore.episode import Episode
from replaylake.datastore.lake import open_lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.maintain import maintain


def episode(producer: str, number: int, first_step: int, num_steps: int, ends: bool) -> Episode:
    steps = np.arange(first_step, first_step + num_steps)
    observations = np.stack([steps, np.full(num_steps, number)], axis=1).astype(np.float32)
    actions, rewards = steps % 2, steps + 0.5
    name = f"{producer}/{number}"
    return Episode(name, observations, actions, rewards, terminated=ends, first_step=first_step)


def write(lake: str, producer: str, num_commits: str) -> None:
    """Two commits an episode: its first piece, then its last beside a whole short one.

    Begins at 0 each time it is started: what was committed before adds nothing.
    """
    dataset = open_lake(lake).dataset("d")
    for sequence in range(int(num_commits)):
        number = sequence // 2
        if sequence % 2 == 0:
            pieces = [episode(producer, number, 0, 3, False)]
        else:
            pieces = [
                episode(producer, number, 3, 2, True),
                episode(f"{producer}s", number, 0, 1, True),
            ]
        dataset.append(pieces, producer=producer, sequence=sequence)
        print("acknowledged", sequence, flush=True)


def compact_until(lake: str, stop: str) -> None:
    while not Path(stop).exists():
        # Nothing counts as open: pieces of episodes that go on are moved about as well.
        done = compact(open_lake(lake), "d", open_s=0.0)[0]
        print("compacted", done.num_commits, done.num_conflicts, flush=True)


def maintain_until(lake: str, stop: str) -> None:
    while not Path(stop).exists():
        maintain(open_lake(lake))
        print("maintained", flush=True)


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    print("ready", flush=True)
    {"write": write, "compact": compact_until, "maintain": maintain_until}[role](*arguments)
