"""Every SQL column is documented, and the documented queries run."""

import re
from pathlib import Path

import numpy as np
import pytest

from replaylake.datastore.episode import Episode
from replaylake.datastore.lake import open_lake

_SQL = (Path(__file__).parents[1] / "docs" / "SQL.md").read_text()


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    lake = open_lake(tmp_path_factory.mktemp("docs") / "lake", create=True)
    episode = Episode(
        "test/0",
        observations=np.zeros((2, 4), np.float32),
        actions=np.array([0, 1]),
        rewards=np.ones(2),
        terminated=True,
        behavior_log_probs=np.log([0.5, 0.5]),
        action_masks=np.ones((2, 2), bool),
        timestamps=np.array([0, 1]),
    )
    lake.dataset("cartpole").append([episode])
    return lake


@pytest.mark.parametrize(
    "view",
    [
        "cartpole.steps",
        "cartpole.episodes",
        "cartpole.transitions",
        "datasets",
        "commits",
        "shards",
        "policies",
        "runs",
    ],
)
def test_every_column_is_documented(lake, view):
    words = set(re.findall(r"\w+", _SQL))
    assert view.rpartition(".")[2] in words
    columns = lake.sql(f"select * from {view}").schema.names
    assert columns
    assert [name for name in columns if name not in words] == []


@pytest.mark.parametrize("query", re.findall(r"```sql\n(.*?)```", _SQL, re.DOTALL))
def test_documented_queries_run(lake, query):
    assert lake.sql(query).num_columns >= 2
