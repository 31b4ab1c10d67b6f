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
from replaylake.offline.running.training.config import (
    TRAIN_OPTIONS,
    TrainConfig,
    TrainRequest,
    train_config,
)

Mode = Literal["max", "min"]
_TUNE: Final = "tune"
# Options of the training that every trial shares: otherwise their measures could not be compared.
_SHARED: Final = ("policy", "where", "where_steps", "reward", "weight", "env", "env_args")
_DISTRIBUTIONS: Final = ("uniform", "loguniform", "choice")


@dataclass(frozen=True)
class TuneConfig:
    """Options of a sweep: the training, and the options to vary.

    The lake and the datasets are arguments of `tune`.
    """

    # Without the options that vary; its seed is not used. In a file these are the keys beside the
    # table [tune].
    train: TrainConfig = field(default_factory=TrainConfig)
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
            is_shared = key in _SHARED
            expect(not is_shared, f"{_TUNE}: vary", key, "an option that need not be the same")
        if self.train.learners != 1 or "learners" in self.vary:
            raise _refused_option_error("learners")
        if "seed" in self.vary:
            raise _refused_option_error("seed")
        is_drawn = any(isinstance(values, Mapping) for values in self.vary.values())
        if self.num_samples > 1 and not is_drawn:
            raise ConfigInvalidError(
                f"{_TUNE}: num_samples: found {self.num_samples} and no option to draw, expected "
                "one such as learning_rate = {loguniform = [1e-5, 1e-2]} in [tune.vary]. To repeat "
                "the same options, add seeds."
            )

    def combinations(self) -> list[dict[str, Any]]:
        """Return each combination's options: every draw with every point of the grid."""
        rng = np.random.default_rng(self.sample_seed)
        grid = {key: values for key, values in self.vary.items() if isinstance(values, list)}
        random = {key: values for key, values in self.vary.items() if key not in grid}
        num = self.num_samples if random else 1
        draws = [{key: _draw(values, rng) for key, values in random.items()} for _ in range(num)]
        points = [
            dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())
        ]
        # In the order of the file, as tables show them.
        product = [{**draw, **point} for draw in draws for point in points]
        return [{key: options[key] for key in self.vary} for options in product]

    def trial_config(self, options: Mapping[str, Any], seed: int) -> TrainConfig:
        """Return the training config of a trial with these options. Raises: ConfigInvalidError."""
        varied = train_config(options)
        own = {key: getattr(varied, key) for key in options if key in TRAIN_OPTIONS}
        merged = {**self.train.options, **varied.options}
        return replace(self.train, **own, seed=seed, options=merged)


def tune_config(body: Mapping[str, Any]) -> tuple[tuple[str, ...], TuneConfig]:
    """Read a file's keys: those of a training, `datasets`, and a table `tune`.

    Returns: the datasets and the configuration. Raises: ConfigInvalidError.
    """
    options = dict(body)
    table = options.pop(_TUNE, None)
    if not isinstance(table, dict):
        raise _missing_key_error(_TUNE, body, "a table [tune] with seeds = [0, 1, 2]")
    check_keys(table, _TABLE_KEYS, _TUNE)
    datasets = _datasets(options, body)
    config = _tune_config(table)
    for key in ("seed", "learners"):
        if key in options:
            raise _refused_option_error(key)
    if "policy" not in options:
        raise _missing_key_error("policy", body, "policy = 'swept'")
    # A misspelled key is taken for the algorithm's: its check knows ours for near matches.
    if "algorithm" not in options and "algorithm" not in config.vary:
        raise _missing_key_error("algorithm", body, "algorithm = 'iql'")
    return datasets, replace(config, train=train_config(options))


# What [tune] may hold.
_TABLE_KEYS: Final = tuple(one.name for one in fields(TuneConfig) if one.name != "train")


