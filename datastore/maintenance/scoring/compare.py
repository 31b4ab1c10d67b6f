"""Comparison of scores: how far two columns of a dataset agree, and where they do not.

Values are compared by episode where a column has one in each, so that long episodes count no more
than short ones; else by agent's episode, or by step. Ranks tell more than differences where two
scorers have scales of their own.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError, NotFoundError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.query.conditions import episodes_where
from replaylake.datastore.query.expressions import canonical_condition

By = Literal["episode", "agent", "step"]

_UNITS: Final[dict[By, tuple[str, ...]]] = {
    "episode": (schema.EPISODE_ID,),
    "agent": (schema.EPISODE_ID, schema.AGENT_ID),
    "step": (schema.EPISODE_ID, schema.AGENT_ID, schema.STEP),
}


@dataclass(frozen=True)
class Disagreement:
    """What two scorers rank most differently. agent_id, step: None where it is a whole episode.

    first_rank, second_rank: share of the others that have a lower score, ties counted by half.
    """

    episode_id: str
    agent_id: str | None
    step: int | None
    first: float
    second: float
    first_rank: float
    second_rank: float


@dataclass(frozen=True)
class ScoreComparison:
    """Two columns of scores over the episodes, or steps, that both have.

    n: how many have both; only_first and only_second have one. agreement: share for which both are
    above the threshold, or neither is; kappa: Cohen's, which takes what chance gives from it.
    spearman, kendall: rank correlations, the latter tau-b. None stands for what is not defined, as
    where a score is always the same. mean_difference: of the second minus the first.
    """

    dataset: str
    version: int
    first: str
    second: str
    by: By
    n: int
    only_first: int
    only_second: int
    threshold: float
    agreement: float
    kappa: float | None
    spearman: float | None
    kendall: float | None
    first_mean: float
    second_mean: float
    mean_difference: float
    mean_absolute_difference: float
    disagreements: tuple[Disagreement, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_scores(
    lake: Lake,
    dataset: str,
    first: str,
    second: str,
    *,
    where: str | None = None,
    threshold: float = 0.0,
    limit: int = 10,
) -> ScoreComparison:
    """Compare two columns of numbers: two scorers, or a scorer and the labels of people.

    Args:
        lake: the lake.
        dataset: `NAME`, `NAME@VERSION` or `NAME@TAG`.
        first: a column of `steps` with numbers or flags.
        second: another.
        where: SQL condition over the columns of `episodes`; selects whole episodes.
        threshold: a score above it passes, for `agreement` and `kappa`.
        limit: number of disagreements, at most.

    Raises: NotFoundError for an absent column; ConfigInvalidError for one of texts;
    QueryRefusedError or QueryError for a condition; EmptyReplayError if none has both scores. Cost:
    two scans of the columns; memory for their values.
    """
    snapshot = lake.snapshot(dataset)
    for name, parameter in ((first, "name"), (second, "against")):
        _check_column(snapshot, name, parameter)
    selected = _select_steps(snapshot, where)
    by = _find_unit(snapshot, selected, first, second)
    keys = ", ".join(_UNITS[by])
    rows = snapshot.sql(
        f'SELECT {keys}, any_value("{first}")::DOUBLE AS first, '
        f'any_value("{second}")::DOUBLE AS second FROM ({selected}) GROUP BY {keys} ORDER BY {keys}'
    )
    has_first, has_second = (
        np.asarray(rows[side].is_valid().to_numpy(zero_copy_only=False), bool)
        for side in ("first", "second")
    )
    both = rows.filter(pa.array(has_first & has_second))
    if not both.num_rows:
        raise EmptyReplayError(
            f"{snapshot.dataset}@{snapshot.version}: found no episode with a value of both "
            f"{first} and {second}, expected one or more. Score the same episodes, or widen "
            "`where`."
        )
    x, y = (both[side].to_numpy().astype(np.float64) for side in ("first", "second"))
    x_passes, y_passes = x > threshold, y > threshold
    return ScoreComparison(
        dataset=snapshot.dataset,
        version=snapshot.version,
        first=first,
        second=second,
        by=by,
        n=len(x),
        only_first=int((has_first & ~has_second).sum()),
        only_second=int((~has_first & has_second).sum()),
        threshold=threshold,
        agreement=float((x_passes == y_passes).mean()),
        kappa=compute_kappa(x_passes, y_passes),
        spearman=compute_spearman(x, y),
        kendall=compute_kendall(x, y),
        first_mean=float(x.mean()),
        second_mean=float(y.mean()),
        mean_difference=float((y - x).mean()),
        mean_absolute_difference=float(np.abs(y - x).mean()),
        disagreements=_list_disagreements(both, x, y, limit),
    )


def compute_kappa(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float | None:
    """Return Cohen's kappa of two flags [N]; None where both are always the same."""
    share, other_share = float(one.mean()), float(other.mean())
    by_chance = share * other_share + (1 - share) * (1 - other_share)
    if by_chance == 1:
        return None
    return (float((one == other).mean()) - by_chance) / (1 - by_chance)


