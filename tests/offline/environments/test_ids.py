import importlib
import os
import subprocess
import sys

import gymnasium
import pytest

from replaylake.datastore.episodes.spaces import Discrete
from replaylake.datastore.errors import ConfigInvalidError, ExtraMissingError, NotFoundError
from replaylake.offline.environments.games import SimultaneousGame, TurnBasedGame
from replaylake.offline.environments.ids import make, make_any, spaces_of

MODULE = """
import gymnasium
from pettingzoo.classic.tictactoe import tictactoe

class Corridor(gymnasium.Env):
    observation_space = gymnasium.spaces.Discrete(9)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=3, name="plain"):
        self.length, self.name = length, name

def make_corridor(length=3, **given):
    return Corridor(length, **given)

def make_nothing():
    return {"length": 3}

def make_trouble(file="arm.urdf"):
    raise FileNotFoundError(file)

def make_noughts():
    return tictactoe.env()

LENGTH = 3
gymnasium.register("Corridor-v3", entry_point="my_environments:Corridor")
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, which is not on the path, with a module of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.curdir)])
    before = set(sys.modules)
    (tmp_path / "my_environments.py").write_text(MODULE)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]
    gymnasium.registry.pop("Corridor-v3", None)
    importlib.invalidate_caches()


def test_spaces_of_cartpole():
    observation, action = spaces_of("CartPole-v1")
    assert observation.shape == (4,)
    assert action == Discrete(2)


@pytest.mark.parametrize("env_id", ["CartPol-v1", "CartPole-v9", "nowhere:Thing-v0", "a/B-v0"])
def test_an_unknown_environment_is_not_found(env_id):
    with pytest.raises(NotFoundError, match=f"'{env_id}'"):
        make(env_id)


def test_a_misspelled_environment_gets_the_near_match():
    with pytest.raises(NotFoundError, match="Expected CartPole-v1"):
        make("CartPol-v1")


def test_a_function_of_a_module_in_the_current_folder_makes_it(here):
    env = make("my_environments:make_corridor")
    assert type(env).__name__ == "Corridor"
    assert env.length == 3
    assert spaces_of("my_environments:make_corridor")[0] == Discrete(9)


def test_a_class_is_called_as_a_function_is(here):
    assert make("my_environments:Corridor", length=5).length == 5


def test_arguments_reach_what_makes_it(here):
    env = make("my_environments:make_corridor", length=7, name="long")
    assert (env.length, env.name) == (7, "long")
    assert make("FrozenLake-v1", map_name="8x8").observation_space.n == 64


def test_a_version_after_the_colon_is_gymnasiums(here):
    env = make("my_environments:Corridor-v3", length=4)
    assert env.spec.id == "Corridor-v3"
    assert env.unwrapped.length == 4


def test_what_the_module_imports_later_is_found_too(here):
    (here / "my_parts.py").write_text("LENGTH = 6")
    (here / "my_late.py").write_text(
        "from my_environments import Corridor\n"
        "def make_it():\n    import my_parts\n    return Corridor(my_parts.LENGTH)\n"
    )
    assert make("my_late:make_it").length == 6


def test_an_installed_module_comes_before_one_in_the_current_folder(here):
    for name in ("fractions", "colorsys"):
        (here / f"{name}.py").write_text("def make_it(): raise AssertionError")
    with pytest.raises(NotFoundError, match=r"module fractions .* has no 'make_it'"):
        make("fractions:make_it")
    # Later ones too.
    sys.modules.pop("colorsys", None)
    make("my_environments:make_corridor")
    assert not hasattr(importlib.import_module("colorsys"), "make_it")


@pytest.mark.parametrize(
    ("env_id", "kind", "message"),
    [
        ("nowhere:make_it", NotFoundError, "found no module 'nowhere', expected module:function"),
        ("my_environments:make_corridr", NotFoundError, "has no .*, expected make_corridor"),
        (":make_it", NotFoundError, "found no name of a module before the colon"),
        ("my_environments:LENGTH", ConfigInvalidError, "found int, expected a function or class"),
        (
            "my_environments:make_nothing",
            ConfigInvalidError,
            "returned dict, expected a gymnasium",
        ),
        (
            "my_environments:make_trouble",
            ConfigInvalidError,
            "no arguments it raised FileNotFoundErr",
        ),
        ("my_environments:Corridor-v4", NotFoundError, "Environment version `v4`"),
    ],
)
def test_what_makes_no_environment_is_named(here, env_id, kind, message):
    with pytest.raises(kind, match=message):
        make(env_id)


@pytest.mark.parametrize("env_id", ["my_environments:make_corridor", "CartPole-v1"])
def test_an_argument_that_it_does_not_take_is_named(here, env_id):
    with pytest.raises(
        ConfigInvalidError, match=r"with the arguments speed=2 it raised TypeError.*`env_args`"
    ):
        make(env_id, speed=2)


def test_a_module_with_a_mistake_is_the_users(here):
    (here / "my_mistake.py").write_text("def make_it(:\n")
    with pytest.raises(ConfigInvalidError, match="it raised SyntaxError"):
        make("my_mistake:make_it")


def test_a_library_that_the_module_lacks_is_named(here):
    (here / "my_robot.py").write_text("import my_simulator")
    with pytest.raises(ExtraMissingError, match=r"found no my_simulator.*Install my_simulator"):
        make("my_robot:make_it")


def test_several_agents_are_a_game():
    turns = make_any("pettingzoo:classic/tictactoe-v3")
    assert isinstance(turns, TurnBasedGame)
    assert turns.agents == ("player_1", "player_2")
    at_once = make_any("pettingzoo:classic/rps-v2", {"max_cycles": 4})
    assert isinstance(at_once, SimultaneousGame)
    assert spaces_of("pettingzoo:classic/rps-v2") == (Discrete(4), Discrete(3))


def test_one_agent_is_expected_where_one_acts(here):
    with pytest.raises(ConfigInvalidError, match=r"several agents \(player_1, player_2\)"):
        make("my_environments:make_noughts")


def test_pettingzoos_older_modules_are_named_as_they_are():
    assert isinstance(make_any("pettingzoo.classic.tictactoe_v3:env"), TurnBasedGame)


@pytest.mark.parametrize(
    ("env_id", "kind", "message"),
    [
        (
            "pettingzoo:classic/tictacto-v3",
            NotFoundError,
            "Expected pettingzoo:classic/tictactoe-v3",
        ),
        ("pettingzoo:nowhere/x-v0", NotFoundError, "not registered with PettingZoo"),
        ("pettingzoo:classic/chess-v6", ExtraMissingError, "chess"),
    ],
)
def test_a_game_that_is_not_there_is_named(env_id, kind, message):
    with pytest.raises(kind, match=message):
        make_any(env_id)


def test_without_pettingzoo_its_extra_is_named(here):
    code = (
        "import sys; sys.modules['pettingzoo'] = None\n"
        "from replaylake.offline.environments.ids import make_any\n"
        "from replaylake.datastore.errors import ExtraMissingError\n"
        "for name in ('pettingzoo:classic/rps-v2', 'my_environments:make_noughts'):\n"
        "    try: make_any(name)\n"
        "    except ExtraMissingError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("pip install 'replaylake[multiagent]'.") == 2
