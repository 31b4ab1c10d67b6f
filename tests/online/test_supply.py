import numpy as np
import pytest

from replaylake.datastore.episode import Episode
from replaylake.datastore.spaces import Box, Discrete
from replaylake.offline.algorithms.catalog import make_learner
from replaylake.online.config import OnlineConfig
from replaylake.online.supply import OnceSupply

SPACES = (Box((3,)), Discrete(2))


def episode(number, num_steps=8):
    return Episode(
        f"test/{number}",
        observations=np.full((num_steps, 3), number, np.float32),
        actions=np.zeros(num_steps, np.int64),
        rewards=np.ones(num_steps),
        behavior_log_probs=np.zeros(num_steps, np.float32),
        policies=np.full(num_steps, "p", dtype=object),
        policy_versions=np.zeros(num_steps, np.int64),
        terminated=True,
    )


@pytest.fixture
def view(lake):
    dataset = lake.dataset("toys")
    dataset.create(*SPACES)
    dataset.append([episode(number) for number in range(6)])
    with dataset.follow(columns=["policy_version"]) as view:
        yield view


def supply(view):
    options = {"hidden_sizes": [4], "num_sequences": 2, "length": 8, "minibatches": 1}
    learner = make_learner("ppo", *SPACES, options=options, seed=0)
    return OnceSupply(view, learner, OnlineConfig("ppo"))


def numbers(batch):
    return sorted(set(batch.observations[..., 0].ravel().tolist()))


def test_it_goes_on_after_what_was_taken_last(view):
    first = supply(view)
    assert numbers(first.sample()) == [0, 1]
    again = supply(view)
    again.load_state_dict(first.state_dict())
    assert numbers(again.sample()) == [2, 3]


def test_it_goes_on_there_too_where_others_came_before(view):
    first = supply(view)
    first.sample()
    state = first.state_dict()
    # As where pieces were recorded in another order than they were taken in.
    state["sampler"]["num_consumed"] -= 1
    again = supply(view)
    again.load_state_dict(state)
    assert numbers(again.sample()) == [2, 3]


def test_it_begins_with_what_there_is_where_the_last_one_is_gone(view):
    first = supply(view)
    first.sample()
    state = first.state_dict()
    state["sampler"] |= {"last_key": bytes(16).hex(), "next": 99}
    again = supply(view)
    again.load_state_dict(state)
    assert numbers(again.sample()) == [0, 1]
