"""The view `sequences`: one row a branch, checked by hand and against the join in Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.token_sequences import (
    TokenSequence,
    join_steps,
    split_sequence,
)
from replaylake.datastore.episodes.tokens import TOKEN_TYPES
from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.delete import delete

Make = Callable[..., Episode]
_ALL = "SELECT * FROM talks.sequences ORDER BY episode_id, agent_id, last_step"


def _by_leaf(lake: Lake, query: str = _ALL) -> dict[tuple[str, int], dict[str, Any]]:
    rows = lake.sql(query).to_pylist()
    return {(row["agent_id"], row["last_step"]): row for row in rows}


def test_one_dialogue(lake: Lake, make_dialogue: Make) -> None:
    extras = {
        "group_id": ["g"] * 3,
        "final_observation_tokens": [None, None, [7]],
        "action_loss_mask": [None, [True, False], None],
        "action_versions": [None, [{"start": 0, "version": 4}, {"start": 1, "version": 5}], None],
    }
    lake.dataset("talks").append([make_dialogue("a", extras=extras, policy_versions=[3, 4, 5])])
    (row,) = lake.sql(_ALL).to_pylist()
    assert row == {
        "episode_id": "a",
        "agent_id": "",
        "root_agent_id": "",
        "first_step": 0,
        "last_step": 2,
        "num_turns": 3,
        "num_tokens": 13,
        "token_ids": [0, 1, 0, 10, 11, 100, 101, 20, 21, 200, 201, 202, 7],
        "loss_mask": [0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 1, 1, 0],
        "log_probs": [*[None] * 2, -0.5, *[None] * 2, *[-0.5] * 2, *[None] * 2, *[-0.5] * 3, None],
        "turn_starts": [0, 3, 7],
        "action_starts": [2, 5, 9],
        "versions": [
            {"start": 2, "version": 3},
            {"start": 5, "version": 4},
            {"start": 6, "version": 5},
            {"start": 9, "version": 5},
        ],
        "return": 1.0,
        "episode_return": 1.0,
        "group_id": "g",
    }
    # Of one version, and of an earlier one.
    lake.dataset("talks").append([make_dialogue("b")])
    counts = [
        lake.snapshot(f"talks@{version}").sql("SELECT count(*) AS n FROM sequences").to_pylist()
        for version in (1, 2)
    ]
    assert counts == [[{"n": 1}], [{"n": 2}]]


def _fork(make: Make, agent: str, num: int, parent: tuple[str | None, int], **extras: Any) -> Any:
    named = {
        "parent_agent_id": [parent[0], *[None] * (num - 1)],
        "parent_step": [parent[1], *[None] * (num - 1)],
    }
    return make("a", num, agent_id=agent, extras=named | extras)


def test_forks_share_what_came_before(lake: Lake, make_dialogue: Make) -> None:
    episodes = [
        make_dialogue("a", 3, agent_id="x"),
        _fork(make_dialogue, "x~1", 2, ("x", 1)),
        _fork(make_dialogue, "x~2", 1, ("x~1", 0)),
    ]
    for episode in episodes:  # branches come in commits of their own
        lake.dataset("talks").append([episode])
    rows = _by_leaf(lake)
    first, second, third = rows["x", 2], rows["x~1", 1], rows["x~2", 0]
    shared = [0, 1, 0, 10, 11, 100, 101]
    assert first["token_ids"] == [*shared, 20, 21, 200, 201, 202]
    assert second["token_ids"] == [*shared, 0, 1, 0, 10, 11, 100, 101]
    assert third["token_ids"] == [*shared, 0, 1, 0, 0, 1, 0]
    # What several branches have counts in the first, and has its log-probs in each.
    assert first["loss_mask"] == [0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert second["loss_mask"] == [0] * 7 + [0, 0, 1, 0, 0, 1, 1]
    assert third["loss_mask"] == [0] * 7 + [0, 0, 0] + [0, 0, 1]
    assert third["log_probs"][:7] == [None, None, -0.5, None, None, -0.5, -0.5]
    assert [row["root_agent_id"] for row in rows.values()] == ["x", "x", "x"]
    assert [row["num_turns"] for row in rows.values()] == [3, 4, 4]
    assert third["turn_starts"] == [0, 3, 7, 10]
    # The rewards of a branch are of its steps: the last of each dialogue has one.
    assert [row["return"] for row in rows.values()] == [1.0, 1.0, 1.0]
    assert [row["episode_return"] for row in rows.values()] == [3.0, 3.0, 3.0]
    total = sum(sum(row["loss_mask"]) for row in rows.values())
    assert (
        total
        == lake.sql("SELECT sum(len(action_tokens)) AS n FROM talks.steps").to_pylist()[0]["n"]
    )


def test_a_rewritten_context_begins_a_sequence(lake: Lake, make_dialogue: Make) -> None:
    rewritten = {"is_continuation": [None, True, False, True]}
    lake.dataset("talks").append(
        [
            make_dialogue("a", 4, agent_id="x", extras=rewritten),
            # The same, with the step named whose context was rewritten.
            _fork(make_dialogue, "x~1", 1, ("x", 0), is_continuation=[False]),
        ]
    )
    rows = _by_leaf(lake)
    assert [(row["first_step"], *leaf) for leaf, row in rows.items()] == [
        (0, "x", 1),
        (2, "x", 3),
        (0, "x~1", 0),
    ]
    assert rows["x", 3]["token_ids"] == [20, 21, 200, 201, 202, 30, 31, 300, 301, 302, 303]
    assert rows["x~1", 0]["token_ids"] == [0, 1, 0]


def test_fork_within_an_agent(lake: Lake, make_dialogue: Make) -> None:
    retried = {"parent_step": [None, 0, 0], "is_trainable": [True, False, True]}
    lake.dataset("talks").append([make_dialogue("a", 3, extras=retried)])
    rows = _by_leaf(lake)
    assert [*rows] == [("", 1), ("", 2)]
    assert rows["", 1]["token_ids"] == [0, 1, 0, 10, 11, 100, 101]
    assert rows["", 1]["loss_mask"] == [0, 0, 1, 0, 0, 0, 0]
    assert rows["", 2]["token_ids"] == [0, 1, 0, 20, 21, 200, 201, 202]
    assert rows["", 2]["loss_mask"] == [0, 0, 0, 0, 0, 1, 1, 1]


def test_unknown_values(lake: Lake, make_dialogue: Make) -> None:
    dataset = lake.dataset("talks")
    without = [None, [-0.5, -0.5], None]
    dataset.append([make_dialogue("a", extras={"action_log_probs": without})])
    (row,) = lake.sql(_ALL).to_pylist()
    assert [i for i, value in enumerate(row["log_probs"]) if value is not None] == [5, 6]
    # A step of which nobody knows the ids leaves a gap that no sequence can have.
    columns = ("observation_tokens", "action_tokens", "action_log_probs")
    text = make_dialogue("b")
    known = {name: [text.extras[name][0], None, text.extras[name][2]] for name in columns}
    dataset.append([make_dialogue("b", extras=known), make_dialogue("c", 1)])
    assert [row["episode_id"] for row in lake.sql(_ALL).to_pylist()] == ["a", "c"]


def test_incomplete_branches_are_left_out(lake: Lake, make_dialogue: Make) -> None:
    dataset = lake.dataset("talks")
    dataset.append(
        [
            # Its beginning is not there, and then it is rewritten.
            make_dialogue("late", 3, first_step=2, extras={"is_continuation": [True, True, False]}),
            make_dialogue("a", 2, agent_id="x"),
            _fork(make_dialogue, "x~1", 1, ("x", 0)),
        ]
    )
    text = make_dialogue("b", 2, agent_id="x")
    known = {name: [values[0], None] for name, values in text.extras.items()}
    dataset.append(
        [
            make_dialogue("b", 2, agent_id="x", extras=known),
            replace(_fork(make_dialogue, "x~1", 1, ("x", 0)), episode_id="b"),
        ]
    )
    delete(lake, "talks", "episode_id = 'a' AND agent_id = 'x'")
    rows = {(row["episode_id"], row["agent_id"]): row for row in lake.sql(_ALL).to_pylist()}
    assert {*rows} == {("late", ""), ("b", "x~1")}
    assert (rows["late", ""]["first_step"], rows["late", ""]["num_turns"]) == (4, 1)
    # What the incomplete branch shares counts in the first that is whole.
    assert rows["b", "x~1"]["loss_mask"] == [0, 0, 1, 0, 0, 1]


def test_a_dataset_without_tokens_has_none(lake: Lake, make_episode: Make) -> None:
    lake.dataset("plain").append([make_episode("a")])
    with pytest.raises(NotFoundError, match="sequences: found no column action_tokens, expected"):
        lake.sql("SELECT * FROM plain.sequences")
    # A name that a query gives itself is its own.
    own = "WITH sequences AS (SELECT 1 AS n) SELECT n FROM sequences"
    assert lake.snapshot("plain").sql(own).to_pylist() == [{"n": 1}]


def _random_episode(make: Make, name: str, rng: np.random.Generator) -> list[Episode]:
    """A tree of agents: each forks from one before it, and some contexts are rewritten."""
    agents: list[Episode] = []
    for number in range(int(rng.integers(1, 6))):
        num = int(rng.integers(1, 5))
        lengths = rng.integers(0, 4, (2, num))
        lengths[1] += 1
        parents: list[int | None] = [None] * num
        names: list[str | None] = [None] * num
        if agents and rng.random() < 0.8:
            parent = agents[int(rng.integers(len(agents)))]
            names[0], parents[0] = parent.agent_id, int(rng.integers(len(parent)))
        for t in range(1, num):
            if rng.random() < 0.3:
                parents[t] = int(rng.integers(t))
        extras: dict[str, Any] = {
            "observation_tokens": [rng.integers(0, 99, n).tolist() for n in lengths[0]],
            "action_tokens": [rng.integers(0, 99, n).tolist() for n in lengths[1]],
            "action_log_probs": [(-1 - rng.random(n)).tolist() for n in lengths[1]],
            "action_loss_mask": [(rng.random(n) < 0.7).tolist() for n in lengths[1]],
            "parent_agent_id": pa.array(names, pa.string()),
            "parent_step": pa.array(parents, pa.int32()),
            "is_continuation": (rng.random(num) < 0.8).tolist(),
            "is_trainable": (rng.random(num) < 0.8).tolist(),
        }
        agent_id = f"x~{number}"
        rewards = rng.normal(size=num)
        agents.append(make(name, num, agent_id=agent_id, extras=extras, rewards=rewards))
    return agents


def _expected(agents: list[Episode]) -> dict[tuple[str, int], dict[str, Any]]:
    """Walk up from each step that none goes on from, as the columns' meaning has it."""
    nodes = {(one.agent_id, t): one for one in agents for t in range(len(one))}

    def parent_of(node: tuple[str, int]) -> tuple[str, int] | None:
        extras, t = nodes[node].extras, node[1]
        if not extras["is_continuation"][t]:
            return None
        if (step := extras["parent_step"][t].as_py()) is not None:
            return extras["parent_agent_id"][t].as_py() or node[0], step
        return (node[0], t - 1) if t else None

    above = {node: parent_of(node) for node in nodes}
    counted: set[tuple[str, int]] = set()
    found = {}
    for leaf in sorted(set(nodes) - set(above.values())):
        path = [leaf]
        while (parent := above[path[-1]]) is not None:
            path.append(parent)
        path.reverse()
        rows: dict[str, list[Any]] = {}
        for node in path:
            for name, kind in TOKEN_TYPES.items():
                if name in nodes[node].extras and pa.types.is_list(kind):
                    rows.setdefault(name, []).append(nodes[node].extras[name][node[1]])
        rows["is_trainable"] = [
            nodes[node].extras["is_trainable"][node[1]] and node not in counted for node in path
        ]
        counted |= {*path}
        columns = {name: pa.array(values, TOKEN_TYPES[name]) for name, values in rows.items()}
        joined = join_steps(columns)
        found[leaf] = {
            "first": path[0],
            "token_ids": joined.token_ids.tolist(),
            "loss_mask": joined.loss_mask.tolist(),
            "log_probs": joined.log_probs.tolist(),  # type: ignore[union-attr]
            "return": sum(nodes[node].rewards[node[1]] for node in path),
            "episode_return": sum(float(agent.rewards.sum()) for agent in agents),
        }
    return found


