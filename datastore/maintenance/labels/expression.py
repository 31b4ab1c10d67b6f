"""Label expression: an SQL expression over a label and the step that it belongs to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.errors import QueryError, QueryRefusedError, SchemaMismatchError
from replaylake.datastore.query.expressions import canonical_expression
from replaylake.datastore.query.statements import execute, parse, walk
from replaylake.datastore.query.table_files import scan_connection

_PREFIX: Final = "SELECT 1 FROM episodes WHERE "
_LABEL: Final = "label"
_STEPS: Final = "steps"
# Of no column of the user's: a name with spaces. It keeps a table without columns as long as it is.
_PLACE: Final = "place of row"


@dataclass(frozen=True)
class LabelExpression:
    """A number a step; `text` names each column by its table, `label` or `steps`."""

    text: str
    label_columns: tuple[str, ...]
    step_columns: tuple[str, ...]

    def evaluate(self, labels: pa.Table, steps: pa.Table) -> pa.Array:
        """Return a double a row; label and step of a row are at the same place.

        Raises: QueryError if DuckDB refuses it, QueryRefusedError if it is not one number a row,
        SchemaMismatchError if one is not finite.
        """
        place = pa.array(range(steps.num_rows), pa.int64())
        tables = {
            _LABEL: labels.select(self.label_columns),
            _STEPS: steps.select(self.step_columns),
        }
        sides = {name: _with_place(table, place) for name, table in tables.items()}
        query = (
            f'SELECT {_LABEL}."{_PLACE}" AS place, CAST(({self.text}) AS DOUBLE) AS value '
            f'FROM {_LABEL} JOIN {_STEPS} ON {_LABEL}."{_PLACE}" = {_STEPS}."{_PLACE}" '
            "ORDER BY place"
        )
        with scan_connection(sides) as connection:
            result = execute(connection, query)
        if result.num_rows != steps.num_rows:
            raise QueryRefusedError(
                f"reward {self.text}: found {result.num_rows} values for {steps.num_rows} labels, "
                "expected one each. Leave out aggregates and unnest."
            )
        values = result.column("value").combine_chunks()
        _check_finite(values, self)
        return values


def parse_expression(
    text: str, label_columns: Sequence[str], step_columns: Sequence[str]
) -> LabelExpression:
    """Check an expression and say whose its columns are: the label's where both have the name.

    `steps.reward` and `label.reward` tell them apart. Raises: QueryRefusedError, QueryError also
    for a column of neither.
    """
    ours = {_LABEL: _fold_case(label_columns), _STEPS: _fold_case(step_columns)}
    used: dict[str, dict[str, None]] = {_LABEL: {}, _STEPS: {}}
    with scan_connection() as connection:
        tree = parse(connection, f"{_PREFIX}({canonical_expression(text)})")
        nodes = list(walk(tree))
        unknown = [
            ".".join(node["column_names"])
            for node in nodes
            if node.get("class") == "COLUMN_REF" and not _qualify(node["column_names"], ours, used)
        ]
        # Of a lambda's own names nothing is known here: DuckDB looks at those.
        if unknown and not any(node.get("class") == "LAMBDA" for node in nodes):
            raise QueryError(
                f"reward {text}: found no column {unknown[0]}, expected one of the labels "
                f"({', '.join(label_columns)}) or of their steps ({', '.join(step_columns)})."
            )
        ast = execute(connection, "SELECT json_deserialize_sql($j) AS q", {"j": json.dumps(tree)})[
            "q"
        ][0].as_py()
    return LabelExpression(str(ast).removeprefix(_PREFIX), tuple(used[_LABEL]), tuple(used[_STEPS]))


def _qualify(
    names: list[Any], ours: dict[str, dict[str, str]], used: dict[str, dict[str, None]]
) -> bool:
    """Note whose column it is, and put its table before it; False if it is nobody's."""
    first = str(names[0]).lower()
    if first in ours and len(names) > 1:
        table, column = first, str(names[1]).lower()
    else:
        table, column = (_LABEL if first in ours[_LABEL] else _STEPS), first
    if column in ours[table]:
        used[table][ours[table][column]] = None
        if column == first and table != first:
            names.insert(0, table)
    return column in ours[table]


def _fold_case(names: Sequence[str]) -> dict[str, str]:
    return {name.lower(): name for name in names}


def _with_place(table: pa.Table, place: pa.Array) -> pa.Table:
    return pa.table([*table.columns, place], [*table.column_names, _PLACE])


def _check_finite(rewards: pa.Array, expression: LabelExpression) -> None:
    finite = pc.is_finite(rewards.drop_null())
    if not pc.all(finite).as_py() and len(finite):
        raise SchemaMismatchError(
            f"reward {expression.text}: found infinity or NaN for "
            f"{pc.sum(pc.invert(finite)).as_py()} of {len(rewards)} steps, expected finite "
            "numbers; NULL leaves a reward as it is."
        )