@dataclass(frozen=True)
class Sweep:
    """A sweep: the training of which some options vary, and how. request: has `tune.train`."""

    request: TrainRequest
    tune: TuneConfig

    @staticmethod
    def of(datasets: str | Sequence[str], config: TuneConfig) -> Sweep:
        """Return the sweep over these datasets. Raises: ConfigInvalidError."""
        return Sweep(TrainRequest.of(datasets, config.train), config)

    def pin(self, lake: Lake) -> Sweep:
        """Return it with the datasets' versions of now. Raises: NotFoundError, InvalidNameError."""
        return replace(self, request=self.request.pin(lake))

    def trial_request(self, options: Mapping[str, Any], seed: int) -> TrainRequest:
        """Return what a trial trains. Raises: ConfigInvalidError."""
        return TrainRequest(self.request.datasets, self.tune.trial_config(options, seed))

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        tune = asdict(self.tune) | {"seeds": list(self.tune.seeds)}
        del tune["train"]
        return {"request": self.request.to_json(), "tune": tune}

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> Sweep:
        """Return what to_json wrote down. Raises: ConfigInvalidError."""
        try:
            request = TrainRequest.from_json(body["request"])
            if "options" in body:
                # Records of before kept what was given beside the first combination of it.
                shared = {name: getattr(request.config, name) for name in _SHARED}
                train = replace(train_config(body["options"]), **shared)
                request = replace(request, config=train)
            return Sweep(request, replace(_tune_config(body["tune"]), train=request.config))
        except KeyError as error:
            raise ConfigInvalidError(
                f"sweep: found a record without {error}, expected the arguments of `tune`. It was "
                "written by another version of ReplayLake: tune again."
            ) from error


def near_options() -> tuple[str, ...]:
    """Return the keys of a sweep that an unknown one may have been meant for."""
    return (*TRAIN_OPTIONS, "datasets", _TUNE, *_TABLE_KEYS)


def resolve_measure(config: TuneConfig, selection: str) -> tuple[str, Mode]:
    """Return the metric to compare by, and whether more or less of it is better.

    selection: what the runs choose by; see policy_selection.py. Raises: ConfigInvalidError for
    `last`.
    """
    measure = config.measure
    if measure is None:
        if selection == "last":
            raise ConfigInvalidError(
                f"{_TUNE}: measure: found no measure to compare trials by, expected an "
                "environment (env = "
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
            "{loguniform = [1e-5, 1e-2]}. An option that does not vary belongs outside of [tune]."
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
    lowest, greatest = bounds
    expect(lowest < greatest, what, bounds, "the least first")
    expect(kind == "uniform" or lowest > 0, what, bounds, "more than 0")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _draw(values: Mapping[str, Any], rng: np.random.Generator) -> Any:
    ((kind, bounds),) = values.items()
    if kind == "choice":
        return bounds[int(rng.integers(len(bounds)))]
    if kind == "uniform":
        return float(rng.uniform(*bounds))
    return float(math.exp(rng.uniform(math.log(bounds[0]), math.log(bounds[1]))))


def _missing_key_error(key: str, body: Mapping[str, Any], example: str) -> ConfigInvalidError:
    near = difflib.get_close_matches(key, body, n=1)
    actual = f"{near[0]!r} but no {key}" if near else f"no {key}"
    return ConfigInvalidError(f"sweep: found {actual}, expected one, as in {example}.")


def _datasets(options: dict[str, Any], body: Mapping[str, Any]) -> tuple[str, ...]:
    if "datasets" not in options:
        raise _missing_key_error("datasets", body, "datasets = ['cartpole@3']")
    value = options.pop("datasets")
    names = [value] if isinstance(value, str) else value
    is_list = isinstance(names, list) and all(isinstance(one, str) for one in names)
    expect(is_list and bool(names), "sweep: datasets", value, "a list such as ['cartpole@3']")
    return tuple(names)


def _refused_option_error(key: str) -> ConfigInvalidError:
    advice = "seeds in [tune] says it" if key == "seed" else "a trial is a process"
    return ConfigInvalidError(f"sweep: found {key}, expected none: {advice}.")
