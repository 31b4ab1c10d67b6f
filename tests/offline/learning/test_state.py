import numpy as np
import pytest
import torch

from replaylake.datastore.errors import PackageInvalidError
from replaylake.offline.learning.state import pack_state, unpack_state


def test_a_nested_state_comes_back():
    tree = {
        "weights": torch.tensor([[1.0, 2.0]]),
        "state": {0: {"step": torch.tensor(3.0), "betas": (0.9, 0.999)}, 1: {}},
        "groups": [{"lr": 1e-3, "fused": True, "maximize": None, "name": "policy"}],
    }
    arrays = pack_state(tree)
    assert all(isinstance(array, np.ndarray) for array in arrays.values())
    back = unpack_state(arrays)
    assert back["groups"] == tree["groups"]
    assert back["state"][0]["betas"] == (0.9, 0.999)
    assert back["state"][1] == {}
    assert back["state"][0]["step"].shape == ()
    torch.testing.assert_close(back["weights"], tree["weights"])


def test_a_real_optimizers_state_comes_back():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([{"name": "policy", "params": [parameter]}], fused=True)
    parameter.sum().backward()
    optimizer.step()
    back = unpack_state(pack_state(optimizer.state_dict()))
    optimizer.load_state_dict(back)
    torch.testing.assert_close(back["state"][0]["exp_avg"], torch.full((2,), 0.1))


def test_packing_copies():
    weights = torch.zeros(2)
    arrays = pack_state({"weights": weights})
    weights += 1
    assert unpack_state(arrays)["weights"].tolist() == [0, 0]


@pytest.mark.parametrize("arrays", [{}, {"structure": np.frombuffer(b"{", np.uint8)}])
def test_arrays_that_no_learner_saved_are_refused(arrays):
    with pytest.raises(PackageInvalidError, match="learner state"):
        unpack_state(arrays)


def test_a_missing_array_is_refused():
    arrays = pack_state({"weights": torch.zeros(1)})
    del arrays["state.weights"]
    with pytest.raises(PackageInvalidError, match=r"state\.weights"):
        unpack_state(arrays)
