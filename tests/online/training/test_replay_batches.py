import numpy as np

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.runs.timings import Timings
from replaylake.offline.algorithms.catalog import make_learner
from replaylake.online.collecting.behavior_policy import BehaviorPolicy, GraphBytes, num_bytes_sent
from replaylake.online.training.replay_batches import move_batch


def batch(num=4):
    return Batch(
        observations={"near": np.zeros((num, 3), np.float32), "far": np.zeros(num, np.uint8)},
        actions=np.zeros(num, np.int64),
        rewards=np.zeros(num, np.float32),
        discounts=np.zeros(num, np.float32),
        next_observations={"near": np.zeros((num, 3), np.float32), "far": np.zeros(num, np.uint8)},
        behavior_log_probs=np.zeros(num, np.float32),
        weights=np.zeros(num, np.float32),
        keys=np.zeros((num, 2), np.uint64),
    )


def test_the_bytes_of_a_batch_are_those_of_all_its_fields():
    assert batch().num_bytes == 4 * (2 * 13 + 8 + 4 * 4 + 16)


def test_what_is_copied_to_another_device_is_a_link_and_what_is_shared_is_none():
    timings = Timings("trainer")
    assert move_batch(batch(), "cpu", timings).rewards.device.type == "cpu"
    assert timings.totals == {}
    # A device of torch's without memory, for the lack of a GPU.
    assert move_batch(batch(), "meta", timings).rewards.device.type == "meta"
    total = timings.totals["trainer", "to_device"]
    assert (total.items, total.num_bytes) == (1, batch().num_bytes)


def test_what_goes_to_other_processes_is_counted_and_what_stays_is_not():
    learner = make_learner("dqn", Box((3,)), Discrete(2), options={"hidden_sizes": [4]}, seed=0)
    graph = BehaviorPolicy("run", 1, GraphBytes(b"onnx", learner.policy().spec))
    assert num_bytes_sent(graph) == 4
    assert num_bytes_sent({"ann": graph, "bob": graph, "cat": BehaviorPolicy()}) == 8
    assert num_bytes_sent(BehaviorPolicy()) == 0
