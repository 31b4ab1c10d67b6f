"""A process of the fault tests: `worker.py ROLE LAKE ...`. Says `ready` first, then what it did."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.maintain import maintain


def episode(producer: str, number: int, first_step: int, num_steps: int, ends: bool) -> Episode:
    steps = np.arange(first_step, first_step + num_steps)
    observations = np.stack([steps, np.full(num_steps, number)], axis=1).astype(np.float32)
    actions, rewards = steps % 2, steps + 0.5
    name = f"{producer}/{number}"
    return Episode(name, observations, actions, rewards, terminated=ends, first_step=first_step)


def write(lake: str, producer: str, num_commits: str, first: str = "0") -> None:
    """Two commits an episode: its first piece, then its last beside a whole short one.

    What was committed before it was started adds nothing.
    """
    dataset = open_lake(lake).dataset("d")
    for sequence in range(int(first), int(num_commits)):
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


def ingest_until(lake: str, stop: str, folder: str, first: str) -> None:
    """One file after the other: four episodes of five steps each, in commits of two episodes."""
    for number in itertools.count(int(first)):
        rows = [
            {"episode_id": f"i{number}e{which}", "step": step, "observation": [step, number],
             "action": step % 2, "reward": step + 0.5, "terminated": step == 4}
            for which in range(4)
            for step in range(5)
        ]  # fmt: skip
        path = Path(folder) / f"{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        ingest(open_lake(lake), [path], "d", commit_steps=10)
        print("ingested", number, flush=True)
        if Path(stop).exists():
            return


ROLES = {
    "write": write,
    "compact": compact_until,
    "maintain": maintain_until,
    "ingest": ingest_until,
}

if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    print("ready", flush=True)
    ROLES[role](*arguments)
