"""Checks: all that can be refused of a sweep before any trial begins."""

from __future__ import annotations

from dataclasses import dataclass

from replaylake.datastore.errors import ConfigInvalid
from replaylake.datastore.lake.lake import Lake
from replaylake.offline.algorithms.catalog import check_options, make_learner
from replaylake.offline.learning.normalisation import fit_facts
from replaylake.offline.running.training.data import open_data
from replaylake.offline.running.tuning.config import Mode, Sweep, measured_by, near_options


@dataclass(frozen=True)
class Checked:
    """A sweep that can be run.

    measure, mode: what its trials are compared by, and whether more of it is better. remarks: what
    a person should know of the data.
    """

    measure: str
    mode: Mode
    remarks: tuple[str, ...]


def check_sweep(lake: Lake, sweep: Sweep) -> Checked:
    """Refuse what not every trial could train. Cost: the data are decoded once.

    sweep: pinned. Raises: ConfigInvalid, NotFound, NameRefused, SchemaMismatch, EmptyReplay,
    SpaceUnsupported, QueryRefused, QueryFailed, ExtraMissing.
    """
    seed, grace = sweep.tune.seeds[0], sweep.tune.grace_updates
    requests = [sweep.trial_request(options, seed) for options in sweep.tune.combinations()]
    first = requests[0]
    spec = lake.snapshot(first.datasets[0]).spec
    for config in (request.config for request in requests):
        check_options(config.algorithm, spec.action_space, config.options, others=near_options())
        if sweep.tune.asha and grace is not None and grace > config.updates:
            raise ConfigInvalid(
                f"tune: grace_updates: found {grace}, expected at most the {config.updates} "
                "updates of a trial: none would be stopped."
            )
    data = open_data(lake, first)
    measure, mode = measured_by(sweep.tune, data.measure)
    if sweep.tune.asha and measure.startswith("evaluation/"):
        raise ConfigInvalid(
            f"tune: measure: found {measure!r} with asha, expected a metric that runs have on "
            "their way, such as 'selection/environment': that one comes at their end."
        )
    facts = fit_facts(data.snapshots, data.where, first.where_steps, first.reward)
    for config in (request.config for request in requests):
        # What options are worth only their learner knows; it costs milliseconds.
        make_learner(
            config.algorithm,
            spec.observation_space,
            spec.action_space,
            options=config.options,
            seed=config.seed,
            discount=config.discount,
            device=config.device,
            facts=facts,
        )
    return Checked(measure, mode, data.remarks)
