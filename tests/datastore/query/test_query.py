"""Hand-made episodes, and what SQL has to say about them.

`a` ends by termination, in two pieces. `b` is truncated, with a final observation. `c` is truncated
without one. `d` lacks steps 2 and 3. `e` is still open. Step t has observation [t, -t] and reward
t + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, Text, Tuple
from replaylake.datastore.errors import (
    NotFoundError,
    QueryError,
    QueryRefusedError,
    SchemaMismatchError,
    ShardCorruptError,
)
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake, open_lake

Make = Callable[..., Episode]


@pytest.fixture
def dataset(lake: Lake, make_episode: Make) -> Dataset:
    dataset = lake.dataset("d")
    unknown = {"final_observation": None}
    dataset.append(
        [
            make_episode("a", 2, policies=["p", "p"], policy_versions=[1, 1]),
            make_episode("b", 2, truncated=True, timestamps=[0, 60_000_000]),
            make_episode("c", 2, truncated=True, **unknown),
            make_episode("d", 2, **unknown),
        ]
    )
    dataset.append(
        [
            make_episode("d", 1, first_step=4, terminated=True, **unknown),
            make_episode(
                "a",
                2,
                first_step=2,
                terminated=True,
                policies=["p", "q"],
                policy_versions=[1, 3],
                **unknown,
            ),
            make_episode("e", 1, source_episode_id="7", **unknown),
        ]
    )
    return dataset


def values(table: pa.Table) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in table.to_pylist()]


def test_steps(lake: Lake, dataset: Dataset) -> None:
    rows = lake.sql("SELECT * FROM d.steps ORDER BY episode_id, step")
    assert rows.num_rows == 12
    assert rows.column_names == dataset.snapshot().table.schema.names
    first = rows.slice(0, 1).to_pylist()[0]
    assert (first["observation"], first["action"], first["reward"]) == ([0.0, 0.0], 0, 1.0)
    assert str(rows.schema.field("timestamp").type) == "timestamp[us, tz=UTC]"


def test_episodes(lake: Lake, dataset: Dataset) -> None:
    query = (
        'SELECT episode_id, num_steps, "return", terminated, truncated, complete, first_step, '
        "policy, min_policy_version, max_policy_version, source_episode_id "
        "FROM d.episodes ORDER BY episode_id"
    )
    assert values(lake.sql(query)) == [
        ("a", 4, 10.0, True, False, True, 0, "q", 1, 3, None),
        ("b", 2, 3.0, False, True, True, 0, None, None, None, None),
        ("c", 2, 3.0, False, True, True, 0, None, None, None, None),
        ("d", 3, 8.0, True, False, True, 0, None, None, None, None),
        ("e", 1, 1.0, False, False, False, 0, None, None, None, "7"),
    ]
    seconds = "SELECT epoch(ended_at - started_at) AS s FROM d.episodes WHERE episode_id = 'b'"
    assert values(lake.sql(seconds)) == [(60.0,)]


def test_transitions(lake: Lake, dataset: Dataset) -> None:
    query = "SELECT episode_id, step, next_observation FROM d.transitions ORDER BY ALL"
    rows = lake.sql(query)
    assert values(rows) == [
        ("a", 0, [1, -1]),
        ("a", 1, [2, -2]),  # the final observation of the first piece
        ("a", 2, [3, -3]),
        ("a", 3, None),  # terminated without a successor
        ("b", 0, [1, -1]),
        ("b", 1, [2, -2]),  # truncated with a final observation
        ("c", 0, [1, -1]),
        ("c", 1, None),  # truncated without one
        ("d", 0, [1, -1]),
        ("d", 1, None),  # step 4 is not the successor of step 1
        ("d", 4, None),
        ("e", 0, None),  # still open
    ]
    steps = lake.sql("SELECT * FROM d.steps").column_names
    assert lake.sql("SELECT * FROM d.transitions").column_names == [*steps, "next_observation"]


def test_agents_of_one_episode_are_apart(lake: Lake, make_episode: Make) -> None:
    lake.dataset("m").append([make_episode("g", 2, agent_id=a) for a in ("left", "right")])
    query = "SELECT agent_id, step, next_observation FROM m.transitions ORDER BY ALL"
    assert values(lake.sql(query)) == [
        ("left", 0, [1, -1]),
        ("left", 1, [2, -2]),
        ("right", 0, [1, -1]),
        ("right", 1, [2, -2]),
    ]
    query = "SELECT episode_id, agent_id, num_steps FROM m.episodes ORDER BY ALL"
    assert values(lake.sql(query)) == [("g", "left", 2), ("g", "right", 2)]


def test_parameters(lake: Lake, dataset: Dataset) -> None:
    query = "SELECT count(*) AS n FROM d.steps WHERE reward >= $low AND episode_id = $name"
    assert values(lake.sql(query, {"low": 2, "name": "a"})) == [(3,)]
    injected = {"low": 0, "name": "' OR true --"}
    assert values(lake.sql(query, injected)) == [(0,)]
    with pytest.raises(QueryError, match="parameter"):
        lake.sql(query, {"low": 2})
    with pytest.raises(QueryError, match="Parameter"):
        lake.sql("SELECT 1", {"low": 2})


@pytest.mark.parametrize(
    "query",
    [
        "SELECT count(*) AS n FROM D.STEPS",
        'SELECT count(*) AS n FROM "d"."steps"',
        'SELECT count(*) AS n FROM "D"."Steps"',
        "FROM d.steps SELECT count(*) AS n",
        "WITH steps AS (SELECT * FROM d.steps) SELECT count(*) AS n FROM steps",
        "WITH d AS (SELECT 1), policies AS (SELECT 2) SELECT count(*) AS n FROM d.steps",
        "SELECT (SELECT count(*) FROM d.steps) AS n",
        "SELECT count(*) AS n FROM d.steps s SEMI JOIN d.episodes e USING (episode_id)",
        "SELECT d.steps.n FROM (SELECT count(*) AS n FROM d.steps) AS steps, d.steps LIMIT 0",
        "SELECT n FROM (SELECT count(*) AS n FROM d.steps UNION ALL SELECT 12) GROUP BY n;",
        "SELECT sum(c) AS n FROM (PIVOT d.steps ON terminated IN (true, false) USING count(*) AS c)"
        " UNPIVOT (c FOR k IN (true_c, false_c))",
    ],
)
def test_a_dataset_may_be_named_in_many_ways(lake: Lake, dataset: Dataset, query: str) -> None:
    if "LIMIT 0" in query:
        with pytest.raises(QueryError):
            lake.sql(query)
    else:
        assert [int(n) for n in lake.sql(query)["n"].to_pylist()] == [12]


def test_two_datasets_and_every_view_in_one_query(lake: Lake, make_episode: Make) -> None:
    """Also datasets that are called as views are, which an earlier version let people make."""
    for name in ("first", "second", "other"):
        lake.dataset(name).append([make_episode("x", 2)])
    (lake.path / "first").rename(lake.path / "steps")
    (lake.path / "second").rename(lake.path / "policies")
    query = (
        "SELECT count(*) AS n FROM other.steps a, steps.steps b, policies.transitions c, "
        "steps.episodes e"
    )
    assert values(lake.sql(query)) == [(8,)]
    assert values(lake.sql("SELECT count(*) AS n FROM policies")) == [(0,)]


def test_describe_and_summarize(lake: Lake, dataset: Dataset) -> None:
    assert "next_observation" in lake.sql("DESCRIBE d.transitions")["column_name"].to_pylist()
    assert lake.sql("SUMMARIZE d.episodes").num_rows > 5


@pytest.mark.parametrize(
    "query",
    [
        "",
        "-- nothing",
        "DROP TABLE x",
        "CREATE TABLE x AS SELECT 1",
        "COPY (SELECT 1) TO 'x.csv'",
        "SET threads = 1",
        "ATTACH 'x.db'",
        "INSTALL httpfs",
        "PRAGMA database_list",
        "SELECT 1; SELECT 2",
        "SELECT 1; DROP TABLE x",
        "EXPLAIN SELECT 1",
    ],
)
def test_what_is_not_one_select_is_refused(
    lake: Lake, query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(QueryRefusedError, match="expected one SELECT"):
        lake.sql(query)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELEC 1", "syntax error"),
        ("SELECT x FROM d.steps", "x"),
        ("SELECT * FROM nothing", "nothing"),
        ("SELECT 1 / 'a'", "Conversion Error"),
    ],
)
def test_duckdb_s_own_words(lake: Lake, dataset: Dataset, query: str, message: str) -> None:
    with pytest.raises(QueryError, match=message) as caught:
        lake.sql(query)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (
            "SELECT * FROM d.step",
            r"^d\.step: found no such view, expected steps, episodes, games, transitions, "
            r"sequences, groups, preference_pairs, decisions, rewards, received, quarantine\.$",
        ),
        (
            "SELECT * FROM steps",
            r"^steps: .* expected the dataset before it: d\.steps, e\.steps\.$",
        ),
        ("SELECT * FROM main.Episodes", r"the dataset before it: d\.episodes"),
        ("SELECT (SELECT max(reward) FROM rewards)", r"the dataset before it: d\.rewards"),
        ("SELECT * FROM d", r"^d: .* expected one of its views, such as d\.steps\.$"),
        ("SELECT * FROM nothing.step", "nothing"),
    ],
)
def test_a_view_that_is_not_there(
    lake: Lake, dataset: Dataset, make_episode: Make, query: str, message: str
) -> None:
    lake.dataset("e").append([make_episode()])
    error = QueryError if "nothing" in query else NotFoundError
    with pytest.raises(error, match=message):
        lake.sql(query)


def test_a_view_in_a_lake_without_datasets(lake: Lake) -> None:
    with pytest.raises(
        NotFoundError, match=r"expected <dataset>\.steps, and this lake has no dataset"
    ):
        lake.sql("SELECT * FROM steps")


def test_a_query_may_name_its_own_tables_like_views(lake: Lake, dataset: Dataset) -> None:
    query = "WITH steps AS (SELECT 1 AS a), d AS (SELECT 2 AS b) SELECT * FROM STEPS, d"
    assert values(lake.sql(query)) == [(1, 2)]
    assert lake.sql("SELECT * FROM information_schema.tables").num_rows == 0


@pytest.mark.parametrize("view", ["steps", "episodes", "transitions"])
def test_a_shard_that_is_gone(lake: Lake, dataset: Dataset, view: str) -> None:
    path = dataset.snapshot().table.paths()[0]
    path.unlink()
    advice = f"{path.name}: No such file or directory, expected the shard .*from a copy of the lake"
    with pytest.raises(ShardCorruptError, match=advice):
        lake.sql(f"SELECT * FROM d.{view}")
    with pytest.raises(ShardCorruptError, match=advice):
        dataset.snapshot().sql(f"SELECT * FROM {view}")


def test_columns_that_are_called_as_a_view_s_own_parts(lake: Lake, make_episode: Make) -> None:
    extras = {"__next_step": [7, 8, 9], "__next_observation": [1, 2, 3]}
    lake.dataset("d").append([make_episode("e", extras=extras)])
    rows = lake.sql("SELECT * FROM d.transitions ORDER BY step")
    assert rows["__next_step"].to_pylist() == [7, 8, 9]
    assert rows.column_names[-3:] == ["__next_step", "__next_observation", "next_observation"]
    assert rows["next_observation"].to_pylist() == [[1, -1], [2, -2], [3, -3]]


def test_what_is_not_there(lake: Lake, dataset: Dataset) -> None:
    with pytest.raises(NotFoundError, match="dataset 'nothing': not in this lake"):
        lake.sql("SELECT * FROM nothing.steps")
    with pytest.raises(NotFoundError, match=r"d\.decisions: nothing was served into dataset 'd'"):
        lake.sql("SELECT * FROM d.decisions")


def test_feedback_tables_beside_steps(lake: Lake, dataset: Dataset) -> None:
    schema = pa.schema([pa.field("decision_id", pa.string(), False)])
    dataset.decisions.create(schema)
    dataset.decisions.append(pa.table({"decision_id": ["x"]}), producer="p", sequence=0)
    dataset.rewards.create(schema)
    query = (
        "SELECT (SELECT count(*) FROM d.steps) AS s, (SELECT count(*) FROM d.decisions) AS n, "
        "(SELECT count(*) FROM d.rewards) AS r, (SELECT count(*) FROM d.decisions) AS again"
    )
    assert values(lake.sql(query)) == [(12, 1, 0, 1)]


def test_a_column_that_came_later(lake: Lake, dataset: Dataset, make_episode: Make) -> None:
    before = dataset.snapshot()
    extras = {
        "note": ["x"],
        "logits": np.array([[0.5, 1.5]], np.float32),
        "info": [{"k": 1, "l": ["m"]}],
    }
    dataset.append([make_episode("z", 1, extras=extras)])
    query = "SELECT note, logits, info.k, info.l FROM d.steps WHERE episode_id IN ('z', 'e')"
    rows = values(lake.sql(query + " ORDER BY episode_id"))
    assert rows == [(None, None, None, None), ("x", [0.5, 1.5], 1, ["m"])]
    assert values(lake.sql("SELECT count(*), count(note) FROM d.transitions")) == [(13, 1)]
    assert "note" not in before.sql("SELECT * FROM steps").column_names


def test_a_dataset_without_steps(lake: Lake) -> None:
    space = Dict({"camera": Box((2, 2), "uint8"), "pair": Tuple((Box((2,)), Text()))})
    lake.dataset("empty").create(space, Discrete(2), mask_size=2, extras={"n": pa.int64()})
    for view in ("steps", "episodes", "transitions"):
        assert lake.sql(f"SELECT * FROM empty.{view}").num_rows == 0
    rows = lake.sql("SELECT observation.pair._0, action_mask, n FROM empty.transitions")
    assert rows.schema.field("_0").type == pa.list_(pa.float32())
    described = lake.dataset("empty").snapshot().describe()
    assert (described["num_episodes"], described["mean_return"]) == (0, None)


def test_mappings_are_sql(lake: Lake, make_episode: Make) -> None:
    observations = {"camera": np.full((3, 2, 2), 7, np.uint8), "pair": (np.eye(3), list("abc"))}
    final = {"camera": np.zeros((2, 2), np.uint8), "pair": (np.zeros(3), "z")}
    episode = make_episode(observations=observations, final_observation=final, truncated=True)
    lake.dataset("n").append([episode])
    query = (
        "SELECT next_observation.pair._1, observation.pair._0[2] FROM n.transitions ORDER BY step"
    )
    assert values(lake.sql(query)) == [("b", 0.0), ("c", 1.0), ("z", 0.0)]
    assert values(lake.sql("SELECT any_value(observation.camera) AS c FROM n.steps")) == [
        (b"\7" * 4,)
    ]


def test_lake_wide_relations(
    lake: Lake, dataset: Dataset, make_episode: Make, package: Path
) -> None:
    lake.registry.record_run(
        "r1", {"kind": "offline", "status": "done", "started_ms": 1000, "ended_ms": 2000}
    )
    lake.registry.register("cql", package, run_id="r1", lineage={"algorithm": "cql"})
    lake.registry.set_alias("cql", "champion", 1)

    assert values(lake.sql("SELECT dataset, version, num_steps, num_shards FROM datasets")) == [
        ("d", 2, 12, 2)
    ]
    query = (
        "SELECT dataset, version, operation, num_episodes, num_steps FROM commits ORDER BY version"
    )
    assert values(lake.sql(query)) == [
        ("d", 0, "CREATE TABLE", None, None),
        ("d", 1, "WRITE", 4, 8),
        ("d", 2, "WRITE", 3, 4),
    ]
    query = "SELECT policy, version, aliases, algorithm, run_id, lineage FROM policies"
    assert values(lake.sql(query)) == [
        ("cql", 1, ["champion"], "cql", "r1", '{"algorithm": "cql"}')
    ]
    query = "SELECT run_id, kind, epoch_ms(started_at) AS s, record->>'status' AS t FROM runs"
    assert values(lake.sql(query)) == [("r1", "offline", 1000, "done")]
    shards = lake.sql("SELECT * FROM shards")
    assert shards["num_rows"].to_pylist() == [8, 4]
    assert shards["sha256"].to_pylist() == [e.sha256 for e in dataset.snapshot().files]
    query = "SELECT count(*) AS n FROM main.runs JOIN POLICIES USING (run_id)"
    assert values(lake.sql(query)) == [(1,)]


def test_a_lake_of_any_name(tmp_path: Path, make_episode: Make) -> None:
    lake = open_lake(tmp_path / "a [b]* 'c'?", create=True)
    lake.dataset("d").append([make_episode()])
    assert values(lake.sql("SELECT count(*) FROM d.steps")) == [(3,)]
    assert lake.dataset("d").snapshot().replay("num_steps > 1").num_steps == 3


def test_python_variables_are_out_of_reach(lake: Lake) -> None:
    secret = pa.table({"x": [1]})  # noqa: F841
    with pytest.raises(QueryError, match="secret"):
        lake.sql("SELECT * FROM secret")


# --- expressions ----------------------------------------------------------------------------


def selected(dataset: Dataset, where: str) -> int:
    return dataset.snapshot().replay(where).num_episodes


@pytest.mark.parametrize(
    ("where", "num"),
    [
        ("terminated", 2),
        ('"return" > 2.5', 4),
        ("return > 2.5", 4),
        ("policy = 'q' AND max_policy_version = 3", 1),
        ("ended_at < TIMESTAMP '2000-01-01' -- a comment", 1),
        ("source_episode_id IS NOT NULL OR episode_id IN ('a', 'b')", 3),
    ],
)
def test_where_selects_whole_episodes(dataset: Dataset, where: str, num: int) -> None:
    assert selected(dataset, where) == num


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("random() < 0.5", "random"),
        ("started_at < now()", "now"),
        ("started_at < current_timestamp", "current_timestamp"),
        ("started_at < CURRENT_DATE", "current_date"),
        ("started_at < ago(INTERVAL 1 DAY)", "ago"),
        ("age(started_at) > INTERVAL 1 DAY", "age"),
        ("num_steps IN (SELECT 2)", "a subquery"),
        ("EXISTS (FROM read_csv('x.csv'))", "a subquery"),
        ("row_number() OVER () > 1", "a window function"),
        ("COLUMNS(*) > 1", r"\*"),
        ("num_steps > $1", "more than an expression"),
        ("true) UNION SELECT 1 FROM episodes WHERE (true", "more than an expression"),
        ("true) GROUP BY (1", "more than an expression"),
        ("list_sum(list_transform([1], lambda x: x + random())) > 1", "random"),
    ],
)
def test_what_cannot_be_reproduced_is_refused(dataset: Dataset, where: str, found: str) -> None:
    with pytest.raises(QueryRefusedError, match=found):
        selected(dataset, where)


def test_a_column_may_be_called_as_a_function_is(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode(extras={"age": [1, 2, 3], "uuid": [4, 5, 6]})])
    view = dataset.snapshot().replay(reward="age + uuid")
    assert view.packed.records.rows["reward"][view.packed.steps].tolist() == [5, 7, 9]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nothing > 1", "nothing"),
        ("num_steps >", "syntax error"),
        (" ", "found an empty one"),
        ("sum(num_steps) > 1", "aggregate"),
        ("1); DROP TABLE x; --", "syntax error"),
    ],
)
def test_expressions_that_do_not_run(dataset: Dataset, where: str, message: str) -> None:
    with pytest.raises((QueryError, QueryRefusedError), match=message):
        selected(dataset, where)


@pytest.mark.parametrize("reward", ["sum(reward)", "unnest([reward, 1])"])
def test_a_reward_is_one_number_a_step(dataset: Dataset, reward: str) -> None:
    with pytest.raises(QueryRefusedError, match="values for 12 steps, expected one per step"):
        dataset.snapshot().replay(reward=reward)


@pytest.mark.parametrize(
    ("reward", "found"),
    [
        ("NULL", "NULL or NaN in 12 of 12"),
        ("reward / 0", "infinity in 12 of 12"),
        ("CASE WHEN step > 0 THEN 1 END", "NULL or NaN in 5 of 12"),
    ],
)
def test_a_reward_is_finite(dataset: Dataset, reward: str, found: str) -> None:
    with pytest.raises(SchemaMismatchError, match=f"found {found} selected steps, expected finite"):
        dataset.snapshot().replay(reward=reward)


def test_a_reward_need_not_be_finite_where_no_episode_is_selected(dataset: Dataset) -> None:
    (first, *_) = dataset.snapshot().sql("select episode_id from episodes order by 1").to_pylist()
    name = first["episode_id"]
    reward = f"CASE WHEN episode_id = '{name}' THEN NULL ELSE reward END"
    view = dataset.snapshot().replay(f"episode_id <> '{name}'", reward=reward)
    assert 0 < view.num_steps < 12


def test_selections_say_what_they_are_in_one_spelling(dataset: Dataset) -> None:
    snapshot = dataset.snapshot()
    one = snapshot.replay('  "return"  >2  and terminated').selections[0]
    same = snapshot.replay("(RETURN > 2) AND (terminated)").selections[0]
    other = snapshot.replay("terminated").selections[0]
    assert one.where is not None
    assert one.where.lower() == (same.where or "").lower()
    assert other.num_steps == one.num_steps == 7
    assert other.content_hash != one.content_hash
    assert snapshot.replay(one.where).selections[0] == one, "the canonical text is its own"


@pytest.mark.parametrize("name", ["foo", "tables", "pg_tabels", "duckdb_table"])
def test_an_unknown_table_is_not_answered_with_a_table_of_duckdb_s(lake, name):
    with pytest.raises(QueryError, match=rf"{name} does not exist, expected a view") as caught:
        lake.sql(f"select * from {name}")
    assert "Did you mean" not in str(caught.value)
