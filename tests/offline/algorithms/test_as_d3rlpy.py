"""Our actor-critics take the steps that d3rlpy's take, from the same weights, batch and noise.

d3rlpy steps its critics before its actor looks at them; ours step together. So its two halves are
asked of two copies of it. Adam's first step hardly knows how long a gradient is, so that both step
plainly too.
"""

import dataclasses
from functools import partial

import pytest
import torch

from replaylake.datastore.episodes.spaces import Box
from replaylake.offline.algorithms.awac import AWACConfig, awac
from replaylake.offline.algorithms.cql import CQLConfig, cql
from replaylake.offline.algorithms.iql import IQLConfig, iql
from replaylake.offline.algorithms.sac import SACConfig, sac
from replaylake.offline.algorithms.td3 import TD3Config, td3
from replaylake.offline.algorithms.td3_plus_bc import TD3PlusBCConfig, td3_plus_bc
from replaylake.offline.d3rlpy.library import load_d3rlpy
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.learner import GradientLearner

OBSERVATION = Box((4,))
ACTION = Box((2,), "float32", [-2.0, 0.0], [2.0, 10.0])
SIZES = [32, 32]
# Of batches of 32 with 2 elements an action, so that noise drawn at once or in parts is the same.
SEED = 7
CONFIGS = {
    "td3": "TD3Config",
    "td3_plus_bc": "TD3PlusBCConfig",
    "iql": "IQLConfig",
    "awac": "AWACConfig",
    "sac": "SACConfig",
    "cql": "CQLConfig",
}


def theirs(name, plainly=False, **options):
    """d3rlpy's algorithm, targets away from what they follow, the spread from where it began."""
    d3rlpy = load_d3rlpy()
    config = getattr(d3rlpy.algos, CONFIGS[name])
    encoder = d3rlpy.models.VectorEncoderFactory(SIZES)
    fields = [f.name for f in dataclasses.fields(config) if f.name.endswith("encoder_factory")]
    options |= dict.fromkeys(fields, encoder)
    if plainly:
        sgd = d3rlpy.optimizers.SGDFactory()
        # d3rlpy's AWAC sums its actor's loss over the 32 rows.
        rate = 1 / 32 if name == "awac" else 1.0
        options |= {"actor_learning_rate": rate, "critic_learning_rate": 1.0}
        options |= {"actor_optim_factory": sgd, "critic_optim_factory": sgd}
    algorithm = config(**options).create()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        algorithm.create_impl((4,), 2)
        modules = algorithm.impl.modules
        with torch.no_grad():
            for module in (modules.targ_q_funcs, getattr(modules, "targ_policy", None)):
                for parameter in [] if module is None else module.parameters():
                    parameter += 0.05 * torch.randn(parameter.shape)
            spread = getattr(modules.policy, "_logstd", None)
            if isinstance(spread, torch.nn.Parameter):
                spread += 3 + 0.5 * torch.randn(spread.shape)  # wide: some actions are clipped
    return algorithm.impl


def their_batch(batch):
    """The batch as d3rlpy takes it: actions in [-1, 1], columns [B, 1], ends as 1."""
    column = {
        name: torch.from_numpy(array).reshape(-1, 1)
        for name, array in (("rewards", batch.rewards), ("discounts", batch.discounts))
    }
    actions = (torch.from_numpy(batch.actions) - torch.tensor([0.0, 5.0])) / torch.tensor([2.0, 5])
    terminals = (column["discounts"] == 0).float()
    assert 0 < terminals.sum() < len(batch)
    return load_d3rlpy().torch_utility.TorchMiniBatch(
        observations=torch.from_numpy(batch.observations),
        actions=actions,
        rewards=column["rewards"],
        next_observations=torch.from_numpy(batch.next_observations),
        next_actions=actions,
        returns_to_go=column["rewards"],
        terminals=terminals,
        intervals=torch.ones_like(terminals),
        device="cpu",
    )


