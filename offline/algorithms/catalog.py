"""Catalog: every algorithm by name, ours first, d3rlpy's behind it.

A name is lower snake case (`bc`, `cql`, `iql`); discrete or continuous follows from the action
space. `d3rlpy:bc` asks for d3rlpy's where we have our own too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol

import torch

from replaylake.datastore.errors import ConfigInvalid, NotFound, SpaceUnsupported
from replaylake.datastore.spaces import Array, Box, Discrete, Space, describe, value_dtype
from replaylake.offline.algorithm import Algorithm
from replaylake.offline.algorithms.bc import BCConfig, bc
from replaylake.offline.d3rlpy.learner import D3rlpyLearner
from replaylake.offline.d3rlpy.learner import check_options as check_d3rlpy_options
from replaylake.offline.d3rlpy.table import TABLE, D3rlpyAlgorithm
from replaylake.offline.learner import GradientLearner, Learner
from replaylake.offline.options import check_keys, from_options, near_matches

_D3RLPY: Final = "d3rlpy:"


class AlgorithmFunction(Protocol):
    """A function in `algorithms/`: spaces and options to an Algorithm."""

    def __call__(
        self,
        observation_space: Space,
        action_space: Space,
        config: Any,
        logged_actions: tuple[Array, Array] | None = None,
    ) -> Algorithm:
        """Return the algorithm. Raises: SpaceUnsupported."""
        ...


@dataclass(frozen=True)
class AlgorithmInfo:
    """A line of the list: name, `discrete` or `continuous`, `replaylake` or `d3rlpy`, ..."""

    name: str
    actions: str
    provider: str
    head: str
    kind: str
    paper: str

    @property
    def uses_rewards(self) -> bool:
        """Whether it learns from rewards: cloning does not."""
        return self.kind != "imitation"

    @property
    def honours_masks(self) -> bool:
        """Whether it keeps to action masks; d3rlpy has none, and only discrete actions have any."""
        return self.provider == "replaylake" and self.actions == "discrete"


_FUNCTIONS: Final[Mapping[str, tuple[AlgorithmFunction, type]]] = {"bc": (bc, BCConfig)}
_OURS: Final = (
    AlgorithmInfo("bc", "discrete", "replaylake", "categorical", "imitation", "Pomerleau 1989"),
    AlgorithmInfo("bc", "continuous", "replaylake", "gaussian", "imitation", "Seitzer et al. 2022"),
)


def algorithms() -> list[AlgorithmInfo]:
    """Return every algorithm that `make_learner` can make, ours first, then by name."""
    theirs = [
        AlgorithmInfo(row.name, row.actions, "d3rlpy", row.head, row.kind, row.paper)
        for row in TABLE
    ]
    return [*_OURS, *sorted(theirs, key=lambda info: (info.name, info.actions))]


def check_algorithm(name: str, action_space: Space) -> AlgorithmInfo:
    """Return what is known of the algorithm for these actions.

    Raises: NotFound with the near matches and the list; SpaceUnsupported naming those that can.
    """
    provider, plain = (
        ("d3rlpy", name.removeprefix(_D3RLPY)) if name.startswith(_D3RLPY) else ("", name)
    )
    named = [i for i in algorithms() if i.name == plain and provider in ("", i.provider)]
    if not named:
        names = sorted({info.name for info in algorithms()})
        raise NotFound(
            f"algorithm {name!r}: not known, expected {near_matches(plain, names)}. "
            f"There are: {', '.join(names)}; {_D3RLPY}NAME asks for d3rlpy's."
        )
    kind = _actions_kind(action_space)
    fitting = [info for info in named if info.actions == kind]
    if not fitting:
        able = sorted({info.name for info in algorithms() if info.actions == kind})
        raise SpaceUnsupported(
            f"algorithm {name}: found action space {describe(action_space)}, expected "
            f"{' or '.join(sorted({_SPACES[info.actions] for info in named}))}. "
            f"Algorithms that take it: {', '.join(able) or 'none'}."
        )
    return fitting[0]


def check_options(
    name: str, action_space: Space, options: Mapping[str, Any], *, others: Iterable[str] = ()
) -> None:
    """Refuse options that the named algorithm does not have.

    `others` are options of the caller's own, which an unknown one may have been meant for.
    Raises: ConfigInvalid with the near matches; NotFound, SpaceUnsupported, ExtraMissing.
    """
    info = check_algorithm(name, action_space)
    if info.provider == "d3rlpy":
        check_d3rlpy_options(_row(info), options, others)
    else:
        _, config_class = _FUNCTIONS[info.name]
        known = [field.name for field in fields(config_class)]
        check_keys(options, known, f"algorithm {name}", others)


def check_masks(name: str, action_space: Space) -> None:
    """Refuse an algorithm that ignores action masks. Raises: SpaceUnsupported, NotFound."""
    info = check_algorithm(name, action_space)
    if info.honours_masks:
        return
    able = sorted({i.name for i in algorithms() if i.honours_masks})
    raise SpaceUnsupported(
        f"algorithm {name}: found action masks that are not all true, expected none: it would "
        f"learn from and choose actions that were not allowed. Algorithms that honour masks: "
        f"{', '.join(able)}."
    )


def check_rewards(name: str, action_space: Space, num_unknown: int, num_steps: int) -> None:
    """Refuse steps without a reward to an algorithm that learns from it.

    `num_unknown` of `num_steps` that may be sampled have none. Raises: ConfigInvalid, NotFound,
    SpaceUnsupported.
    """
    info = check_algorithm(name, action_space)
    if not num_unknown or not info.uses_rewards:
        return
    fitting = [other for other in algorithms() if other.actions == info.actions]
    able = sorted({other.name for other in fitting if not other.uses_rewards})
    raise ConfigInvalid(
        f"algorithm {name}: {num_unknown} of {num_steps} steps have no reward, expected one for "
        f"each. Clone behaviour with {' or '.join(able)}, give rewards with `replaylake annotate`, "
        "or say in SQL what an unknown one counts as (--reward 'coalesce(reward, 0)')."
    )


def make_learner(
    name: str,
    observation_space: Space,
    action_space: Space,
    *,
    options: Mapping[str, Any],
    seed: int,
    discount: float = 0.99,
    device: torch.device | str = "cpu",
    logged_actions: tuple[Array, Array] | None = None,
) -> Learner:
    """Make the named algorithm's learner for these spaces.

    Args:
        name: such as `bc`, `cql` or `d3rlpy:bc`.
        observation_space: the dataset's.
        action_space: the dataset's; decides between discrete and continuous.
        options: the algorithm's own, by key.
        seed: of initial weights and of whatever the algorithm draws.
        discount: gamma.
        device: where torch computes.
        logged_actions: least and greatest logged action [*act], to normalise an unbounded Box by.

    Raises: NotFound, SpaceUnsupported, ConfigInvalid (the device too), ExtraMissing.
    """
    info = check_algorithm(name, action_space)
    device = _checked_device(device)
    if info.provider == "d3rlpy":
        return D3rlpyLearner(
            _row(info),
            observation_space,
            action_space,
            options=options,
            seed=seed,
            discount=discount,
            device=device,
            logged_actions=logged_actions,
        )
    function, config_class = _FUNCTIONS[info.name]
    config: Any = from_options(config_class, options, f"algorithm {name}")
    algorithm = function(observation_space, action_space, config, logged_actions)
    return GradientLearner(algorithm, seed=seed, discount=discount, device=device)


def _row(info: AlgorithmInfo) -> D3rlpyAlgorithm:
    return next(r for r in TABLE if (r.name, r.actions) == (info.name, info.actions))


def _checked_device(device: torch.device | str) -> torch.device:
    try:
        checked = torch.device(device)
        torch.empty(0, device=checked)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        raise ConfigInvalid(
            f"device: found {str(device)!r}, which torch {torch.__version__} cannot use here "
            f"({str(error).splitlines()[0]}), expected cpu, or cuda where there is one."
        ) from error
    return checked


_SPACES: Final = {"discrete": "Discrete", "continuous": "a float Box"}


def _actions_kind(space: Space) -> str:
    if isinstance(space, Discrete):
        return "discrete"
    is_continuous = isinstance(space, Box) and value_dtype(space).kind == "f"
    return "continuous" if is_continuous else "other"
