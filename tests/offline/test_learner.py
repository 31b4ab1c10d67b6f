import numpy as np
import pytest
import torch
from torch import nn

from replaylake.datastore.errors import ConfigInvalid
from replaylake.datastore.policies.policy import PolicySpec
from replaylake.datastore.spaces import Box, Discrete
from replaylake.offline.algorithm import Algorithm, Losses, Networks, Target
from replaylake.offline.graph import TorchPolicy
from replaylake.offline.learner import GradientLearner
from replaylake.offline.networks import CategoricalNetwork

SPEC = PolicySpec(Box((4,)), Discrete(3), "categorical")


class Constant(nn.Module):
    """One number, so that a step can be followed by hand."""

    def __init__(self, value):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def two_constants(losses, targets=None, **changes):
    return Algorithm(
        spec=SPEC,
        losses=losses,
        networks=lambda: Networks({"actor": Constant(2.0), "critic": Constant(3.0)}),
        optimizer=sgd,
        targets=targets or {},
        **changes,
    )


def values(learner):
    state = learner.state_dict()
    return [float(state[f"state.networks.{name}.value"]) for name in ("actor", "critic")]


def test_a_loss_moves_its_own_group_only(batch):
    def losses(networks, targets, tensors, rng):
        product = networks["actor"].value * networks["critic"].value
        return Losses({"actor": product})

    learner = GradientLearner(two_constants(losses), seed=0)
    metrics = learner.update(batch()).metrics
    # d(actor * critic) / d actor = 3: 2 - 0.1 * 3. The critic stays, though the loss runs through
    # it.
    assert values(learner) == [pytest.approx(1.7), 3.0]
    assert float(metrics["actor_loss"]) == 6.0


def test_two_groups_step_at_once_each_by_its_own_loss(batch):
    def losses(networks, targets, tensors, rng):
        product = networks["actor"].value * networks["critic"].value
        return Losses({"actor": product, "critic": -product})

    learner = GradientLearner(two_constants(losses), seed=0)
    learner.update(batch())
    assert values(learner) == [pytest.approx(1.7), pytest.approx(3.2)]


def test_a_loss_of_no_network_is_refused_by_name(batch):
    def losses(networks, targets, tensors, rng):
        return Losses({"actors": networks["actor"].value})

    with pytest.raises(ConfigInvalid, match=r"'actors'.*\['actor', 'critic'\]"):
        GradientLearner(two_constants(losses), seed=0).update(batch())


def test_targets_follow_by_tau_every_period(batch):
    seen = []

    def losses(networks, targets, tensors, rng):
        seen.append(float(targets["critic"].value))
        return Losses({"critic": networks["critic"].value * 1.0})

    algorithm = two_constants(losses, {"critic": Target(tau=0.5, period=2)})
    learner = GradientLearner(algorithm, seed=0)
    for _ in range(4):
        learner.update(batch())
    # The critic goes 3, 2.9, 2.8, 2.7, 2.6; after update 2 the target is (3 + 2.8) / 2.
    assert seen == [3.0, 3.0, pytest.approx(2.9), pytest.approx(2.9)]
    state = learner.state_dict()
    assert float(state["state.targets.critic.value"]) == pytest.approx((2.9 + 2.6) / 2)


def test_each_group_has_its_own_target_and_its_own_pace(batch):
    """As in TD3: the actor moves every second update, its target and the critic's by turns."""

    def losses(networks, targets, tensors, rng):
        return Losses({"actor": networks["actor"].value * 1, "critic": networks["critic"].value})

    targets = {"actor": Target(tau=0.5, period=2), "critic": Target(tau=1.0, period=3)}
    algorithm = two_constants(losses, targets, update_periods={"actor": 2})
    learner = GradientLearner(algorithm, seed=0)
    seen = []
    for _ in range(4):
        learner.update(batch())
        state = learner.state_dict()
        aims = [float(state[f"state.targets.{group}.value"]) for group in ("actor", "critic")]
        seen.append([*values(learner), *aims])
    # Steps of 0.1: the actor from 2 at updates 2 and 4, the critic from 3 at each. The actor's
    # target: (2 + 1.9) / 2, then (1.95 + 1.8) / 2; the critic's is copied after update 3.
    assert seen == [
        pytest.approx([2.0, 2.9, 2.0, 3.0]),
        pytest.approx([1.9, 2.8, 1.95, 3.0]),
        pytest.approx([1.9, 2.7, 1.95, 2.7]),
        pytest.approx([1.8, 2.6, 1.875, 2.7]),
    ]


