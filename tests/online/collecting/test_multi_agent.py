from itertools import pairwise

import numpy as np
import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ConfigInvalidError, RolloutError, SchemaMismatchError
from replaylake.datastore.lake.policies.policy import Act, PolicySpec
from replaylake.datastore.lake.policies.uniform import UniformPolicy
from replaylake.online.collecting.behavior_policy import BehaviorPolicy
from replaylake.online.collecting.multi_agent import MultiAgentWorker
from replaylake.online.collecting.worker import RolloutConfig, RolloutWorker
from replaylake.online.collecting.workers import make_worker

OBSERVATIONS = Box((3,), "float32", 0.0, np.inf)


class Scripted:
    """Acts by the clock that it sees; with `remembers` it adds up its rewards."""

    def __init__(self, script, remembers=False):
        self._script = script
        self.spec = PolicySpec(OBSERVATIONS, Discrete(2), "categorical", state_size=int(remembers))

    def initial_state(self, n):
        return np.zeros((n, 1), np.float32) if self.spec.state_size else None

    def act(self, observations, state=None, **_):
        actions = [self._script[int(tick)] for tick in observations[:, 0]]
        return Act(np.array(actions), np.zeros(len(actions), np.float32), state)

    def observe(self, state, rewards):
        return None if state is None else state + np.asarray(rewards, np.float32)[:, None]


def scripted(script, name="scripted", **options):
    return BehaviorPolicy(name, 3, source=Scripted(script, **options))


def made(env_id, acting, *, episodes=1, num_envs=1, **env_args):
    config = RolloutConfig(env_id, envs_per_worker=num_envs, seed=5, env_args=env_args)
    return make_worker(config, iter(range(episodes)), acting, producer="me", worker=2)


def collected(*args, **options):
    worker = made(*args, **options)
    while not worker.exhausted:
        worker.advance(1000, 60)
    worker.close()
    episodes = {(e.episode_id, e.agent_id): e for e in worker.take_episodes(False)}
    return worker, episodes


@pytest.fixture
def games(toys):
    return "replaylake_games"


def test_a_reward_is_kept_with_the_agents_previous_action(games):
    worker, found = collected(f"{games}:Ping", scripted([1, 0, 1, 1, 0]))
    assert isinstance(worker, MultiAgentWorker)
    ann, bob = sorted(found.values(), key=lambda episode: episode.agent_id)
    assert (ann.agent_id, bob.agent_id) == ("ann", "bob")
    assert ann.episode_id == bob.episode_id
    assert ann.episode_id.startswith("me/")
    # ann acts at 0, 2, 4: 1, then 1 and bob's 10 * 1, then nothing.
    assert ann.rewards.tolist() == [1, 11, 0]
    # bob acts at 1 and 3. Before that ann's first pays him 10, after it her second another 10.
    assert bob.rewards.tolist() == [20, 1]
    assert ann.env_steps.tolist() == [0, 2, 4]
    assert bob.env_steps.tolist() == [1, 3]
    assert ann.actions.tolist() == [1, 1, 0]
    assert bob.actions.tolist() == [0, 1]
    assert np.asarray(ann.observations)[:, 0].tolist() == [0, 2, 4]
    assert np.asarray(bob.observations).tolist() == [[1, 1, 5], [3, 1, 5]]
    assert ann.final_observation.tolist() == [5, 0, 5]
    assert bob.final_observation.tolist() == [5, 1, 5]
    assert (ann.terminated, ann.truncated) == (True, False)
    assert (bob.terminated, bob.truncated) == (True, False)
    assert ann.first_step == bob.first_step == 0
    assert set(ann.policies) == {"scripted"}
    assert ann.policy_versions.tolist() == [3, 3, 3]
    assert ann.extras["worker"].tolist() == [2, 2, 2]
    assert bob.extras["seed"].tolist() == [5, 5]
    assert [tuple(end) for end in worker.take_ends()] == [
        (0, 5, 12.0, 3, "ann"),
        (0, 5, 21.0, 2, "bob"),
    ]


