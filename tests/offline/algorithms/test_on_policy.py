"""PPO and IMPALA: what they make of sequences out of the store, step by step and by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from replaylake.datastore.errors import ConfigInvalidError, SpaceUnsupportedError
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.replay.to_torch import to_torch
from replaylake.offline.algorithms.catalog import check_algorithm, make_learner, require
from replaylake.offline.algorithms.impala import IMPALAConfig, impala
from replaylake.offline.algorithms.ppo import PPOConfig, ppo
from replaylake.offline.learning.algorithm import Algorithm, Losses, Networks, OnPolicy
from replaylake.offline.learning.export import export_onnx
from replaylake.offline.learning.learner import GradientLearner
from replaylake.offline.learning.minibatches import take_rows
from replaylake.offline.networks.actor_critic import Outputs
from replaylake.offline.networks.graph import TorchPolicy
from replaylake.offline.running.train import train
from replaylake.offline.running.training.config import TrainConfig

OBSERVATION = Box((3,))
ACTIONS = {
    "discrete": Discrete(3, 5),
    "continuous": Box((2,), "float32", -2.0, 1.0),
    "multi_discrete": MultiDiscrete((2, 3)),
    "binary": MultiBinary(2),
    "masked": Discrete(3),
}
NAMES = ["ppo", "impala"]


def make(name, actions="discrete", observation=OBSERVATION, seed=0, **options):
    given = {"hidden_sizes": [8], "length": 4, "num_sequences": 6, **options}
    return make_learner(name, observation, ACTIONS[actions], options=given, seed=seed, discount=0.5)


def observed(space, rng, num):
    if isinstance(space, Dict):
        return {key: observed(sub, rng, num) for key, sub in space.spaces.items()}
    if isinstance(space, Discrete):
        return rng.integers(space.start, space.start + space.n, num)
    if space.is_image:
        return rng.integers(0, 256, (num, *space.shape), np.uint8)
    return rng.standard_normal((num, *space.shape)).astype(np.float32)


def first(values):
    return {k: first(v) for k, v in values.items()} if isinstance(values, dict) else values[0]


def row(values, at):
    if isinstance(values, dict):
        return {k: row(v, at) for k, v in values.items()}
    return values[at : at + 1]


def acted(learner, lengths, seed=0, masked=False):
    """Episodes that the learner's policy acts in; the longer ones are truncated, not terminated."""
    policy, rng = TorchPolicy(learner.policy()), np.random.default_rng(seed)
    space, episodes = policy.spec.observation_space, []
    for number, length in enumerate(lengths):
        observations = observed(space, rng, length)
        state, acts, states, masks = policy.initial_state(1), [], [], None
        if masked:
            masks = rng.random((length, 3)) < 0.5
            masks[np.arange(length), rng.integers(0, 3, length)] = True
        for step in range(length):
            states.append(state)
            mask = None if masks is None else masks[step : step + 1]
            acts.append(
                policy.act(
                    row(observations, step), state, rng=rng, deterministic=False, action_mask=mask
                )
            )
            state = acts[-1].state
        extras = {} if state is None else {"policy_state": np.concatenate(states)}
        episodes.append(
            Episode(
                f"e/{number:03}",
                observations,
                np.concatenate([act.actions for act in acts]),
                rng.standard_normal(length),
                terminated=length <= 5,
                truncated=length > 5,
                final_observation=first(observed(space, rng, 1)),
                behavior_log_probs=np.concatenate([act.log_probs for act in acts]),
                action_masks=masks,
                extras=extras,
            )
        )
    return episodes


@pytest.fixture
def sampled(tmp_path):
    """Put episodes into a lake, and draw a learner's batch of them out of it again."""

    def sampled(learner, episodes, num=None):
        lake = open_lake(tmp_path / f"lake{len(list(tmp_path.iterdir()))}", create=True)
        lake.dataset("acted").append(episodes)
        columns = ["policy_state"] if learner.policy().spec.state_size else []
        view = lake.snapshot("acted").replay(columns=columns)
        return view.in_order(num or learner.on_policy.num_sequences, learner.item).sample()

    return sampled


