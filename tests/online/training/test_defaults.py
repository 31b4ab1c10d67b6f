import pytest

from replaylake.datastore.episodes.spaces import Discrete
from replaylake.offline.algorithms.catalog import check_algorithm
from replaylake.online.training.config import OnlineConfig
from replaylake.online.training.job import resolve_config


@pytest.mark.parametrize(
    ("learner_gpus", "device", "expected"),
    [(0.0, "cpu", "cpu"), (1.0, "cpu", "cuda"), (0.5, "cuda:1", "cuda:1"), (0.0, "cuda", "cuda")],
)
def test_a_gpu_that_is_asked_for_is_learned_on(learner_gpus, device, expected):
    config = OnlineConfig("dqn", learner_gpus=learner_gpus, device=device)
    assert resolve_config(config, check_algorithm("dqn", Discrete(2)), None).device == expected
