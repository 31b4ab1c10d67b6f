from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import deltalake
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ConfigInvalidError, NotFoundError
from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.feedback.decisions import (
    decisions_encoder,
    ensure_feedback_tables,
    rewards_encoder,
)
from replaylake.datastore.feedback.join import join_feedback
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.trim import trim
from replaylake.datastore.storage.log.expiry import expire
from replaylake.datastore.storage.table.table import Table

Make = Callable[..., Episode]
HOUR_MS = 3_600_000
DAY_S = 86_400.0


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def left(lake: Lake) -> list[str]:
    ids = lake.dataset("d").table.snapshot().read(["episode_id"])["episode_id"].to_pylist()
    return list(dict.fromkeys(ids))


@pytest.fixture
def many(lake: Lake, make_episode: Make) -> Lake:
    """Ten whole episodes of three steps, two a commit."""
    for number in range(0, 10, 2):
        pair = [make_episode(f"e{number + i}", terminated=True) for i in range(2)]
        lake.dataset("d").append(pair)
    return lake


@pytest.mark.parametrize(
    ("max_steps", "first", "dropped", "rewritten"),
    [(30, 0, 0, 0), (29, 1, 0, 1), (27, 1, 0, 1), (24, 2, 1, 0), (10, 7, 3, 1), (0, 10, 5, 0)],
)
def test_the_oldest_whole_episodes_go(
    many: Lake, max_steps: int, first: int, dropped: int, rewritten: int
) -> None:
    done = trim(many, "d", max_steps=max_steps)
    assert left(many) == [f"e{number}" for number in range(first, 10)]
    assert (done.num_episodes, done.num_steps, done.steps_left) == (
        first,
        3 * first,
        30 - 3 * first,
    )
    assert (done.shards_dropped, done.shards_rewritten) == (dropped, rewritten)
    assert done.version == (5 if first == 0 else 6)


def test_trimming_again_changes_nothing(many: Lake) -> None:
    trim(many, "d", max_steps=10)
    again = trim(many, "d", max_steps=10)
    assert (again.num_episodes, again.version) == (0, 6)


def test_age_outlives_compaction(many: Lake, make_episode: Make) -> None:
    compact(many, "d")
    many.dataset("d").append([make_episode("new", terminated=True)])
    trim(many, "d", max_steps=9)
    assert left(many) == ["e8", "e9", "new"]
    # What was cut is as old as before: the next trim begins with it.
    trim(many, "d", max_steps=6)
    assert left(many) == ["e9", "new"]


def test_earlier_versions_and_other_engines(many: Lake) -> None:
    trim(many, "d", max_steps=9)
    assert many.snapshot("d@5").num_steps == 30
    theirs = deltalake.DeltaTable(str(many.path / "d"))
    assert theirs.to_pyarrow_table(columns=["step"]).num_rows == 9


def test_an_episode_goes_with_all_its_pieces(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("long", 2)])
    dataset.append([make_episode("short", 2, terminated=True)])
    dataset.append([make_episode("long", 2, first_step=2, terminated=True)])
    dataset.append([make_episode("last", 2, terminated=True)])
    done = trim(lake, "d", max_steps=7)
    assert left(lake) == ["short", "last"]
    assert done.num_steps == 4


def test_a_game_goes_with_all_its_agents(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    for agent in ("x", "y"):
        dataset.append([make_episode("g1", 2, agent_id=agent, terminated=True)])
    dataset.append([make_episode("g2", 2, agent_id="x", terminated=True)])
    trim(lake, "d", max_steps=5)
    assert left(lake) == ["g2"]


def test_open_episodes_stay_and_the_next_go(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("open")])
    for name in ("a", "b", "c"):
        dataset.append([make_episode(name, terminated=True)])
    trim(lake, "d", max_steps=6)
    assert left(lake) == ["open", "c"]
    trim(lake, "d", max_steps=0)
    assert left(lake) == ["open"]
    # Nothing came for hours: it was abandoned.
    trim(lake, "d", max_steps=0, now_ms=now_ms() + 2 * HOUR_MS)
    assert left(lake) == []


def test_a_game_with_one_agent_open_stays(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("g", agent_id="x", terminated=True)])
    dataset.append([make_episode("g", agent_id="y")])
    trim(lake, "d", max_steps=0)
    assert left(lake) == ["g"]


