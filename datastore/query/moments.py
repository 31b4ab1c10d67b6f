"""Measures: how many, mean, spread, least and greatest of numbers of the steps, element by element.

Each by one query in one thread, so that the same files give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import QueryRefusedError
from replaylake.datastore.query.conditions import episodes_where
from replaylake.datastore.query.expressions import reproducible_views
from replaylake.datastore.query.statements import execute
from replaylake.datastore.storage.table.table import TableSnapshot

_KEY: Final = f"{schema.EPISODE_ID}, {schema.AGENT_ID}"


@dataclass(frozen=True)
class ElementMoments:
    """Of W numbers a row, float64 [W] each: num of those that are known, mean, squares, bounds.

    squares: the sum of (x - mean)^2. Where num is 0, all are 0 but the bounds, infinite.
    """

    num: Array
    mean: Array
    squares: Array
    least: Array
    greatest: Array

    @property
    def std(self) -> Array:
        """The population's standard deviation, float64 [W]."""
        std: Array = np.sqrt(self.squares / np.maximum(self.num, 1))
        return std

    def merge(self, other: ElementMoments) -> ElementMoments:
        """Return that of both together (Chan, Golub and LeVeque 1979, eq. 2.1)."""
        total = self.num + other.num
        share = other.num / np.maximum(total, 1)
        delta = other.mean - self.mean
        return ElementMoments(
            num=total,
            mean=self.mean + delta * share,
            squares=self.squares + other.squares + delta**2 * self.num * share,
            least=np.minimum(self.least, other.least),
            greatest=np.maximum(self.greatest, other.greatest),
        )


@dataclass(frozen=True)
class Elements:
    """What to measure: an SQL value over `steps`, a number or a list of `width` of them."""

    sql: str
    width: int = 1
    is_list: bool = False


def measure_steps(
    snapshot: TableSnapshot,
    elements: Mapping[str, Elements],
    *,
    where: str | None = None,
    where_steps: str | None = None,
) -> dict[str, ElementMoments]:
    """Measure some numbers of the steps that `where_steps` selects in episodes that `where` does.

    All SQL is what canonical_expression returned. NULL is no number.
    Raises: QueryError; QueryRefusedError for SQL that is not one value a step. Cost: one pass over
    the columns named, 40 ns an element (1 core, 2026-12).
    """
    joined = ", ".join(
        f"CAST({e.sql} AS DOUBLE[])" if e.is_list else f"[CAST(({e.sql}) AS DOUBLE)]"
        for e in elements.values()
    )
    rows = f"SELECT list_concat({joined}) AS numbers FROM {_steps(snapshot, where, where_steps)}"
    with reproducible_views(snapshot) as connection:
        table = execute(
            connection,
            "SELECT element, count(number) AS num, avg(number) AS mean, "
            "var_pop(number) AS variance, min(number) AS least, max(number) AS greatest "
            "FROM (SELECT unnest(numbers) AS number, "
            f"generate_subscripts(numbers, 1) AS element FROM ({rows})) GROUP BY element",
        )
    return _split(table, elements)


def measure_returns(
    snapshot: TableSnapshot, reward: str, *, where: str | None = None
) -> ElementMoments:
    """Measure the sums of an SQL expression over the steps of each episode and agent, [1].

    A sum in which one is NULL is not known. Raises: QueryError. Cost: a pass over the columns that
    it names.
    """
    steps = _steps(snapshot, where, None)
    sums = (
        f"SELECT CASE WHEN count(reward) = count(*) THEN sum(reward) END AS total FROM "
        f"(SELECT {_KEY}, CAST(({reward}) AS DOUBLE) AS reward FROM {steps}) "
        f"GROUP BY {_KEY}"
    )
    with reproducible_views(snapshot) as connection:
        table = execute(
            connection,
            "SELECT 1 AS element, count(total) AS num, avg(total) AS mean, var_pop(total) AS "
            f"variance, min(total) AS least, max(total) AS greatest FROM ({sums})",
        )
    return _split(table, {"return": Elements(reward)})["return"]


def _steps(snapshot: TableSnapshot, where: str | None, where_steps: str | None) -> str:
    """Return a FROM item and its WHERE."""
    text = "steps WHERE true"
    if where is not None:
        episodes = f"SELECT {_KEY} FROM ({episodes_where(where, snapshot.schema.names)})"
        text += f" AND ({_KEY}) IN ({episodes})"
    if where_steps is not None:
        text += f" AND coalesce(CAST(({where_steps}) AS BOOLEAN), false)"
    return text


def _split(table: pa.Table, elements: Mapping[str, Elements]) -> dict[str, ElementMoments]:
    width = sum(e.width for e in elements.values())
    places = table["element"].to_numpy() - 1
    if len(places) and (int(places.max()) >= width or len(places) < width):
        raise QueryRefusedError(
            f"measures of {', '.join(elements)}: found {int(places.max()) + 1} numbers a step, "
            f"expected {width}. Leave out aggregates and unnest."
        )
    num = _column(table, "num", places, width, 0.0)
    variance = _column(table, "variance", places, width, 0.0)
    whole = ElementMoments(
        num=num,
        mean=_column(table, "mean", places, width, 0.0),
        squares=variance * num,
        least=_column(table, "least", places, width, np.inf),
        greatest=_column(table, "greatest", places, width, -np.inf),
    )
    split, start = {}, 0
    for name, e in elements.items():
        some = slice(start, start + e.width)
        split[name] = ElementMoments(
            *(getattr(whole, field)[some] for field in whole.__annotations__)
        )
        start += e.width
    return split


def _column(table: pa.Table, name: str, places: Array, width: int, absent: float) -> Array:
    values = np.full(width, absent)
    # NULL, of what has no number, becomes NaN.
    known = table[name].cast(pa.float64()).to_numpy()
    values[places] = np.where(np.isnan(known), absent, known)
    return values
