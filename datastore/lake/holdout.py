"""Holdout: which episodes a policy never learns from, so that they can tell what it is worth.

The split is a condition over `episodes`, evaluated like any other `where`: lineage keeps it as SQL,
and whoever evaluates later asks for the other side of the same one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from replaylake.datastore.episodes import schema
from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError, SchemaMismatchError
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.query.conditions import episodes_where
from replaylake.datastore.query.expressions import canonical_condition
from replaylake.datastore.query.statements import literal
from replaylake.datastore.replay.view_query import explain_sql_errors

# Of md5's 32 hex digits: 52 bits, which a float64 holds exactly.
_DIGITS: Final = 13


# A condition by a fraction as `canonical_condition` writes it, alone or after that of the caller.
_CANONICAL: Final = re.compile(
    rf"\((?:(?P<rest>.+) AND \()?substr\(md5\(concat\('(?P<salt>(?:[^']|'')*):', "
    rf"{schema.EPISODE_ID}\)\), 1, {_DIGITS}\) (?P<side>>=|<) '(?P<limit>[0-9a-f]{{{_DIGITS}}})'"
    r"\)?\)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Holdout:
    """A split of episodes in two, by a hash of their ids or by when they began.

    fraction: about this share is held out, in 0..1. An episode stays on its side in every version
    and in every dataset that has it, with all of its agents; `salt` makes another such split.
    after: what began then or later is held out, with a time zone; as one would deploy a policy.
    Exactly one of both is given. Raises: ConfigInvalidError.
    """

    fraction: float | None = None
    after: datetime | None = None
    salt: str = ""

    def __post_init__(self) -> None:
        if (self.fraction is None) == (self.after is None):
            raise ConfigInvalidError(
                f"holdout: found fraction {self.fraction} and after {self.after}, expected one of "
                "both. Say which share of the episodes to hold out, or from when on.",
                parameter="holdout",
            )
        if self.fraction is not None:
            _check_fraction(self.fraction)
        if self.after is not None:
            _check_time(self.after)
        if not isinstance(self.salt, str) or (self.salt and self.after is not None):
            raise ConfigInvalidError(
                f"holdout: found salt {self.salt!r}, expected text, and none for a split by time. "
                "Leave it out.",
                parameter="holdout",
            )

    def condition(self, held_out: bool) -> str:
        """Return SQL over the columns of `episodes` that selects one side."""
        if self.after is not None:
            moment = self.after.astimezone(UTC).isoformat(sep=" ")
            compared = ">=" if held_out else "<"
            return f"started_at {compared} CAST({literal(moment)} AS TIMESTAMPTZ)"
        assert self.fraction is not None  # the constructor saw to it
        # As text of equal length, digits compare as the numbers that they are.
        limit = f"{int(self.fraction * 16**_DIGITS):0{_DIGITS}x}"
        hashed = f"md5(concat({literal(f'{self.salt}:')}, {schema.EPISODE_ID}))"
        compared = "<" if held_out else ">="
        return f"substr({hashed}, 1, {_DIGITS}) {compared} {literal(limit)}"

    def within(self, where: str | None, held_out: bool) -> str:
        """Return the condition for one side of the episodes that `where` selects.

        Raises: QueryError, QueryRefusedError.
        """
        condition = self.condition(held_out)
        if where is None:
            return condition
        # Parsed by itself: `a) OR (b` would reach around the brackets, to the other side.
        with explain_sql_errors("where", where):
            return f"({canonical_condition(where)}) AND ({condition})"

    def check(self, snapshot: Snapshot, where: str | None = None) -> None:
        """Refuse a snapshot that cannot be split, before anything is learned from it.

        Raises: SchemaMismatchError where, by time, the beginning of an episode is not known, or
        agents of one episode began on either side; EmptyReplayError where one side has no episode;
        QueryError, QueryRefusedError. Cost: a query over `episodes`.
        """
        if where is not None:
            with explain_sql_errors("where", where):
                where = canonical_condition(where)
        selected = episodes_where(where or "true", snapshot.table.schema.names)
        name = f"holdout of {snapshot.dataset}@{snapshot.version}"
        if self.after is not None:
            _check_began(snapshot, selected, self.condition(True), name)
        (count,) = snapshot.sql(
            f"SELECT count(*) AS num, count(*) FILTER ({self.condition(True)}) AS num_held "
            f"FROM ({selected})"
        ).to_pylist()
        num, num_held = count["num"], count["num_held"]
        if num_held == 0 or num_held == num:
            way = f"fraction {self.fraction:g}" if self.after is None else f"after {self.after}"
            raise EmptyReplayError(
                f"{name}, {way}: found {num_held} of {num} episodes held out, expected some on "
                "either side. Choose another fraction or time, or train without a holdout."
            )

    def to_json(self) -> dict[str, Any]:
        """Return what from_json takes, JSON-able."""
        if self.after is not None:
            return {"after": self.after.astimezone(UTC).isoformat()}
        return {"fraction": self.fraction, "salt": self.salt}

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> Holdout:
        """Return the split that to_json described. Raises: ConfigInvalidError."""
        if unknown := sorted(set(body) - {"fraction", "after", "salt"}):
            raise ConfigInvalidError(
                f"holdout: found {', '.join(unknown)}, expected fraction and salt, or after. A "
                "newer ReplayLake may have written it."
            )
        after = body.get("after")
        try:
            moment = None if after is None else datetime.fromisoformat(after)
        except (TypeError, ValueError) as error:
            raise ConfigInvalidError(
                f"holdout: found after {after!r}, expected a time such as "
                "2026-03-01T00:00:00+00:00."
            ) from error
        return Holdout(body.get("fraction"), moment, body.get("salt", ""))


def describe_where(where: str) -> str:
    """Return a condition as lineage has it, with a holdout by a fraction in words."""
    found = _CANONICAL.fullmatch(where)
    if found is None:
        return where
    fraction = int(found["limit"], 16) / 16**_DIGITS
    salt = found["salt"].replace("''", "'")
    salted = f" with the salt {salt!r}" if salt else ""
    side = "without" if found["side"] == ">=" else "in"
    words = f"{side} the holdout of {fraction:.6g} by episode_id{salted}"
    return words if found["rest"] is None else f"{found['rest']}, {words}"


def _check_fraction(fraction: object) -> None:
    is_number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
    if not is_number or not 0 < fraction < 1:  # type: ignore[operator]
        raise ConfigInvalidError(
            f"holdout: found fraction {fraction!r}, expected a number above 0 and below 1. 0.2 "
            "keeps a fifth of the episodes to evaluate on.",
            parameter="holdout",
        )


def _check_time(after: object) -> None:
    if not isinstance(after, datetime) or after.utcoffset() is None:
        raise ConfigInvalidError(
            f"holdout: found after {after}, expected a time with its zone. Write it as in "
            "2026-03-01T00:00:00+00:00.",
            parameter="holdout",
        )


def _check_began(snapshot: Snapshot, selected: str, is_after: str, name: str) -> None:
    """Refuse beginnings that are not known, and episodes whose agents began on either side."""
    key = schema.EPISODE_ID
    (row,) = snapshot.sql(
        f"SELECT count(*) FILTER (num_known < num_agents) AS num_unknown, "
        f"count(*) FILTER (num_after BETWEEN 1 AND num_agents - 1) AS num_torn, "
        f"count(*) AS num, min({key}) FILTER (num_known < num_agents) AS unknown, "
        f"min({key}) FILTER (num_after BETWEEN 1 AND num_agents - 1) AS torn FROM ("
        f"SELECT {key}, count(*) AS num_agents, count(started_at) AS num_known, "
        f"count(*) FILTER ({is_after}) AS num_after FROM ({selected}) GROUP BY {key})"
    ).to_pylist()
    if row["num_unknown"]:
        raise SchemaMismatchError(
            f"{name} by time: found {row['num_unknown']} of {row['num']} episodes without a "
            f"timestamp, such as {row['unknown']}, expected one in each. Hold out a fraction, or "
            "leave them out with where='started_at IS NOT NULL'."
        )
    if row["num_torn"]:
        raise SchemaMismatchError(
            f"{name} by time: found {row['num_torn']} of {row['num']} episodes whose agents "
            f"began before and after it, such as {row['torn']}, expected all of an episode on "
            "one side. Choose another time, or hold out a fraction."
        )