def test_age_is_that_of_the_newest_row(lake: Lake, make_episode: Make) -> None:
    now_us = 1000 * now_ms()
    for name, days in (("a", 9), ("b", 3), ("c", 8), ("d", 1)):
        times = np.full(3, now_us - int(days * DAY_S * 1e6))
        times[2] += 3_600_000_000
        episode = make_episode(name, terminated=True, timestamps=times)
        lake.dataset("d").append([episode])
    trim(lake, "d", older_than_s=8 * DAY_S)
    assert left(lake) == ["b", "c", "d"]
    trim(lake, "d", older_than_s=2 * DAY_S)
    assert left(lake) == ["d"]


def test_without_timestamps_age_is_that_of_the_first_commit(many: Lake) -> None:
    times = [info["timestamp"] for info in many.dataset("d").history()]
    between = times[3] + 86_400_000 - 1
    assert trim(many, "d", older_than_s=DAY_S, now_ms=between).num_episodes == 4
    assert left(many) == [f"e{number}" for number in range(4, 10)]


def test_nothing_goes_early_for_lying_in_a_shard_with_older_rows(many: Lake) -> None:
    compact(many, "d")
    (entry,) = many.dataset("d").table.snapshot().files
    time.sleep(0.01)
    many.dataset("d").append([_episode("new")])
    day_ms = 86_400_000
    # The oldest rows are that old, the youngest may not be.
    assert trim(many, "d", older_than_s=DAY_S, now_ms=entry.modified_ms + day_ms).steps_left == 33
    later = many.dataset("d").history()[-1]["timestamp"] + day_ms
    assert trim(many, "d", older_than_s=DAY_S, now_ms=later).num_episodes == 10
    assert left(many) == ["new"]


def test_without_its_commit_the_shards_own_time_counts(many: Lake) -> None:
    newest = many.dataset("d").table.snapshot()
    expire(many.dataset("d").table.log, newest.version)
    latest = max(entry.modified_ms for entry in newest.files)
    again = open_lake(many.path)
    assert trim(again, "d", older_than_s=DAY_S, now_ms=latest + 86_400_000 - 5000).steps_left == 30
    assert trim(again, "d", older_than_s=DAY_S, now_ms=latest + 86_400_000 + 5000).steps_left == 0


def test_both_limits(many: Lake) -> None:
    done = trim(many, "d", max_steps=15, older_than_s=DAY_S)
    assert done.steps_left == 15
    done = trim(many, "d", max_steps=15, older_than_s=DAY_S, now_ms=now_ms() + 2 * 86_400_000)
    assert done.steps_left == 0


@pytest.mark.parametrize("days", [-1, 1])
def test_a_clock_a_day_off_trims_no_more_than_that(many: Lake, days: int) -> None:
    assert (
        trim(many, "d", older_than_s=2 * DAY_S, now_ms=now_ms() + days * 86_400_000).steps_left
        == 30
    )