def test_random_trees_are_as_python_joins_them(lake: Lake, make_dialogue: Make) -> None:
    rng = np.random.default_rng(5)
    episodes = {f"e{i}": _random_episode(make_dialogue, f"e{i}", rng) for i in range(40)}
    every = [agent for agents in episodes.values() for agent in agents]
    lake.dataset("talks").append([replace(one, terminated=False) for one in every])
    rows = lake.sql(_ALL).to_pylist()
    assert max(row["num_turns"] for row in rows) > 6
    assert {row["root_agent_id"] == row["agent_id"] for row in rows} == {True, False}
    for name, agents in episodes.items():
        found = {
            (row["agent_id"], row["last_step"]): {
                "first": (row["root_agent_id"], row["first_step"]),
                "token_ids": row["token_ids"],
                "loss_mask": [bool(flag) for flag in row["loss_mask"]],
                "log_probs": [0.0 if value is None else value for value in row["log_probs"]],
                "return": pytest.approx(row["return"]),
                "episode_return": pytest.approx(row["episode_return"]),
            }
            for row in rows
            if row["episode_id"] == name
        }
        assert found == _expected(agents)


def _random_sequence(rng: np.random.Generator) -> TokenSequence:
    """A dialogue in which a filtered token, and a whole filtered turn, may keep its log-prob."""
    num = int(rng.integers(2, 40))
    sampled = np.repeat(rng.random(num) < 0.5, 2)[:num]
    sampled[-1] |= not sampled.any()
    loss_mask = sampled & (rng.random(num) < 0.8)
    log_probs = np.where(sampled, -rng.exponential(1, num) - 1e-6, 0).astype(np.float32)
    versions = np.where(sampled, np.sort(rng.integers(3, 6, num)), -1)
    return TokenSequence(rng.integers(0, 2**31, num, np.int32), loss_mask, log_probs, versions)