def by_one_pass(learner, batch):
    """The metrics of one pass over the batch in one part: before anything was learned from it."""
    return {name: float(value) for name, value in learner.update(batch).metrics.items()}


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("actions", ACTIONS)
def test_who_acted_has_a_ratio_of_one(sampled, actions, recurrent):
    given = {"recurrent": recurrent, "epochs": 1, "minibatches": 1}
    for name in NAMES:
        learner = make(name, actions, **given)
        # It is not the uniform policy that it begins as.
        for _ in range(3):
            learner.update(sampled(learner, acted(learner, [5, 9, 2])))
        episodes = acted(learner, [5, 9, 2, 7], seed=1, masked=actions == "masked")
        batch = sampled(learner, episodes)
        metrics = by_one_pass(learner, batch)
        if name == "ppo":
            assert metrics["kl"] == pytest.approx(0, abs=1e-6)
            assert metrics["clipped"] == 0
        else:
            assert metrics["rho"] == pytest.approx(1, abs=1e-4)
        if name == "ppo":  # after a step on the batch it is another policy
            assert by_one_pass(learner, batch)["kl"] > 1e-9


def test_a_squashed_action_near_its_bound_keeps_its_density(sampled):
    learner = make("ppo", "continuous", epochs=1, minibatches=1, num_sequences=50)
    # Means of +-3 before the tanh, which is 0.995 of the range.
    with torch.no_grad():
        learner._networks["actor_critic"].actor.network.body.layers[-1].bias.copy_(
            torch.tensor([3.9, -3.9])
        )
    assert by_one_pass(learner, sampled(learner, acted(learner, [4] * 50)))["kl"] < 1e-4


def hand_made(**changes):
    """Three sequences of T = 4: terminated after 2 steps, cut off after 3, going on after 4."""
    mask = np.array([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]], bool)
    observations = np.zeros((3, 5, 3), np.float32)
    # What is observed is the number of the step, from 10 on in the second, from 20 in the third.
    for b, length in enumerate((2, 3, 4)):
        observations[b, : length + 1, 0] = 10 * b + np.arange(length + 1)
    discounts = 0.5 * mask
    discounts[0, 1] = 0
    fields = {
        "observations": observations[:, :-1],
        "actions": np.where(mask, 5, 0),
        "rewards": np.where(mask, 1, 0).astype(np.float32),
        "discounts": discounts.astype(np.float32),
        "next_observations": observations[:, 1:],
        "behavior_log_probs": np.where(mask, np.log(1 / 3), 0).astype(np.float32),
        "weights": np.ones(3, np.float32),
        "keys": np.zeros((3, 4, 2), np.uint64),
        "mask": mask,
        "bootstrappable": mask.copy(),
    }
    return to_torch(Batch(**{**fields, **changes}))


class FirstNumber(torch.nn.Module):
    """Values the observation at its first number; all actions are as likely."""

    def forward(self, observations):
        return Outputs((torch.zeros(len(observations), 3),), self.compute_values(observations))

    def compute_values(self, observations):
        return observations[:, 0]


def postprocessed(function, config, batch):
    algorithm = function(OBSERVATION, ACTIONS["discrete"], config)
    return algorithm.postprocess(Networks({"actor_critic": FirstNumber()}), batch)


def test_advantages_end_where_their_sequence_does():
    config = PPOConfig(gae_lambda=0.5, normalize_advantages=False)
    found = postprocessed(ppo, config, hand_made())
    # delta = 1 + 0.5 v(s') - v(s), and A = delta + 0.25 A' but for the last step of each.
    #  terminated: 1 + 0.5 - 0 = 1.5; then 1 - 1 = 0
    #  cut off: 1 + 5.5 - 10 = -3.5, 1 + 6 - 11 = -4, 1 + 6.5 - 12 = -4.5
    #  going on: 1 + 10.5 - 20 = -8.5, -9, -9.5, 1 + 12 - 23 = -10
    second = [-3.5 + 0.25 * (-4 + 0.25 * -4.5), -4 + 0.25 * -4.5, -4.5]
    third = [0, 0, -9.5 + 0.25 * -10, -10]
    third[1] = -9 + 0.25 * third[2]
    third[0] = -8.5 + 0.25 * third[1]
    expected = [1.5, 0, *second, *third]
    assert found.columns["advantages"].tolist() == pytest.approx(expected)
    values = [0, 1, 10, 11, 12, 20, 21, 22, 23]
    assert found.columns["values"].tolist() == values
    targets = np.add(expected, values).tolist()
    assert found.columns["value_targets"].tolist() == pytest.approx(targets)
    assert found.observations[:, 0].tolist() == values
    assert found.actions.tolist() == [5] * 9