def layers_of(module, *heads):
    """The linear layers of a d3rlpy network; several heads are one last layer."""
    hidden = [layer for layer in module._encoder._layers if isinstance(layer, torch.nn.Linear)]
    weights = [(layer.weight, layer.bias) for layer in hidden]
    last = [getattr(module, head) for head in heads]
    return [*weights, (torch.cat([x.weight for x in last]), torch.cat([x.bias for x in last]))]


def ensemble(q_funcs):
    members = [layers_of(q_func, "_fc") for q_func in q_funcs]
    return [
        tuple(torch.stack(parts) for parts in zip(*layer, strict=True))
        for layer in zip(*members, strict=True)
    ]


def policy_layers(policy):
    if hasattr(policy, "_fc"):
        return layers_of(policy, "_fc")
    bounded = isinstance(policy._logstd, torch.nn.Parameter)
    return layers_of(policy, "_mu") if bounded else layers_of(policy, "_mu", "_logstd")


def flat(layers):
    return [tensor for layer in layers for tensor in layer]


def parameters_of(modules):
    """d3rlpy's parameters by our groups, in our order."""
    groups = {
        "policy": flat(policy_layers(modules.policy)),
        "critics": flat(ensemble(modules.q_funcs)),
    }
    if isinstance(getattr(modules.policy, "_logstd", None), torch.nn.Parameter):
        groups["policy"].append(modules.policy._logstd.reshape(-1))
    if hasattr(modules, "value_func"):
        groups["value"] = flat(layers_of(modules.value_func, "_fc"))
    for group, name in (("temperature", "log_temp"), ("alpha", "log_alpha")):
        if hasattr(modules, name):
            groups[group] = [getattr(modules, name)._parameter.reshape(())]
    return {name: [tensor.detach().clone() for tensor in group] for name, group in groups.items()}


def targets_of(modules):
    groups = {"critics": flat(ensemble(modules.targ_q_funcs))}
    if hasattr(modules, "targ_policy"):
        groups["policy"] = flat(policy_layers(modules.targ_policy))
    return {name: [tensor.detach().clone() for tensor in group] for name, group in groups.items()}


def our_parameters(group):
    """Ours in the order of parameters_of: layer by layer, weight then bias; then the spread."""
    perceptrons = [module for module in group.modules() if hasattr(module, "sink_parameters")]
    sunk = [tensor for perceptron in perceptrons for tensor in perceptron.sink_parameters()]
    ids = {id(tensor) for tensor in sunk}
    return [*sunk, *(p for p in group.parameters() if id(p) not in ids)]


def ours(function, config, modules, plainly=False):
    algorithm = function(OBSERVATION, ACTION, config, DatasetStatistics())
    if plainly:
        algorithm = dataclasses.replace(algorithm, optimizer=partial(torch.optim.SGD, lr=1.0))
    learner = GradientLearner(algorithm, seed=3)
    sides = ((learner._networks, parameters_of), (learner._targets, targets_of))
    for networks, read in sides:
        found = read(modules)
        for name, group in networks.items():
            if name not in found:
                continue
            for parameter, tensor in zip(our_parameters(group), found[name], strict=True):
                parameter.data.copy_(tensor)
    learner._rng.manual_seed(SEED)
    return learner


def assert_same(group, expected, rtol=0.0):
    for parameter, tensor in zip(our_parameters(group), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), tensor, rtol=rtol, atol=1e-5)


def assert_moved(before, after):
    assert max((x - y).abs().max().item() for x, y in zip(before, after, strict=True)) > 1e-4


