"""A reader of some datasets and columns: the others are not there, whatever the query tries."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Dict, Discrete, Text
from replaylake.datastore.errors import (
    NotFoundError,
    QueryError,
    QueryRefusedError,
    ReplayLakeError,
)
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.roles import Grant, read_role_table
from replaylake.datastore.query import summaries
from replaylake.datastore.query.connections import session
from replaylake.datastore.query.statements import find_tables
from replaylake.datastore.query.views import COLUMN_SOURCES, plan_views

TOKEN = b"0123456789abcdef"
# What the reader must not see: a value of each hidden column, and the names of two.
PLANTED = ("planted", "4711", "email", "rival")
LISTED = ["episode_id", "agent_id", "step", "observation", "reward", "truncated", "pay"]


def grant(tmp_path: Path, entry: str) -> Grant:
    path = tmp_path / "roles.toml"
    hashed = hashlib.sha256(TOKEN).hexdigest()
    path.write_text(f'[[tokens]]\nname = "analyst"\nsha256 = "{hashed}"\n{entry}\n')
    return read_role_table(path).find_reader(TOKEN)


@pytest.fixture
def shop(lake: Lake) -> Lake:
    def episode(name: str) -> Episode:
        steps = 9
        return Episode(
            name,
            observations={"age": np.arange(steps), "name": np.array(["x"] * steps, object)},
            actions=np.ones(steps, np.int64),
            rewards=np.arange(steps, dtype=float),
            terminated=True,
            policies=["planted-policy"] * steps,
            policy_versions=[4711] * steps,
            extras={
                "email": ["planted@example.com"] * steps,
                "pay": [{"amount": 3}] * steps,
                "group_id": [name] * steps,
            },
        )

    for name in ("shop", "rival"):
        lake.dataset(name).create(Dict({"age": Discrete(100), "name": Text()}), Discrete(2))
        lake.dataset(name).append([episode(f"planted-{number}") for number in range(2)])
    return lake


@pytest.fixture
def reader(tmp_path: Path) -> Grant:
    listed = [name for name in LISTED if name not in ("episode_id", "agent_id")]
    return grant(tmp_path, f'reader = ["shop"]\ncolumns.shop = {listed}')


def names_of(lake: Lake, reader: Grant, view: str) -> list[str]:
    names: list[str] = lake.sql_untrusted(f"select * from {view}", reader=reader).rows.column_names
    return names


def test_columns_outside_the_list_are_not_there(shop: Lake, reader: Grant) -> None:
    rows = shop.sql_untrusted("select * from shop.steps order by all", reader=reader).rows
    assert rows.column_names == ["step", "observation", "reward", "truncated", "pay"]
    assert rows.num_rows == 18
    query = "select sum(reward) as r, max(observation.age) as age, max(pay.amount) from shop.steps"
    (row,) = shop.sql_untrusted(query, reader=reader).rows.to_pylist()
    assert list(row.values()) == [72.0, 8, 3]
    with pytest.raises(QueryError) as hidden:
        shop.sql_untrusted("select email from shop.steps", reader=reader)
    suggested = set(re.findall(r'"(\w+)"', str(hidden.value))) - {"email"}
    assert suggested <= set(LISTED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "query",
    [
        # The column by its name, and what DuckDB suggests for a name like it.
        "select email from shop.steps",
        "select s.email from shop.steps as s",
        "select shop.steps.email from shop.steps",
        "select emali, polic from shop.steps",
        "select * exclude (email) from shop.steps",
        "select * replace ('x' as email) from shop.steps",
        "select reward from shop.steps where email is not null",
        "select reward from shop.steps order by email",
        "select count(*) from shop.steps group by policy_version",
        # By its place, by a pattern, and by the row as a whole.
        "select #6 from shop.steps",
        "select #1, #2, #3, #4, #5, #6, #7, #8 from shop.steps",
        "select columns('.*mail|pol.*') from shop.steps",
        "select columns(*) from shop.steps",
        "select * like 'e%' from shop.steps",
        "select s from shop.steps as s",
        "select to_json(s), struct_extract(s, 'email') from shop.steps as s",
        "select s['email'] from shop.steps as s",
        "select row_to_json(s) from shop.steps as s",
        "from (pivot shop.steps on policy using count(*))",
        "unpivot shop.steps on columns(*)",
        "select filename, file_row_number, rowid from shop.steps",
        # By views that are computed from it.
        "select * from shop.episodes",
        "select policy from shop.episodes",
        "select policies, max_policy_version from shop.games",
        "select * from shop.transitions",
        "select action from shop.transitions",
        "select * from shop.groups",
        "select best_episode_id from shop.groups",
        "select * from shop.sequences",
        "select * from shop.quarantine",
        "select * from shop.decisions",
        # By catalogs, and by reading the files.
        "select * from information_schema.columns",
        "select * from pragma_table_info('shop.steps')",
        "select * from duckdb_columns()",
        "select * from duckdb_views()",
        "select sql from sqlite_master",
        "describe shop.steps",
        "from (describe shop.steps)",
        "from (summarize shop.steps)",
        "explain analyze select * from shop.steps",
        "select json_serialize_plan('select * from shop.steps')",
        "select * from read_parquet('{shard}')",
        "select * from parquet_schema('{shard}')",
        "select * from '{shard}'",
        "select * from query_table('shop.steps')",
        "select * from query('select email from shop.steps')",
        # Another dataset, and what of the lake names it.
        "select * from rival.steps",
        "select * from rival.nothing",
        "select * from steps",
        "select * from datasets",
        "select * from commits",
        "select * from shards",
        "select * from policies",
        "select * from runs",
        "select * from promotions",
        "select * from metrics",
        # Errors at run time that repeat values.
        "select error(to_json(s)::varchar) from shop.steps as s",
        "select cast(s::varchar as integer) from shop.steps as s",
    ],
)
def test_what_a_query_tries(shop: Lake, reader: Grant, query: str) -> None:
    table = shop.dataset("shop").snapshot().table
    filled_in = query.replace("{shard}", str(table.paths()[0]))
    try:
        rows = shop.sql_untrusted(filled_in, reader=reader).rows
        seen = f"{rows.column_names} {rows.to_pylist()}"
    except ReplayLakeError as error:
        # It may repeat the query.
        seen = str(error)
        for word in PLANTED:
            if word in filled_in:
                seen = seen.replace(word, "")
    assert not [word for word in PLANTED if word in seen], seen


def test_views_have_what_depends_on_listed_columns(shop: Lake, tmp_path: Path) -> None:
    reader = grant(tmp_path, f'reader = ["*"]\ncolumns."*" = {LISTED}')
    assert names_of(shop, reader, "shop.episodes") == [
        *("episode_id", "agent_id", "num_steps", "return", "truncated", "first_step"),
    ]
    assert names_of(shop, reader, "rival.games") == [
        *("episode_id", "num_agents", "num_steps", "return", "agent_returns", "truncated"),
    ]
    # Which observation follows depends on `terminated`, and on `final_observation`.
    listed = names_of(shop, reader, "shop.steps")
    assert names_of(shop, reader, "shop.transitions") == listed
    for view in ("groups", "preference_pairs", "sequences"):
        with pytest.raises(NotFoundError, match=f"{view}: found no column"):
            names_of(shop, reader, f"shop.{view}")


@pytest.mark.parametrize("name", ['"pieces of shop."', 'main."pieces of shop."'])
def test_tables_behind_the_views_are_not_there(shop: Lake, tmp_path: Path, name: str) -> None:
    summaries.refresh(shop.dataset("shop").snapshot().table)
    reader = grant(tmp_path, f'reader = ["shop"]\ncolumns.shop = {LISTED}')
    assert names_of(shop, reader, "shop.episodes")
    with pytest.raises(QueryRefusedError, match="no view of the lake"):
        shop.sql_untrusted(f"select p.* from {name} as p, shop.episodes", reader=reader)


def test_a_view_without_a_listed_column_names_those_with_one(shop: Lake, reader: Grant) -> None:
    with pytest.raises(NotFoundError, match=r"no such view, expected steps, transitions\.$"):
        names_of(shop, reader, "shop.episodes")


def test_every_column_of_the_views_names_its_sources(lake: Lake, make_dialogue: Any) -> None:
    lake.dataset("talks").append([make_dialogue("a", extras={"group_id": ["g"] * 3})])
    for view, sources in COLUMN_SOURCES.items():
        names = lake.sql(f"select * from talks.{view}").column_names
        own = lake.sql("select * from talks.steps").column_names if view == "transitions" else []
        assert names == [*own, *sources], view


def test_per_token_columns_need_their_column(
    lake: Lake, make_dialogue: Any, tmp_path: Path
) -> None:
    columns = {"action_advantages": [[1.0] * (t + 1) for t in range(3)]}
    lake.dataset("talks").append([make_dialogue("a", extras=columns)])
    listed = ["episode_id", "agent_id", "step", "observation_tokens", "action_tokens"]
    for more, seen in (([], []), (["action_advantages"], ["action_advantages"])):
        reader = grant(tmp_path, f'reader = ["talks"]\ncolumns.talks = {[*listed, *more]}')
        names = names_of(lake, reader, "talks.sequences")
        assert [name for name in names if name.startswith("action_adv")] == seen
        assert "token_ids" in names


def test_the_lakes_own_views_show_what_may_be_read(shop: Lake, reader: Grant) -> None:
    for view in ("datasets", "commits", "shards"):
        rows = shop.sql_untrusted(f"select distinct dataset from {view}", reader=reader).rows
        assert rows.to_pylist() == [{"dataset": "shop"}]


def test_versions_of_a_dataset_that_may_not_be_read(shop: Lake, reader: Grant) -> None:
    query = "select * from before.steps"
    rows = shop.sql_untrusted(query, at={"before": "shop@1"}, reader=reader).rows
    assert rows.column_names == ["step", "observation", "reward", "truncated", "pay"]
    shop.tag("rival@1", "planted")
    said = []
    for at in ({"rival": 1}, {"rival": "planted"}, {"rival": 99}, {"before": "rival@1"}):
        with pytest.raises(NotFoundError) as refused:
            shop.sql_untrusted("select 1", at=at, reader=reader)
        said.append(str(refused.value).replace("rival", "nowhere"))
    with pytest.raises(NotFoundError) as absent:
        shop.sql_untrusted("select 1", at={"nowhere": 1}, reader=reader)
    assert set(said) == {str(absent.value)}
    # Its name is as free as any that is not taken.
    query = "select count(*) as n from rival.steps"
    rows = shop.sql_untrusted(query, at={"rival": "shop@1"}, reader=reader).rows
    assert rows.to_pylist() == [{"n": 18}]


def test_a_reader_of_all_datasets_sees_the_whole_lake(shop: Lake, tmp_path: Path) -> None:
    reader = grant(tmp_path, 'reader = ["*"]')
    query = "select count(email) as n from rival.steps, policies, runs"
    assert shop.sql_untrusted(query, reader=reader).rows.to_pylist() == [{"n": 0}]


def test_views_read_the_summary_as_the_steps(
    lake: Lake, make_episode: Callable[..., Episode], tmp_path: Path
) -> None:
    lake.dataset("d").append([make_episode(f"e{number}", 50) for number in range(40)])
    assert summaries.refresh(lake.dataset("d").snapshot().table)
    columns = ["episode_id", "agent_id", "reward"]
    reader = grant(tmp_path, f'reader = ["d"]\ncolumns.d = {columns}')
    query = "select * from d.episodes order by all"
    expected = lake.sql(query).select(["episode_id", "agent_id", "num_steps", "return"])
    assert lake.sql_untrusted(query, reader=reader).rows.equals(expected)
    # The same rules for SQL in this process: the views are the same.
    with session() as connection:
        names = find_tables(connection, query)
        views = plan_views(names, lake.catalog(reader=reader))
    assert views.names == [("d", "episodes")]
