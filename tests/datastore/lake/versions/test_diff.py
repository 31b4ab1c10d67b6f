"""What differs between two versions, whatever moved in between."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.versions import diff as module
from replaylake.datastore.lake.versions.diff import ChangeCounts, EpisodeKey, diff
from replaylake.datastore.storage.table.rewrite import RewritePlan, rewrite


@pytest.fixture
def dataset(lake, make_episode):
    """Version 1 has a (3 steps) and b (5 steps) in one shard, version 2 c (2 steps) in another."""
    dataset = lake.dataset("d")
    dataset.append([make_episode("a"), make_episode("b", 5)])
    dataset.append([make_episode("c", 2)])
    return dataset


def _keys(*names):
    return tuple(EpisodeKey(name, "") for name in names)


def _diff(dataset, a, b, **options):
    return diff(dataset.snapshot(a), dataset.snapshot(b), **options)


def _compact(dataset):
    """Put all shards into one, rows in another order, as compaction may."""
    table = dataset.table.snapshot()
    rows = table.read()
    rows = rows.take(pa.array(np.random.default_rng(0).permutation(rows.num_rows)))
    dataset.table.commit(
        [dataset.table.write(rows, since=0)],
        producer="compact/test",
        sequence=dataset.table.log.newest().version,
        operation="COMPACT",
        removed=[entry.path for entry in table.files],
        data_change=False,
    )


def _rewrite(dataset, change, name="change"):
    rewrite(
        dataset.table,
        lambda snapshot: RewritePlan({entry: change for entry in snapshot.files}),
        producer=f"test/{name}",
        sequence=0,
        operation="REWRITE",
    )


def _without(name):
    return lambda rows: rows.filter(pc.not_equal(rows["episode_id"], name))


def _reward(rows, name, step, value):
    where = pc.and_(pc.equal(rows["episode_id"], name), pc.equal(rows["step"], step))
    index = rows.schema.get_field_index("reward")
    column = pc.if_else(where, pa.scalar(value, pa.float64()), rows["reward"])
    return rows.set_column(index, rows.schema.field(index), column)


def test_an_append(dataset):
    found = _diff(dataset, 1, 2)
    assert (found.from_version, found.to_version) == (1, 2)
    assert found.shards == ChangeCounts(added=1)
    assert found.episodes == ChangeCounts(added=1)
    assert found.steps == ChangeCounts(added=2)
    assert found.added == _keys("c")
    assert not found.is_empty


def test_the_way_back(dataset):
    found = _diff(dataset, 2, 1)
    assert found.episodes == ChangeCounts(removed=1)
    assert found.steps == ChangeCounts(removed=2)
    assert found.removed == _keys("c")


def test_from_nothing(dataset):
    found = _diff(dataset, 0, 2)
    assert found.episodes == ChangeCounts(added=3)
    assert found.steps == ChangeCounts(added=10)


def test_the_same_version_reads_nothing(dataset, monkeypatch):
    monkeypatch.setattr(module, "session", None)
    assert _diff(dataset, 2, 2).is_empty


def test_compaction_is_no_difference(dataset):
    _compact(dataset)
    found = _diff(dataset, 2, 3)
    assert found.shards == ChangeCounts(added=1, removed=2)
    assert found.is_empty
    assert found.episodes == ChangeCounts()


def test_what_compaction_moved_is_not_read(dataset, monkeypatch):
    _compact(dataset)
    _compact(dataset)
    monkeypatch.setattr(module, "session", None)
    assert _diff(dataset, 2, 4).is_empty
    assert _diff(dataset, 4, 2).is_empty


def test_through_compaction_the_rest_is_seen(dataset, make_episode):
    _compact(dataset)
    dataset.append([make_episode("new", 4)])
    _rewrite(dataset, _without("a"))
    _rewrite(dataset, lambda rows: _reward(rows, "b", 2, 99.0), "reward")
    _compact(dataset)
    found = _diff(dataset, 2, None)
    assert found.episodes == ChangeCounts(added=1, removed=1, changed=1)
    assert found.steps == ChangeCounts(added=4, removed=3, changed=1)
    assert (found.added, found.removed, found.changed) == (_keys("new"), _keys("a"), _keys("b"))
    assert found.columns_changed == {"reward": 1}


def test_a_column_that_was_added_and_filled(dataset):
    def label(rows):
        marks = pc.if_else(pc.equal(rows["episode_id"], "b"), 1.5, pa.scalar(None, pa.float64()))
        return rows.append_column("label", marks)

    _rewrite(dataset, label)
    found = _diff(dataset, 2, 3)
    assert found.columns_added == ("label",)
    assert found.steps == ChangeCounts(changed=5)
    assert found.episodes == ChangeCounts(changed=1)
    assert found.columns_changed == {"label": 5}
    back = _diff(dataset, 3, 2)
    assert back.columns_removed == ("label",)
    assert back.steps == ChangeCounts(changed=5)


def test_a_column_that_was_added_and_is_empty(dataset, make_episode):
    dataset.append([make_episode("x", extras={"label": np.ones(3)})])
    found = _diff(dataset, 2, 3)
    assert found.columns_added == ("label",)
    assert found.steps == ChangeCounts(added=3)
    assert not replace(found, steps=ChangeCounts()).is_empty


def test_a_piece_of_an_episode_changes_it(dataset, make_episode):
    open_piece = make_episode("open", 3)
    dataset.append([open_piece])
    dataset.append([make_episode("open", 2, first_step=3, terminated=True)])
    found = _diff(dataset, 3, 4)
    assert found.episodes == ChangeCounts(changed=1)
    assert found.steps == ChangeCounts(added=2)
    assert found.changed == _keys("open")
    assert _diff(dataset, 2, 4).episodes == ChangeCounts(added=1)
    assert _diff(dataset, 4, 3).episodes == ChangeCounts(changed=1)


def test_a_log_that_starts_later_is_a_new_episode(dataset, make_episode):
    dataset.append([make_episode("late", 3, first_step=7, terminated=True)])
    assert _diff(dataset, 2, 3).added == _keys("late")


def test_steps_that_left_an_episode(dataset):
    _rewrite(
        dataset,
        lambda rows: rows.filter(
            pc.or_(pc.not_equal(rows["episode_id"], "b"), pc.less(rows["step"], 3))
        ),
    )
    found = _diff(dataset, 2, 3)
    assert found.episodes == ChangeCounts(changed=1)
    assert found.steps == ChangeCounts(removed=2)


def test_agents_are_apart(lake, make_episode):
    dataset = lake.dataset("two")
    dataset.append([make_episode("e", agent_id="left"), make_episode("e", agent_id="right")])
    _rewrite(dataset, lambda rows: rows.filter(pc.equal(rows["agent_id"].cast("string"), "left")))
    found = _diff(dataset, 1, 2)
    assert found.removed == (EpisodeKey("e", "right"),)
    assert found.episodes == ChangeCounts(removed=1)


def test_the_lists_end_at_the_limit_and_the_counts_do_not(dataset, make_episode):
    dataset.append([make_episode(f"n{number}", 1) for number in range(5)])
    found = _diff(dataset, 2, 3, limit=2)
    assert found.added == _keys("n0", "n1")
    assert found.episodes == ChangeCounts(added=5)


def test_nan_is_like_nan_and_null_like_null(lake, make_episode):
    dataset = lake.dataset("odd")
    dataset.append([make_episode("a", extras={"x": np.array([np.nan, 1.0, 2.0])})])
    _rewrite(dataset, lambda rows: rows.slice(0))
    assert _diff(dataset, 1, 2).is_empty


def test_two_datasets_are_not_compared(lake, dataset, make_episode):
    lake.dataset("other").append([make_episode("z")])
    with pytest.raises(ConfigInvalidError, match="two datasets"):
        diff(dataset.snapshot(), lake.snapshot("other"))