def test_normalized_advantages_are_of_the_steps_alone():
    plain = postprocessed(ppo, PPOConfig(normalize_advantages=False), hand_made())
    found = postprocessed(ppo, PPOConfig(), hand_made()).columns["advantages"]
    known = plain.columns["advantages"].numpy()
    np.testing.assert_allclose(found, (known - known.mean()) / known.std(), rtol=1e-5)


def test_v_trace_ends_where_its_sequence_does():
    # Who acted was twice as likely to take the action, but in the last step of the second one half.
    log_mu = np.full((3, 4), np.log(2 / 3), np.float32)
    log_mu[1, 2] = np.log(1 / 6)
    config = IMPALAConfig()
    found = postprocessed(impala, config, hand_made(behavior_log_probs=log_mu))
    # rho = c = 1/2, and 1 (of 2) in that step. e = rho delta + 0.5 c e', deltas as above.
    second = [0.5 * -3.5, 0.5 * -4, -4.5]
    second[1] += 0.25 * second[2]
    second[0] += 0.25 * second[1]
    third = [0.5 * delta for delta in (-8.5, -9, -9.5, -10)]
    for k in (2, 1, 0):
        third[k] += 0.25 * third[k + 1]
    errors = [0.75, 0, *second, *third]
    values = [0, 1, 10, 11, 12, 20, 21, 22, 23]
    targets = np.add(errors, values)
    assert found.columns["value_targets"].tolist() == pytest.approx(targets.tolist())
    # A = rho (1 + 0.5 vs' - v), and behind the last step stands its value.
    followed = [targets[1], 0, targets[3], targets[4], 13, *targets[6:9], 24]
    rho = [0.5, 0.5, 0.5, 0.5, 1, *[0.5] * 4]
    expected = [r * (1 + 0.5 * vs - v) for r, vs, v in zip(rho, followed, values, strict=True)]
    assert found.columns["advantages"].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("function", [ppo, impala])
