import math

import numpy as np
import pytest
import torch

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.offline.learning.action_scaling import ActionUnscaler, action_scaling


def test_bounds_map_to_minus_one_and_one():
    scaling = action_scaling(Box((2,), "float32", [-2.0, 0.0], [2.0, 10.0]), None)
    actions = torch.tensor([[-2.0, 0.0], [0.0, 5.0], [2.0, 10.0]])
    normalized = torch.tensor([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0]])
    torch.testing.assert_close(scaling.normalize(actions), normalized)
    scaled = ActionUnscaler(scaling)
    torch.testing.assert_close(scaled(normalized), actions)
    # A standard deviation of 1 becomes the half range.
    torch.testing.assert_close(
        scaled.log_stds(torch.zeros(1, 2)), torch.log(torch.tensor([[2.0, 5.0]]))
    )
    assert scaling.source == ("space", "space")


def test_an_open_bound_is_taken_from_the_log_element_by_element():
    space = Box((2,), "float32", [-math.inf, 0.0], [1.0, 10.0])
    scaling = action_scaling(space, (np.array([-3.0, 4.0]), np.array([1.0, 6.0])))
    np.testing.assert_allclose(scaling.center, [-1, 5])
    np.testing.assert_allclose(scaling.scale, [2, 5])
    assert scaling.source == ("dataset", "space")
    assert scaling.bound_space(space).low == (-3.0, 0.0)


def test_actions_of_any_shape_are_flattened():
    scaling = action_scaling(Box((2, 2), "float64", -4, 4), None)
    actions = torch.full((3, 2, 2), 2.0, dtype=torch.float64)
    normalized = scaling.normalize(actions)
    assert normalized.shape == (3, 4)
    assert normalized.dtype == torch.float32
    torch.testing.assert_close(normalized, torch.full((3, 4), 0.5))


def test_an_action_that_never_varies_is_only_centered():
    scaling = action_scaling(Box((1,)), (np.array([3.0]), np.array([3.0])))
    torch.testing.assert_close(scaling.normalize(torch.tensor([[3.0]])), torch.zeros(1, 1))


def test_an_open_box_without_a_log_is_refused():
    with pytest.raises(SpaceUnsupportedError, match="without finite bounds"):
        action_scaling(Box((1,)), None)


@pytest.mark.parametrize("space", [Discrete(2), Box((1,), "int64", 0, 3)])
def test_other_spaces_are_refused(space):
    with pytest.raises(SpaceUnsupportedError, match="float Box"):
        action_scaling(space, None)
