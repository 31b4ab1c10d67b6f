import pytest
import torch

from replaylake.datastore.episodes.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Text,
    Tuple,
)
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.offline.networks.actors import GaussianNetwork
from replaylake.offline.networks.features import ObservationFeatures


def test_a_box_is_flattened():
    features = ObservationFeatures(Box((2, 3)))
    assert features.num_features == 6
    torch.testing.assert_close(
        features(torch.arange(12.0).reshape(2, 2, 3)), torch.arange(12.0).reshape(2, 6)
    )


def test_a_scalar_box_is_one_feature():
    assert ObservationFeatures(Box(()))(torch.tensor([1.0, 2.0])).tolist() == [[1.0], [2.0]]


def test_discrete_kinds_are_one_hot():
    rooms = ObservationFeatures(Discrete(3, 5))
    assert rooms(torch.tensor([5, 7])).tolist() == [[1, 0, 0], [0, 0, 1]]
    multi = ObservationFeatures(MultiDiscrete((2, 3)))
    assert multi(torch.tensor([[1, 2]])).tolist() == [[0, 1, 0, 0, 1]]
    assert ObservationFeatures(MultiBinary(2))(torch.tensor([[0, 1]])).tolist() == [[0, 1]]


def test_leaves_of_a_dict_are_joined_in_order():
    space = Dict({"a": Box((2,)), "b": Tuple((Discrete(2), Box((1,))))})
    features = ObservationFeatures(space)
    observations = {
        "a": torch.tensor([[1.0, 2.0]]),
        "b": {"_0": torch.tensor([1]), "_1": torch.tensor([[9.0]])},
    }
    assert features(observations).tolist() == [[1, 2, 0, 1, 9]]
    leaves = [observations["a"], observations["b"]["_0"], observations["b"]["_1"]]
    assert features(features.nest(leaves)).tolist() == [[1, 2, 0, 1, 9]]


@pytest.mark.parametrize(("space", "name"), [(Text(), "n"), (Dict({"t": Text()}), "n.t")])
def test_text_is_refused_by_name(space, name):
    with pytest.raises(
        SpaceUnsupportedError, match=rf"observatio{name}: found Text, expected a Box"
    ):
        ObservationFeatures(space)


def test_log_stds_are_kept_in_range():
    network = GaussianNetwork(Box((1,)), 1, (4,))
    with torch.no_grad():
        network.body.layers[-1].bias.copy_(torch.tensor([0.0, 100.0]))
    _, log_stds = network(torch.zeros(1, 1))
    assert log_stds.item() == 2.0
