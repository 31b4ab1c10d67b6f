from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ConfigInvalidError, PackageInvalidError
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.replay.to_torch import to_torch
from replaylake.offline.dataset_statistics import DatasetStatistics, RewardScaling
from replaylake.offline.learning.algorithm import Algorithm, Losses, Networks, Target
from replaylake.offline.learning.learner import GradientLearner
from replaylake.offline.networks.actors import CategoricalNetwork
from replaylake.offline.networks.graph import TorchPolicy

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
    def losses(networks, targets, tensors, rng, due):
        product = networks["actor"].value * networks["critic"].value
        return Losses({"actor": product})

    learner = GradientLearner(two_constants(losses), seed=0)
    metrics = learner.update(batch()).metrics
    # d(actor * critic) / d actor = 3: 2 - 0.1 * 3. The critic stays, though the loss runs through
    # it.
    assert values(learner) == [pytest.approx(1.7), 3.0]
    assert float(metrics["actor_loss"]) == 6.0


def test_two_groups_step_at_once_each_by_its_own_loss(batch):
    def losses(networks, targets, tensors, rng, due):
        product = networks["actor"].value * networks["critic"].value
        return Losses({"actor": product, "critic": -product})

    learner = GradientLearner(two_constants(losses), seed=0)
    learner.update(batch())
    assert values(learner) == [pytest.approx(1.7), pytest.approx(3.2)]


def test_a_loss_of_no_network_is_refused_by_name(batch):
    def losses(networks, targets, tensors, rng, due):
        return Losses({"actors": networks["actor"].value})

    with pytest.raises(ConfigInvalidError, match=r"'actors'.*\['actor', 'critic'\]"):
        GradientLearner(two_constants(losses), seed=0).update(batch())


def test_targets_follow_by_tau_every_period(batch):
    seen = []

    def losses(networks, targets, tensors, rng, due):
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

    def losses(networks, targets, tensors, rng, due):
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
    with pytest.raises(ConfigInvalidError, match=r"'actors'.*\['actor', 'critic'\]"):
        GradientLearner(two_constants(None, **changes), seed=0)


@pytest.mark.parametrize("wrong", [{"tau": 0.0}, {"tau": 1.5}, {"period": 0}])
def test_a_target_out_of_range_is_refused(wrong):
    with pytest.raises(ConfigInvalidError, match=next(iter(wrong))):
        Target(**wrong)


def test_postprocess_sees_tensors_and_changes_what_losses_get(batch):
    def losses(networks, targets, tensors, rng, due):
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

    def losses(networks, targets, tensors, rng, due):
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
        other["state.networks.policy.body.layers.0.weight"]
        != first["state.networks.policy.body.layers.0.weight"]
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


def test_rewards_arrive_scaled_and_returns_by_the_same_unit(batch):
    seen = []

    def losses(networks, targets, tensors, rng, due):
        seen.append((tensors.rewards, tensors.returns))
        return Losses({"actor": networks["actor"].value})

    facts = DatasetStatistics(rewards=RewardScaling(0.0, 4.0))
    learner = GradientLearner(two_constants(losses), seed=0, facts=facts)
    given = batch()
    learner.update(replace(given, returns=given.rewards * 2))
    np.testing.assert_allclose(seen[0][0], given.rewards / 4)
    np.testing.assert_allclose(seen[0][1], given.rewards / 2)
    assert learner.normalization["rewards"] == {"shift": 0.0, "scale": 4.0}


@pytest.mark.parametrize("sums", [{"needs_returns": True}, {"n_step": 3}])
def test_a_shift_of_rewards_is_refused_where_they_are_summed_up(sums):
    facts = DatasetStatistics(rewards=RewardScaling(1.0, 2.0))
    with pytest.raises(ConfigInvalidError, match="a shift of 1, expected none"):
        GradientLearner(two_constants(lambda *_: Losses({}), **sums), seed=0, facts=facts)


