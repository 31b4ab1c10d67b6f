"""List functions: SQL macros over lists with one value for each token, or for each step.

Only the macros that a query names are defined: defining all of them takes longer than most
sessions (7 ms, 2 cores, 2026-11-27).
"""

from __future__ import annotations

from typing import Final

import duckdb

from replaylake.datastore.query.statements import execute

# Lists have one length, with NULL where a token has no value. A macro follows those it calls.
_MACROS: Final = {
    # list_zip alone would fill the shorter list with NULL.
    "zip_tokens": "(one, other) AS CASE WHEN len(one) <> len(other) THEN error("
    "'found lists of ' || len(one) || ' and ' || len(other) || ' values, expected lists of one "
    "length, with a value for each token: of one row of sequences, or of one step') "
    "ELSE list_zip(one, other) END",
    "mask_values": "(list, mask) AS list_transform(zip_tokens(list, mask), "
    "lambda pair: CASE WHEN pair[2] <> 0 THEN pair[1] END)",
    "log_ratios": "(log_probs, behavior_log_probs) AS "
    "list_transform(zip_tokens(log_probs, behavior_log_probs), "
    "lambda pair: pair[1]::DOUBLE - pair[2]::DOUBLE)",
    "importance_weights": "(log_probs, behavior_log_probs) AS "
    "list_transform(log_ratios(log_probs, behavior_log_probs), lambda ratio: exp(ratio))",
    # Estimators k1 and k3 of Schulman (2020), "Approximating KL divergence": the tokens are samples
    # of the behavior policy.
    "mismatch_kl": "(log_probs, behavior_log_probs) AS "
    "-list_avg(log_ratios(log_probs, behavior_log_probs))",
    "mismatch_kl_k3": "(log_probs, behavior_log_probs) AS list_avg(list_transform("
    "log_ratios(log_probs, behavior_log_probs), lambda ratio: exp(ratio) - 1 - ratio))",
    # Credit: an outcome, or rewards, as one number for each step. Lists are reduced to lists: a
    # reduction has the type of its elements.
    "discounted_credit": "(outcome, num_steps, gamma) AS list_transform(range(num_steps), "
    "lambda i: outcome * power(gamma::DOUBLE, num_steps - 1 - i))",
    "turn_credit": "(outcome, is_turn) AS list_transform(is_turn, lambda flag: "
    "CASE WHEN flag THEN outcome / len(list_filter(is_turn, lambda other: other)) "
    "ELSE 0::DOUBLE END)",
    "returns_to_go": "(rewards, gamma) AS CASE WHEN len(rewards) = 0 THEN []::DOUBLE[] "
    "ELSE list_reverse(list_reduce("
    "list_transform(list_reverse(rewards), lambda reward: [reward::DOUBLE]), "
    "lambda sums, reward: list_append(sums, reward[1] + gamma::DOUBLE * sums[-1]))) END",
    # Schulman et al. (2016), "High-Dimensional Continuous Control Using Generalized Advantage
    # Estimation", equations 11 and 16.
    "gae": "(rewards, state_values, gamma, decay) AS CASE "
    "WHEN len(state_values) - len(rewards) NOT IN (0, 1) THEN error("
    "'found ' || len(rewards) || ' rewards and ' || len(state_values) || ' values, expected a "
    "value for each reward, and one more for the observation after the last step if the episode "
    "was truncated') "
    "ELSE returns_to_go(list_transform(rewards, lambda reward, i: reward::DOUBLE "
    "+ gamma::DOUBLE * CASE WHEN i < len(state_values) THEN state_values[i + 1]::DOUBLE ELSE 0 END "
    "- state_values[i]::DOUBLE), gamma::DOUBLE * decay::DOUBLE) END",
    "staleness": "(versions, policy_version) AS "
    "policy_version - list_min(list_transform(versions, lambda run: run.version))",
}
_CALLED_MACROS: Final = {
    "mask_values": ("zip_tokens",),
    "gae": ("returns_to_go",),
    "log_ratios": ("zip_tokens",),
    "importance_weights": ("zip_tokens", "log_ratios"),
    "mismatch_kl": ("zip_tokens", "log_ratios"),
    "mismatch_kl_k3": ("zip_tokens", "log_ratios"),
}


def define_list_functions(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    """Define the functions whose names occur in a query, for this connection only."""
    text = query.lower()
    named = {name for name in _MACROS if name in text}
    named |= {needed for name in named for needed in _CALLED_MACROS.get(name, ())}
    for name in _MACROS:
        if name in named:
            execute(connection, f"CREATE TEMP MACRO {name}{_MACROS[name]}")
