"""What a run learns from, and what it holds out."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError
from replaylake.datastore.lake.holdout import Holdout
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import check_package
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.running.train import TrainConfig, train

SMALL = {"hidden_sizes": [16]}


def quick(**changes):
    return TrainConfig(**{"updates": 20, "batch_size": 16, "options": SMALL, **changes})


def one_step_episodes(num, terminated=False, final_observation=None):
    return [
        Episode(
            f"w/{i}",
            np.full((1, 2), i, np.float32),
            np.array([i % 2]),
            np.ones(1),
            terminated=terminated,
            truncated=not terminated,
            final_observation=final_observation,
        )
        for i in range(num)
    ]


def test_without_a_termination_values_are_learned_and_it_is_said(tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("endless").append(one_step_episodes(8, final_observation=np.ones(2, np.float32)))
    seen = []
    train(
        lake,
        ["endless"],
        quick(algorithm="dqn", policy="p"),
        callbacks=Callbacks(on_start=seen.append),
    )
    (remark,) = seen[0].remarks
    assert remark.startswith("no step terminates: values count what would have come after")
    seen.clear()
    train(
        lake,
        ["endless"],
        quick(algorithm="bc", policy="p"),
        callbacks=Callbacks(on_start=seen.append),
    )
    assert seen[0].remarks == ()


def test_steps_that_cannot_be_bootstrapped_are_counted(tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    ends = one_step_episodes(3, terminated=True)
    lake.dataset("mixed").append([*ends, *line_world_without_ends(2)])
    seen = []
    train(
        lake,
        ["mixed"],
        quick(algorithm="dqn", policy="p"),
        callbacks=Callbacks(on_start=seen.append),
    )
    (remark,) = seen[0].remarks
    assert remark.startswith("2 of 13 steps are left out by algorithms that bootstrap")


def line_world_without_ends(num):
    rng = np.random.default_rng(0)
    return [
        Episode(
            f"cut/{i}",
            rng.standard_normal((5, 2)).astype(np.float32),
            rng.integers(0, 2, 5),
            np.ones(5),
            truncated=True,
        )
        for i in range(num)
    ]


def test_where_nothing_can_be_bootstrapped_it_says_so(tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("ends").append(one_step_episodes(5))
    with pytest.raises(EmptyReplayError, match=r"found 5 steps, none at which .* may start"):
        train(lake, ["ends"], quick(algorithm="dqn", policy="p"))
    assert lake.registry.runs() == []


def refused(lake, match, config, **changes):
    """Train, find it refused, and that no run and no policy says that it began."""
    with pytest.raises(ConfigInvalidError, match=match):
        train(lake, ["d"], replace(config, policy="p", **changes))
    assert lake.registry.runs() == lake.registry.list() == []
    assert lake.storage.names("_lake/runs") == []


def test_prioritized_sampling_is_refused_to_what_gives_no_priorities(tmp_path, line_world):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("d").append(line_world())
    match = (
        r"algorithm bc: found that it returns no priorities.*returns them: cql, dqn, marwil, sac\."
    )
    refused(lake, match, config=quick(prioritized=True))
    refused(lake, "returns no priorities", config=quick(algorithm="d3rlpy:dqn", prioritized=True))
    assert train(
        lake, ["d"], quick(algorithm="marwil", prioritized=True, policy="p")
    ).policy.version


@pytest.mark.parametrize(
    ("algorithm", "options"), [("marwil", {}), ("dqn", {"n_step": 3}), ("ips_bandit", {})]
)
def test_sums_of_shifted_rewards_and_unknown_chances_are_refused(
    tmp_path, line_world, algorithm, options
):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("d").append(line_world())
    config = quick(algorithm=algorithm, options={**SMALL, **options}, normalize_rewards="mean_std")
    match = "behavior_log_prob" if algorithm == "ips_bandit" else "normalize_rewards = 'std'"
    refused(lake, match, config=config, reward="reward + step")


@pytest.mark.slow
def test_held_out_steps_that_no_value_can_be_fitted_to_are_refused(tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("d").append(one_step_episodes(12))
    config = quick(holdout=0.4, select="fqe")
    with pytest.raises(EmptyReplayError, match=r"select 'fqe': found \d held-out steps, none with"):
        train(lake, ["d"], replace(config, policy="p"))
    assert lake.registry.runs() == []
    assert train(lake, ["d"], quick(holdout=0.4, policy="p")).selection["measure"] == "loss"


def test_held_out_steps_without_rewards_are_refused(tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("d").create(Box((2,)), Discrete(2), rewards_optional=True)
    ends = one_step_episodes(12, terminated=True)
    held = Holdout(fraction=0.4)
    lake.dataset("d").append(ends)
    ids = lake.snapshot("d").sql(f"SELECT episode_id FROM episodes WHERE {held.condition(True)}")
    unknown = set(ids["episode_id"].to_pylist())
    lake.dataset("e").create(Box((2,)), Discrete(2), rewards_optional=True)
    lake.dataset("e").append(
        dataclasses.replace(e, rewards=np.full(1, np.nan)) if e.episode_id in unknown else e
        for e in ends
    )
    for config in (quick(holdout=0.4, select="fqe"), quick(algorithm="dqn", holdout=0.4)):
        match = rf"select 'fqe': {len(unknown)} of {len(unknown)} held-out steps have no reward"
        with pytest.raises(ConfigInvalidError, match=match):
            train(lake, ["e"], replace(config, policy="p"))
    assert lake.registry.runs() == []


def test_one_episode_cannot_be_split(tmp_path, line_world):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("one").append(line_world(num_episodes=1))
    with pytest.raises(EmptyReplayError, match=r"holdout of one@1, fraction 0.5: found [01] of 1 "):
        train(lake, ["one"], quick(holdout=0.5, policy="p"))
    assert train(lake, ["one"], quick(policy="p")).num_episodes == 1


def test_what_is_held_out_is_not_learned_from(tmp_path, line_world):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("line").append(line_world(num_episodes=20))
    lake.dataset("more").append(line_world(num_episodes=20, seed=1))
    result = train(lake, ["line", "more"], quick(holdout=0.3, policy="p", where="num_steps > 1"))
    held = Holdout(fraction=0.3)
    num = 0
    for name, entry in zip(("line", "more"), result.datasets, strict=True):
        where = held.within("num_steps > 1", False)
        view = lake.snapshot(name).replay(where)
        assert view.selections[0].content_hash == entry["content_hash"]
        assert view.selections[0].where == entry["where"]
        num += view.num_episodes
    assert 0 < result.num_episodes == num < 40
    assert check_package(result.policy.path).body["holdout"] == held.to_json()