@pytest.mark.parametrize(
    "changes",
    [{"targets": {"actors": Target()}}, {"update_periods": {"actors": 2}}],
)
def test_targets_and_periods_of_no_network_are_refused(changes):
    with pytest.raises(ConfigInvalid, match=r"'actors'.*\['actor', 'critic'\]"):
        GradientLearner(two_constants(None, **changes), seed=0)


@pytest.mark.parametrize("wrong", [{"tau": 0.0}, {"tau": 1.5}, {"period": 0}])
def test_a_target_out_of_range_is_refused(wrong):
    with pytest.raises(ConfigInvalid, match=next(iter(wrong))):
        Target(**wrong)


def test_postprocess_sees_tensors_and_changes_what_losses_get(batch):
    def losses(networks, targets, tensors, rng):
        assert tensors is marked
        priorities = torch.ones(len(tensors))
        return Losses({"actor": networks["actor"].value * 1}, priorities, {"q": torch.tensor(4.0)})

    def postprocess(networks, tensors):
        nonlocal marked
        assert isinstance(tensors.rewards, torch.Tensor)
        assert not torch.is_grad_enabled()
        marked = tensors
        return marked

    marked = None
    algorithm = two_constants(losses)
    algorithm = Algorithm(**{**vars(algorithm), "postprocess": postprocess})
    update = GradientLearner(algorithm, seed=0).update(batch(size=5))
    np.testing.assert_array_equal(update.priorities, np.ones(5, np.float32))
    assert float(update.metrics["q"]) == 4.0


def noisy_algorithm():
    """Draws from its own generator in every loss."""

    def losses(networks, targets, tensors, rng):
        logits = networks["policy"](tensors.observations)
        noise = torch.randn(logits.shape, generator=rng)
        return Losses({"policy": ((logits - noise) ** 2).mean()})

    return Algorithm(
        spec=SPEC,
        losses=losses,
        networks=lambda: Networks({"policy": CategoricalNetwork(Box((4,)), 3, (8,))}),
    )


def run(learner, batch, updates, first=0):
    for seed in range(first, first + updates):
        learner.update(batch(seed=seed))
    return learner.state_dict()


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def test_the_same_seed_gives_the_same_weights_whatever_the_global_state(batch):
    torch.manual_seed(1)
    first = run(GradientLearner(noisy_algorithm(), seed=7), batch, 5)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = run(GradientLearner(noisy_algorithm(), seed=7), batch, 5)
    assert_same(first, second)
    torch.testing.assert_close(torch.get_rng_state(), before)
    other = run(GradientLearner(noisy_algorithm(), seed=8), batch, 5)
    assert (
        other["state.networks.policy.body.0.weight"] != first["state.networks.policy.body.0.weight"]
    ).any()


def test_it_continues_bit_for_bit_from_a_saved_state(batch):
    whole = run(GradientLearner(noisy_algorithm(), seed=0), batch, 6)
    half = run(GradientLearner(noisy_algorithm(), seed=0), batch, 3)
    resumed = GradientLearner(noisy_algorithm(), seed=99)
    resumed.load_state_dict(half)
    assert_same(run(resumed, batch, 3, first=3), whole)


def test_the_policy_acts_with_the_weights_of_now(batch):
    learner = GradientLearner(noisy_algorithm(), seed=0)
    policy = TorchPolicy(learner.policy())
    observations = batch(size=256).observations
    before = policy.act(observations).actions
    run(learner, batch, 200)
    after = policy.act(observations).actions
    assert (before != after).any()
    np.testing.assert_array_equal(after, TorchPolicy(learner.policy()).act(observations).actions)
