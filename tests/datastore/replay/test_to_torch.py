import numpy as np
import torch

from replaylake.datastore.batch import Batch
from replaylake.datastore.replay.to_torch import to_torch


def make_batch(**changes):
    fields = {
        "observations": np.ones((2, 3), np.float32),
        "actions": np.array([0, 1]),
        "rewards": np.zeros(2, np.float32),
        "discounts": np.full(2, 0.99, np.float32),
        "next_observations": np.zeros((2, 3), np.float32),
        "behavior_log_probs": np.full(2, np.nan, np.float32),
        "weights": np.ones(2, np.float32),
        "keys": np.zeros((2, 2), np.uint64),
    }
    return Batch(**{**fields, **changes})


def test_shapes_and_dtypes_stay():
    tensors = to_torch(make_batch(action_masks=np.ones((2, 4), bool)))
    assert tensors.observations.dtype == torch.float32
    assert tensors.actions.dtype == torch.int64
    assert tensors.action_masks.dtype == torch.bool
    assert tensors.next_action_masks is None
    assert tensors.bootstrappable is None
    flags = to_torch(make_batch(bootstrappable=np.array([True, False]))).bootstrappable
    assert flags.tolist() == [True, False]
    assert isinstance(tensors.keys, np.ndarray)
    assert len(tensors) == 2


def test_mappings_nest():
    observations = {"a": np.ones((2, 1), np.float32), "b": {"c": np.zeros(2, np.int64)}}
    tensors = to_torch(make_batch(observations=observations))
    assert tensors.observations["a"].shape == (2, 1)
    assert tensors.observations["b"]["c"].dtype == torch.int64


def test_fields_of_packed_records_are_taken_whatever_their_strides():
    # 4 + 1 bytes a record: strides that torch cannot take as they are.
    records = np.zeros(2, dtype=[("reward", "<f4"), ("flag", "?")])
    records["reward"] = [1.5, 2.5]
    assert to_torch(make_batch(rewards=records["reward"])).rewards.tolist() == [1.5, 2.5]