def test_a_step_without_a_successor_is_left_out(function):
    config = {ppo: PPOConfig(normalize_advantages=False), impala: IMPALAConfig()}[function]
    bootstrappable = hand_made().mask.numpy().copy()
    bootstrappable[1, 2] = False
    known = postprocessed(function, config, hand_made(bootstrappable=bootstrappable))
    assert known.observations[:, 0].tolist() == [0, 1, 10, 11, 20, 21, 22, 23]
    # As if the sequence had been cut off before it: v(s') is that of what is observed there.
    mask = hand_made().mask.numpy().copy()
    mask[1, 2] = False
    expected = postprocessed(function, config, hand_made(mask=mask))
    for name, value in expected.columns.items():
        torch.testing.assert_close(known.columns[name], value)


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_steps_left_out_at_a_beginning_change_no_others(name, recurrent):
    """As too old ones are; who remembers goes on from before them."""
    learner = make(name, recurrent=recurrent, normalize_advantages=False)
    states = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
    whole = replace(hand_made(), columns={"policy_state": states})
    mask = whole.mask.clone()
    mask[1, :1] = mask[2, :2] = False
    found = []
    for batch in (whole, replace(whole, mask=mask)):
        with torch.no_grad():
            rows = learner._algorithm.postprocess(learner._networks, batch)
            networks = learner._networks
            steps = rows if not recurrent else take_rows(replace(rows, mask=None), rows.mask)
            if recurrent:
                values = networks["actor_critic"](rows.observations, states[:, 0]).values
                found.append([values[rows.mask.flatten()], steps.columns["value_targets"]])
            else:
                found.append([steps.observations, steps.columns["value_targets"]])
    kept = torch.tensor([0, 1, 3, 4, 7, 8])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours[kept], theirs)


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_with_nothing_to_learn_changes_nothing(name, recurrent):
    learner = make(name, recurrent=recurrent)
    columns = {"policy_state": torch.zeros(3, 4, 8)}
    batch = replace(hand_made(bootstrappable=np.zeros((3, 4), bool)), columns=columns)
    before = learner.state_dict()
    assert learner.update(batch).metrics == {}
    assert_same(before, learner.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_what_is_past_the_end_does_not_matter(name):
    given = {"epochs": 1, "minibatches": 1}
    learners = [make(name, recurrent=r, **given) for r in (False, False, True, True)]
    columns = {"policy_state": torch.zeros(3, 4, 8)}
    for number, learner in enumerate(learners):
        batch = replace(hand_made(), columns=columns)
        if number % 2:
            batch = replace(batch, **{n: getattr(batch, n).clone() for n in ("rewards", "actions")})
            batch.rewards[~batch.mask] = 1e6
            batch.actions[~batch.mask] = 99
        learner.update(batch)
    assert_same(learners[0].state_dict(), learners[1].state_dict())
    assert_same(learners[2].state_dict(), learners[3].state_dict())


def assert_same(state, other):
    assert state.keys() == other.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


@pytest.mark.parametrize("name", NAMES)
def test_actions_of_unknown_probability_are_refused(name):
    log_probs = np.zeros((3, 4), np.float32)
    log_probs[2, 1] = np.nan
    log_probs[0, 3] = np.nan  # past the end
    with pytest.raises(
        ConfigInvalidError, match=f"{name}: found 1 of 9 steps without a behavior log"
    ):
        make(name).update(hand_made(behavior_log_probs=log_probs))


def stacked(episodes):
    """Episodes of as many steps as a sequence has, each a row of a batch."""
    observations = np.stack([episode.observations for episode in episodes])
    following = [
        np.concatenate([episode.observations[1:], episode.final_observation[None]])
        for episode in episodes
    ]
    shape = observations.shape[:2]
    discounts = np.full(shape, 0.5, np.float32)
    discounts[:, -1] = 0
    return Batch(
        observations=observations,
        actions=np.stack([episode.actions for episode in episodes]),
        rewards=np.stack([episode.rewards for episode in episodes]).astype(np.float32),
        discounts=discounts,
        next_observations=np.stack(following),
        behavior_log_probs=np.stack([episode.behavior_log_probs for episode in episodes]),
        weights=np.ones(len(episodes), np.float32),
        keys=np.zeros((*shape, 2), np.uint64),
        mask=np.ones(shape, bool),
    )


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("actions", ["discrete", "continuous", "multi_discrete"])
@pytest.mark.parametrize("name", NAMES)
def test_what_paid_becomes_likelier(name, actions, shared):
    """Nothing is observed; the reward is 1 for one action, or for those above 0."""
    learner = make(name, actions, shared=shared, normalize_advantages=True)

    def good(values):
        return (values.reshape(len(values), -1)[:, 0] > {"continuous": 0}.get(actions, 0.5)) & (
            True if actions != "discrete" else values == 6
        )

    shares = []
    for seed in range(25):
        episodes = [
            replace(
                episode,
                rewards=good(episode.actions).astype(np.float64),
                observations=np.zeros_like(episode.observations),
            )
            for episode in acted(learner, [4] * 12, seed)
        ]
        shares.append(np.mean([episode.rewards.mean() for episode in episodes]))
        learner.update(stacked(episodes))
    assert np.mean(shares[-3:]) > np.mean(shares[:3]) + 0.1


def test_an_update_is_a_step_for_each_minibatch_of_each_epoch(sampled):
    learner = make("ppo", epochs=3, minibatches=4)
    learner.update(sampled(learner, acted(learner, [5, 9, 2])))
    assert int(learner._num_updates) == 12


def test_metrics_are_means_over_minibatches():
    seen = []

    def losses(networks, targets, batch, rng, due):
        seen.append(batch.rewards.mean())
        value = networks["value"].weight.sum()
        return Losses({"value": value * 0.0}, metrics={"reward": batch.rewards.mean()})

    algorithm = Algorithm(
        spec=ppo(OBSERVATION, Discrete(2), PPOConfig()).spec,
        losses=losses,
        networks=lambda: Networks({"value": torch.nn.Linear(1, 1)}),
        on_policy=OnPolicy(length=4, num_sequences=3, epochs=2, minibatches=3),
    )
    learner = GradientLearner(algorithm, seed=0)
    batch = replace(hand_made(), rewards=torch.arange(12.0).view(3, 4))
    found = learner.update(batch).metrics["reward"]
    # Its postprocess leaves sequences: a part is one of them.
    assert sorted(map(float, seen)) == [1.5, 1.5, 5.5, 5.5, 9.5, 9.5]
    assert float(found) == pytest.approx(5.5)


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_learner_goes_on_to_the_bit(sampled, name, recurrent):
    given = {"recurrent": recurrent, "epochs": 2, "minibatches": 2}
    learner = make(name, "continuous", **given)
    batch = sampled(learner, acted(learner, [5, 9, 2, 8]))
    learner.update(batch)
    other = make(name, "continuous", seed=7, **given)
    other.load_state_dict(learner.state_dict())
    learner.update(batch)
    other.update(batch)
    assert_same(learner.state_dict(), other.state_dict())


@pytest.mark.parametrize("core", ["gru", "lstm"])
def test_a_recurrent_policy_learns_as_it_acted(sampled, core):
    """What it says of a sequence of the store is what it said step by step, and it is exported."""
    learner = make("ppo", recurrent=True, core=core, length=3)
    episodes = acted(learner, [5, 7])
    batch = to_torch(sampled(learner, episodes, num=5))
    spec = learner.policy().spec
    assert spec.state_size == {"gru": 8, "lstm": 16}[core]
    network = learner._networks["actor_critic"]
    with torch.no_grad():
        (logits,), _ = network(batch.observations, batch.columns["policy_state"][:, 0])
    said = torch.log_softmax(logits.view(5, 3, 3), -1)
    taken = said.gather(-1, (batch.actions - 5).clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(taken[batch.mask], batch.behavior_log_probs[batch.mask])
    assert export_onnx(learner.policy())


def test_a_recurrent_learner_wants_the_recorded_state():
    with pytest.raises(ConfigInvalidError, match=r"no column 'policy_state'.*columns="):
        make("ppo", recurrent=True).update(hand_made())


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize(
    "space",
    [
        Discrete(4, 2),  # padding's 0 is none of it
        Dict({"camera": Box((9, 9), "uint8", 0, 255), "room": Discrete(3, 1)}),
    ],
)
def test_any_observations(sampled, space, recurrent):
    for name in NAMES:
        learner = make(name, observation=space, recurrent=recurrent)
        metrics = learner.update(sampled(learner, acted(learner, [2, 6, 3]))).metrics
        assert all(np.isfinite(float(value)) for value in metrics.values())
        assert export_onnx(learner.policy())


def test_frames_are_encoded_once():
    frames = Box((9, 9), "uint8", 0, 255)
    names = [n for n in make("ppo", observation=frames).state_dict() if n.endswith("weight")]
    assert sum("_convolutions.0" in name for name in names) == 1
    apart = make("ppo", observation=frames, shared=False).state_dict()
    assert sum("_convolutions.0.weight" in name for name in apart) == 2


def test_what_is_asked_of_a_trainer():
    learner = make("ppo", length=6, num_sequences=3, epochs=5, minibatches=2)
    assert learner.on_policy == OnPolicy(6, 3, 5, 2)
    assert (learner.item.length, learner.item.overlap, learner.item.discount) == (6, 0, 0.5)
    replayed = make_learner("bc", OBSERVATION, Discrete(2), options={}, seed=0)
    assert replayed.on_policy is None


@pytest.mark.parametrize("name", NAMES)
def test_a_log_is_refused_by_name(name):
    assert check_algorithm(name, Discrete(2)).consumes_once
    with pytest.raises(ConfigInvalidError, match=rf"{name}.*train online.*awac, bc"):
        require(check_algorithm(name, Box((1,))), "logs")
    require(check_algorithm("bc", Box((1,))), "logs")


def test_actions_without_bounds_are_refused():
    unbounded = Box((1,))
    with pytest.raises(SpaceUnsupportedError, match="without finite bounds"):
        make_learner("ppo", OBSERVATION, unbounded, options={}, seed=0)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("length", 0),
        ("num_sequences", 0),
        ("epochs", 0),
        ("minibatches", 0),
        ("entropy_weight", -0.1),
        ("value_weight", -1.0),
        ("max_gradient_norm", 0.0),
        ("learning_rate", 0.0),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_options_out_of_range_are_refused(name, option, value):
    with pytest.raises(ConfigInvalidError, match=f"{name}: {option}: found {value}"):
        make(name, **{option: value})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ppo", {"clip": 0.0}),
        ("ppo", {"gae_lambda": 1.5}),
        ("ppo", {"value_clip": 0.0}),
        ("impala", {"lambda_": -0.5}),
        ("impala", {"clip_rho": 0.0}),
        ("impala", {"clip_pg_rho": 0.0}),
        ("impala", {"optimizer": "sgd"}),
        ("ppo", {"recurrent": True, "shared": False}),
    ],
)
def test_their_own_options_out_of_range_are_refused(name, options):
    with pytest.raises(ConfigInvalidError, match=f"{name}: {list(options)[-1]}: found"):
        make(name, **options)


