"""Stored tokens: what a dataset's token columns and parents are compared with before a commit."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replaylake.datastore.episodes.parents import StepTree
from replaylake.datastore.episodes.schema import AGENT_ID, EPISODE_ID, STEP
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.episodes.tokenizer import Tokenizer
from replaylake.datastore.episodes.tokens import PARENT_AGENT_ID, PARENT_STEP, TOKEN_IDS
from replaylake.datastore.errors import SchemaMismatchError
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.storage.arrow_values import combine_chunks, numbers

_FIND_STEPS = f"""
WITH asked AS (
    SELECT unnest($episodes) AS episode, unnest($agents) AS agent, unnest($steps) AS step,
           unnest(range(len($steps))) AS number
)
SELECT DISTINCT number
FROM asked
JOIN (SELECT {EPISODE_ID}, {AGENT_ID}, {STEP} FROM steps
      WHERE {EPISODE_ID} IN (SELECT unnest($episodes))) AS known
  ON known.{EPISODE_ID} = episode AND known.{AGENT_ID} = agent AND known.{STEP} = asked.step
"""


def read_step_tree(rows: pa.Table) -> StepTree:
    """Return the keys of encoded steps, and what they go on from; the rows have parent_step."""
    has_agents = PARENT_AGENT_ID in rows.column_names
    return StepTree(
        combine_chunks(rows[EPISODE_ID]),
        combine_chunks(rows[AGENT_ID]),
        numbers(rows[STEP]).astype(np.int64),
        combine_chunks(rows[PARENT_AGENT_ID]) if has_agents else None,
        combine_chunks(rows[PARENT_STEP]),
    )


def find_stored_steps(
    snapshot: Snapshot, episode_ids: pa.Array, agent_ids: pa.Array, steps: Array
) -> NDArray[np.bool_]:
    """Return which of some steps a version has. Cost: a scan of the ids."""
    parameters: dict[str, object] = {
        "episodes": episode_ids.to_pylist(),
        "agents": agent_ids.to_pylist(),
        "steps": steps.tolist(),
    }
    found = np.zeros(len(steps), np.bool_)
    found[numbers(snapshot.sql(_FIND_STEPS, parameters)["number"])] = True
    return found


def check_vocabulary(snapshot: Snapshot, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer whose vocabulary lacks an id that is stored.

    Raises: SchemaMismatchError.
    """
    columns = [name for name in TOKEN_IDS if name in snapshot.spec.extras]
    if tokenizer.vocabulary_size is None or not columns:
        return
    greatest = ", ".join(f"max(list_max({name}))" for name in columns)
    row = snapshot.sql(f"SELECT list_max([{greatest}]) AS id FROM steps").to_pylist()[0]
    if row["id"] is not None and row["id"] >= tokenizer.vocabulary_size:
        raise SchemaMismatchError(
            f"dataset {snapshot.dataset!r}: found token id {row['id']}, expected "
            f"0..{tokenizer.vocabulary_size - 1}, the vocabulary of {tokenizer.describe()}. State "
            "the tokenizer that made the ids."
        )