def test_it_is_planned_again_after_a_compactor(many: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Table.commit, []

    def commit(self: Table, *arguments: Any, **options: Any) -> Any:
        if options.get("operation") == "TRIM" and not calls:
            calls.append(1)
            compact(open_lake(many.path), "d")
        return real(self, *arguments, **options)

    monkeypatch.setattr(Table, "commit", commit)
    done = trim(many, "d", max_steps=9)
    assert left(many) == ["e7", "e8", "e9"]
    assert (done.num_episodes, done.num_steps) == (7, 21)


@pytest.mark.parametrize("limits", [{}, {"max_steps": -1}, {"older_than_s": -1.0}])
def test_a_limit_is_needed(many: Lake, limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigInvalidError, match=f"^{next(iter(limits), 'trim')}: found "):
        trim(many, "d", **limits)


def test_a_dataset_that_is_not_there(lake: Lake) -> None:
    with pytest.raises(NotFoundError, match="nope"):
        trim(lake, "nope", max_steps=1)


class Served:
    """Decisions and rewards, as a server logs them, a second apart from an hour ago on."""

    def __init__(self, lake: Lake) -> None:
        self.lake = lake
        self.dataset = lake.dataset("d")
        ensure_feedback_tables(self.dataset, Box((2,)), Discrete(2))
        self._signer = DecisionSigner(lake.signing_key(), "d", "00" * 6)
        self._at_us = 1000 * (now_ms() - HOUR_MS)
        self._sequence = 0

    def decision(self, episode: str | None) -> str:
        self._at_us += 1_000_000
        (key,) = self._signer.issue("bc", 1, self._at_us)
        fixed = {"policy": "bc", "policy_version": 1, "observation": [0.0, 1.0], "action": 1}
        more = {"request_id": None, "episode_id": episode, "log_prob": -0.5, "deterministic": False}
        record = {"decision_id": key, "timestamp": self._at_us, **fixed, **more}
        self._append(self.dataset.decisions, decisions_encoder(self.dataset), record)
        return key

    def reward(self, key: str, *, terminated: bool = False) -> None:
        end = {"terminated": terminated, "truncated": False, "final_observation": None}
        record = {"decision_id": key, "timestamp": self._at_us, "reward": 1.0, **end}
        self._append(self.dataset.rewards, rewards_encoder(self.dataset), record)

    def ids(self, table: Table) -> list[str]:
        found: list[str] = table.snapshot().read(["decision_id"])["decision_id"].to_pylist()
        return found

    def _append(
        self, table: Table, encode: Callable[..., pa.Table], record: dict[str, Any]
    ) -> None:
        self._sequence += 1
        table.append(encode([record]), producer="server", sequence=self._sequence)


@pytest.mark.slow
def test_decisions_leave_with_their_episodes_and_do_not_come_back(lake: Lake) -> None:
    served = Served(lake)
    keys = {}
    for episode in ("a", "b"):
        keys[episode] = [served.decision(episode) for _ in range(3)]
        for key in keys[episode]:
            served.reward(key, terminated=key == keys[episode][-1])
    assert join_feedback(lake, "d").steps == 6
    done = trim(lake, "d", max_steps=3)
    assert (done.num_episodes, done.num_decisions, done.num_rewards) == (1, 3, 3)
    assert served.ids(served.dataset.decisions) == keys["b"]
    assert served.ids(served.dataset.rewards) == keys["b"]
    assert join_feedback(lake, "d").steps == 0


@pytest.mark.slow
def test_a_late_reward_brings_nothing_back(lake: Lake) -> None:
    served = Served(lake)
    first, middle, last = (served.decision("a") for _ in range(3))
    other = served.decision("a")  # the client's id again, for the episode after
    for key in (first, last, other):
        served.reward(key, terminated=key != first)
    assert join_feedback(lake, "d", window_s=1.0).steps == 3
    trim(lake, "d", max_steps=1)
    assert served.ids(served.dataset.decisions) == [other]
    served.reward(middle)
    assert join_feedback(lake, "d", window_s=1.0).steps == 0


@pytest.mark.slow
def test_a_crash_before_the_steps_leave_brings_nothing_back(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(lake)
    key = served.decision(None)
    served.reward(key, terminated=True)
    join_feedback(lake, "d")
    real = Table.commit

    def commit(self: Table, *arguments: Any, **options: Any) -> Any:
        if self.root == "d":
            raise KeyboardInterrupt
        return real(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Table, "commit", commit)
        with pytest.raises(KeyboardInterrupt):
            trim(lake, "d", max_steps=0)
    assert join_feedback(lake, "d").steps == 0
    assert lake.dataset("d").snapshot().num_steps == 1
    trim(lake, "d", max_steps=0)
    assert lake.dataset("d").snapshot().num_steps == 0
    assert join_feedback(lake, "d").steps == 0


def _episode(name: str) -> Episode:
    return Episode(
        name,
        observations=np.zeros((3, 2), np.float32),
        actions=np.array([0, 1, 0]),
        rewards=np.ones(3),
        terminated=True,
    )


@pytest.mark.slow
@given(
    commits=st.lists(
        st.lists(
            st.tuples(st.integers(0, 5), st.integers(1, 3)),
            min_size=1,
            max_size=3,
            unique_by=lambda piece: piece[0],
        ),
        min_size=1,
        max_size=6,
    ),
    max_steps=st.integers(0, 20),
    is_compacted=st.booleans(),
)
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_what_goes_is_the_shortest_front_of_whole_episodes(
    commits: list[list[tuple[int, int]]],
    max_steps: int,
    is_compacted: bool,
    tmp_path_factory: Any,
    make_episode: Make,
) -> None:
    lake = open_lake(tmp_path_factory.mktemp("lake"), create=True)
    lake.dataset("d").create(Box((2,)), Discrete(2))
    lengths: dict[str, int] = {}
    for commit in commits:
        pieces = []
        for number, num_steps in commit:
            name = f"e{number}"
            begun = lengths.get(name, 0)
            pieces.append(make_episode(name, num_steps, first_step=begun))
            lengths[name] = begun + num_steps
        lake.dataset("d").append(pieces)
    later = now_ms() + 2 * HOUR_MS
    if is_compacted:
        compact(lake, "d", now_ms=later)
    trim(lake, "d", max_steps=max_steps, now_ms=later)
    expected = list(lengths)  # by first commit and row
    while sum(lengths[name] for name in expected) > max_steps:
        expected.pop(0)
    assert sorted(left(lake)) == sorted(expected)
    assert lake.dataset("d").snapshot().num_steps == sum(lengths[name] for name in expected)