def test_tensors_are_taken_as_arrays_are(batch):
    array_learner = GradientLearner(noisy_algorithm(), seed=0)
    tensor_learner = GradientLearner(noisy_algorithm(), seed=0)
    array_learner.update(batch())
    tensor_learner.update(to_torch(batch()))
    assert_same(array_learner.state_dict(), tensor_learner.state_dict())


def test_what_reduces_gradients_is_given_all_of_them_before_the_step(batch):
    def losses(networks, targets, tensors, rng, due):
        product = networks["actor"].value * networks["critic"].value
        return Losses({"actor": product, "critic": -product})

    def halve(gradients):
        assert gradients.tolist() == [3.0, -2.0]
        gradients.mul_(0.5)

    learner = GradientLearner(two_constants(losses), seed=0, reduce=halve)
    learner.update(batch())
    assert values(learner) == [pytest.approx(1.85), pytest.approx(3.1)]


def test_a_group_that_is_not_due_needs_no_loss(batch):
    asked = []

    def losses(networks, targets, tensors, rng, due):
        asked.append(sorted(due))
        return Losses({group: networks[group].value for group in due})

    learner = GradientLearner(two_constants(losses, update_periods={"actor": 2}), seed=0)
    for _ in range(2):
        learner.update(batch())
    assert asked == [["critic"], ["actor", "critic"]]
    assert values(learner) == [pytest.approx(1.9), pytest.approx(2.8)]


def test_the_state_of_other_networks_is_refused_and_nothing_is_changed():
    def of_size(size, targets=None):
        algorithm = Algorithm(
            spec=SPEC,
            losses=lambda *_: Losses({}),
            networks=lambda: Networks(
                {"policy": CategoricalNetwork(SPEC.observation_space, 3, [size])}
            ),
            targets=targets or {},
        )
        return GradientLearner(algorithm, seed=size)

    learner = of_size(8)
    before = learner.state_dict()
    wider = r"networks\.policy\.body\.layers\.0\.weight: found \[16, 4\], expected \[8, 4\]"
    with pytest.raises(PackageInvalidError, match=wider):
        learner.load_state_dict(of_size(16).state_dict())
    with pytest.raises(
        PackageInvalidError, match=r"targets\.policy.*: found \[8, 4\], expected none"
    ):
        learner.load_state_dict(of_size(8, {"policy": Target()}).state_dict())
    for name, array in learner.state_dict().items():
        np.testing.assert_array_equal(array, before[name])


def test_a_parameter_of_two_groups_is_refused_by_name():
    shared = nn.Linear(2, 2)
    networks = {"actor": nn.Sequential(shared), "critic": nn.Sequential(shared, nn.Linear(2, 1))}
    algorithm = replace(two_constants(lambda *_: Losses({})), networks=lambda: Networks(networks))
    with pytest.raises(ConfigInvalidError, match=r"critic\.0\.weight in group 'actor' too"):
        GradientLearner(algorithm, seed=0)


def test_parameters_that_are_not_float32_are_refused_by_name():
    networks = {"actor": nn.Linear(2, 2).double()}
    algorithm = replace(two_constants(lambda *_: Losses({})), networks=lambda: Networks(networks))
    with pytest.raises(ConfigInvalidError, match=r"actor\.weight of torch\.float64"):
        GradientLearner(algorithm, seed=0)


def test_a_network_without_parameters_is_left_alone(batch):
    def losses(networks, targets, tensors, rng, due):
        return Losses({"actor": networks["actor"].value.square()})

    networks = {"actor": Constant(2.0), "fixed": nn.Identity()}
    algorithm = replace(two_constants(losses), networks=lambda: Networks(networks))
    learner = GradientLearner(algorithm, seed=0)
    learner.update(batch())
    assert float(learner.state_dict()["state.networks.actor.value"]) == pytest.approx(1.6)
