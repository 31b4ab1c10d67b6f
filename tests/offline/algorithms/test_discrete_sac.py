import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ConfigInvalidError, SpaceUnsupportedError
from replaylake.datastore.lake.policies.package import load_policy, save_package
from replaylake.offline.algorithms.discrete_sac import DiscreteSACConfig, discrete_sac
from replaylake.offline.d3rlpy.library import load_d3rlpy
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.export import export_onnx
from replaylake.offline.learning.learner import GradientLearner
from replaylake.offline.networks.graph import TorchPolicy

OBSERVATION = Box((4,))
ACTIONS = Discrete(3, 5)
SIZES = (16, 16)


def make(space=ACTIONS, optimizer=None, seed=0, **options):
    config = DiscreteSACConfig(**{"hidden_sizes": SIZES, **options})
    algorithm = discrete_sac(OBSERVATION, space, config, DatasetStatistics())
    if optimizer is not None:
        algorithm = dataclasses.replace(algorithm, optimizer=optimizer)
    return GradientLearner(algorithm, seed=seed)


def started(batch, seed=0, **changes):
    """A batch whose actions begin at 5, as the space's do."""
    made = batch(seed=seed, **changes)
    return dataclasses.replace(made, actions=made.actions + 5)


def constant(learner, *, logits, qs, target_qs):
    """Make networks say the same everywhere: only their last biases are not 0."""
    networks, targets = learner._networks, learner._targets
    with torch.no_grad():
        for module in (networks["policy"], networks["critics"], targets["critics"]):
            for parameter in module.parameters():
                parameter.zero_()
        networks["policy"].body.layers[-1].bias.copy_(torch.tensor(logits))
        networks["critics"].body.biases[-1].copy_(torch.tensor(qs))
        targets["critics"].body.biases[-1].copy_(torch.tensor(target_qs))