def test_agents_that_act_at_once_share_the_clock(games):
    _, found = collected(f"{games}:Race", scripted([1, 0, 1, 0]))
    ann, bob = sorted(found.values(), key=lambda episode: episode.agent_id)
    assert ann.env_steps.tolist() == [0, 1, 2, 3]
    assert bob.env_steps.tolist() == [0, 1]
    assert ann.rewards.tolist() == [1, 0, 1, 0]
    assert bob.rewards.tolist() == [2, 1]
    assert (ann.terminated, ann.truncated) == (False, True)
    assert (bob.terminated, bob.truncated) == (True, False)
    assert bob.final_observation.tolist() == [2, 1, 5]
    assert ann.final_observation.tolist() == [4, 0, 5]


def test_one_that_joins_late_begins_at_its_own_step_0(games):
    _, found = collected(f"{games}:Race", scripted([1, 1, 1, 1]), late=True)
    (cleo,) = [episode for episode in found.values() if episode.agent_id == "cleo"]
    assert cleo.first_step == 0
    assert cleo.env_steps.tolist() == [1, 2, 3]
    assert cleo.rewards.tolist() == [3, 3, 3]


def test_one_that_is_gone_without_a_word_was_cut_off(games):
    _, found = collected(f"{games}:Race", scripted([1] * 4), silent=True)
    (ann,) = [episode for episode in found.values() if episode.agent_id == "ann"]
    assert (ann.terminated, ann.truncated, len(ann)) == (False, True, 4)


def test_masks_beside_the_observation_are_honored_and_kept_apart(games):
    worker, found = collected(f"{games}:Ping", BehaviorPolicy(), episodes=20, masked=True)
    assert len(found) == 40
    for episode in found.values():
        assert np.asarray(episode.observations).shape == (len(episode), 3)
        odd = episode.env_steps % 2 == 1
        assert episode.action_masks.tolist() == [[not is_odd, True] for is_odd in odd]
        assert (episode.actions[odd] == 1).all()
        np.testing.assert_allclose(np.exp(episode.behavior_log_probs), np.where(odd, 1, 0.5))
    assert made(f"{games}:Ping", BehaviorPolicy(), masked=True).mask_size == 2
    assert worker.mask_size is None
    assert made(f"{games}:Ping", BehaviorPolicy()).mask_size is None


def test_a_policy_an_agent(games):
    acting = {"ann": scripted([1] * 5, "a"), "bob": scripted([0] * 5, "b")}
    _, found = collected(f"{games}:Ping", acting)
    ann, bob = sorted(found.values(), key=lambda episode: episode.agent_id)
    assert set(ann.policies) == {"a"}
    assert ann.actions.tolist() == [1, 1, 1]
    assert set(bob.policies) == {"b"}
    assert bob.actions.tolist() == [0, 0]


@pytest.mark.parametrize("agents", [("ann",), ("ann", "bob", "zoe"), ("zoe",)])
def test_policies_for_other_agents_are_refused(games, agents):
    with pytest.raises(ConfigInvalidError, match="expected one for each of ann, bob"):
        made(f"{games}:Ping", {agent: BehaviorPolicy() for agent in agents})


def test_policies_by_agent_are_refused_where_one_acts():
    with pytest.raises(ConfigInvalidError, match="policies for ann, expected one policy"):
        made("CartPole-v1", {"ann": BehaviorPolicy()})
    worker = made("CartPole-v1", BehaviorPolicy())
    assert isinstance(worker, RolloutWorker)
    with pytest.raises(ConfigInvalidError, match="policies for ann"):
        worker.set_behavior_policy({"ann": BehaviorPolicy()})
    worker.close()


def test_a_policy_of_other_spaces_is_refused(games):
    other = BehaviorPolicy("other", 1, source=UniformPolicy(Box((4,)), Discrete(2)))
    with pytest.raises(SchemaMismatchError, match="observation space"):
        made(f"{games}:Ping", other)


def test_agents_with_different_spaces_are_refused_by_name(games):
    with pytest.raises(SchemaMismatchError, match=r"agent 'bob' has the observation space .*'ann'"):
        made(f"{games}:Race", BehaviorPolicy(), wide="bob")


def test_games_do_not_depend_on_how_many_are_played_side_by_side(games):
    def numbers(num_envs):
        worker, found = collected(
            "pettingzoo:classic/tictactoe-v3", BehaviorPolicy(), episodes=12, num_envs=num_envs
        )
        return sorted(
            (int(e.extras["seed"][0]), e.agent_id, e.actions.tolist(), e.rewards.tolist())
            for e in found.values()
        ), sorted(worker.take_ends())

    assert numbers(1) == numbers(5)


