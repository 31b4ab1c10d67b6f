"""Sequence views: what SQL sees as `sequences`, as a SELECT over steps with token columns.

A branch is a path in the tree of an episode's steps, from a first step, or one whose context was
rewritten, to a step that none goes on from. One whose beginning is not stored, or that has a step
without ids, is left out: its tokens would not be what the model saw. Steps of one agent that follow
one another are taken together (a segment, called by its first step), so that the recursion is as
deep as forks are nested, and not as dialogues are long.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import pyarrow as pa

from replaylake.datastore.episodes import schema, tokens
from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.query.group_views import GROUP_ID

# Columns that a dataset may lack, and what stands for them.
_OPTIONAL: Final = {
    tokens.FINAL_OBSERVATION_TOKENS: "NULL::INTEGER[]",
    tokens.ACTION_LOG_PROBS: "NULL::FLOAT[]",
    tokens.ACTION_LOSS_MASK: "NULL::BOOLEAN[]",
    tokens.ACTION_VERSIONS: 'NULL::STRUCT("start" INTEGER, "version" BIGINT)[]',
    tokens.PARENT_AGENT_ID: "NULL::VARCHAR",
    tokens.PARENT_STEP: "NULL::INTEGER",
    tokens.IS_CONTINUATION: "NULL::BOOLEAN",
    tokens.IS_TRAINABLE: "NULL::BOOLEAN",
    GROUP_ID: "NULL::VARCHAR",
}
_KEY: Final = f"{schema.EPISODE_ID}, {schema.AGENT_ID}"

# `follows` is whether a step goes on from the one before it in its agent's rows.
_SEQUENCES: Final = """
WITH RECURSIVE linked AS (
    SELECT episode_id, agent_id, step,
           coalesce({is_continuation}, TRUE) AS is_continuation,
           coalesce(CAST({parent_agent_id} AS VARCHAR), agent_id) AS parent_agent_id,
           {parent_step} AS parent_step,
           action_tokens IS NOT NULL AS has_ids,
           coalesce(lag(step) OVER agent_steps = step - 1, FALSE) AS has_step_before
    FROM {steps}
    WINDOW agent_steps AS (PARTITION BY episode_id, agent_id ORDER BY step)
), marked AS (
    SELECT *,
           has_step_before AND is_continuation AND (
               parent_step IS NULL
               OR (parent_agent_id = agent_id AND parent_step = step - 1)
           ) AS follows
    FROM linked
), placed AS (
    SELECT episode_id, agent_id, step,
           max(step) FILTER (NOT follows) OVER (
               PARTITION BY episode_id, agent_id ORDER BY step
           ) AS segment,
           CASE WHEN NOT follows AND is_continuation AND parent_step IS NOT NULL
                THEN parent_agent_id END AS parent_agent_id,
           parent_step, has_ids,
           NOT follows AND (NOT is_continuation OR (parent_step IS NULL AND step = 0)) AS is_root
    FROM marked
), segments AS (
    SELECT episode_id, agent_id, segment, max(step) AS last_step,
           any_value(parent_agent_id) AS parent_agent_id,
           any_value(parent_step) FILTER (parent_agent_id IS NOT NULL) AS parent_step,
           bool_or(is_root) AS is_root,
           min(step) FILTER (NOT has_ids) AS first_without_ids
    FROM placed
    GROUP BY ALL
), tree AS (
    SELECT s.*, p.segment AS parent_segment
    FROM segments AS s
    LEFT JOIN placed AS p
           ON p.episode_id = s.episode_id AND p.agent_id = s.parent_agent_id
              AND p.step = s.parent_step
), branches AS (
    SELECT episode_id, agent_id AS leaf_agent_id, last_step AS leaf_step,
           agent_id, segment, last_step, 0 AS depth,
           is_root, coalesce(first_without_ids > last_step, TRUE) AS has_ids
    FROM tree AS t
    WHERE NOT EXISTS (
        FROM tree AS child
        WHERE child.episode_id = t.episode_id AND child.parent_agent_id = t.agent_id
              AND child.parent_step = t.last_step
    )
    UNION ALL
    SELECT b.episode_id, b.leaf_agent_id, b.leaf_step,
           p.agent_id, p.segment, t.parent_step, b.depth + 1,
           p.is_root, coalesce(p.first_without_ids > t.parent_step, TRUE)
    FROM branches AS b
    JOIN tree AS t
      ON t.episode_id = b.episode_id AND t.agent_id = b.agent_id AND t.segment = b.segment
    JOIN tree AS p
      ON p.episode_id = t.episode_id AND p.agent_id = t.parent_agent_id
         AND p.segment = t.parent_segment
), whole AS (
    SELECT *
    FROM branches
    WINDOW branch AS (PARTITION BY episode_id, leaf_agent_id, leaf_step)
    QUALIFY bool_or(is_root) OVER branch AND bool_and(has_ids) OVER branch
), counted AS (
    SELECT *,
           max(last_step) OVER (
               PARTITION BY episode_id, agent_id, segment ORDER BY leaf_agent_id, leaf_step
               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
           ) AS counted_step
    FROM whole
), generations AS (
    SELECT episode_id, agent_id, step, reward, policy_version,
           observation_tokens, action_tokens,
           len(observation_tokens) AS num_observed, len(action_tokens) AS num_acted,
           coalesce({is_trainable}, TRUE) AS is_trainable,
           {action_loss_mask} AS action_loss_mask, {action_log_probs} AS action_log_probs,
           {action_versions} AS action_versions,
           {final_observation_tokens} AS final_observation_tokens,
           {group_id} AS group_id{per_token_columns}
    FROM {steps}
), turns AS (
    SELECT c.episode_id, leaf_agent_id, leaf_step, depth, g.agent_id, g.step, reward, group_id,
           CASE WHEN depth = 0 AND g.step = leaf_step THEN final_observation_tokens
           END AS final_tokens,
           list_concat(observation_tokens, action_tokens, final_tokens) AS turn_tokens,
           list_concat(
               list_resize([]::TINYINT[], num_observed, 0),
               CASE WHEN NOT is_trainable OR g.step <= counted_step
                    THEN list_resize([]::TINYINT[], num_acted, 0)
                    WHEN action_loss_mask IS NULL
                    THEN list_resize([]::TINYINT[], num_acted, 1)
                    ELSE CAST(action_loss_mask AS TINYINT[]) END,
               list_resize([]::TINYINT[], coalesce(len(final_tokens), 0), 0)
           ) AS turn_mask,
           list_concat(
               list_resize([]::FLOAT[], num_observed),
               CASE WHEN action_log_probs IS NULL THEN list_resize([]::FLOAT[], num_acted)
                    ELSE action_log_probs END,
               list_resize([]::FLOAT[], coalesce(len(final_tokens), 0))
           ) AS turn_log_probs,
           num_observed,
           num_observed + num_acted + coalesce(len(final_tokens), 0) AS num_tokens,
           CASE WHEN action_versions IS NOT NULL THEN action_versions
                WHEN policy_version IS NOT NULL AND num_acted > 0
                THEN [{{'start': 0::INTEGER, 'version': policy_version}}]
                ELSE [] END AS turn_versions{per_token_turns}
    FROM counted AS c
    JOIN generations AS g
      ON g.episode_id = c.episode_id AND g.agent_id = c.agent_id
         AND g.step BETWEEN c.segment AND c.last_step
), gathered AS (
    SELECT episode_id, leaf_agent_id AS agent_id,
           first(agent_id ORDER BY depth DESC, step) AS root_agent_id,
           first(step ORDER BY depth DESC, step) AS first_step,
           leaf_step AS last_step,
           count(*) AS num_turns,
           flatten(list(turn_tokens ORDER BY depth DESC, step)) AS token_ids,
           flatten(list(turn_mask ORDER BY depth DESC, step)) AS loss_mask,
           flatten(list(turn_log_probs ORDER BY depth DESC, step)) AS log_probs,
           list(num_tokens ORDER BY depth DESC, step) AS lengths,
           list(num_observed ORDER BY depth DESC, step) AS nums_observed,
           list(turn_versions ORDER BY depth DESC, step) AS turn_versions,
           CASE WHEN count(reward) = count(*) THEN sum(reward ORDER BY depth DESC, step)
           END AS "return",
           any_value(group_id) AS group_id{per_token_lists}
    FROM turns
    GROUP BY ALL
), episode_returns AS (
    SELECT episode_id, CASE WHEN count(reward) = count(*)
           THEN sum(reward ORDER BY agent_id, step) END AS episode_return
    FROM {steps}
    GROUP BY ALL
), measured AS (
    SELECT *,
           list_transform(
               lengths, lambda length, i: CAST(list_sum(lengths[:i]) - length AS INTEGER)
           ) AS turn_starts,
           list_transform(
               turn_starts, lambda start, i: CAST(start + nums_observed[i] AS INTEGER)
           ) AS action_starts
    FROM gathered
    JOIN episode_returns USING (episode_id)
)
SELECT episode_id, agent_id, root_agent_id, first_step, last_step, num_turns,
       CAST(list_sum(lengths) AS BIGINT) AS num_tokens,
       token_ids, loss_mask, log_probs, turn_starts, action_starts,
       flatten(list_transform(turn_versions, lambda runs, i: list_transform(
           runs, lambda run: {{
               'start': CAST(run.start + action_starts[i] AS INTEGER), 'version': run.version
           }}
       ))) AS versions,
       "return", episode_return, group_id{per_token_names}
