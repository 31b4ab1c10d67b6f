"""An algorithm of the user's own: the documented example, and what is refused."""

import importlib
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import replaylake as rl
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ConfigInvalidError, NotFoundError, SpaceUnsupportedError
from replaylake.datastore.lake.policies.package import check_package, load_policy
from replaylake.offline.algorithms.catalog import (
    check_algorithm,
    check_options,
    find_algorithms,
    make_learner,
)
from replaylake.offline.algorithms.description import needs, options
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.running.training.interruption import RunInterrupted

DOCS = Path(__file__).parents[3] / "docs" / "ALGORITHMS.md"
NAME = "my_algorithms:filtered_cloning"


def examples():
    """The Python of the documented section: the module, its training, its stepping by hand."""
    section = DOCS.read_text().split("\n## Your own algorithm\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Puts a module where Python finds it; given its text."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(text, name="my_algorithms"):
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - before:
        if name.startswith(("my_algorithms", "other_")):
            del sys.modules[name]


@pytest.fixture
def documented(module):
    module(examples()[0])


@pytest.fixture
def lake(tmp_path, monkeypatch, line_world):
    monkeypatch.chdir(tmp_path)
    lake = rl.open("lake", create=True)
    lake.dataset("cartpole").append(line_world(num_episodes=20))
    return lake


def test_the_documented_example_trains_and_is_kept_with_its_options(documented, lake):
    given = {"rl": rl}
    exec(examples()[1], given)
    result = given["result"]
    assert result.update > 0
    assert 0 < result.metrics["kept"] < 1
    shown = lake.registry.show(result.policy)
    assert shown["lineage"]["algorithm"] == NAME
    policy = load_policy(result.policy.path)
    found = check_package(result.policy.path).body["config"]["options"]
    assert found == {"hidden_sizes": [64, 64], "learning_rate": 1e-3, "margin": 1.0}
    assert policy.act(np.zeros((3, 2), np.float32)).actions.shape == (3,)


def test_the_documented_example_is_stepped_by_hand(documented, lake):
    given = {"rl": rl, **vars(importlib.import_module("my_algorithms"))}
    exec(examples()[2], given)
    assert set(given["update"].metrics) == {"policy_loss", "value_loss", "kept"}


def test_a_run_of_it_is_resumed_to_the_same_bits(documented, lake):
    config = rl.TrainConfig(
        algorithm=NAME, updates=20, checkpoint_updates=5, options={"hidden_sizes": [8]}
    )
    whole = rl.train(lake, ["cartpole"], replace(config, policy="whole"))
    asked = iter(range(100))
    with pytest.raises(RunInterrupted) as interrupted:
        rl.train(
            lake,
            ["cartpole"],
            replace(config, policy="parted"),
            callbacks=Callbacks(should_end=lambda: next(asked) > 10),
        )
    resumed = rl.resume(lake, interrupted.value.run_id)
    weights = [
        load_policy(result.policy.path).act(np.eye(2, dtype=np.float32), None)
        for result in (whole, resumed)
    ]
    np.testing.assert_array_equal(weights[0].actions, weights[1].actions)
    assert whole.metrics == resumed.metrics


def test_its_options_are_listed_and_checked(documented):
    (info,) = find_algorithms(NAME)
    listed = {one.name: (one.type, one.default) for one in options(info)}
    assert listed["margin"] == ("float", 0.0)
    assert listed["hidden_sizes"] == ("list of int", [256, 256])
    assert needs(info) == ("what it asks for",)
    check_options(NAME, Discrete(2), {"margin": 1.0})
    with pytest.raises(ConfigInvalidError, match="found option 'margn', expected margin"):
        check_options(NAME, Discrete(2), {"margn": 1.0})


def test_it_may_refuse_spaces_by_name(documented):
    with pytest.raises(SpaceUnsupportedError, match=r"filtered_cloning: found action space Box"):
        make_learner(NAME, Box((2,)), Box((1,)), options={}, seed=0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:f", "found no module 'nowhere', expected module:function.*PYTHONPATH"),
        ("nowhere.inside:f", "found no module 'nowhere'"),
        (":f", "found no name of a module"),
        ("my_algorithms:filtered", "has no 'filtered', expected filtered_cloning"),
        ("my_algorithms:", "has no ''"),
    ],
)
def test_what_is_not_there_is_named(documented, name, message):
    with pytest.raises(NotFoundError, match=message):
        check_algorithm(name, Discrete(2))


def test_an_import_that_fails_inside_the_module_is_its_own(module):
    module("import other_missing")
    with pytest.raises(ModuleNotFoundError, match="other_missing"):
        check_algorithm("my_algorithms:f", Discrete(2))


HEADER = """
from dataclasses import dataclass
from replaylake.offline.learning.algorithm import Algorithm

@dataclass(frozen=True)
class Config:
    rate: float = 1.0

@dataclass(frozen=True)
class Demanding:
    rate: float
"""


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        ("def f(o, a, config, facts) -> Algorithm: ...", "found nothing as the annotation of `c"),
        ("def f(o, a, config: dict, facts) -> Algorithm: ...", "found dict as the annotation"),
        ("def f(o, a, config: Config, facts): ...", "found nothing as its return annotation"),
        ("def f(o, a, config: Config, facts) -> int: ...", "found int as its return annotation"),
        ("def f(o, a, config: Demanding, facts) -> Algorithm: ...", "no default of option 'rate'"),
        ("def f(o, a, config: 'Absent', facts) -> Algorithm: ...", "'Absent' is not defined"),
        ("f = 3", "f"),
    ],
)
def test_a_function_that_makes_no_algorithm_is_refused(module, signature, message):
    module(HEADER + signature)
    with pytest.raises(ConfigInvalidError, match=message):
        check_algorithm("my_algorithms:f", Discrete(2))


def test_what_it_returns_is_checked(module):
    module(HEADER + "def f(o, a, config: Config, facts) -> Algorithm: return 3")
    with pytest.raises(ConfigInvalidError, match="my_algorithms:f: returned int"):
        make_learner("my_algorithms:f", Box((2,)), Discrete(2), options={}, seed=0)
