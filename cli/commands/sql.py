"""`replaylake sql`: one SELECT over the lake."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from replaylake.cli.config import parse_literal
from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
    parse_pairs,
)
from replaylake.cli.output.command_output import (
    CommandOutput,
    count,
    data_lines,
    fit_columns,
    result_stream,
    table_lines,
    terminal_width,
)
from replaylake.datastore.errors import NotFoundError

if TYPE_CHECKING:
    from replaylake.datastore.lake.lake import Lake
    from replaylake.datastore.lake.roles import Grant


# Rows of a table on a terminal, without --limit.
_MAX_SHOWN: Final = 100
_TOKEN_VARIABLE: Final = "REPLAYLAKE_SQL_TOKEN"
_MAX_TOKEN_BYTES: Final = 1 << 16


class OutputFormat(StrEnum):
    """How the rows are written."""

    table = "table"
    csv = "csv"
    json = "json"
    jsonl = "jsonl"
    parquet = "parquet"


def sql(
    query: Annotated[
        str | None,
        typer.Argument(metavar="QUERY", show_default=False, help="SELECT statement to run."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="F", help="File with the query; - for standard input."),
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            metavar="K=V",
            help="Value of the parameter $K in the query, as a TOML value or a bare word. "
            "Repeatable.",
        ),
    ] = None,
    at: Annotated[
        list[str] | None,
        typer.Option(
            "--at",
            metavar="DATASET=VERSION",
            help="Version or tag to read a dataset at; NAME=DATASET@VERSION reads it under another "
            "name. Repeatable.",
        ),
    ] = None,
    form: Annotated[
        OutputFormat | None,
        typer.Option(
            "--format",
            help="Format of the rows; by default table, with --json json.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FILE", help="File to write the rows to, whole or not at all."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            metavar="N",
            min=0,
            show_default=False,
            help="Maximum number of rows to print or write; by default all, in a table on a "
            f"terminal {_MAX_SHOWN}. A LIMIT in the query also saves the work for the others.",
        ),
    ] = None,
    untrusted: Annotated[
        bool,
        typer.Option(
            "--untrusted",
            help="Run a query of an untrusted author in a sandboxed process, with limits.",
        ),
    ] = False,
    access: Annotated[
        Path | None,
        typer.Option(
            "--access",
            metavar="FILE",
            help="TOML file with a role table, for --untrusted: the query sees the datasets and "
            "columns that its author's token may read, and no others.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="File with the author's token, for --access; by default the variable "
            f"{_TOKEN_VARIABLE}.",
        ),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run one SELECT over the lake.

    Each dataset has the views NAME.steps, NAME.episodes, NAME.games, NAME.transitions,
    NAME.sequences, NAME.groups, NAME.preference_pairs, NAME.decisions, NAME.rewards,
    NAME.received and NAME.quarantine; the lake has commits, datasets, evaluations,
    metrics, policies, promotions, runs and shards, whose columns are described in docs/SQL.md.

    Example:
      replaylake sql "select count(*) as n, avg(num_steps) as steps from cartpole.episodes"
      replaylake sql "select * from cartpole.steps where step < $n" --param n=3 --format csv
      replaylake sql "select count(*) as n from cartpole.steps" --at cartpole=12
    """
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    text = _query_text(query, file)
    parameters = {
        key: parse_literal(value, "--param", key)
        for key, value in parse_pairs(param or [], "--param").items()
    }
    versions = parse_pairs(at or [], "--at", "DATASET=VERSION, such as cartpole=12")
    output_format = _format(form, as_json, output)
    reader = _find_reader(access, token_file, untrusted)
    with report.waiting("running the query"):
        rows, also = _rows(open_lake(lake), text, parameters, versions, untrusted, reader)
    is_table = output is None and output_format == "table"
    if limit is None and is_table and result_stream().isatty():
        limit = _MAX_SHOWN
    shown = rows if limit is None else rows.slice(0, limit)
    if output is not None:
        _save(report, shown, output_format, output, also)
    else:
        _print(report, shown, output_format, also)
    if is_table:
        num, total = shown.num_rows, count(rows.num_rows, "row")
        report.print_message(total if num == rows.num_rows else f"{num:,} of {total}")
    elif shown.num_rows < rows.num_rows:
        report.print_message(f"{shown.num_rows:,} of {count(rows.num_rows, 'row')}")
    if cut_by := also.get("truncated"):
        report.print_message(
            f"cut short: the whole result has more {cut_by} than --untrusted allows"
        )


