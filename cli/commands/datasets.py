"""`replaylake list` and `replaylake show`: what is in the lake."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaylake.cli.commands.set_reference import reference_text
from replaylake.cli.name_completion import complete_datasets
from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
)
from replaylake.cli.output.command_output import (
    CommandOutput,
    count,
    number_text,
    size,
    table_lines,
    terminal_width,
)

if TYPE_CHECKING:
    from replaylake.datastore.lake.lake import Lake
    from replaylake.datastore.lake.profile.episode_report import EpisodeReport
    from replaylake.datastore.lake.profile.profile import Profile

# Letters of a text in the range of a column.
_MAX_TEXT = 24
_MIN_TEXT = 8
_COLUMNS = ("dataset", "version", "num_steps", "num_shards", "num_bytes")


def list_datasets(
    lake: LakeOption = DEFAULT_LAKE, as_json: JsonOption = False, debug: DebugOption = False
) -> None:
    """List the datasets of the lake.

    Example:
      replaylake list
      replaylake list --json
    """
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    store = open_lake(lake)
    rows = store.sql(f"SELECT {', '.join(_COLUMNS)} FROM datasets ORDER BY dataset").to_pylist()
    if not rows:
        report.print_message(
            f"no datasets in {lake}: `replaylake ingest SOURCE --dataset NAME` makes one"
        )
    report.print_result({"datasets": rows}, table_lines(rows, _COLUMNS) if rows else [])


def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME[@VERSION]",
            autocompletion=complete_datasets,
            show_default=False,
            help="Dataset, at a version, a tag, or its newest version.",
        ),
    ],
    page: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="File for an HTML page with plots of the contents; --json then includes the "
            "plotted data.",
        ),
    ] = None,
    episode: Annotated[
        str | None,
        typer.Option(
            "--episode",
            metavar="ID",
            help="Print this episode turn by turn: a dialogue with its tools, branches and "
            "rewards. ID is its id in the dataset or in its source.",
        ),
    ] = None,
    tokens: Annotated[
        bool,
        typer.Option(
            "--tokens",
            help="Show the tokens of generations, with a shade for each one's probability. "
            "Requires --episode.",
        ),
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="FILE",
            help="File tokenizer.json with the texts of tokens; without it, their ids are "
            "shown. Requires --tokens.",
        ),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show the contents of a dataset, or one of its episodes.

    Prints the numbers of episodes and steps, returns, ends of episodes, spaces, and the columns
    with their ranges.

    Example:
      replaylake show cartpole
      replaylake show cartpole@3 --json
      replaylake show cartpole --report report.html
      replaylake show chats --episode task-7 --tokens
    """
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    for flag, given, needed in (
        ("--tokens", tokens, "--episode" if episode is None else ""),
        ("--tokenizer", tokenizer is not None, "" if tokens else "--tokens"),
    ):
        if given and needed:
            raise typer.BadParameter(f"requires {needed}.", param_hint=flag)
    if episode is not None and page is not None:
        raise typer.BadParameter("cannot be used with --report.", param_hint="--episode")
    store = open_lake(lake)
    if episode is not None:
        _show_episode(store, name, episode, tokens, tokenizer, report)
        return
    if page is None:
        with report.waiting(f"reading {name}"):
            body = store.snapshot(name).describe()
        report.print_result(body, _dataset_lines(body))
        return
    profile, episodes = _write_page(store, name, page, report)
    body = {
        **profile.summary,
        "report": str(page),
        "profile": profile.to_json(),
        "episodes": episodes.to_json(),
    }
    report.print_result(body, [*_dataset_lines(profile.summary), f"  report       {page}"])


def _show_episode(
    store: Lake,
    name: str,
    episode: str,
    tokens: bool,
    tokenizer: Path | None,
    report: CommandOutput,
) -> None:
    from replaylake.cli.output.dialogue import dialogue_lines
    from replaylake.datastore.interchange.export.dialogue import (
        read_dialogue,
        read_token_texts,
    )
    from replaylake.datastore.storage.arrow_values import keep_pandas_unloaded

    keep_pandas_unloaded()
    snapshot = store.snapshot(name)
    texts = [] if tokenizer is None else read_token_texts(tokenizer, snapshot.spec.tokenizer)
    dialogue = read_dialogue(snapshot, episode, with_tokens=tokens, texts=texts)
    body = dialogue.to_json() if report.as_json else {}
    report.print_result(body, dialogue_lines(dialogue, tokens))


