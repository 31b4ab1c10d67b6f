"""Own: an algorithm of the user's, named by the module and the function that makes it.

`my_algorithms:filtered_cloning` is `def filtered_cloning(observation_space, action_space, config:
FilteredConfig, facts: DatasetStatistics) -> Algorithm` of a module that Python can import, or of
one in the current folder. Its options are the fields of the dataclass that `config` is annotated
with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, Final, get_type_hints

from replaylake.datastore.episodes.spaces import Space
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.offline.algorithms.builtin import AlgorithmFunction
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning import user_code
from replaylake.offline.learning.algorithm import Algorithm
from replaylake.offline.learning.options import to_options

_SIGNATURE: Final = (
    "def NAME(observation_space, action_space, config: YourConfig, facts: DatasetFacts) "
    "-> Algorithm, where YourConfig is a dataclass whose fields all have defaults"
)


@dataclass(frozen=True)
class UserAlgorithm:
    """A function of the user's, and the dataclass of its options."""

    function: AlgorithmFunction
    config_class: type


def load_user_algorithm(name: str) -> UserAlgorithm:
    """Import the algorithm named `module:function`.

    Runs the module, as any import does. Raises: NotFoundError if there is no such module or
    function; ConfigInvalidError if the function is not annotated as one that makes an algorithm.
    """
    function = user_code.load_object(name, "algorithm", "my_algorithms:filtered_cloning")
    return UserAlgorithm(_CheckedFunction(name, function), _config_class(name, function))


def _config_class(name: str, function: Any) -> type:
    """Return what `config` is annotated with. Raises: ConfigInvalidError."""
    try:
        hints: Mapping[str, Any] = get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ConfigInvalidError(
            f"algorithm {name}: found annotations that cannot be read ({error}), expected "
            f"{_SIGNATURE}. Define the annotated types at the module's top level."
        ) from error
    config = hints.get("config")
    if not isinstance(config, type) or not is_dataclass(config):
        raise ConfigInvalidError(
            f"algorithm {name}: found {_annotation_text(config)} as the annotation of `config`, "
            f"expected {_SIGNATURE}."
        )
    if hints.get("return") is not Algorithm:
        raise ConfigInvalidError(
            f"algorithm {name}: found {_annotation_text(hints.get('return'))} as its return "
            f"annotation, expected "
            f"{_SIGNATURE}."
        )
    for field in fields(config):
        if field.default is MISSING and field.default_factory is MISSING:
            raise ConfigInvalidError(
                f"algorithm {name}: found no default of option {field.name!r} in "
                f"{config.__name__}, expected one. Add one, because all options are optional."
            )
    return config


def _annotation_text(annotation: Any) -> str:
    return "nothing" if annotation is None else getattr(annotation, "__name__", str(annotation))


@dataclass(frozen=True)
class _CheckedFunction:
    """The function; what it returns says its options, so that a package keeps them."""

    name: str
    function: AlgorithmFunction

    def __call__(
        self, observation_space: Space, action_space: Space, config: Any, facts: DatasetStatistics
    ) -> Algorithm:
        rule = self.function(observation_space, action_space, config, facts)
        if not isinstance(rule, Algorithm):
            raise ConfigInvalidError(
                f"algorithm {self.name}: returned {type(rule).__name__}, expected an "
                "Algorithm (replaylake.offline.learning.algorithm)."
            )
        return rule if rule.config else replace(rule, config=to_options(config))
