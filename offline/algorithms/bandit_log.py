"""Bandit log: what a log has to be for algorithms of kind `bandit` to learn from it."""

from __future__ import annotations

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.replay.scans import num_not_terminated, num_unknown_log_probs
from replaylake.datastore.replay.view import ReplayView


def check_bandit_log(name: str, view: ReplayView) -> None:
    """Refuse, for the named algorithm, a log that is no log of one-step decisions with chances.

    Cost: two passes over the records. Raises: ConfigInvalidError.
    """
    num_steps = len(view.packed.steps)
    if num := num_unknown_log_probs(view.packed):
        raise ConfigInvalidError(
            f"algorithm {name}: {num} of {num_steps} steps have no behavior_log_prob, expected one "
            "for each: rewards are weighted by the probability of the logged action. Ingest with "
            "the column of propensities (`mapping` behavior_prob=COLUMN), leave the steps out "
            "(`where_steps` 'behavior_log_prob IS NOT NULL'), or clone with bc."
        )
    if num := num_not_terminated(view.packed):
        raise ConfigInvalidError(
            f"algorithm {name}: {num} of {num_steps} steps are not terminated, expected decisions "
            "of one step each: later steps would be ignored. Learn from episodes with an "
            "offline algorithm such as cql, or leave those steps out (`where_steps` terminated)."
        )
