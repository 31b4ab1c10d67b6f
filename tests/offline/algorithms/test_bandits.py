"""ips_bandit and dr_bandit: their losses by hand; what they learn of problems with an answer."""

import dataclasses

import numpy as np
import pytest
import torch

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ConfigInvalidError, SpaceUnsupportedError
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import GraphSession
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.offline.algorithms.bandit_log import check_bandit_log
from replaylake.offline.algorithms.dr_bandit import DRBanditConfig, dr_bandit
from replaylake.offline.algorithms.ips_bandit import IPSBanditConfig, ips_bandit
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.export import export_onnx
from replaylake.offline.learning.learner import GradientLearner
from replaylake.offline.networks.graph import TorchPolicy, run_graph

BOTH = [(ips_bandit, IPSBanditConfig), (dr_bandit, DRBanditConfig)]
SMALL = {"hidden_sizes": (32,)}
NUM_LOGGED = 50_000
OBSERVATION, ACTIONS = Box((4,)), Discrete(3)


def make(function, config, observation=OBSERVATION, actions=ACTIONS, seed=0, **options):
    algorithm = function(observation, actions, config(**{**SMALL, **options}), DatasetStatistics())
    return GradientLearner(algorithm, seed=seed)


def decisions(batch, seed=0, size=64, num_actions=3, **changes):
    """A batch of one-step decisions by a uniform policy."""
    rng = np.random.default_rng(seed)
    chance = np.full(size, -np.log(num_actions), np.float32)
    fields = {
        "discounts": np.zeros(size, np.float32),
        "behavior_log_probs": chance,
        "keys": rng.integers(0, 2**63, (size, 2)).astype(np.uint64),
    }
    made = batch(seed=seed, size=size, num_actions=num_actions)
    return dataclasses.replace(made, **{**fields, **changes})


def probs(learner, made):
    logits = run_graph(learner.policy(), {"observations": made.observations})["logits"]
    logits = np.where(True if made.action_masks is None else made.action_masks, logits, -np.inf)
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def masked(made):
    """The same decisions with every second first action forbidden, where it was not taken."""
    masks = np.ones((len(made), 3), bool)
    masks[::2, 0] = made.actions[::2] == 0
    return dataclasses.replace(made, action_masks=masks)


@pytest.mark.parametrize("self_normalized", [True, False])
def test_the_ips_loss_by_hand(batch, self_normalized):
    learner = make(ips_bandit, IPSBanditConfig, self_normalized=self_normalized, max_weight=1.05)
    chances = np.linspace(0.2, 0.5, 64).astype(np.float32)
    made = masked(
        decisions(
            batch,
            weights=np.linspace(0, 2, 64, dtype=np.float32),
            behavior_log_probs=np.log(chances),
        )
    )
    pi = probs(learner, made)[np.arange(64), made.actions]
    weights = np.minimum(pi / chances, 1.05)
    assert (pi / chances > 1.05).any()
    weights *= made.weights
    total = (weights * made.rewards).sum()
    expected = total / weights.sum() if self_normalized else total / 64
    found = float(learner.update(made).metrics["policy_loss"])
    assert found == pytest.approx(-expected, rel=1e-5)


def test_the_doubly_robust_loss_by_hand_judges_rows_by_the_model_that_did_not_see_them(batch):
    learner = make(dr_bandit, DRBanditConfig, max_weight=1.05)
    made = masked(decisions(batch, weights=np.linspace(0, 2, 64, dtype=np.float32)))
    with torch.no_grad():
        models = learner._networks["reward"](torch.from_numpy(made.observations)).numpy()
    rows, halves = np.arange(64), (made.keys[:, 0] % 2).astype(int)
    pi = probs(learner, made)
    # An odd key is of the first half, which model 0 learns from.
    judge, learned = models[halves, rows], models[1 - halves, rows]
    weights = np.minimum(3 * pi[rows, made.actions], 1.05)
    corrections = weights * (made.rewards - judge[rows, made.actions])
    values = (pi * judge).sum(axis=1) + corrections
    squares = (learned[rows, made.actions] - made.rewards) ** 2
    metrics = {k: float(v) for k, v in learner.update(made).metrics.items()}
    assert metrics["policy_loss"] == pytest.approx(-(made.weights * values).mean(), rel=1e-4)
    assert metrics["reward_loss"] == pytest.approx((made.weights * squares).mean(), rel=1e-4)