def test_agents_draw_from_streams_of_their_own(games):
    _, found = collected(f"{games}:Race", BehaviorPolicy(), episodes=40)
    firsts = {}
    for episode in found.values():
        firsts.setdefault(episode.episode_id, {})[episode.agent_id] = episode.actions[:2].tolist()
    assert any(game["ann"] != game["bob"] for game in firsts.values())


def test_open_games_are_taken_as_pieces_that_go_on(games):
    script = [1, 0, 1, 1, 0]
    _, whole = collected(f"{games}:Ping", scripted(script))
    worker = made(f"{games}:Ping", scripted(script))
    pieces = {"ann": [], "bob": []}
    game_ids = set()
    for ticks in range(1, 6):
        assert worker.advance(1, 60) == 1
        for piece in worker.take_episodes(True):
            pieces[piece.agent_id].append(piece)
            game_ids.add(piece.episode_id)
        if ticks == 3:
            # ann's action at 2 is not paid for yet: its step waits.
            assert [len(piece) for piece in pieces["ann"]] == [1]
            assert worker.open_episodes == list(game_ids)
    assert worker.exhausted
    assert worker.open_episodes == []
    assert len(game_ids) == 1
    for (_, agent), episode in whole.items():
        parts = pieces[agent]
        assert len(parts) > 1
        assert [part.first_step for part in parts] == np.cumsum(
            [0, *(len(part) for part in parts[:-1])]
        ).tolist()
        for name in ("observations", "actions", "rewards", "env_steps"):
            joined = np.concatenate([np.asarray(getattr(part, name)) for part in parts])
            assert joined.tolist() == np.asarray(getattr(episode, name)).tolist()
        for before, after in pairwise(parts):
            assert (before.terminated, before.truncated) == (False, False)
            first = np.asarray(after.observations)[0]
            assert before.final_observation.tolist() == first.tolist()
        assert parts[-1].terminated
    assert [end.episode_return for end in worker.take_ends()] == [12, 21]


def test_without_pieces_a_game_is_taken_once_it_is_over(games):
    worker = made(f"{games}:Race", scripted([1] * 4))
    # bob is out after two ticks, of 4 steps of both.
    assert worker.advance(5, 60) == 5
    assert worker.take_episodes(False) == []
    assert worker.take_ends() == []
    worker.advance(100, 60)
    assert {episode.agent_id for episode in worker.take_episodes(False)} == {"ann", "bob"}
    assert worker.first_step_at is None


def test_a_policy_is_told_its_own_rewards(games):
    _, found = collected(f"{games}:Ping", scripted([1, 0, 1, 1, 0], remembers=True))
    ann, bob = sorted(found.values(), key=lambda episode: episode.agent_id)
    assert ann.extras["policy_state"].tolist() == [[0], [1], [12]]
    assert bob.extras["policy_state"].tolist() == [[0], [20]]


def test_another_policy_acts_from_the_next_step_on(games):
    worker = made(f"{games}:Ping", scripted([0] * 5, "old"))
    worker.advance(2, 60)
    worker.set_behavior_policy({"ann": scripted([1] * 5, "new")})
    worker.advance(100, 60)
    ann, bob = sorted(worker.take_episodes(False), key=lambda episode: episode.agent_id)
    assert ann.policies.tolist() == ["old", "new", "new"]
    assert bob.policies.tolist() == ["old", "old"]


def test_a_game_that_raises_is_named_with_its_seed(games):
    worker = made(f"{games}:Ping", scripted([0] * 5), broken_at=3)
    with pytest.raises(
        RolloutError, match=r"worker 2: step of .*:Ping raised ValueError: .* at tick 3 .* seed 5;"
    ):
        worker.advance(100, 60)


def test_an_agent_that_comes_back_is_refused(games):
    worker = made(f"{games}:Race", scripted([0] * 4), revives=True)
    with pytest.raises(RolloutError, match="agent 'bob' left and came back at tick 3"):
        worker.advance(100, 60)


def test_times_are_kept(games):
    worker, _ = collected(f"{games}:Ping", scripted([0] * 5))
    totals = worker.timings.take().totals
    assert totals["workers", "inference"].items == totals["workers", "env_step"].items == 5
