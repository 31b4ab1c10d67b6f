"""Delete takes whole episodes out of the newest version, and what was served for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import NotFoundError, QueryError, QueryRefusedError
from replaylake.datastore.feedback.segments import frame_records, journal_folder
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.delete import delete
from replaylake.datastore.maintenance.episode_condition import condition_of_ids, find_unknown_ids
from replaylake.datastore.maintenance.purge.purge import purge


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


@pytest.fixture
def people(lake: Lake, make_episode: Callable[..., Any]) -> Lake:
    """Episodes a, b, c of users u1, u2, u1, in shards of one episode; `spam` has b's user."""
    for name, user in (("a", "u1"), ("b", "u2"), ("c", "u1")):
        users = {"user_id": np.array([user] * 2, object)}
        lake.dataset("d").append([make_episode(name, 2, extras=users)])
    lake.dataset("spam").append([make_episode("x", 1, extras={"who": np.array(["u2"], object)})])
    return lake


@pytest.mark.parametrize(
    ("where", "left"),
    [
        ("user_id in (select who from spam.steps)", ["a", "c"]),
        ("any(user_id in (select who from spam.steps where reward > 0))", ["a", "c"]),
        ("num_steps > (select max(num_steps) from spam.episodes) and user_id = 'u1'", ["b"]),
        ("exists (select 1 from spam.steps where who = 'u3')", ["a", "b", "c"]),
        ("not any(user_id = 'u1')", ["a", "c"]),
    ],
)
def test_a_condition_may_have_subqueries(people: Lake, where: str, left: list[str]) -> None:
    delete(people, "d", where)
    assert ids(people) == left


def test_a_subquery_is_executed_by_itself(people: Lake) -> None:
    with pytest.raises(QueryError, match="executed by itself"):
        delete(people, "d", "exists (select 1 from spam.steps where who = user_id)")
    with pytest.raises(QueryRefusedError, match="enable_logging"):
        delete(people, "d", "num_steps in (select * from enable_logging())")
    assert ids(people) == ["a", "b", "c"]


def test_ids_select_by_any_column(people: Lake) -> None:
    by_user = condition_of_ids(people, "d", ["u1", "nobody"], "user_id")
    seen = delete(people, "d", by_user, dry_run=True)
    assert (seen.num_episodes, seen.first_episodes) == (2, ("a", "c"))
    sizes = [entry.size_bytes for entry in people.snapshot("d").files]
    assert seen.num_bytes == sizes[0] + sizes[2]
    assert find_unknown_ids(people, "d", ["u1", "nobody"], "user_id") == ["nobody"]
    assert delete(people, "d", condition_of_ids(people, "d", ["b"])).num_episodes == 1
    assert ids(people) == ["a", "c"]
    with pytest.raises(NotFoundError, match="no column 'user'"):
        condition_of_ids(people, "d", ["u1"], "user")
    assert purge(people, "d", by_user).num_episodes == 2
    assert ids(people) == []


def test_no_such_dataset(lake: Lake) -> None:
    with pytest.raises(NotFoundError, match="nothing"):
        delete(lake, "nothing", "true")


@pytest.mark.slow
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


def test_the_name_of_a_column_may_be_that_of_any_alias(
    lake: Lake, tmp_path: Path, make_episode: Callable[..., Any]
) -> None:
    rows = [
        {"episode_id": name, "step": 0, "observation": [1.0], "action": 0, "reward": reward,
         "terminated": True, "key": name, "selected": 1}
        for name, reward in (("a", 1.0), ("b", 1.0), ("c", "x"))
    ]  # fmt: skip
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ingest(lake, [log], "d")
    done = delete(lake, "d", "\"key\" = 'c' or \"key\" = 'a'")
    assert (done.num_episodes, done.num_rejected) == (2, 1)


def test_a_field_of_a_struct_is_no_column_of_its_name(
    lake: Lake, make_episode: Callable[..., Any]
) -> None:
    def episode(name: str, inner: str, outer: str) -> Any:
        meta = pa.array([{"uid": inner}] * 2, pa.struct([("uid", pa.string())]))
        return make_episode(name, 2, extras={"meta": meta, "uid": pa.array([outer] * 2)})

    lake.dataset("d").append([episode("a", "anna", "x"), episode("b", "bert", "anna")])
    assert delete(lake, "d", "meta.uid = 'anna'").num_episodes == 1
    assert lake.dataset("d").append([episode("c", "carl", "anna")]).num_episodes == 1