@pytest.mark.parametrize(("function", "config"), BOTH)
def test_forbidden_actions_weigh_nothing_and_are_not_taken(batch, function, config):
    """Action 0 pays most, but the contexts with o_0 > 0 forbid it; there 2 is best."""
    learner = make(function, config, learning_rate=1e-2)
    for seed in range(300):
        made = decisions(batch, seed=seed, size=128)
        masks = np.ones((128, 3), bool)
        masks[:, 0] = made.observations[:, 0] <= 0
        rng = np.random.default_rng(seed)
        actions = (masks * rng.random((128, 3))).argmax(axis=1)
        paid = np.array([1.0, 0.1, 0.5])[actions] + rng.normal(0, 0.1, 128)
        learner.update(
            dataclasses.replace(
                made,
                actions=actions,
                action_masks=masks,
                behavior_log_probs=-np.log(masks.sum(axis=1)).astype(np.float32),
                rewards=paid.astype(np.float32),
            )
        )
    chosen = TorchPolicy(learner.policy()).act(made.observations, action_mask=masks).actions
    assert (chosen == np.where(masks[:, 0], 0, 2)).mean() > 0.95


class Problem:
    """8 features, 6 actions, rewards 0 or 1 with a known chance; 50,000 logged decisions."""

    def __init__(self, seed, level):
        rng = np.random.default_rng(seed)
        self._theta, self._level = rng.standard_normal((8, 6)) / np.sqrt(2), level
        self.observations = rng.standard_normal((NUM_LOGGED, 8)).astype(np.float32)
        logits = self.observations @ rng.standard_normal((8, 6)) / np.sqrt(8)
        mu = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        self.actions = (mu.cumsum(axis=1) > rng.random((NUM_LOGGED, 1))).argmax(axis=1)
        rows = np.arange(NUM_LOGGED)
        self.log_mu = np.log(mu[rows, self.actions]).astype(np.float32)
        chances = self.chances(self.observations)[rows, self.actions]
        self.rewards = (rng.random(NUM_LOGGED) < chances).astype(np.float32)
        self.keys = rng.integers(0, 2**63, (NUM_LOGGED, 2)).astype(np.uint64)
        self.unseen = rng.standard_normal((20_000, 8)).astype(np.float32)

    def chances(self, observations):
        return 1 / (1 + np.exp(-(observations @ self._theta + self._level)))

    def batch(self, rng):
        rows = rng.integers(0, NUM_LOGGED, 256)
        return {
            "observations": self.observations[rows],
            "next_observations": self.observations[rows],
            "actions": self.actions[rows],
            "rewards": self.rewards[rows],
            "behavior_log_probs": self.log_mu[rows],
            "keys": self.keys[rows],
        }

    def value(self, policy):
        """Of contexts that nobody logged, as a share of the best policy's."""
        chances = self.chances(self.unseen)
        taken = chances[np.arange(20_000), policy.act(self.unseen).actions]
        return taken.mean() / chances.max(axis=1).mean()


@pytest.mark.slow
@pytest.mark.parametrize(("function", "config"), BOTH)
@pytest.mark.parametrize("level", [-1, -2])
def test_it_learns_within_5_percent_of_the_best_policy(batch, function, config, level):
    problem = Problem(4, level)
    learner = make(function, config, Box((8,)), Discrete(6), hidden_sizes=(64, 64))
    rng = np.random.default_rng(0)
    assert problem.rewards.mean() < 0.7 * problem.chances(problem.unseen).max(axis=1).mean()
    for _ in range(2000):
        learner.update(decisions(batch, size=256, **problem.batch(rng)))
    assert problem.value(TorchPolicy(learner.policy())) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize(("function", "config"), BOTH)
