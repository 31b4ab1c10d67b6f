import numpy as np
import pytest

from replaylake.datastore.episodes.compatibility import (
    find_spec_mismatch,
    is_compatible,
    join_specs,
)
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple
from replaylake.datastore.errors import SchemaMismatchError
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.replay.view import concatenate

OBSERVATION = Box((2,), "float32")


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (Box((2,)), Box((2,), "float32", -1, 1), True),
        (Box((2,)), Box((3,)), False),
        (Box((2,)), Box((2,), "float64"), True),
        (Box((2,)), Box((2,), "float16"), False),
        (Box((2,), "int32"), Box((2,), "int64"), False),
        (Box((), "int64"), Discrete(3), False),
        (Discrete(3), Discrete(3), True),
        (Discrete(3), Discrete(4), False),
        (Discrete(3), Discrete(3, start=1), False),
        (MultiDiscrete((2, 2)), MultiDiscrete((2, 3)), False),
        (Dict({"a": Box((2,))}), Dict({"a": Box((2,), "float32", 0, 1)}), True),
        (Dict({"a": Box((2,))}), Dict({"b": Box((2,))}), False),
        (Tuple((Box((2,)),)), Tuple((Box((2,), "float32", 0, 1),)), True),
    ],
)
def test_kind_shape_and_dtype_count_and_bounds_do_not(first, second, same):
    assert is_compatible(first, second) is same
    assert is_compatible(second, first) is same


def test_any_width_lets_another_width_in_but_no_other_kind():
    assert is_compatible(Box((2,), "int8"), Box((2,), "int64"), any_width=True)
    assert not is_compatible(Box((2,)), Box((2,), "int64"), any_width=True)


def test_the_joined_bounds_hold_for_both():
    first = DatasetSpec(OBSERVATION, Box((2,), "float64", [-1, 0], [1, 1]))
    second = DatasetSpec(OBSERVATION, Box((2,), "float32", [0, -3], [5, 0]), None)
    assert find_spec_mismatch(first, second) is None
    both = Box((2,), "float64", [-1, -3], [5, 1])
    assert join_specs(first, second).action_space == join_specs(second, first).action_space == both


def test_masks_of_two_widths_are_a_difference_and_none_is_not():
    spec = {size: DatasetSpec(OBSERVATION, Discrete(3), size) for size in (None, 3, 4)}
    assert find_spec_mismatch(spec[None], spec[3]) is None
    assert (
        join_specs(spec[None], spec[3]).mask_size == join_specs(spec[3], spec[None]).mask_size == 3
    )
    assert find_spec_mismatch(spec[3], spec[4]) == "the action mask has 3 and 4 actions"


@pytest.mark.parametrize("order", [("log", "live"), ("live", "log")])
def test_a_served_dataset_with_masks_joins_a_log_without(tmp_path, order):
    lake = open_lake(tmp_path / "lake", create=True)
    rows = np.array([[1, 2], [3, 4]], np.float32)

    def episode(name, **changes):
        return Episode(name, rows, np.array([0, 1]), np.ones(2), terminated=True, **changes)

    lake.dataset("log").append([episode("log/1")])
    masks = np.array([[True, False], [True, True]])
    lake.dataset("live").create(Box((2,), "float32", -9, 9), Discrete(2), mask_size=2)
    lake.dataset("live").append([episode("live/1", action_masks=masks), episode("live/2")])
    view = concatenate([lake.dataset(name).snapshot().replay() for name in order])
    assert view.spec.mask_size == 2
    assert (view.num_steps, view.num_episodes, view.num_transitions) == (6, 3, 6)
    found = view.packed.records.rows[view.packed.steps]
    assert sorted(map(tuple, found["action_mask"].tolist())) == [(True, False)] + [(True, True)] * 5
    np.testing.assert_array_equal(found["observation"], np.tile(rows, (3, 1)))
    batch = view.uniform(64, seed=0).sample()
    assert batch.action_masks.shape == batch.next_action_masks.shape == (64, 2)


def test_what_differs_is_said(tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    for name, width in (("a", 2), ("b", 3)):
        observations = np.zeros((1, width), np.float32)
        lake.dataset(name).append([Episode("e", observations, np.array([0]), np.ones(1), True)])
    views = [lake.dataset(name).snapshot().replay() for name in "ab"]
    message = r"datasets a@1 and b@1: the observation space is Box float32\[2\] and .*\[3\]"
    with pytest.raises(SchemaMismatchError, match=message):
        concatenate(views)
