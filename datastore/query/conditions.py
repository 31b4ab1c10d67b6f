"""Conditions over episodes: what `where` may say of an episode and of its steps.

A condition names the columns of `episodes`. `any(c)` holds if the condition c over the columns of
`steps` is true for at least one step of the episode, `all(c)` if it is true for every step; NULL is
not true. A column that only `steps` has may also be named alone if it has one value in each
episode.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

import duckdb

from replaylake.datastore.episodes import schema
from replaylake.datastore.errors import QueryRefusedError
from replaylake.datastore.query.connections import session
from replaylake.datastore.query.episode_views import EPISODE_COLUMNS
from replaylake.datastore.query.statements import (
    VARYING_COLUMN,
    execute,
    literal,
    parse,
    walk,
    walk_outside_subqueries,
)

# Aggregates over the steps of an episode; NULL does not count as true.
_QUANTIFIERS: Final = {
    "any": "bool_or(coalesce(CAST(({sql}) AS BOOLEAN), false))",
    "all": "bool_and(coalesce(CAST(({sql}) AS BOOLEAN), false))",
}
# What may stand before any( or all( where it begins a condition. After `=` it is SQL's own ANY,
# after UNION its own ALL.
_BEFORE_CONDITION: Final = {"(", ",", "and", "or", "not", "when", "then", "else", "case"}
_KEY: Final = f"{schema.EPISODE_ID}, {schema.AGENT_ID}"
_PREFIX: Final = "SELECT 1 FROM episodes WHERE "


def quote_quantifiers(text: str) -> str:
    """Return a condition with any( and all(, which are keywords of SQL, as names of functions."""
    try:
        data = text.encode()
        tokens = duckdb.tokenize(text)
    except (duckdb.Error, UnicodeEncodeError):
        return text  # for the parser to refuse
    # Offsets are in bytes.
    starts = [start for start, kind in tokens if kind != duckdb.token_type.comment]
    if not starts:
        return text
    words = [_first_word(data[a:b]) for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]
    parts, position = [], 0
    for index, word in enumerate(words[:-1]):
        is_first = index == 0 or words[index - 1] in _BEFORE_CONDITION
        if word in _QUANTIFIERS and words[index + 1].startswith("(") and is_first:
            parts += [data[position : starts[index]], f'"{word}"'.encode()]
            position = starts[index] + len(word)
    return b"".join([*parts, data[position:]]).decode()


def check_quantifiers(condition: str, tree: Any) -> None:
    """Refuse any() and all() of another form than any(condition). Raises: QueryRefusedError."""
    for node in _quantifiers(tree):
        if len(node["arguments"]) != 1 or node.get("distinct") or node.get("filter"):
            raise QueryRefusedError(
                f"{condition!r}: found {node['function_name']}() of {len(node['arguments'])} "
                "arguments, expected one condition over the columns of steps."
            )
        if any(True for _ in _quantifiers(node["arguments"])):
            raise QueryRefusedError(
                f"{condition!r}: found any() or all() within {node['function_name']}(), expected a "
                "condition over the columns of one step. Join the two by AND or OR."
            )


@dataclass(frozen=True)
class StepsPart:
    """What a condition asks of steps. columns: those that it names outside of any() and all().

    quantified: by the name that stands for it in `where`, the word and the condition over steps.
    """

    where: str
    columns: tuple[str, ...]
    quantified: dict[str, tuple[str, str]]


def split_condition(condition: str, step_columns: Collection[str]) -> StepsPart:
    """Separate what a condition, in DuckDB's spelling, asks of `episodes` and of `steps`."""
    with session() as connection:
        tree = parse(connection, f"{_PREFIX}({condition}\n)")
        select = tree["statements"][0]["node"]
        own = {name.lower(): name for name in step_columns}
        quantified: dict[str, tuple[str, str]] = {}

        def spell(node: Any) -> str:
            before, select["where_clause"] = select["where_clause"], node
            text = {"j": json.dumps(tree)}
            select["where_clause"] = before
            ast = execute(connection, "SELECT json_deserialize_sql($j) AS q", text)["q"][0]
            return str(ast.as_py()).removeprefix(_PREFIX)

        def replace_quantifiers(node: Any) -> Any:
            if isinstance(node, list):
                return [replace_quantifiers(child) for child in node]
            if not isinstance(node, dict):
                return node
            if _is_quantifier(node):
                # No column of a dataset has a space in its name.
                name = f"condition {len(quantified) + 1}"
                word = node["function_name"].lower()
                quantified[name] = word, spell(node["arguments"][0]["expression"])
                return _column_reference(connection, name)
            return {key: replace_quantifiers(child) for key, child in node.items()}

        where = replace_quantifiers(select["where_clause"])
        bare = [name for name in _named_columns(where) if name not in EPISODE_COLUMNS]
        columns = tuple(own[name] for name in bare if name in own)
        return StepsPart(spell(where), columns, quantified)


def step_columns_of(condition: str, step_columns: Collection[str]) -> list[str]:
    """Return the columns of `steps` that a condition over episodes names, also in any() and all().

    In DuckDB's spelling. A column that `episodes` has too counts only within these.
    """
    part = split_condition(condition, step_columns)
    names = dict.fromkeys(part.columns)
    for _, sql in part.quantified.values():
        names.update(dict.fromkeys(quantified_columns(sql, step_columns)))
    return list(names)


def quantified_columns(sql: str, step_columns: Collection[str]) -> list[str]:
    """Return the columns of `steps` that a condition over steps names."""
    own = {name.lower(): name for name in step_columns}
    with session() as connection:
        tree = parse(connection, f"{_PREFIX}({sql}\n)")
    return [own[name] for name in _named_columns(tree) if name in own]


def episodes_where(condition: str, step_columns: Collection[str]) -> str:
    """Return a SELECT of the rows of `episodes` that a condition selects, over both views.

    Args:
        condition: in DuckDB's spelling, as `canonical_condition` returns it.
        step_columns: the names of the columns of `steps`.

    Executing it raises QueryError if a column that is named outside of any() and all() has
    several values in one episode.
    """
    part = split_condition(condition, step_columns)
    if not part.columns and not part.quantified:
        return f"SELECT * FROM episodes WHERE ({condition})"
    columns = [f'{_only_value(name)} AS "{name}"' for name in part.columns]
    columns += [
        f'{_QUANTIFIERS[word].format(sql=sql)} AS "{name}"'
        for name, (word, sql) in part.quantified.items()
    ]
    of_steps = f"SELECT {_KEY}, {', '.join(columns)} FROM steps GROUP BY {_KEY}"
    return (
        f'SELECT episodes.* FROM episodes JOIN ({of_steps}) AS "of steps" USING ({_KEY}) '
        f"WHERE ({part.where})"
    )


def quantify(word: str, condition: str) -> str:
    """Return the aggregate over the steps of an episode that any or all of a condition is."""
    return _QUANTIFIERS[word].format(sql=condition)


def _only_value(name: str) -> str:
    quoted = f'"{name}"'
    message = (
        f"{literal(VARYING_COLUMN + f'found several values of {name} in episode ')} || "
        f"any_value({schema.EPISODE_ID}) || "
        + literal(
            f", expected one in each episode. Write any(...) around the condition on {name} if it "
            "has to hold for at least one step, or all(...) if for every step."
        )
    )
    return (
        f"CASE WHEN min({quoted}) IS DISTINCT FROM max({quoted}) "
        f"OR count({quoted}) NOT IN (0, count(*)) THEN error({message}) "
        f"ELSE any_value({quoted}) END"
    )


def _first_word(data: bytes) -> str:
    """Return a token's text in small letters: a word, or what stands there."""
    text = data.decode(errors="replace")
    word = next((text[:i] for i, c in enumerate(text) if not (c.isalnum() or c == "_")), text)
    return word.lower() if word else text[:1]


def _is_quantifier(node: dict[str, Any]) -> bool:
    is_function = node.get("class") == "FUNCTION" and not node.get("is_operator")
    return is_function and str(node.get("function_name")).lower() in _QUANTIFIERS


def _quantifiers(tree: Any) -> Iterator[dict[str, Any]]:
    return (node for node in walk(tree) if _is_quantifier(node))


def _named_columns(tree: Any) -> list[str]:
    """Return the columns that an expression names, in small letters; lambda's own are none."""
    own = {
        name.lower()
        for node in walk(tree)
        if node.get("class") == "LAMBDA"
        for child in walk(node.get("lhs"))
        for name in child.get("column_names", ())
    }
    names = []
    for node in walk_outside_subqueries(tree):
        if node.get("class") == "COLUMN_REF":
            path = [name.lower() for name in node["column_names"]]
            names.append(path[1] if len(path) > 1 and path[0] in ("episodes", "steps") else path[0])
    return list(dict.fromkeys(name for name in names if name not in own))


def _column_reference(connection: duckdb.DuckDBPyConnection, name: str) -> Any:
    tree = parse(connection, f'{_PREFIX}"{name}"')
    return tree["statements"][0]["node"]["where_clause"]