FROM measured
"""
_TYPES: Final = {pa.float32(): "FLOAT", pa.bool_(): "BOOLEAN"}
_PER_TOKEN_TURN: Final = """,
           list_concat(
               list_resize([]::{kind}[], num_observed),
               CASE WHEN {name} IS NULL THEN list_resize([]::{kind}[], num_acted)
                    ELSE CAST({name} AS {kind}[]) END,
               list_resize([]::{kind}[], coalesce(len(final_tokens), 0))
           ) AS {turn}"""

# The columns of steps that each column depends on, also by which rows are in the view. Of those
# that a dataset may lack, it has to have none.
_TREE: Final = frozenset(
    {
        schema.EPISODE_ID,
        schema.AGENT_ID,
        schema.STEP,
        tokens.ACTION_TOKENS,
        tokens.PARENT_AGENT_ID,
        tokens.PARENT_STEP,
        tokens.IS_CONTINUATION,
    }
)
_IDS: Final = _TREE | {tokens.OBSERVATION_TOKENS, tokens.FINAL_OBSERVATION_TOKENS}
SEQUENCE_SOURCES: Final = {
    schema.EPISODE_ID: _TREE,
    schema.AGENT_ID: _TREE,
    "root_agent_id": _TREE,
    "first_step": _TREE,
    "last_step": _TREE,
    "num_turns": _TREE,
    "num_tokens": _IDS,
    "token_ids": _IDS,
    "loss_mask": _IDS | {tokens.ACTION_LOSS_MASK, tokens.IS_TRAINABLE},
    "log_probs": _IDS | {tokens.ACTION_LOG_PROBS},
    "turn_starts": _IDS,
    "action_starts": _IDS,
    "versions": _IDS | {tokens.ACTION_VERSIONS, schema.POLICY_VERSION},
    "return": _TREE | {schema.REWARD},
    "episode_return": _TREE | {schema.REWARD},
    GROUP_ID: _TREE | {GROUP_ID},
}


def find_per_token_sources(columns: pa.Schema) -> dict[str, frozenset[str]]:
    """Return the columns of steps that each of `list_per_token` depends on."""
    return {name: _IDS | {name} for name in list_per_token(columns)}


def list_per_token(columns: pa.Schema) -> dict[str, str]:
    """Return the columns of `sequences` that depend on the dataset, and DuckDB's type of a value.

    These are the columns of steps that have one value for each token of the action, besides those
    that `sequences` has in every dataset.
    """
    own = {*SEQUENCE_SOURCES, tokens.ACTION_LOG_PROBS, tokens.ACTION_LOSS_MASK}
    per_token = {}
    for field in columns:
        # SQL does not distinguish upper case.
        if field.name.lower() not in own and tokens.is_per_token(field.name, field.type):
            per_token[field.name] = _TYPES.get(field.type.value_type, "DOUBLE")
    return per_token


def sequences_sql(steps: str, columns: pa.Schema, readable: Collection[str]) -> str:
    """Return `sequences` over a FROM item of steps with these columns.

    Raises: NotFoundError if those that the query's author may read hold no tokens.
    """
    if not tokens.has_tokens(readable):
        raise NotFoundError(
            f"sequences: found no column {tokens.ACTION_TOKENS}, expected a dataset with token "
            "columns: generations of a language model as ids."
        )
    optional = {name: name if name in columns.names else null for name, null in _OPTIONAL.items()}
    return _SEQUENCES.format(steps=steps, **optional, **_format_per_token(list_per_token(columns)))


def _format_per_token(per_token: Mapping[str, str]) -> dict[str, str]:
    """Return the SQL of per-token columns for each of their placeholders in `_SEQUENCES`."""
    names = {'"' + name.replace('"', '""') + '"': kind for name, kind in per_token.items()}
    turns = {name: f"per_token_{number}" for number, name in enumerate(names)}
    return {
        "per_token_columns": "".join(f", {name}" for name in names),
        "per_token_turns": "".join(
            _PER_TOKEN_TURN.format(name=name, kind=kind, turn=turns[name])
            for name, kind in names.items()
        ),
        "per_token_lists": "".join(
            f",\n           flatten(list({turn} ORDER BY depth DESC, step)) AS {name}"
            for name, turn in turns.items()
        ),
        "per_token_names": "".join(f", {name}" for name in names),
    }