def test_split_sequences_are_joined_again(lake: Lake, make_dialogue: Make) -> None:
    """What is split into steps, stored and read from `sequences` has the same bytes."""
    rng = np.random.default_rng(21)
    sequences = [_random_sequence(rng) for _ in range(300)]
    episodes = []
    for number, sequence in enumerate(sequences):
        columns = split_sequence(sequence)
        num = len(columns["action_tokens"])
        episodes.append(replace(make_dialogue(f"{number:03}", num), extras=columns))
    lake.dataset("talks").append(episodes)
    rows = lake.sql(_ALL).to_pylist()
    assert len(rows) == len(sequences)
    num_filtered = 0
    for row, sequence in zip(rows, sequences, strict=True):
        assert row["token_ids"] == sequence.token_ids.tolist()
        assert row["loss_mask"] == sequence.loss_mask.tolist()
        assert sequence.log_probs is not None
        log_probs = np.array([0 if v is None else v for v in row["log_probs"]], np.float32)
        assert log_probs.tobytes() == sequence.log_probs.tobytes()
        versions = np.full(len(sequence), -1)
        sampled = sequence.log_probs != 0
        starts = [run["start"] for run in row["versions"]]
        for start, end, run in zip(starts, [*starts[1:], None], row["versions"], strict=True):
            versions[start:end] = run["version"]
        assert sequence.versions is not None
        assert np.where(sampled, versions, -1).tolist() == sequence.versions.tolist()
        num_filtered += int((sampled & ~sequence.loss_mask).sum())
    assert num_filtered > 300
