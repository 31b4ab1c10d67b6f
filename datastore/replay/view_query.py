"""ViewQuery: what a view is asked for beside its snapshot, and the key of what comes out."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Final

import duckdb

from replaylake.datastore.errors import ConfigInvalidError, QueryError, QueryRefusedError
from replaylake.datastore.query.expressions import canonical_condition, canonical_expression
from replaylake.datastore.replay.arguments import check_int
from replaylake.datastore.replay.layout import MAX_FRAMES, RecordLayout
from replaylake.datastore.storage.table.table import TableSnapshot

# What packing puts into records, and where: one more whenever the same shards and query would give
# other bytes. (A layout's dtype is in the key besides.)
PACKED_FORMAT: Final = 1
# How DuckDB's messages begin that are about what was asked.
_SQL_ERRORS: Final = ("Parser Error", "Binder Error", "Catalog Error", "Conversion Error")
_TABLES: Final = {
    "where": "episodes",
    "where_steps": "steps",
    "where_pairs": "preference_pairs",
    "reward": "steps",
    "weight": "steps` and `episodes",
    "target-prob": "steps",
    "behavior-prob": "steps",
}


@dataclass(frozen=True)
class ViewQuery:
    """Which episodes and steps, and how they are decoded; see Snapshot.replay for each.

    where, where_steps and reward are SQL, as it was given or in DuckDB's own spelling.
    """

    where: str | None = None
    where_steps: str | None = None
    reward: str | None = None
    columns: tuple[str, ...] = ()
    float64: bool = False
    frame_stack: int = 1

    def __post_init__(self) -> None:
        """Raises: ConfigInvalidError for an argument of another type."""
        for name, text in (*self.conditions(), ("reward", self.reward)):
            if text is not None and not isinstance(text, str):
                raise ConfigInvalidError(
                    f"replay: found {name} {text!r}, expected SQL in a string, or None. Write it "
                    "as in where='num_steps > 10'."
                )
        if not isinstance(self.float64, bool):
            raise ConfigInvalidError(
                f"replay: found float64 {self.float64!r}, expected True or False. True keeps what "
                "is stored as float64."
            )
        frames = check_int("replay: frame_stack", self.frame_stack, minimum=1, maximum=MAX_FRAMES)
        # numpy's numbers are no JSON, which the view's key is made of.
        object.__setattr__(self, "frame_stack", frames)

    @property
    def has_sql(self) -> bool:
        """Whether a part of it is SQL, which DuckDB may spell otherwise."""
        return not self.where is self.where_steps is self.reward is None

    def conditions(self) -> tuple[tuple[str, str | None], ...]:
        """Return what narrows it down, each by its argument's name."""
        return ("where", self.where), ("where_steps", self.where_steps)

    def canonical(self) -> ViewQuery:
        """Return it in DuckDB's own spelling. Raises: QueryRefusedError, QueryError."""
        return replace(
            self,
            where=_canonical("where", self.where),
            where_steps=_canonical("where_steps", self.where_steps),
            reward=_canonical("reward", self.reward),
        )


def view_key(snapshot: TableSnapshot, layout: RecordLayout, query: ViewQuery) -> str:
    """Return 64 hex digits: where they are equal, the packed records are equal byte for byte.

    They cover the shards' sha256 in their order, in which episodes are packed; the columns, which
    SQL may name; the spaces; the query, with the DuckDB that evaluates it; and the layout.
    """
    about = {
        "format": PACKED_FORMAT,
        "byteorder": sys.byteorder,
        "shards": [entry.sha256 for entry in snapshot.files],
        "schema": snapshot.schema.to_string(show_field_metadata=False, show_schema_metadata=False),
        # What returns are normalized by is in no record, nor is the environment.
        "spec": replace(layout.spec, score_reference=None, env_spec=None).configuration(),
        "query": asdict(query),
        "duckdb": duckdb.__version__ if query.has_sql else None,
        "dtype": str(layout.dtype),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


@contextmanager
def explain_sql_errors(argument: str, expression: str, table: str = "") -> Iterator[None]:
    """Say of which argument an error of its SQL is; `table` is what it names, where not usual.

    Raises: QueryError, QueryRefusedError.
    """
    try:
        yield
    except QueryError as error:
        if not str(error).startswith(_SQL_ERRORS):
            # Such as a shard that cannot be read.
            raise QueryError(f"{argument} {expression!r}: {error}") from error
        table = table or _TABLES[argument]
        raise QueryError(
            f"{argument} {expression!r}: found {error}, expected SQL over the columns of "
            f"`{table}`. docs/SQL.md names them, and `replaylake show DATASET`."
        ) from error
    except QueryRefusedError as error:
        raise QueryRefusedError(f"{argument}: {error}") from error


def column_names(columns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of further columns, each once. Raises: ConfigInvalidError."""
    is_list = isinstance(columns, Sequence) and not isinstance(columns, str)
    if is_list and all(isinstance(name, str) for name in columns):
        return tuple(dict.fromkeys(columns))
    raise ConfigInvalidError(
        f"replay: found columns {columns!r}, expected a list of names. Pass them as in "
        "columns=['policy_version']."
    )


def _canonical(argument: str, expression: str | None) -> str | None:
    if expression is None:
        return None
    with explain_sql_errors(argument, expression):
        if argument == "where":
            return canonical_condition(expression)
        return canonical_expression(expression)