def compute_spearman(x: Array, y: Array) -> float | None:
    """Return Spearman's rank correlation of numbers [N]; None where either is always the same."""
    ranks = [_mid_ranks(values) for values in (x, y)]
    centered = [rank - rank.mean() for rank in ranks]
    norm = math.sqrt(float((centered[0] ** 2).sum()) * float((centered[1] ** 2).sum()))
    return float((centered[0] * centered[1]).sum()) / norm if norm else None


def compute_kendall(x: Array, y: Array) -> float | None:
    """Return Kendall's tau-b of numbers [N]; None where either is always the same.

    Knight (1966): O(N log N), as the number of inversions of y in the order of x.
    """
    first, second = (np.unique(values, return_inverse=True)[1] for values in (x, y))
    num = len(x)
    pairs = num * (num - 1) // 2
    tied, other_tied = _count_ties(first), _count_ties(second)
    both_tied = _count_ties(first.astype(np.int64) * num + second)
    if tied == pairs or other_tied == pairs:
        return None
    discordant = _count_inversions(second[np.lexsort((second, first))].astype(np.int64))
    concordant = pairs - tied - other_tied + both_tied - discordant
    return (concordant - discordant) / math.sqrt((pairs - tied) * (pairs - other_tied))


def _count_ties(codes: Array) -> int:
    counts = np.unique(codes, return_counts=True)[1].astype(np.int64)
    return int((counts * (counts - 1) // 2).sum())


def _count_inversions(values: NDArray[np.int64]) -> int:
    """Count the pairs of which the first is larger, one binary digit after the other.

    Two values differ first in one digit: there, within those that agree in the digits before, each
    0 is in as many inversions as there are 1s before it.
    """
    total, current = 0, values
    for bit in reversed(range(int(values.max()).bit_length())):
        group, ones = current >> (bit + 1), (current >> bit) & 1
        before = np.cumsum(ones) - ones
        in_group = before - before[np.searchsorted(group, group)]
        total += int(in_group[ones == 0].sum())
        current = current[np.argsort(current >> bit, kind="stable")]
    return total


def _mid_ranks(values: Array) -> NDArray[np.float64]:
    """Return ranks from 1, those that are equal with the mean of theirs."""
    _, codes, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: NDArray[np.float64] = (ends - (counts - 1) / 2)[codes]
    return ranks


def _list_disagreements(rows: pa.Table, x: Array, y: Array, limit: int) -> tuple[Disagreement, ...]:
    scale = max(1, len(x) - 1)
    first, second = ((_mid_ranks(values) - 1) / scale for values in (x, y))
    # Equal values agree, also where one scorer gives them more often.
    gaps = np.where(x == y, 0.0, np.abs(first - second))
    # Those that are equal in this, by their difference, and then by id.
    order = np.lexsort((-np.abs(x - y), -gaps))[:limit]
    found = []
    for row in order[gaps[order] > 0].tolist():
        place = rows.slice(row, 1).to_pylist()[0]
        found.append(
            Disagreement(
                place[schema.EPISODE_ID],
                place.get(schema.AGENT_ID),
                place.get(schema.STEP),
                float(x[row]),
                float(y[row]),
                float(first[row]),
                float(second[row]),
            )
        )
    return tuple(found)


def _check_column(snapshot: Snapshot, name: str, parameter: str) -> None:
    columns = snapshot.table.schema
    numeric = [
        one.name
        for one in columns
        if pa.types.is_floating(one.type)
        or pa.types.is_integer(one.type)
        or pa.types.is_boolean(one.type)
    ]
    if name not in columns.names:
        raise NotFoundError(
            f"{parameter}: found no column {name!r} in {snapshot.dataset}@{snapshot.version}, "
            f"expected one of {', '.join(numeric)}. Score the dataset first.",
            parameter=parameter,
        )
    if name not in numeric:
        raise ConfigInvalidError(
            f"{parameter}: found {name}, a column of {columns.field(name).type}, expected numbers "
            f"or flags: one of {', '.join(numeric)}.",
            parameter=parameter,
        )


def _select_steps(snapshot: Snapshot, where: str | None) -> str:
    if where is None:
        return "SELECT * FROM steps"
    names = snapshot.table.schema.names
    selected = episodes_where(canonical_condition(where), names)
    keys = f"{schema.EPISODE_ID}, {schema.AGENT_ID}"
    return f"SELECT steps.* FROM steps SEMI JOIN ({selected}) AS selected USING ({keys})"


def _find_unit(snapshot: Snapshot, selected: str, first: str, second: str) -> By:
    """Return the largest unit in which each of the columns has one value."""
    by: By
    for by in ("episode", "agent"):
        keys = ", ".join(_UNITS[by])
        is_one = " AND ".join(
            f'(min("{name}") IS NOT DISTINCT FROM max("{name}") '
            f'AND count("{name}") IN (0, count(*)))'
            for name in (first, second)
        )
        found = snapshot.sql(
            f"SELECT bool_and(is_one) AS is_one FROM "
            f"(SELECT {is_one} AS is_one FROM ({selected}) GROUP BY {keys})"
        )
        if found["is_one"][0].as_py() is not False:
            return by
    return "step"
