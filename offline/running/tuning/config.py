"""Tune configuration: what a sweep trains, under which seeds and options, and how it compares."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, Literal

import numpy as np

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.runs.summary import is_loss
from replaylake.offline.learning.options import check_keys, expect, from_options
from replaylake.offline.running.training.config import TRAIN_OPTIONS, TrainRequest, train_config

Mode = Literal["max", "min"]
_TUNE: Final = "tune"
# Keys of the file that `train offline` has as arguments and flags.
_REQUEST: Final = (
    "datasets",
    "policy",
    "where",
    "where_steps",
    "reward",
    "weight",
    "env",
    "env_args",
)
_DISTRIBUTIONS: Final = ("uniform", "loguniform", "choice")


@dataclass(frozen=True)
class TuneConfig:
    """How to sweep; what to train is the rest of the file."""

    # What every combination of options is trained under: a list, or how many from 0 on.
    seeds: Sequence[int] = (0, 1, 2)
    # By option, of the training or its algorithm: a list, each value of which is tried, or where to
    # draw from: {uniform = [0.1, 1.0]}, {loguniform = [1e-5, 1e-2]}, {choice = [1, 2, 4]}.
    vary: dict[str, Any] = field(default_factory=dict)
    # How often the options that are drawn are drawn, each draw beside each value of the lists.
    num_samples: int = 1
    sample_seed: int = 0
    # The metric to compare by; None: what the runs choose their policies by.
    measure: str | None = None
    # None: less is better of a loss, by its name, and more of all else.
    mode: Mode | None = None
    # Trials at once; None: as many as there are cores for.
    concurrency: int | None = None
    cpus_per_trial: int = 1
    gpus_per_trial: float = 0.0
    # Stop combinations early that are behind under the first seed (Li et al. 2020); the others are
    # then trained under all seeds, to their ends.
    asha: bool = False
    # Updates before any is stopped; None: up to the first measurement.
    grace_updates: int | None = None
    # One in so many goes on from each rung; the next rung is so many times as far.
    reduction: int = 3

    def __post_init__(self) -> None:
        for name in ("num_samples", "concurrency", "cpus_per_trial", "grace_updates"):
            value = getattr(self, name)
            expect(value is None or value >= 1, f"{_TUNE}: {name}", value, "1 or more")
        expect(self.reduction >= 2, f"{_TUNE}: reduction", self.reduction, "2 or more")
        expect(self.gpus_per_trial >= 0, f"{_TUNE}: gpus_per_trial", self.gpus_per_trial, "0 up")
        distinct = len(set(self.seeds)) == len(self.seeds) > 0
        expect(distinct, f"{_TUNE}: seeds", list(self.seeds), "one or more, each once")
        for key, values in self.vary.items():
            _check_values(key, values)
        is_drawn = any(isinstance(values, Mapping) for values in self.vary.values())
        if self.num_samples > 1 and not is_drawn:
            raise ConfigInvalidError(
                f"{_TUNE}: num_samples: found {self.num_samples} and no option to draw, expected "
                "one such as learning_rate = {loguniform = [1e-5, 1e-2]} in [tune.vary]. To train "
                "the same more often, name more seeds."
            )

    def combinations(self) -> list[dict[str, Any]]:
        """Return the options of each combination: draws, and within each draw the lists' grid."""
        rng = np.random.default_rng(self.sample_seed)
        grid = {key: values for key, values in self.vary.items() if isinstance(values, list)}
        drawn = {key: values for key, values in self.vary.items() if key not in grid}
        num = self.num_samples if drawn else 1
        draws = [{key: _draw(values, rng) for key, values in drawn.items()} for _ in range(num)]
        points = [
            dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())
        ]
        # In the order of the file, as tables show them.
        found = [{**draw, **point} for draw in draws for point in points]
        return [{key: options[key] for key in self.vary} for options in found]


@dataclass(frozen=True)
class Sweep:
    """A sweep: the training of which some options vary, and how.

    request: of a training without those options; its seed is not used. options: the algorithm's and
    the training's own, as they were given; `vary` overrides them.
    """

    request: TrainRequest
    options: Mapping[str, Any]
    tune: TuneConfig

    @staticmethod
    def from_options(given: Mapping[str, Any]) -> Sweep:
        """Read a configuration file's keys. Raises: ConfigInvalidError."""
        options = dict(given)
        table = options.pop(_TUNE, None)
        if not isinstance(table, dict):
            raise _missing_key_error(_TUNE, given, "a table [tune] with seeds = [0, 1, 2]")
        asked: dict[str, Any] = {key: options.pop(key) for key in _REQUEST if key in options}
        tune = _tune_config(table)
        for refused in ("seed", "learners"):
            if refused in options or refused in tune.vary:
                advice = "seeds in [tune] says it" if refused == "seed" else "a trial is a process"
                raise ConfigInvalidError(f"sweep: found {refused}, expected none: {advice}.")
        # A misspelt key is taken for the algorithm's: its check knows ours for near matches.
        sample = {**options, **tune.combinations()[0]}
        if "policy" not in asked:
            raise _missing_key_error("policy", given, "policy = 'swept'")
        if "algorithm" not in sample:
            raise _missing_key_error("algorithm", given, "algorithm = 'iql'")
        request = TrainRequest(
            datasets=_datasets(asked, given),
            policy_name=_text(asked, "policy") or "",
            config=train_config(sample),
            where=_text(asked, "where"),
            where_steps=_text(asked, "where_steps"),
            reward=_text(asked, "reward"),
            weight=_text(asked, "weight"),
            env_id=_text(asked, "env"),
            env_args=_table(asked, "env_args"),
        )
        return Sweep(request, options, tune)

    def pin(self, lake: Lake) -> Sweep:
        """Return it with the datasets' versions of now. Raises: NotFoundError, InvalidNameError."""
        return replace(self, request=self.request.pin(lake))

    def trial_request(self, options: Mapping[str, Any], seed: int) -> TrainRequest:
        """Return what a trial trains. Raises: ConfigInvalidError."""
        config = train_config({**self.options, **options, "seed": seed})
        return replace(self.request, config=config)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        tune = asdict(self.tune) | {"seeds": list(self.tune.seeds)}
        return {"request": self.request.to_json(), "options": dict(self.options), "tune": tune}

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> Sweep:
        """Return what to_json wrote down. Raises: ConfigInvalidError."""
        try:
            request = TrainRequest.from_json(body["request"])
            return Sweep(request, body["options"], _tune_config(body["tune"]))
        except KeyError as error:
            raise ConfigInvalidError(
                f"sweep: found a record without {error}, expected what `tune` was asked for. It is "
                "of another version of ReplayLake: tune again."
            ) from error


