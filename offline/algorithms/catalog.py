"""Catalog: every algorithm by name, ours first, d3rlpy's behind it.

A name is lower snake case (`bc`, `cql`, `iql`); discrete or continuous follows from the action
space. `d3rlpy:bc` asks for d3rlpy's where we have our own too; `my_module:my_function` for one of
the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

import torch

from replaylake.datastore.episodes.spaces import (
    Box,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    describe,
    value_dtype,
)
from replaylake.datastore.errors import ConfigInvalidError, NotFoundError, SpaceUnsupportedError
from replaylake.offline.algorithms.builtin import BUILTIN, BuiltinAlgorithm
from replaylake.offline.algorithms.info import AlgorithmInfo
from replaylake.offline.algorithms.user_algorithm import UserAlgorithm, load_user_algorithm
from replaylake.offline.d3rlpy.algorithms import D3RLPY_ALGORITHMS, D3rlpyAlgorithm
from replaylake.offline.d3rlpy.learner import D3rlpyLearner
from replaylake.offline.d3rlpy.options import check_options as check_d3rlpy_options
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.learner import GradientLearner, Learner
from replaylake.offline.learning.learner_wrapper import FrameStackLearner
from replaylake.offline.learning.options import check_keys, from_options, near_matches
from replaylake.offline.networks.actors import NO_STATISTICS
from replaylake.offline.networks.frame_stack import stack_space

_D3RLPY: Final = "d3rlpy:"
_SPACES: Final = {
    "discrete": "Discrete",
    "continuous": "a float Box",
    "multi_discrete": "MultiDiscrete or MultiBinary",
}


def algorithms() -> list[AlgorithmInfo]:
    """Return every algorithm that `make_learner` can make, ours first, then by name."""
    theirs = [
        AlgorithmInfo(row.name, row.actions, "d3rlpy", row.head, row.kind, row.paper)
        for row in D3RLPY_ALGORITHMS
    ]
    ours = [
        AlgorithmInfo(row.name, row.actions, "replaylake", row.head, row.kind, row.paper)
        for row in BUILTIN
    ]
    return [*ours, *sorted(theirs, key=lambda info: (info.name, info.actions))]


def reference(info: AlgorithmInfo) -> str:
    """Return what `--algorithm` takes for it: `d3rlpy:bc` where we have a `bc` too."""
    ours = {row.name for row in BUILTIN if row.actions == info.actions}
    is_hidden = info.provider == "d3rlpy" and info.name in ours
    return f"{_D3RLPY}{info.name}" if is_hidden else info.name


def find_algorithms(name: str) -> list[AlgorithmInfo]:
    """Return those of a name, one for each kind of actions; of a bare name, ours and d3rlpy's.

    Raises: NotFoundError with the near matches and the list; ConfigInvalidError for a function that
    makes no algorithm.
    """
    if _is_user_defined(name):
        load_user_algorithm(name)
        return [_user_algorithm_info(name, "any")]
    is_theirs, plain = name.startswith(_D3RLPY), name.removeprefix(_D3RLPY)
    matches = [
        info
        for info in algorithms()
        if info.name == plain and not (is_theirs and info.provider != "d3rlpy")
    ]
    if not matches:
        names = sorted({info.name for info in algorithms()})
        near = near_matches(plain, names)
        # Where none is near, all of them have just been named.
        there_are = "" if near.startswith("one of ") else f"There are: {', '.join(names)}; "
        raise NotFoundError(
            f"algorithm {name!r}: not known, expected {near}. {there_are}"
            f"{_D3RLPY}NAME selects d3rlpy's, MODULE:FUNCTION your own."
        )
    return matches


def check_algorithm(
    name: str, action_space: Space, *, needed: Collection[Capability] = ()
) -> AlgorithmInfo:
    """Return what is known of the algorithm for these actions.

    needed: capabilities that the run requires; a refusal names only algorithms with them. Raises:
    NotFoundError with the near matches and the list; SpaceUnsupportedError naming those that can;
    ConfigInvalidError for a function that makes no algorithm.
    """
    matches = find_algorithms(name)
    kind = _actions_kind(action_space)
    if _is_user_defined(name):
        return _user_algorithm_info(name, kind)
    fitting = [info for info in matches if info.actions == kind]
    if not fitting:
        able = _list_able(kind, needed)
        others = " and meets the other requirements of this run" if needed else ""
        advice = f"Algorithms that take it: {', '.join(able)}" if able else "No algorithm takes it"
        raise SpaceUnsupportedError(
            f"algorithm {name}: found action space {describe(action_space)}, expected "
            f"{' or '.join(sorted({_SPACES[info.actions] for info in matches}))}. "
            f"{advice}{'' if able else others}."
        )
    return fitting[0]


def check_options(
    name: str, action_space: Space, options: Mapping[str, Any], *, others: Iterable[str] = ()
) -> None:
    """Refuse options that the named algorithm does not have.

    `others` are options of the caller's own, which an unknown one may have been meant for.
    Raises: ConfigInvalidError with the near matches; NotFoundError, SpaceUnsupportedError,
    ExtraMissingError.
    """
    info = check_algorithm(name, action_space)
    if info.provider == "d3rlpy":
        check_d3rlpy_options(d3rlpy_row(info), options, others)
    else:
        known = [field.name for field in fields(builtin_row(info).config_class)]
        check_keys(options, known, f"algorithm {name}", others)


Capability = Literal[
    "action masks", "unknown rewards", "logs", "rewards", "replay", "priorities", "gradients"
]


@dataclass(frozen=True)
class _Requirement:
    """A capability that only some algorithms have, and the error for the others.

    found: what was found and expected, and the remedies other than another algorithm. advice: names
    the algorithms with the capability, as {able}. negation: the predicate of "No algorithm ...",
    which replaces the advice if there are none.
    """

    is_met: Callable[[AlgorithmInfo], bool]
    found: str
    advice: str
    negation: str
    error: type[ConfigInvalidError | SpaceUnsupportedError] = ConfigInvalidError


_REQUIREMENTS: Final[Mapping[Capability, _Requirement]] = {
    "action masks": _Requirement(
        lambda info: info.honors_masks,
        "found action masks that are not all true, expected none: it would learn from and choose "
        "actions that were not allowed.",
        "Algorithms that honor masks: {able}.",
        "honors masks",
        SpaceUnsupportedError,
    ),
    "unknown rewards": _Requirement(
        lambda info: not info.uses_rewards,
        "{num_unknown} of {num_steps} steps have no reward, expected one for each. Add rewards "
        "with `replaylake annotate`, or replace unknown ones by an SQL expression (`reward` "
        "'coalesce(reward, 0)').",
        "Or clone behavior, which needs no rewards, with {able}.",
        "learns without rewards",
    ),
    "logs": _Requirement(
        lambda info: not info.consumes_once,
        "found a log to learn from, expected what its own policy is doing: it learns from each "
        "step once, soon after it was taken. Use `replaylake train online`.",
        "Or use one that learns from logs: {able}.",
        "learns from logs",
    ),
    "rewards": _Requirement(
        lambda info: info.uses_rewards,
        "it clones behavior, expected one that learns from rewards: it would only imitate itself. "
        "Collect with `replaylake rollout`, then `replaylake train offline`.",
        "Or use one that learns from rewards: {able}.",
        "learns from rewards",
    ),
    "replay": _Requirement(
        lambda info: not info.consumes_once,
        "found other datasets to mix in, expected none, because it learns from each step once, "
        "soon after it was collected. Leave mix out.",
        "Or use one that learns from replayed steps: {able}.",
        "learns from replayed steps",
    ),
    "priorities": _Requirement(
        lambda info: info.gives_priorities,
        "found that it returns no priorities, expected one for each step of a batch. Leave "
        "prioritized out.",
        "Or use one that returns them: {able}.",
        "returns priorities",
    ),
    "gradients": _Requirement(
        lambda info: info.has_gradients,
        "found d3rlpy's, which steps its gradients down itself, expected one whose gradients "
        "several learners can average. Leave learners out.",
        "Or use one of: {able}.",
        "exposes its gradients",
    ),
}


def require(
    info: AlgorithmInfo,
    capability: Capability,
    *,
    needed: Collection[Capability] = (),
    **found: int,
) -> None:
    """Refuse an algorithm without the capability, naming those that have it.

    Args:
        info: the algorithm.
        capability: what it has to be able to.
        needed: further capabilities that the run requires; only algorithms that have them are
            named.
        **found: num_unknown and num_steps, where it is "unknown rewards".

    Raises: SpaceUnsupportedError where it is "action masks", else ConfigInvalidError.
    """
    if not _REQUIREMENTS[capability].is_met(info):
        raise missing_capability_error(info, capability, needed=needed, **found)


def missing_capability_error(
    info: AlgorithmInfo,
    capability: Capability,
    *,
    needed: Collection[Capability] = (),
    **found: int,
) -> ConfigInvalidError | SpaceUnsupportedError:
    """Return the error that `require` raises."""
    requirement = _REQUIREMENTS[capability]
    able = _list_able(info.actions, {capability, *needed})
    advice = (
        requirement.advice.format(able=", ".join(able))
        if able
        else f"No algorithm for {info.actions.replace('_', '-')} actions {requirement.negation}"
        f"{' and meets the other requirements of this run' if needed else ''}."
    )
    refusal = f"{requirement.found.format(**found)} {advice}"
    return requirement.error(f"algorithm {reference(info)}: {refusal}")


def _list_able(actions: str, needed: Collection[Capability]) -> list[str]:
    """Return the algorithms for these actions with all capabilities, as `--algorithm` takes them.

    Those for bandits are left out: they want a log of decisions with their probabilities.
    """
    return sorted(
        reference(info)
        for info in algorithms()
        if info.actions == actions
        and info.kind != "bandit"
        and all(_REQUIREMENTS[capability].is_met(info) for capability in needed)
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
    facts: DatasetStatistics = NO_STATISTICS,
    reduce: Callable[[torch.Tensor], None] | None = None,
    frame_stack: int = 1,
) -> Learner:
    """Make the named algorithm's learner for these spaces.

    Args:
        name: such as `bc`, `cql` or `d3rlpy:bc`, or `module:function` of the user's own.
        observation_space: the dataset's.
        action_space: the dataset's; decides between discrete and continuous.
        options: the algorithm's own, by key.
        seed: of initial weights and of whatever the algorithm draws.
        discount: gamma.
        device: where torch computes.
        facts: what was measured on the data: what actions, observations and rewards are scaled by.
        reduce: changes the gradients of each update in place; see GradientLearner.
        frame_stack: how many consecutive observations its batches hold as one; its policy takes
            them one at a time.

    Raises: NotFoundError, SpaceUnsupportedError, ConfigInvalidError (the device too; `reduce` of an
    algorithm that hides its gradients), ExtraMissingError.
    """
    info = check_algorithm(name, action_space)
    if reduce is not None:
        require(info, "gradients")
    device = _parse_device(device)
    if frame_stack > 1:
        learner = make_learner(
            name,
            stack_space(observation_space, frame_stack),
            action_space,
            options=options,
            seed=seed,
            discount=discount,
            device=device,
            facts=facts,
            reduce=reduce,
        )
        return FrameStackLearner(learner, frame_stack)
    if info.provider == "d3rlpy":
        return D3rlpyLearner(
            d3rlpy_row(info),
            observation_space,
            action_space,
            options=options,
            seed=seed,
            discount=discount,
            device=device,
            facts=facts,
        )
    row = builtin_row(info)
    config: Any = from_options(row.config_class, options, f"algorithm {name}")
    algorithm = row.function(observation_space, action_space, config, facts)
    return GradientLearner(
        algorithm, seed=seed, discount=discount, device=device, facts=facts, reduce=reduce
    )


def d3rlpy_row(info: AlgorithmInfo) -> D3rlpyAlgorithm:
    """Return the row of d3rlpy's table."""
    return next(r for r in D3RLPY_ALGORITHMS if (r.name, r.actions) == (info.name, info.actions))