def _rows(
    lake: Lake,
    text: str,
    parameters: Mapping[str, object],
    versions: Mapping[str, str],
    untrusted: bool,
    reader: Grant | None,
) -> tuple[Any, dict[str, Any]]:
    """Return the rows, and what else there is to say of them."""
    if not untrusted:
        return lake.sql(text, parameters, at=versions), {}
    result = lake.sql_untrusted(text, parameters, at=versions, reader=reader)
    return result.rows, {"truncated": result.truncated}


def _find_reader(access: Path | None, token_file: Path | None, untrusted: bool) -> Grant | None:
    """Return the grant of the query's author; None without --access. Raises: ReplayLakeError.

    Raises: typer.BadParameter for options that need one another, and without a token.
    """
    from replaylake.datastore.lake.roles import read_role_table

    if access is None:
        if token_file is not None:
            raise typer.BadParameter("requires --access.", param_hint="--token-file")
        return None
    if not untrusted:
        # In this process SQL also reads files, and DuckDB's own catalog.
        raise typer.BadParameter("requires --untrusted.", param_hint="--access")
    table = read_role_table(access)
    if token_file is None:
        token = os.environb.get(_TOKEN_VARIABLE.encode(), b"")
    else:
        try:
            with token_file.open("rb") as file:
                token = file.read(_MAX_TOKEN_BYTES)
        except OSError as error:
            raise typer.BadParameter(
                f"{token_file}: {error.strerror}, expected a readable file with one token.",
                param_hint="--token-file",
            ) from error
    if not token.strip():
        raise typer.BadParameter(
            f"found no token in {token_file or _TOKEN_VARIABLE}, expected the one of the query's "
            f"author, in --token-file or {_TOKEN_VARIABLE}.",
            param_hint="--access",
        )
    return table.find_reader(token.strip())


def _query_text(query: str | None, file: Path | None) -> str:
    if (query is None) == (file is None):
        raise typer.BadParameter("expected a query or --file, one of the two.", param_hint="QUERY")
    if query is not None:
        return query
    try:
        return sys.stdin.read() if str(file) == "-" else Path(str(file)).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NotFoundError(
            f"--file {file}: could not be read ({error}), expected a text file with one SELECT."
        ) from error


def _format(form: OutputFormat | None, as_json: bool, output: Path | None) -> str:
    """Settle --format and --json. Raises: typer.BadParameter where they contradict each other."""
    if output is None and as_json and form not in (None, OutputFormat.json):
        raise typer.BadParameter(
            f"{form} cannot be used with --json unless --output names a file.",
            param_hint="--format",
        )
    if form is None:
        suffix = "" if output is None else output.suffix.lstrip(".")
        names = {known.value for known in OutputFormat} - {"table"}
        return "json" if as_json and output is None else suffix if suffix in names else "table"
    return form.value


def _save(
    report: CommandOutput, rows: Any, form: str, output: Path, also: Mapping[str, Any]
) -> None:
    from replaylake.datastore.query.results import write_result

    if form == "table":
        raise typer.BadParameter(
            f"expected --format csv, json, jsonl or parquet for {output.name}, or one of these as "
            "its suffix: a table is for people.",
            param_hint="--output",
        )
    write_result(rows, form, output, also)
    body = {
        "output": str(output),
        "format": form,
        "num_rows": rows.num_rows,
        "columns": rows.column_names,
        **also,
    }
    report.print_result(body, [f"wrote {count(rows.num_rows, 'row')} to {output}"])


def _print(report: CommandOutput, rows: Any, form: str, also: Mapping[str, Any]) -> None:
    from replaylake.datastore.query.results import write_result

    if form == "table":
        _print_table(report, rows)
        return
    stream = result_stream()
    if form == "parquet" and stream.isatty():
        raise typer.BadParameter(
            "a terminal cannot show Parquet: add --output FILE, or pipe it on.",
            param_hint="--format",
        )
    stream.flush()
    write_result(rows, form, stream.buffer, also)
    stream.buffer.flush()


def _print_table(report: CommandOutput, rows: Any) -> None:
    """Print the columns that fit on the terminal, and name the others; off a terminal, all."""
    from replaylake.datastore.query.results import python_rows

    values, columns = list(python_rows(rows)), rows.column_names
    if (width := terminal_width()) is not None:
        columns = fit_columns(values, columns, width)
    report.print_result({}, data_lines(table_lines(values, columns)))
    omitted = [name for name in rows.column_names if name not in columns]
    if omitted:
        report.print_message(
            f"not shown for want of width: {', '.join(omitted)} (select them, or --format csv)"
        )