def test_minibatches_of_a_recurrent_learner_are_sequences(sampled):
    learner = make("ppo", recurrent=True, length=3, num_sequences=5)
    batch = to_torch(sampled(learner, acted(learner, [5, 7])))
    algorithm, networks = learner._algorithm, learner._networks
    with torch.no_grad():
        found = algorithm.postprocess(networks, batch)
    assert found.mask.sum(dim=1).tolist() == [3, 2, 3, 3, 1]
    half = take_rows(found, torch.tensor([4, 1]))
    losses = algorithm.losses(networks, networks, half, torch.Generator(), frozenset())
    # Steps count alike, wherever they are: 1 and 2 of them.
    each = [
        algorithm.losses(
            networks, networks, take_rows(found, torch.tensor([k])), torch.Generator(), frozenset()
        ).metrics["value_loss"]
        for k in (4, 1)
    ]
    expected = (each[0] + 2 * each[1]) / 3
    torch.testing.assert_close(losses.metrics["value_loss"], expected)


def test_a_core_goes_on_to_what_followed_a_sequence(sampled):
    learner = make("ppo", recurrent=True, length=3, gae_lambda=0.0, normalize_advantages=False)
    batch = to_torch(sampled(learner, acted(learner, [8, 7]), num=6))
    network = learner._networks["actor_critic"]
    with torch.no_grad():
        found = learner._algorithm.postprocess(learner._networks, batch).columns["value_targets"]
        for b, length in enumerate([3, 3, 2, 3, 3, 1]):
            state = batch.columns["policy_state"][b, :1, :]
            observations = [*batch.observations[b, :length], batch.next_observations[b, length - 1]]
            values = []
            for observation in observations:
                remembered, state = network.core.step(network.features(observation[None]), state)
                values.append(network.body(remembered)[0, -1])
            # None of them terminated: r + gamma v(s').
            expected = batch.rewards[b, :length] + 0.5 * torch.stack(values[1:])
            torch.testing.assert_close(found[b, :length], expected)


OWN = """
from dataclasses import dataclass, replace
from replaylake.offline.learning.algorithm import Algorithm, OnPolicy
from replaylake.offline.algorithms.bc import BCConfig, bc
from replaylake.offline.dataset_statistics import DatasetStatistics

@dataclass(frozen=True)
class OwnConfig:
    pass

def own(observation_space, action_space, config: OwnConfig, facts: DatasetStatistics) -> Algorithm:
    cloning = bc(observation_space, action_space, BCConfig(), facts)
    return replace(cloning, on_policy=OnPolicy(length=4, num_sequences=2))
"""


@pytest.mark.parametrize("name", ["ppo", "impala", "own_on_policy:own"])
def test_train_offline_refuses_them(tmp_path, monkeypatch, line_world, name):
    (tmp_path / "own_on_policy.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("line").append(line_world())
    with pytest.raises(ConfigInvalidError, match=f"algorithm {name}: found a log to learn from"):
        train(lake, ["line"], TrainConfig(algorithm=name, policy="p"))