def _write_page(
    store: Lake, name: str, page: Path, report: CommandOutput
) -> tuple[Profile, EpisodeReport]:
    from replaylake.cli.output.page import html
    from replaylake.datastore.lake.profile.episode_report import report_episodes
    from replaylake.datastore.lake.profile.profile import compute_profile
    from replaylake.datastore.storage.storage import atomic_write

    snapshot = store.snapshot(name)
    with report.progress("profiled", "steps") as progress:
        profile = compute_profile(snapshot, store.dataset(snapshot.dataset).history(), progress)
    episodes = report_episodes(snapshot)
    with atomic_write(page) as stream:
        stream.write(html(profile, episodes).encode())
    return profile, episodes


def _dataset_lines(body: Mapping[str, Any]) -> Iterator[str]:
    yield f"{body['dataset']}@{body['version']}"
    yield (
        f"  {count(body['num_episodes'], 'episode')}, {count(body['num_steps'], 'step')}, "
        f"{count(body['num_shards'], 'shard')}, {size(body['num_bytes'])}"
    )
    if body["num_episodes"]:
        yield f"  return       {_returns(body)}; mean length {number_text(body['mean_num_steps'])}"
        if body["normalized_return"] is not None:
            yield (
                f"  normalized   mean {number_text(body['normalized_return'])} "
                f"({reference_text(body['score_reference'])})"
            )
        yield (
            f"  ends         {body['num_terminated']:,} terminated, {body['num_truncated']:,} "
            f"truncated, {body['num_incomplete']:,} open"
        )
        steps = count(body["num_steps"], "step")
        yield f"  log-probs    known for {body['num_log_probs']:,} of {steps}"
    yield f"  observation  {body['observation_space']}"
    yield f"  action       {body['action_space']}"
    width = max(len(column) for column in body["columns"])
    limit = terminal_width()
    yield "  columns"
    for column, kind in body["columns"].items():
        yield _shorten(f"    {column.ljust(width)}  {_short_type(kind)}", limit)
    if body["num_steps"]:
        yield "  ranges"
        yield from _range_lines(body["ranges"])


def _range_lines(ranges: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the least and greatest value of each column and the share of rows that lack it."""
    rows = [("column", "min", "max", "missing")]
    limit = _MAX_TEXT
    if (width := terminal_width()) is not None:
        # Beside two values: four spaces, the name, the share, and two spaces between columns.
        left = width - max(map(len, ranges)) - len(rows[0][3]) - 10
        limit = min(max(left // 2, _MIN_TEXT), _MAX_TEXT)
    for name, one in ranges.items():
        least, greatest = _value_text(one["min"], limit), _value_text(one["max"], limit)
        rows.append((name, least, greatest, _share_text(one["missing"])))
    widths = [max(len(row[place]) for row in rows) for place in range(4)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"    {'  '.join(cells)}".rstrip()


def _value_text(value: Any, limit: int) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return _shorten(" ".join(value.split()), limit)
    return number_text(value)


def _shorten(text: str, limit: int | None) -> str:
    return text if limit is None or len(text) <= limit else f"{text[: limit - 3]}..."


def _share_text(share: float | None) -> str:
    if share is None:
        return ""
    # Some of very many are not none, and nearly all are not all.
    percent = 100 * share if share in (0, 1) else min(99.9, max(0.1, 100 * share))
    return f"{percent:.3g}%"


def _returns(body: Mapping[str, Any]) -> str:
    num_known, num_episodes = body["num_returns"], body["num_episodes"]
    if not num_known:
        return "unknown"
    lowest, greatest = number_text(body["min_return"]), number_text(body["max_return"])
    text = f"mean {number_text(body['mean_return'])}, from {lowest} to {greatest}"
    if num_known == num_episodes:
        return text
    return f"{text} (known for {num_known:,} of {count(num_episodes, 'episode')})"


def _short_type(kind: str) -> str:
    """Return an Arrow type as a person would say it: `float[4]` for a fixed-size list of them."""
    kind = re.sub(r"dictionary<values=(\w+),[^>]*>", r"\1", kind)
    kind = re.sub(r"fixed_size_list<\w+: ([\w ]+?)(?: not null)?>\[(\d+)\]", r"\1[\2]", kind)
    kind = re.sub(r"struct<([^<>]*)>", _list_fields, kind)
    return re.sub(r"list<\w+: (\w+|\{[^{}]*\})(?: not null)?>", r"\1[]", kind)


def _list_fields(found: re.Match[str]) -> str:
    """Return the names of a struct's fields: with their types, a line has no room for it."""
    names = (field.partition(":")[0] for field in found[1].split(", ") if ": " in field)
    return f"{{{', '.join(names)}}}"