def builtin_row(info: AlgorithmInfo) -> BuiltinAlgorithm | UserAlgorithm:
    """Return the row of the table of our own, or what the user's module has."""
    if info.kind == "own":
        return load_user_algorithm(info.name)
    return next(r for r in BUILTIN if (r.name, r.actions) == (info.name, info.actions))


def _is_user_defined(name: str) -> bool:
    """Whether it names a function of a module."""
    return ":" in name and not name.startswith(_D3RLPY)


def _user_algorithm_info(name: str, actions: str) -> AlgorithmInfo:
    return AlgorithmInfo(name, actions, "module", "its own", "own", "its own")


def _parse_device(device: torch.device | str) -> torch.device:
    try:
        checked = torch.device(device)
        torch.empty(0, device=checked)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        raise ConfigInvalidError(
            f"device: found {str(device)!r}, which torch {torch.__version__} cannot use on "
            f"this machine ({str(error).splitlines()[0]}), expected cpu, or cuda where there is "
            "one."
        ) from error
    return checked


def _actions_kind(space: Space) -> str:
    if isinstance(space, Discrete):
        return "discrete"
    if isinstance(space, MultiDiscrete | MultiBinary):
        return "multi_discrete"
    is_continuous = isinstance(space, Box) and value_dtype(space).kind == "f"
    return "continuous" if is_continuous else "other"
