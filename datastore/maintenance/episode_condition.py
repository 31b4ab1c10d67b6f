"""EpisodeCondition: which episodes delete and purge are asked to remove.

Unlike a condition that a policy is trained with, it does not have to select the same episodes at
any later time, so it may contain subqueries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as pt

from replaylake.datastore.episodes.schema import EPISODE_ID
from replaylake.datastore.errors import ConfigInvalidError, NotFoundError, QueryError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.query.conditions import step_columns_of
from replaylake.datastore.query.connections import session
from replaylake.datastore.query.episode_views import EPISODE_COLUMNS
from replaylake.datastore.query.expressions import canonical_removal_condition
from replaylake.datastore.query.statements import execute
from replaylake.datastore.storage.table.delta_schema import plain_type, to_duckdb

_IDS: Final = "ids"


@dataclass(frozen=True)
class EpisodeCondition:
    """A condition over episodes. Its subqueries were executed: `tables` has their rows.

    sql: in DuckDB's spelling. step_types: the columns that it takes from steps, each with its type
    in SQL. scalars: those of them of which a rejected row's JSON can hold a value. values: by
    column, the values that it was made of, as text; empty for a condition in SQL.
    """

    sql: str
    tables: Mapping[str, pa.Table] = field(default_factory=dict)
    step_types: Mapping[str, str] = field(default_factory=dict)
    scalars: frozenset[str] = frozenset()
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)


def make_condition(lake: Lake, dataset: str, where: str) -> EpisodeCondition:
    """Return the condition, its subqueries executed over the newest versions of the lake.

    Raises: NotFoundError, QueryRefusedError, QueryError.
    """
    sql, subqueries = canonical_removal_condition(where)
    tables = {}
    for name, text in subqueries.items():
        try:
            tables[name] = lake.sql(text)
        except QueryError as error:
            raise QueryError(
                f"`where`: its subquery {text}: {error} A subquery is executed by itself, over the "
                "views of the lake, such as live.steps; it cannot name columns of the episodes."
            ) from error
    return _with_types(lake, dataset, sql, tables)


def condition_of_ids(
    lake: Lake, dataset: str, ids: Sequence[str], column: str = EPISODE_ID
) -> EpisodeCondition:
    """Return the condition that a column, as text, has one of the values in `ids`.

    In a column of floats `4711` is the value `4711.0`.
    A column that only `steps` has selects the episodes in which at least one step has such a value.
    Raises: ConfigInvalidError without an id, NotFoundError for an unknown column.
    """
    if not ids:
        raise ConfigInvalidError(
            "ids: found none, expected at least one. Write one id on each line.", parameter="ids"
        )
    schema = lake.dataset(dataset).snapshot().table.schema
    names = {*EPISODE_COLUMNS, *schema.names}
    if column not in names:
        raise NotFoundError(
            f"{dataset}: found no column {column!r}, expected one of {', '.join(sorted(names))}."
        )
    inside = f'CAST("{column}" AS VARCHAR) IN (SELECT id FROM {_IDS})'
    text = inside if column in EPISODE_COLUMNS else f"any({inside})"
    sql, _ = canonical_removal_condition(text, given_tables=(_IDS,))
    spelled = [*ids, *_spell(ids, schema, column).values()]
    tables = {_IDS: pa.table({"id": pa.array(dict.fromkeys(spelled), pa.string())})}
    return replace(_with_types(lake, dataset, sql, tables), values={column: tuple(ids)})


def find_unknown_ids(lake: Lake, dataset: str, ids: Sequence[str], column: str) -> list[str]:
    """Return those of the ids that no step of the newest version has in a column."""
    view = "episodes" if column in EPISODE_COLUMNS else "steps"
    rows = lake.sql(f'SELECT DISTINCT CAST("{column}" AS VARCHAR) AS id FROM {dataset}.{view}')
    known = set(rows["id"].to_pylist())
    spelled = _spell(ids, lake.dataset(dataset).snapshot().table.schema, column)
    return [one for one in ids if one not in known and spelled.get(one) not in known]


def _spell(ids: Sequence[str], schema: pa.Schema, column: str) -> dict[str, str]:
    """Return by id how DuckDB writes that number, of a column of floats."""
    if column not in schema.names or not pt.is_floating(plain_type(schema.field(column).type)):
        return {}
    kind = to_duckdb(schema.field(column).type)
    with session() as connection:
        connection.register("given", pa.table({"id": pa.array(ids, pa.string())}))
        cast = f"SELECT id, CAST(try_cast(id AS {kind}) AS VARCHAR) AS spelled FROM given"
        rows = execute(connection, cast).to_pylist()
    return {row["id"]: row["spelled"] for row in rows if row["spelled"] is not None}


def _with_types(
    lake: Lake, dataset: str, sql: str, tables: Mapping[str, pa.Table]
) -> EpisodeCondition:
    schema = lake.dataset(dataset).snapshot().table.schema
    fields: list[Any] = [schema.field(name) for name in step_columns_of(sql, schema.names)]
    return EpisodeCondition(
        sql,
        tables,
        {field.name: to_duckdb(field.type) for field in fields},
        frozenset(field.name for field in fields if _is_scalar(plain_type(field.type))),
    )


def _is_scalar(kind: pa.DataType) -> bool:
    return bool(
        pt.is_string(kind) or pt.is_integer(kind) or pt.is_floating(kind) or pt.is_boolean(kind)
    )
