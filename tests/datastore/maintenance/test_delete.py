"""Delete takes whole episodes out of the newest version, and what was served for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from deltalake import DeltaTable

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import NotFoundError, QueryError, QueryRefusedError
from replaylake.datastore.feedback.segments import frame_records, journal_folder
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.delete import delete


@pytest.fixture
def filled(lake: Lake, make_episode: Callable[..., Any]) -> Lake:
    """Episodes a, b, c of 1, 2 and 3 steps; a alone in a shard."""
    dataset = lake.dataset("d")
    dataset.create(Box((2,)), Discrete(2))
    dataset.append([make_episode("a", 1)])
    dataset.append([make_episode("b", 2), make_episode("c", 3)])
    return lake


def ids(lake: Lake) -> list[str]:
    rows = lake.sql("select distinct episode_id as e from d.steps order by e")
    return [row["e"] for row in rows.to_pylist()]


def test_episodes_leave_from_now_on(filled: Lake) -> None:
    done = delete(filled, "d", "num_steps = 2")
    assert (done.version, done.num_episodes, done.num_steps, done.steps_left) == (3, 1, 2, 4)
    assert ids(filled) == ["a", "c"]
    assert filled.dataset("d").snapshot(2).table.read().num_rows == 6
    info = filled.dataset("d").commit_info(3)
    assert (info["operation"], info["episodes_removed"]) == ("DELETE", 1)
    oracle = DeltaTable(str(filled.dataset("d").path)).to_pyarrow_table()
    assert sorted(set(oracle.column("episode_id").to_pylist())) == ["a", "c"]


def test_a_dry_run_changes_nothing(filled: Lake) -> None:
    seen = delete(filled, "d", '"return" >= 3', dry_run=True)
    assert (seen.dry_run, seen.version) == (True, None)
    assert (seen.num_episodes, seen.num_steps, seen.steps_left) == (2, 5, 1)
    assert filled.dataset("d").snapshot().version == 2
    done = delete(filled, "d", '"return" >= 3')
    assert (done.num_episodes, done.num_steps, done.steps_left) == (2, 5, 1)


def test_nothing_selected_commits_nothing(filled: Lake) -> None:
    done = delete(filled, "d", "num_steps > 99")
    assert (done.version, done.num_episodes, done.num_steps) == (None, 0, 0)
    assert filled.dataset("d").snapshot().version == 2


def test_the_same_episode_can_come_back_and_go_again(filled: Lake, make_episode: Any) -> None:
    delete(filled, "d", "episode_id = 'a'")
    filled.dataset("d").append([make_episode("a", 1)])
    assert delete(filled, "d", "episode_id = 'a'").num_steps == 1
    assert ids(filled) == ["b", "c"]


def test_all_of_it(filled: Lake) -> None:
    delete(filled, "d", "true")
    assert filled.dataset("d").snapshot().num_steps == 0
    assert ids(filled) == []


def test_an_episode_goes_with_all_its_agents(lake: Lake, make_episode: Any) -> None:
    lake.dataset("d").append(
        [make_episode("g", agent_id="p"), make_episode("g", 1, agent_id="q"), make_episode("h")]
    )
    done = delete(lake, "d", "agent_id = 'q'")
    assert (done.num_episodes, done.num_steps) == (1, 4)
    assert ids(lake) == ["h"]


@pytest.mark.parametrize(
    ("where", "error", "said"),
    [
        ("random() < 0.5", QueryRefusedError, "random"),
        ("", QueryRefusedError, "empty"),
        ("reward > 1", QueryError, "reward"),
    ],
)
def test_what_is_refused(filled: Lake, where: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        delete(filled, "d", where)
    assert filled.dataset("d").snapshot().version == 2


def test_no_such_dataset(lake: Lake) -> None:
    with pytest.raises(NotFoundError, match="nothing"):
        delete(lake, "nothing", "true")


def test_the_join_does_not_bring_it_back(served: Any) -> None:
    for client in ("ada", "bob"):
        first, gap, last = (served.decide(t, client) for t in (0, 1, 2))
        served.reward(first, 3)
        served.reward(last, 3, ends=True)
    assert served.run(7200).steps == 4
    done = delete(served.lake, "d", "source_episode_id = 'ada'")
    assert (done.num_steps, done.num_decisions, done.num_rewards) == (2, 3, 2)
    assert (served.count("steps"), served.count("decisions"), served.count("rewards")) == (2, 3, 2)
    served.reward(gap, 7300)  # bob's, which still may come
    again = served.run(7400)
    assert (again.steps, served.count("steps")) == (1, 3)
    rows = served.lake.sql("select distinct source_episode_id as s from d.steps").to_pylist()
    assert rows == [{"s": "bob"}]


def test_what_waits_to_continue_an_open_episode_goes_too(served: Any) -> None:
    served.reward(served.decide(0, "ada"), 1)
    assert served.run(10, window_s=5).steps == 1
    later = served.decide(20, "ada")
    done = delete(served.lake, "d", "source_episode_id = 'ada'")
    assert (done.num_steps, done.num_decisions, done.num_rewards) == (1, 2, 1)
    served.reward(later, 21, ends=True)
    assert served.run(30).steps == 0


def test_the_next_episode_under_the_same_id_stays(served: Any) -> None:
    served.reward(served.decide(0, "ada"), 1, ends=True)
    assert served.run(10).steps == 1
    later = served.decide(20, "ada")
    assert delete(served.lake, "d", "true").num_decisions == 1
    served.reward(later, 21, ends=True)
    assert served.run(30).steps == 1


def test_what_a_killed_server_left_is_committed_first(served: Any) -> None:
    key = served.decide(0, "ada")
    served.reward(key, 1, ends=True)
    served.run(10)
    folder = journal_folder(served.dataset.rewards)
    folder.mkdir()
    record = {"decision_id": key, "timestamp": int((served.now_s + 20) * 1e6), "reward": 9.0,
              "terminated": True, "truncated": False, "final_observation": None}  # fmt: skip
    (folder / "dead-0.jsonl").write_bytes(frame_records([json.dumps(record).encode()])[0])
    assert delete(served.lake, "d", "true").num_rewards == 2
    assert list(folder.glob("*.jsonl")) == []
