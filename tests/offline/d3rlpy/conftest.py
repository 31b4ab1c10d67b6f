"""What the tests of d3rlpy's algorithms share: small learners, and batches of what they ask for."""

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.lake import open_lake
from replaylake.offline.d3rlpy.algorithms import D3RLPY_ALGORITHMS
from replaylake.offline.d3rlpy.learner import D3rlpyLearner
from replaylake.offline.networks.actors import NO_STATISTICS

OBSERVATION = Box((4,))
DISCRETE = Discrete(3)
CONTINUOUS = Box((2,), "float32", [-2.0, 0.0], [2.0, 10.0])
# Small networks: what is shown here does not depend on their size, and the default 256x256 is slow.
SMALL = {"hidden_sizes": [16, 16]}
# What follows the warm-up is to be shown too, and the default draws 100 actions.
OWN = {
    "bcq": {"n_action_samples": 8},
    "bear": {"warmup_steps": 2, "n_action_samples": 8},
    "plas": {"warmup_steps": 2},
    "plas_with_perturbation": {"warmup_steps": 2},
}


@pytest.fixture(scope="session")
def view(tmp_path_factory):
    """Two episodes of 10 steps with Box actions, one of them truncated."""
    rng = np.random.default_rng(1)
    lake = open_lake(tmp_path_factory.mktemp("lakes") / "lake", create=True)
    lake.dataset("logged").append(
        [
            Episode(
                episode_id=f"e{number}",
                observations=rng.standard_normal((10, 4)).astype(np.float32),
                actions=rng.uniform(0, 2, (10, 2)).astype(np.float32),
                rewards=rng.standard_normal(10),
                terminated=number == 0,
                truncated=number == 1,
                final_observation=rng.standard_normal(4).astype(np.float32),
            )
            for number in range(2)
        ]
    )
    return lake.dataset("logged").snapshot().replay()


@pytest.fixture
def row_of():
    """A function that finds a row of the table."""
    return lambda name, actions: next(
        r for r in D3RLPY_ALGORITHMS if (r.name, r.actions) == (name, actions)
    )


@pytest.fixture
def options_of():
    """A function that returns the options with which the tests make a row's learner."""
    return lambda row: OWN.get(row.name, {}) if row.actions == "continuous" else {}


@pytest.fixture
def make(view, options_of):
    """A function that makes a row's learner, ready for its first update."""

    def made(row, seed=0, space=None, discount=0.99, facts=NO_STATISTICS, **options):
        learner = D3rlpyLearner(
            row,
            OBSERVATION,
            space or (DISCRETE if row.actions == "discrete" else CONTINUOUS),
            options={**SMALL, **options_of(row), **options},
            seed=seed,
            discount=discount,
            facts=facts,
        )
        learner.prepare(view)
        return learner

    return made


@pytest.fixture
def batch_for(batch):
    """A function that makes a batch of what a row's learner asks for."""

    def made(row, seed=0, **changes):
        rng = np.random.default_rng(seed)
        if row.needs == "next_actions":
            changes["next_actions"] = rng.uniform(0, 2, (32, 2)).astype(np.float32)
        if row.needs == "returns":
            changes["returns"] = rng.standard_normal(32).astype(np.float32)
        return batch("discrete" if row.actions == "discrete" else "box", seed=seed, **changes)

    return made


@pytest.fixture
def run(batch_for):
    """A function that lets a learner take updates."""

    def ran(learner, updates, first=0):
        for seed in range(first, first + updates):
            learner.update(batch_for(learner._algorithm, seed=seed))
        return learner

    return ran
