"""Rewards that nobody knows, through the store: NaN in an Episode, NULL in SQL, NaN in replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import deltalake
import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EpisodeInvalidError,
    SchemaMismatchError,
    SourceInvalidError,
)
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.versions.diff import diff
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.copy.copy import copy
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.labels.annotate import annotate
from replaylake.datastore.query.summaries import read_coverage, refresh
from replaylake.datastore.replay.view import concatenate
from replaylake.offline.running.train import TrainConfig, train

Make = Callable[..., Episode]
SPACES = Box((2,)), Discrete(2)
UNKNOWN = np.array([1.0, np.nan, 3.0])
QUICK = TrainConfig(updates=5, batch_size=4, options={"hidden_sizes": [8]})


@pytest.fixture
def dataset(lake: Lake, make_episode: Make) -> Dataset:
    """Episodes a (all known: 1, 2, 3), b (1, ?, 3) and c (none)."""
    handle = lake.dataset("d")
    handle.create(*SPACES, rewards_optional=True)
    handle.append([make_episode("a", terminated=True)])
    handle.append(
        [
            make_episode("b", rewards=UNKNOWN, terminated=True),
            make_episode("c", rewards=np.full(3, np.nan), truncated=True),
        ]
    )
    return handle


def rewards_in(dataset: Dataset) -> dict[str, list[float | None]]:
    rows = dataset.snapshot().sql(
        "SELECT episode_id, list(reward ORDER BY step) AS r FROM steps GROUP BY 1 ORDER BY 1"
    )
    return dict(zip(*(column.to_pylist() for column in rows.columns), strict=True))


def test_are_null_in_sql_and_nan_in_arrays(dataset: Dataset) -> None:
    assert rewards_in(dataset) == {"a": [1, 2, 3], "b": [1, None, 3], "c": [None] * 3}
    rewards = dataset.snapshot().arrays()["reward"]
    np.testing.assert_array_equal(rewards, [1, 2, 3, 1, np.nan, 3, np.nan, np.nan, np.nan])
    assert dataset.spec.rewards_optional


def test_other_engines_see_nulls(dataset: Dataset) -> None:
    table = deltalake.DeltaTable(str(dataset.path))
    assert [f.nullable for f in table.schema().fields if f.name == "reward"] == [True]
    assert table.to_pyarrow_table().column("reward").null_count == 4


def test_datasets_made_without_saying_so_refuse_them(lake: Lake, make_episode: Make) -> None:
    unknown = make_episode("b", rewards=UNKNOWN)
    plain = lake.dataset("plain")
    with pytest.raises(
        EpisodeInvalidError, match="b: reward at step 1: found nan, expected finite"
    ):
        plain.append([unknown])
    plain.append([make_episode("a")])
    with pytest.raises(EpisodeInvalidError, match="found nan, expected finite"):
        plain.append([unknown, make_episode("c")])
    with plain.writer() as writer, pytest.raises(EpisodeInvalidError, match="found nan"):
        writer.write(unknown)
    assert not plain.spec.rewards_optional
    assert not plain.snapshot().table.schema.field("reward").nullable
    assert "replaylake.rewards_optional" not in plain.spec.configuration()


def test_infinity_is_refused_all_the_same(dataset: Dataset, make_episode: Make) -> None:
    with pytest.raises(EpisodeInvalidError, match="reward at step 2: found inf"):
        dataset.append([make_episode("x", rewards=np.array([1.0, np.nan, np.inf]))])


def test_writers_take_them(lake: Lake, dataset: Dataset, make_episode: Make) -> None:
    with dataset.writer() as writer:
        writer.write(make_episode("w", rewards=UNKNOWN, terminated=True))
        opened = writer.begin("o")
        opened.step(np.zeros(2, np.float32), 1, np.nan, np.ones(2, np.float32), terminated=True)
    assert rewards_in(dataset)["w"] == [1, None, 3]
    assert rewards_in(dataset)["o"] == [None]
    made = lake.dataset("made")
    made.append(
        [make_episode("b", rewards=UNKNOWN)], spec=DatasetSpec(*SPACES, rewards_optional=True)
    )
    assert rewards_in(made) == {"b": [1, None, 3]}


def test_many_short_episodes_are_checked_alike(dataset: Dataset, make_episode: Make) -> None:
    """They are joined for the check: each keeps its own."""
    ones = [make_episode(f"{i}", 1, rewards=np.array([r])) for i, r in enumerate((np.nan, 2.0))]
    dataset.append(ones)
    assert rewards_in(dataset)["0"] == [None]
    assert rewards_in(dataset)["1"] == [2.0]


def test_a_return_is_known_where_all_its_rewards_are(dataset: Dataset) -> None:
    snapshot = dataset.snapshot()
    found = snapshot.sql('SELECT episode_id AS e, "return" AS r FROM episodes ORDER BY 1')
    assert found.to_pylist() == [{"e": "a", "r": 6}, {"e": "b", "r": None}, {"e": "c", "r": None}]
    games = snapshot.sql("SELECT \"return\" AS r, agent_returns[''] AS a FROM games ORDER BY 1")
    assert games.to_pylist() == [{"r": 6, "a": 6}, {"r": None, "a": None}, {"r": None, "a": None}]
    discounted = snapshot.sql(
        "SELECT discounted_return(reward, step, 0.5) AS g FROM steps GROUP BY episode_id ORDER BY 1"
    )
    assert discounted.column("g").to_pylist() == [1 + 1 + 0.75, None, None]


def test_a_return_of_pieces_is_unknown_if_one_piece_is(lake: Lake, make_episode: Make) -> None:
    handle = lake.dataset("pieces")
    handle.create(*SPACES, rewards_optional=True)
    handle.append([make_episode("p", 10, final_observation=None)])
    rewards = np.where(np.arange(10) == 4, np.nan, 1.0)
    handle.append([make_episode("p", 10, first_step=10, rewards=rewards, terminated=True)])
    handle.append([make_episode("q", 20, truncated=True)])
    query = 'SELECT num_steps, "return" AS r FROM episodes ORDER BY episode_id'
    expected = [{"num_steps": 20, "r": None}, {"num_steps": 20, "r": 210.0}]
    assert handle.snapshot().sql(query).to_pylist() == expected
    # Made of the pieces that are known already, instead of from the steps.
    assert refresh(handle.snapshot().table)
    assert handle.snapshot().sql(query).to_pylist() == expected
    known = read_coverage(handle.snapshot().table)
    assert known is not None
    assert known.rest == ()


def test_description(lake: Lake, dataset: Dataset, make_episode: Make) -> None:
    about = dataset.snapshot().describe()
    assert (about["num_returns"], about["mean_return"], about["max_return"]) == (1, 6.0, 6.0)
    none = lake.dataset("unknown")
    none.create(*SPACES, rewards_optional=True)
    none.append([make_episode("c", rewards=np.full(3, np.nan))])
    about = none.snapshot().describe()
    assert (about["num_returns"], about["mean_return"]) == (0, None)


def test_replay_keeps_them(dataset: Dataset) -> None:
    view = dataset.snapshot().replay()
    batch = view.uniform(64, seed=0).sample()
    assert np.isnan(batch.rewards).any()
    assert set(batch.rewards[~np.isnan(batch.rewards)].tolist()) == {1, 2, 3}
    assert view.num_unknown_rewards == 4
    chosen = dataset.snapshot().replay(where_steps="reward IS NOT NULL")
    assert chosen.num_unknown_rewards == 0
    assert not np.isnan(chosen.uniform(64, seed=0).sample().rewards).any()


def test_views_of_both_kinds_join(lake: Lake, dataset: Dataset, make_episode: Make) -> None:
    other = lake.dataset("other")
    other.append([make_episode("z", terminated=True)])
    views = [handle.snapshot().replay() for handle in (other, dataset)]
    assert views[0].num_unknown_rewards == 0
    assert concatenate(views).num_unknown_rewards == 4


def test_a_reward_in_sql_has_to_say_what_they_count_as(dataset: Dataset) -> None:
    snapshot = dataset.snapshot()
    with pytest.raises(SchemaMismatchError, match="found NULL or NaN in 4 of 9"):
        snapshot.replay(reward="reward * 2")
    assert snapshot.replay(reward="coalesce(reward, 0)").num_unknown_rewards == 0


def test_learning_from_rewards_is_refused_and_cloning_is_not(lake: Lake, dataset: Dataset) -> None:
    with pytest.raises(ConfigInvalidError, match="cql: 4 of 9 steps have no reward") as refused:
        train(lake, ["d"], replace(QUICK, algorithm="cql", options={}, policy="p"))
    for way in ("with bc", "replaylake annotate", "coalesce(reward, 0)"):
        assert way in str(refused.value)
    assert train(lake, ["d"], replace(QUICK, policy="p")).num_steps == 9


def test_labels_fill_them(lake: Lake, dataset: Dataset) -> None:
    labels = pa.table({"episode_id": ["b", "b", "c"], "step": [1, 0, 2], "score": [0.5, None, 7.0]})
    done = annotate(lake, "d", labels, on=["episode_id", "step"], set={"reward": "score"})
    assert done.steps == 2
    assert rewards_in(dataset) == {"a": [1, 2, 3], "b": [1, 0.5, 3], "c": [None, None, 7]}
    assert dataset.snapshot().replay().num_unknown_rewards == 2
    # A label that builds on an unknown reward gives none.
    more = pa.table({"episode_id": ["c"], "step": [0], "bonus": [1.0]})
    done = annotate(
        lake, "d", more, on=["episode_id", "step"], set={"reward": "steps.reward + bonus"}
    )
    assert done.steps == 0


@pytest.mark.slow
def test_diff_compact_copy_and_fsck(lake: Lake, dataset: Dataset, tmp_path: Path) -> None:
    before = dataset.snapshot()
    labels = pa.table({"episode_id": ["c"], "score": [7.0]})
    annotate(lake, "d", labels, on="episode_id", set={"reward": "score"})
    found = diff(before, dataset.snapshot())
    assert (found.steps.changed, found.steps.added, found.steps.removed) == (1, 0, 0)
    assert dict(found.columns_changed) == {"reward": 1}
    expected = rewards_in(dataset)
    compact(lake, "d")
    assert rewards_in(dataset) == expected
    other = open_lake(tmp_path / "other", create=True)
    copy(lake, "d", other)
    assert rewards_in(other.dataset("d")) == expected
    assert other.dataset("d").spec == dataset.spec
    assert fsck(other).is_clean
    other.dataset("d").append([Episode("n", np.zeros((1, 2), np.float32), [0], [np.nan])])


def test_a_copy_does_not_bring_them_where_all_are_known(
    lake: Lake, dataset: Dataset, make_episode: Make
) -> None:
    lake.dataset("known").append([make_episode("k")])
    with pytest.raises(SchemaMismatchError, match="rewards may be unknown in d"):
        copy(lake, "d", lake, as_name="known")
    copy(lake, "known", lake, as_name="d")
    assert rewards_in(dataset)["k"] == [1, 2, 3]


# --- ingest ---------------------------------------------------------------------------------

LOG = "episode_id,x,action,{name}terminated\na,0.5,1,{first}0\na,0.6,0,{second}1\n"


def a_log(path: Path, name: str = "", first: str = "", second: str = "") -> Path:
    path.write_text(LOG.format(name=name, first=first, second=second))
    return path


MAP = {"observation": "x"}


def test_a_log_without_rewards_is_refused_unless_said(lake: Lake, tmp_path: Path) -> None:
    log = a_log(tmp_path / "log.csv")
    with pytest.raises(SourceInvalidError, match=r"is the reward\. .*`reward_unknown`"):
        ingest(lake, [log], "d", options=ReadOptions(mapping=MAP))
    ingest(lake, [log], "d", options=ReadOptions(mapping=MAP, reward_unknown=True))
    (found,) = rewards_in(lake.dataset("d")).values()
    assert found == [None, None]
    # What is known later goes into the same dataset.
    known = a_log(tmp_path / "known.csv", "reward,", "1.5,", "2.5,")
    ingest(lake, [known], "d", options=ReadOptions(mapping=MAP))
    assert [1.5, 2.5] in rewards_in(lake.dataset("d")).values()


def test_empty_cells_are_unknown_if_said(lake: Lake, tmp_path: Path) -> None:
    log = a_log(tmp_path / "log.csv", "reward,", "1.5,", ",")
    with pytest.raises(EpisodeInvalidError, match=r"column 'reward': found no value"):
        ingest(lake, [log], "d", options=ReadOptions(mapping=MAP), on_invalid="abort")
    ingest(lake, [log], "d", options=ReadOptions(mapping=MAP, reward_unknown=True))
    (found,) = rewards_in(lake.dataset("d")).values()
    assert found == [1.5, None]


def test_an_existing_dataset_of_known_rewards_refuses_them(lake: Lake, tmp_path: Path) -> None:
    ingest(lake, [a_log(tmp_path / "k.csv", "reward,", "1,", "2,")], "d", options=ReadOptions(MAP))
    log = a_log(tmp_path / "log.csv")
    options = ReadOptions(mapping=MAP, reward_unknown=True)
    with pytest.raises(EpisodeInvalidError, match="reward at step 0: found nan"):
        ingest(lake, [log], "d", options=options, on_invalid="abort")