def test_it_learns_from_open_bandit_without_taking_one_item_for_all(
    shared_data, tmp_path, function, config
):
    lake = open_lake(tmp_path / "lake", create=True)
    ingest(lake, [shared_data / "obd" / "random" / "men" / "men.csv"], "obd")
    view = lake.snapshot("obd").replay()
    check_bandit_log(function.__name__, view)
    spec = view.spec
    learner = make(
        function, config, spec.observation_space, spec.action_space, hidden_sizes=(256, 256)
    )
    item = Transitions(only_bootstrappable=False)
    sampler = view.uniform(256, item, seed=0)
    for _ in range(1000):
        made = sampler.sample()
        learner.update(made)
    everything = view.uniform(10_000, item, seed=1).sample()
    policy = TorchPolicy(learner.policy())
    actions = policy.act(everything.observations).actions
    counts = np.bincount(actions, minlength=34) / len(actions)
    assert (counts > 0.01).sum() >= 5
    assert counts.max() < 0.9
    # On the rows that it learned from it claims more than the log's 0.0046.
    pi = probs(learner, everything)[np.arange(10_000), everything.actions]
    weights = pi / np.exp(everything.behavior_log_probs)
    assert (weights * everything.rewards).sum() / weights.sum() > 0.0046


@pytest.mark.parametrize(("function", "config"), BOTH)
def test_it_continues_bit_for_bit(batch, function, config):
    def run(learner, seeds):
        for seed in seeds:
            learner.update(decisions(batch, seed=seed))
        return learner.state_dict()

    whole = run(make(function, config), range(6))
    half = run(make(function, config), range(3))
    resumed = make(function, config, seed=9)
    resumed.load_state_dict(half)
    found = run(resumed, range(3, 6))
    assert found.keys() == whole.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize(("function", "config"), BOTH)
def test_its_graph_is_the_network(batch, function, config):
    learner = make(function, config)
    learner.update(decisions(batch))
    graph = learner.policy()
    assert graph.spec.head == "categorical"
    inputs = {"observations": batch(seed=3).observations}
    found = GraphSession(export_onnx(graph), graph.spec).run(inputs)["logits"]
    np.testing.assert_allclose(found, run_graph(graph, inputs)["logits"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("function", "config"), BOTH)
def test_other_actions_are_refused(function, config):
    with pytest.raises(SpaceUnsupportedError, match=f"{function.__name__}: .*expected Discrete"):
        make(function, config, actions=Box((2,)))


@pytest.mark.parametrize(("function", "config"), BOTH)
@pytest.mark.parametrize(
    "options",
    [{"learning_rate": 0.0}, {"max_weight": 0.0}, {"weight_decay": -1.0}, {"hidden_sizes": (0,)}],
)
def test_options_out_of_range_are_refused(function, config, options):
    with pytest.raises(ConfigInvalidError, match=f"{function.__name__}: {next(iter(options))}"):
        config(**options)


def test_a_log_of_longer_episodes_or_without_chances_is_refused(cartpole_lake, tmp_path):
    with pytest.raises(
        ConfigInvalidError, match=r"ips_bandit: 4136 of 4137 steps are not terminated"
    ):
        check_bandit_log("ips_bandit", cartpole_lake.snapshot("cartpole").replay())
    log = tmp_path / "log.csv"
    log.write_text("observation,action,reward,terminated\n1.0,0,1.0,1\n2.0,1,0.0,1\n")
    lake = open_lake(tmp_path / "lake", create=True)
    ingest(lake, [log], "log")
    with pytest.raises(ConfigInvalidError, match=r"2 of 2 steps have no behavior_log_prob"):
        check_bandit_log("dr_bandit", lake.snapshot("log").replay())
