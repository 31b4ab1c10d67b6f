"""Ids: what an environment's id names, and how the environment is made.

CartPole-v1                          one of Gymnasium's registry
module:Name-v0                       the same, registered when the module is imported
pettingzoo:classic/connect_four-v3   one of PettingZoo's registry
module:function                      what the function returns: an environment of Gymnasium's, or
                                     one of PettingZoo's for several agents

The second and the fourth are told apart by what follows the colon: a version, `-v` and a number,
is no part of a name in Python.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Mapping
from typing import Any, Final

from replaylake.datastore.episodes.spaces import Space
from replaylake.datastore.errors import (
    ConfigInvalidError,
    ExtraMissingError,
    NotFoundError,
    ReplayLakeError,
)
from replaylake.offline.environments.games import Game, make_pettingzoo, wrap_game
from replaylake.offline.environments.spaces import Environment, from_gymnasium, gymnasium
from replaylake.offline.learning import user_code

_VERSIONED: Final = re.compile(r"-v\d+$")
_PETTINGZOO: Final = "pettingzoo"


def make(env_id: str, /, **env_args: Any) -> Environment:
    """Make an environment of one agent.

    Gymnasium's checker is left out, which costs a third of a CartPole step.

    Args:
        env_id: see above.
        env_args: for whatever makes it: Gymnasium's `make`, or the function.

    Raises: NotFoundError for an id that is not registered, with the near matches, or a module or
    function that is not there; ExtraMissingError where the environment's own library is not
    installed; ConfigInvalidError for arguments that it does not take, for a function that returns
    something else, and for an environment of several agents.
    """
    env = make_any(env_id, env_args)
    if isinstance(env, Game):
        env.close()
        raise ConfigInvalidError(
            f"environment {env_id}: found one of several agents ({', '.join(env.agents)}), "
            "expected one with a single agent. `rollout` supports several, and reports the return "
            "of each."
        )
    return env


def make_any(env_id: str, env_args: Mapping[str, Any] | None = None) -> Environment | Game:
    """Make an environment of one agent or of several. Raises: as make, and SchemaMismatchError."""
    arguments = dict(env_args or {})
    module, colon, name = env_id.partition(":")
    if not colon or (_VERSIONED.search(name) and module != _PETTINGZOO):
        return _of_gymnasium(env_id, arguments)
    try:
        with warnings.catch_warnings():
            # PettingZoo's, of the modules that are named as its documentation still does.
            warnings.filterwarnings("ignore", message="The old environment creation API")
            env = (
                make_pettingzoo(name, arguments)
                if _VERSIONED.search(name)
                else _factory(env_id)(**arguments)
            )
    except ReplayLakeError:
        raise
    except ModuleNotFoundError as error:
        raise _missing_extra_error(env_id, error) from error
    except Exception as error:
        raise _construction_error(env_id, arguments, error) from error
    if isinstance(env, gymnasium.Env):
        return env
    return wrap_game(env, env_id)


def spaces_of(env_id: str, env_args: Mapping[str, Any] | None = None) -> tuple[Space, Space]:
    """Return an environment's (observation space, action space); of several agents, each one's.

    Raises: as make; SchemaMismatchError where agents have different ones.
    """
    env = make_any(env_id, env_args)
    try:
        return from_gymnasium(env.observation_space), from_gymnasium(env.action_space)
    finally:
        env.close()


def _of_gymnasium(env_id: str, env_args: Mapping[str, Any]) -> Environment:
    try:
        with warnings.catch_warnings():
            # An older version of an environment is the user's choice, made by its id. Of which
            # category the warning is depends on Gymnasium's own version.
            warnings.filterwarnings("ignore", message=".*is out of date")
            options = {"disable_env_checker": True, **env_args}
            module, colon, _ = env_id.partition(":")
            if colon and module:
                # Gymnasium does it too, but not from the current folder.
                user_code.import_user_module(module)
            env: Environment = gymnasium.make(env_id, **options)
            return env
    except gymnasium.error.DependencyNotInstalled as error:
        raise ExtraMissingError(f"environment {env_id}: {error}.") from error
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        near = difflib.get_close_matches(env_id, list(gymnasium.registry), n=3, cutoff=0.6)
        raise NotFoundError(
            f"environment {env_id!r}: not registered with Gymnasium ({error}) "
            f"Expected {' or '.join(near) if near else 'an id such as CartPole-v1'}; "
            "`module:Name-v0` imports the module that registers it, `module:function` calls the "
            "function that creates it."
        ) from error
    except Exception as error:
        raise _construction_error(env_id, env_args, error) from error


def _factory(env_id: str) -> Any:
    function = user_code.load_object(env_id, "environment", "my_environments:make_arm")
    if not callable(function):
        raise ConfigInvalidError(
            f"environment {env_id}: found {type(function).__name__}, expected a function or class "
            "that returns an environment. For an environment that is registered with Gymnasium, "
            "name its version: module:Name-v0."
        )
    return function


def _missing_extra_error(env_id: str, error: ModuleNotFoundError) -> ExtraMissingError:
    library = (error.name or str(error)).partition(".")[0]
    is_ours = library == _PETTINGZOO
    advice = "Run: pip install 'replaylake[multiagent]'" if is_ours else f"Install {library}"
    return ExtraMissingError(
        f"environment {env_id}: found no {library}, which it imports, expected it to be installed. "
        f"{advice}."
    )


def _construction_error(
    env_id: str, env_args: Mapping[str, Any], error: Exception
) -> ConfigInvalidError:
    arguments = ", ".join(f"{key}={value!r}" for key, value in env_args.items()) or "no arguments"
    return ConfigInvalidError(
        f"environment {env_id}: with the arguments {arguments} it raised {type(error).__name__}: "
        f"{error}. "
        "Expected an environment: check its arguments (`env_args`) and its code (a traceback shows "
        "where)."
    )