# pi = (1/2, 1/4, 1/4), whose entropy is 3/2 ln 2 = 1.0397; ln 3 = 1.0986.
LOGITS = [math.log(2), 0.0, 0.0]
QS = [[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]
TARGET_QS = [[4.0, 1.0, 2.0], [2.0, 3.0, 6.0]]


def one_row(masked=False, **changes):
    """Of a single step: action 6, the second; reward 1, discount 1/2."""
    allowed = np.array([[True, True, False]]) if masked else None
    fields = {
        "observations": np.zeros((1, 4), np.float32),
        "actions": np.array([6]),
        "rewards": np.ones(1, np.float32),
        "discounts": np.full(1, 0.5, np.float32),
        "next_observations": np.zeros((1, 4), np.float32),
        "behavior_log_probs": np.full(1, np.nan, np.float32),
        "weights": np.ones(1, np.float32),
        "keys": np.zeros((1, 2), np.uint64),
        "action_masks": allowed,
        "next_action_masks": allowed,
    }
    return {**fields, **changes}


def test_one_update_by_hand(batch):
    learner = make(
        optimizer=partial(torch.optim.SGD, lr=1.0), initial_temperature=0.5, tau=0.25, num_critics=2
    )
    constant(learner, logits=LOGITS, qs=QS, target_qs=TARGET_QS)
    update = learner.update(batch(**one_row()))
    # The least of the targets: 2, 1, 2. v = 1/2 2 + 1/4 1 + 1/4 2 + 1/2 H = 1.75 + 0.75 ln 2
    target = 1 + 0.5 * (1.75 + 0.75 * math.log(2))
    error = 2 - target  # both critics say 2 of the second action
    assert float(update.metrics["critics_loss"]) == pytest.approx(2 * error**2, rel=1e-5)
    assert update.priorities == pytest.approx([abs(error)], rel=1e-5)
    assert float(update.metrics["q_mean"]) == pytest.approx(2)
    # The least of the critics: 1, 2, 1. Their mean is 1/2 + 1/2 + 1/4 = 1.25.
    entropy = 1.5 * math.log(2)
    assert float(update.metrics["policy_loss"]) == pytest.approx(-1.25 - 0.5 * entropy, rel=1e-5)
    assert float(update.metrics["entropy"]) == pytest.approx(entropy, rel=1e-5)
    # temperature (H - 0.98 ln 3), and its slope by ln temperature is the same
    loss = 0.5 * (entropy - 0.98 * math.log(3))
    assert float(update.metrics["temperature_loss"]) == pytest.approx(loss, rel=1e-4)
    stepped = float(learner._networks["temperature"].value.detach())
    assert stepped == pytest.approx(math.log(0.5) - loss, rel=1e-5)
    # Gradients: of the critics 2 error where the action was; of a logit p (w - mean of w), with
    # w = temperature ln p - q.
    q = learner._networks["critics"].body.biases[-1].detach().numpy()
    expected = np.array(QS) - [0, 2 * error, 0]
    np.testing.assert_allclose(q, expected, rtol=1e-5)
    p = np.array([0.5, 0.25, 0.25])
    w = 0.5 * np.log(p) - [1, 2, 1]
    logits = learner._networks["policy"].body.layers[-1].bias.detach().numpy()
    np.testing.assert_allclose(logits, LOGITS - p * (w - p @ w), rtol=1e-5)
    followed = learner._targets["critics"].body.biases[-1].numpy()
    np.testing.assert_allclose(followed, 0.75 * np.array(TARGET_QS) + 0.25 * q, rtol=1e-5)


def test_what_is_forbidden_counts_nowhere(batch):
    learner = make(optimizer=partial(torch.optim.SGD, lr=1.0), initial_temperature=0.5)
    constant(learner, logits=LOGITS, qs=QS, target_qs=[[4.0, 1.0, 1e6], [2.0, 3.0, 1e6]])
    update = learner.update(batch(**one_row(masked=True)))
    # pi = (2/3, 1/3); the least of the targets 2, 1; of the critics 1, 2.
    entropy = math.log(3) - 2 / 3 * math.log(2)
    error = 2 - (1 + 0.5 * (5 / 3 + 0.5 * entropy))
    assert update.priorities == pytest.approx([abs(error)], rel=1e-5)
    assert float(update.metrics["policy_loss"]) == pytest.approx(-4 / 3 - 0.5 * entropy, rel=1e-5)
    # Two actions are allowed: no more than ln 2 can be asked for.
    loss = 0.5 * (entropy - 0.98 * math.log(2))
    assert float(update.metrics["temperature_loss"]) == pytest.approx(loss, rel=1e-4)
    logits = learner._networks["policy"].body.layers[-1].bias.detach().numpy()
    assert logits[2] == LOGITS[2]


def test_an_end_without_allowed_actions_is_not_bootstrapped_from(batch):
    learner = make()
    constant(learner, logits=LOGITS, qs=QS, target_qs=TARGET_QS)
    ended = one_row(next_action_masks=np.zeros((1, 3), bool), discounts=np.zeros(1, np.float32))
    assert learner.update(batch(**ended)).priorities == pytest.approx([1.0])


def d3rlpys(learner, made, **options):
    """d3rlpy's algorithm with our networks, plainly stepped."""
    d3rlpy = load_d3rlpy()
    encoder = d3rlpy.models.VectorEncoderFactory(list(SIZES))
    sgd = d3rlpy.optimizers.SGDFactory()
    config = d3rlpy.algos.DiscreteSACConfig(
        actor_encoder_factory=encoder,
        critic_encoder_factory=encoder,
        actor_optim_factory=sgd,
        critic_optim_factory=sgd,
        temp_optim_factory=sgd,
        actor_learning_rate=1.0,
        critic_learning_rate=1.0,
        temp_learning_rate=1.0,
        target_update_interval=1_000_000,
        **options,
    )
    algorithm = config.create(device="cpu:0")
    algorithm.create_impl((4,), 3)
    modules = algorithm.impl.modules
    with torch.no_grad():
        for theirs, ours in zip(
            modules.policy.parameters(), learner._networks["policy"].parameters(), strict=True
        ):
            theirs.copy_(ours)
        for of_theirs, of_ours in (
            (modules.q_funcs, learner._networks),
            (modules.targ_q_funcs, learner._targets),
        ):
            for number, member in enumerate(of_theirs):
                ours = [
                    parameter[number] for parameter in of_ours["critics"].body.sink_parameters()
                ]
                for one, other in zip(member.parameters(), ours, strict=True):
                    one.copy_(other)
    actions = (made.actions - 5).astype(np.float32)[:, None]
    algorithm.update(
        d3rlpy.dataset.TransitionMiniBatch(
            observations=made.observations,
            actions=actions,
            rewards=made.rewards[:, None],
            next_observations=made.next_observations,
            next_actions=np.zeros_like(actions),
            terminals=(made.discounts[:, None] == 0).astype(np.float32),
            intervals=np.ones_like(actions),
            transitions=[],
        )
    )
    return modules


def only(learner, group, rate, made):
    """Update, stepping one parameter group alone."""
    for one in learner._optimizer.param_groups:
        one["lr"] = rate if one["name"] == group else 0.0
    return learner.update(made)


def test_one_update_is_d3rlpys(batch):
    made = started(batch, rewards=np.zeros(32, np.float32))
    learner = make(optimizer=partial(torch.optim.SGD, lr=0.0), initial_temperature=0.1)
    # Targets away from what they follow.
    with torch.no_grad():
        for parameter in learner._targets.parameters():
            parameter.mul_(0.5)
    before = [p.detach().clone() for p in learner._networks["policy"].parameters()]
    theirs = d3rlpys(learner, made, initial_temperature=0.1)
    # d3rlpy steps its critics, then its temperature, then its actor, each beside what was stepped
    # before. Its critics' loss is Huber's: half of ours where no error is greater than 1.
    assert only(learner, "critics", 0.5, made).priorities.max() < 1
    only(learner, "temperature", 1.0, made)
    only(learner, "policy", 1.0, made)
    for number, member in enumerate(theirs.q_funcs):
        ours = [
            parameter[number] for parameter in learner._networks["critics"].body.sink_parameters()
        ]
        for one, other in zip(member.parameters(), ours, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-6)
    temperature = theirs.log_temp._parameter.item()
    assert temperature != pytest.approx(math.log(0.1), abs=1e-4)
    ours = float(learner._networks["temperature"].value.detach())
    assert ours == pytest.approx(temperature, abs=1e-6)
    policy = list(learner._networks["policy"].parameters())
    assert max((p - b).abs().max().item() for p, b in zip(policy, before, strict=True)) > 1e-3
    for one, other in zip(theirs.policy.parameters(), policy, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_it_finds_the_better_action_and_keeps_its_entropy(batch):
    """A bandit: the first action pays 1, the others nothing."""
    learner = make(
        critic_learning_rate=1e-2,
        actor_learning_rate=1e-2,
        temperature_learning_rate=1e-2,
        target_entropy=0.5,
    )
    for seed in range(400):
        made = started(batch, seed)
        rewards = (made.actions == 5).astype(np.float32)
        update = learner.update(
            dataclasses.replace(made, rewards=rewards, discounts=np.zeros(32, np.float32))
        )
    assert float(update.metrics["entropy"]) == pytest.approx(0.5 * math.log(3), abs=0.05)
    act = TorchPolicy(learner.policy()).act(made.observations)
    assert (act.actions == 5).mean() > 0.95


def test_it_exports_and_acts_by_masks(batch, tmp_path):
    learner = make()
    learner.update(started(batch))
    graph = learner.policy()
    assert graph.spec.head == "categorical"
    save_package(
        tmp_path / "p", onnx=export_onnx(graph), spec=graph.spec, manifest={}, learner_weights={}
    )
    observations = np.random.default_rng(0).standard_normal((200, 4)).astype(np.float32)
    masks = np.random.default_rng(1).random((200, 3)) < 0.5
    masks[:, 1] |= ~masks.any(axis=1)
    act = load_policy(tmp_path / "p").act(
        observations, rng=np.random.default_rng(2), deterministic=False, action_mask=masks
    )
    assert masks[np.arange(200), act.actions - 5].all()
    assert len(np.unique(act.actions)) == 3


def test_it_continues_bit_for_bit(batch):
    whole, half = make(), make()
    for seed in range(4):
        whole.update(started(batch, seed))
    for seed in range(2):
        half.update(started(batch, seed))
    rest = make(seed=9)
    rest.load_state_dict(half.state_dict())
    for seed in range(2, 4):
        rest.update(started(batch, seed))
    expected = whole.state_dict()
    for name, array in rest.state_dict().items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def test_what_it_refuses():
    with pytest.raises(SpaceUnsupportedError, match="sac: found action space"):
        make(space=Box((2,)))
    with pytest.raises(ConfigInvalidError, match="sac: target_entropy"):
        make(target_entropy=1.5)
    with pytest.raises(ConfigInvalidError, match="sac: initial_temperature"):
        make(initial_temperature=0.0)