def near_options() -> tuple[str, ...]:
    """Return the keys of a sweep that an unknown one may have been meant for."""
    return (*TRAIN_OPTIONS, *_REQUEST, _TUNE, *(field.name for field in fields(TuneConfig)))


def resolve_measure(config: TuneConfig, selection: str) -> tuple[str, Mode]:
    """Return the metric to compare by, and whether more or less of it is better.

    selection: what the runs choose by; see selection.py. Raises: ConfigInvalidError for `last`.
    """
    measure = config.measure
    if measure is None:
        if selection == "last":
            raise ConfigInvalidError(
                f"{_TUNE}: measure: found nothing to compare by, expected an environment (env = "
                "'CartPole-v1', and select = 'environment' beside a reward), held-out episodes "
                "(holdout = 0.2), or a metric of the runs (measure = 'policy_loss' in [tune])."
            )
        measure = f"selection/{selection}"
    return measure, config.mode or ("min" if is_loss(measure) else "max")


def _tune_config(table: Mapping[str, Any]) -> TuneConfig:
    options = dict(table)
    seeds = options.get("seeds")
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        expect(seeds >= 1, f"{_TUNE}: seeds", seeds, "1 or more")
        options["seeds"] = list(range(seeds))
    return from_options(TuneConfig, options, _TUNE)


def _check_values(key: str, values: Any) -> None:
    what = f"{_TUNE}: vary: {key}"
    if isinstance(values, list):
        expect(len(values) > 0, what, values, "one value or more")
        return
    if not isinstance(values, Mapping):
        raise ConfigInvalidError(
            f"{what}: found {values!r}, expected a list of values, or a table such as "
            "{loguniform = [1e-5, 1e-2]}. An option that does not vary stands outside of [tune]."
        )
    check_keys(values, _DISTRIBUTIONS, what)
    expect(len(values) == 1, what, dict(values), f"one of {', '.join(_DISTRIBUTIONS)}")
    ((kind, bounds),) = values.items()
    what = f"{what}: {kind}"
    if kind == "choice":
        expect(isinstance(bounds, list) and len(bounds) > 0, what, bounds, "a list of values")
        return
    numbers = isinstance(bounds, list) and len(bounds) == 2 and all(map(_is_number, bounds))
    expect(numbers, what, bounds, "[least, greatest]")
    least, greatest = bounds
    expect(least < greatest, what, bounds, "the least first")
    expect(kind == "uniform" or least > 0, what, bounds, "more than 0")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _draw(values: Mapping[str, Any], rng: np.random.Generator) -> Any:
    ((kind, bounds),) = values.items()
    if kind == "choice":
        return bounds[int(rng.integers(len(bounds)))]
    if kind == "uniform":
        return float(rng.uniform(*bounds))
    return float(math.exp(rng.uniform(math.log(bounds[0]), math.log(bounds[1]))))


def _missing_key_error(key: str, given: Mapping[str, Any], example: str) -> ConfigInvalidError:
    near = difflib.get_close_matches(key, given, n=1)
    found = f"{near[0]!r} but no {key}" if near else f"no {key}"
    return ConfigInvalidError(f"sweep: found {found}, expected one, as in {example}.")


def _datasets(asked: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[str, ...]:
    if "datasets" not in asked:
        raise _missing_key_error("datasets", given, "datasets = ['cartpole@3']")
    found = asked["datasets"]
    named = [found] if isinstance(found, str) else found
    is_list = isinstance(named, list) and all(isinstance(one, str) for one in named)
    expect(is_list and bool(named), "sweep: datasets", found, "a list such as ['cartpole@3']")
    return tuple(named)


def _table(asked: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = asked.get(key, {})
    expect(isinstance(value, dict), f"sweep: {key}", value, "a table")
    return dict(value)


def _text(asked: Mapping[str, Any], key: str) -> str | None:
    value = asked.get(key)
    expect(value is None or isinstance(value, str), f"sweep: {key}", value, "a text")
    return value