CASES = {
    "td3": (td3, TD3Config, {"update_actor_interval": 1}, {}),
    "td3_plus_bc": (td3_plus_bc, TD3PlusBCConfig, {"update_actor_interval": 1}, {}),
    "iql": (iql, IQLConfig, {}, {}),
    # d3rlpy's targets have the policy's entropy in them, which is no option there.
    "awac": (awac, AWACConfig, {"temperature": 1.0}, {}),
    "awac-3": (
        awac,
        AWACConfig,
        {"num_action_samples": 3, "lam": 0.5, "temperature": 1.0},
        {"n_action_samples": 3, "lam": 0.5},
    ),
    "sac": (sac, SACConfig, {"temperature_learning_rate": 0.0}, {"temp_learning_rate": 0.0}),
    **{
        f"cql{suffix}": (
            cql,
            CQLConfig,
            {"temperature_learning_rate": 0.0, "alpha_learning_rate": 0.0, **backup},
            {"temp_learning_rate": 0.0, "alpha_learning_rate": 0.0, **backup},
        )
        for suffix, backup in (
            ("", {}),
            ("-soft", {"soft_q_backup": True}),
            ("-max", {"max_q_backup": True}),
        )
    },
}


def draws_of_the_critics(case, batch_size):
    """Draw from torch's generator what d3rlpy's critics draw before its actor does."""
    noise = torch.zeros(batch_size, 2)
    if case in ("sac", "awac", "awac-3", "cql-soft"):
        torch.normal(noise, torch.ones_like(noise))
    samples = torch.zeros(10, batch_size, 2)
    if case.startswith("cql"):
        for _ in range(3 if case == "cql-max" else 2):
            torch.normal(samples, torch.ones_like(samples))
        samples.uniform_(-1, 1)


@pytest.mark.parametrize("plainly", [True, False], ids=["sgd", "adam"])
@pytest.mark.parametrize("case", CASES)
def test_one_update_is_d3rlpys(case, plainly, batch):
    function, config_class, our_options, their_options = CASES[case]
    their_options = {**our_options, **their_options} if "td3" in case else their_options
    name = case.split("-")[0]
    critic_side, actor_side = (theirs(name, plainly, **their_options) for _ in range(2))
    config = config_class(hidden_sizes=SIZES, **our_options)
    learner = ours(function, config, critic_side.modules, plainly)
    given = batch("box", seed=5)
    before = parameters_of(critic_side.modules)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        critic_side.update_critic(their_batch(given))
        critic_side.update_critic_target()
        torch.manual_seed(SEED)
        draws_of_the_critics(case, len(given))
        actor_side.update_actor(their_batch(given))
    learner.update(given)
    after = parameters_of(critic_side.modules)
    for group in {"critics", "value"} & set(after):
        assert_moved(before[group], after[group])
        assert_same(learner._networks[group], after[group], rtol=1e-5)
    policy = parameters_of(actor_side.modules)["policy"]
    assert_moved(before["policy"], policy)
    assert_same(learner._networks["policy"], policy, rtol=1e-5)
    assert_same(learner._targets["critics"], targets_of(critic_side.modules)["critics"])


@pytest.mark.parametrize(
    ("case", "function", "config_class"), [("sac", sac, SACConfig), ("cql", cql, CQLConfig)]
)
def test_a_learned_temperature_is_d3rlpys(case, function, config_class, batch):
    actor_side = theirs(case)
    learner = ours(function, config_class(hidden_sizes=SIZES), actor_side.modules)
    given = batch("box", seed=5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        draws_of_the_critics(case, len(given))
        actor_side.update_actor(their_batch(given))
    learner.update(given)
    after = parameters_of(actor_side.modules)["temperature"]
    assert after[0].item() != 0
    assert_same(learner._networks["temperature"], after)


def test_a_learned_multiplier_is_d3rlpys(batch):
    critic_side = theirs("cql")
    learner = ours(cql, CQLConfig(hidden_sizes=SIZES), critic_side.modules)
    given = batch("box", seed=5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        losses = critic_side.update_critic(their_batch(given))
    metrics = learner.update(given).metrics
    after = parameters_of(critic_side.modules)["alpha"]
    assert after[0].item() != 0
    assert_same(learner._networks["alpha"], after)
    # Theirs is of the multiplier after its step; exp(0) was the one before.
    conservative = losses["conservative_loss"] / losses["alpha"]
    td = losses["critic_loss"] - losses["conservative_loss"]
    assert float(metrics["critics_loss"]) == pytest.approx(td + conservative, rel=1e-4)
