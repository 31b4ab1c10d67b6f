"""Samples: their branches are those of the view `sequences`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.interchange.export.export_selection import select_for_export
from replaylake.datastore.interchange.export.stored_episodes import iter_stored_episodes
from replaylake.datastore.interchange.export.trainers.samples import make_sample, read_branches
from replaylake.datastore.lake.lake import Lake

Make = Callable[..., Episode]


def _make_episodes(make: Make) -> list[Episode]:
    """Dialogues in which any of the optional facts may be missing, and some that are no line."""
    rng = np.random.default_rng(5)
    episodes = []
    for number in range(60):
        num = int(rng.integers(1, 5))
        extras: dict[str, Any] = {}
        if number % 2:
            extras["action_loss_mask"] = [[bool(rng.integers(2))] * (t + 1) for t in range(num)]
        if number % 3:
            extras["is_trainable"] = [bool(rng.integers(2)) for _ in range(num)]
        if number % 4 == 1:
            extras["action_log_probs"] = [None, *([-0.25] * (t + 1) for t in range(1, num))]
        if number % 5 == 1:
            runs = [{"start": 0, "version": 3}]
            extras["action_versions"] = [runs, *([None] * (num - 1))]
        if number % 7 == 1:
            extras["final_observation_tokens"] = [*([None] * (num - 1)), [7, 8]]
        if number % 9 == 1 and num > 1:
            extras["is_continuation"] = [None, False, *([None] * (num - 2))]
        if number % 11 == 1:
            extras |= {"action_tokens": [None] * num, "observation_tokens": [None] * num}
            extras |= {name: [None] * num for name in ("action_log_probs", "action_loss_mask")}
            extras |= {"action_versions": [None] * num, "final_observation_tokens": [None] * num}
        episode = make(f"e{number:02}", num, extras=extras)
        versions = None if number % 6 == 0 else np.arange(num)
        episodes.append(replace(episode, policy_versions=versions))
        if number % 13 == 1:
            episodes.append(make(f"e{number:02}", 2, agent_id="other"))
    return episodes


def test_branches_are_those_of_the_view(lake: Lake, make_dialogue: Make, tmp_path: Path) -> None:
    lake.dataset("talks").append(_make_episodes(make_dialogue))
    snapshot = lake.snapshot("talks")
    stored = iter_stored_episodes(snapshot, select_for_export(snapshot, None, None), tmp_path)
    samples = [
        make_sample([*several], with_tokens=False)
        for _, several in groupby(stored, lambda episode: episode.episode_id)
    ]
    found = [row for rows in read_branches(samples).values() for row in rows]
    expected = lake.sql("SELECT * FROM talks.sequences").to_pylist()
    assert len(found) == len(expected) > 50
    by_leaf = {(row["episode_id"], row["agent_id"], row["last_step"]): row for row in expected}
    for row in found:
        known = by_leaf[row["episode_id"], row["agent_id"], row["last_step"]]
        names = {*row} & {*known}
        assert {"token_ids", "loss_mask", "log_probs", "versions"} <= names
        assert {name: row[name] for name in names} == {name: known[name] for name in names}
