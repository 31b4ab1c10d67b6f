"""`replaylake ingest`: foreign files into a dataset."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from enum import StrEnum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from replaylake.cli.commands.quarantine import (
    EpisodeOption,
    FileOption,
    ReasonOption,
    selection,
)
from replaylake.cli.mapping import Gaps, OpenEnds, iter_misspellings, resolve
from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    EnvArgsOption,
    JsonOption,
    LakeOption,
    parse_duration,
    parse_env_args,
    parse_pairs,
)
from replaylake.cli.output.command_output import CommandOutput, count
from replaylake.cli.output.follow import follow_lines
from replaylake.cli.output.link_table import link_lines
from replaylake.cli.output.receipt import (
    check_lines,
    preview_lines,
    receipt_lines,
    repair_lines,
)

if TYPE_CHECKING:
    from replaylake.cli.output.progress import ProgressReport
    from replaylake.datastore.episodes.spaces import Space
    from replaylake.datastore.interchange.formats.format import ReadOptions
    from replaylake.datastore.interchange.ingest.alignment import Align
    from replaylake.datastore.interchange.ingest.inspection import IngestProgress
    from replaylake.datastore.interchange.ingest.quarantine_rows import QuarantineSelection
    from replaylake.datastore.lake.lake import Lake
    from replaylake.datastore.lake.runs.run_profile import ProcessProfile


# The headings of `replaylake ingest --help`.
_COLUMNS: Final = "Column options"
_EPISODES: Final = "Episode options"
_ACTIONS: Final = "Action options"
_STREAM: Final = "Stream options"
_QUARANTINE: Final = "Quarantine options"
_KEYS: Final = "Key options"

# What a stage is called while it lasts, and what it counts.
_STAGES: Final = {
    "hash": ("hashed", "bytes"),
    "read": ("read", "rows"),
    "check": ("checked", "steps"),
    "commit": ("committed", "steps"),
}


class OnInvalid(StrEnum):
    """What becomes of an episode that does not pass the checks."""

    reject = "reject"
    abort = "abort"


class OnConflict(StrEnum):
    """How rows that differ from the stored rows with the same keys are treated."""

    SET_ASIDE = "set_aside"
    REPLACE = "replace"  # in capitals, as `replace` is a method of texts


def ingest(
    dataset: Annotated[
        str,
        typer.Option(
            "--dataset",
            metavar="NAME",
            help="Dataset to append to; created if it does not exist.",
            show_default=False,
        ),
    ],
    source: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="SOURCE",
            show_default=False,
            help="Files, directories, quoted glob patterns, zip archives, or - for JSON lines on "
            "standard input. One or more, unless --from-quarantine is given.",
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="Format of the files, one that `replaylake formats` lists; detected from the "
            "content by default.",
        ),
    ] = None,
    mapping: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            rich_help_panel=_COLUMNS,
            metavar="OURS=THEIRS",
            help="Column that holds a field: reward=payoff. Several make a vector: "
            "observation=x,user_*. Repeatable.",
        ),
    ] = None,
    mapping_file: Annotated[
        Path | None,
        typer.Option(
            "--mapping",
            metavar="FILE",
            help="TOML file with values of --map, --fill and other reading options; command-line "
            "options override it.",
        ),
    ] = None,
    fill: Annotated[
        list[str] | None,
        typer.Option(
            "--fill",
            rich_help_panel=_COLUMNS,
            metavar="COLUMN=VALUE",
            help="Value to use where a column has none. Repeatable.",
        ),
    ] = None,
    episode_by: Annotated[
        str | None,
        typer.Option(
            "--episode-by",
            rich_help_panel=_EPISODES,
            metavar="COLUMNS",
            help="Columns that identify an episode, for example user,session.",
        ),
    ] = None,
    order_by: Annotated[
        str | None,
        typer.Option(
            "--order-by",
            rich_help_panel=_EPISODES,
            metavar="COLUMNS",
            help="Columns that order the rows of an episode, for example hour,id.",
        ),
    ] = None,
    timezone: Annotated[
        str | None,
        typer.Option(
            "--timezone",
            rich_help_panel=_COLUMNS,
            metavar="ZONE",
            help="Time zone of timestamps without one, for example Europe/Berlin or UTC.",
        ),
    ] = None,
    delimiter: Annotated[
        str | None,
        typer.Option(
            "--delimiter",
            rich_help_panel=_COLUMNS,
            metavar="CHAR",
            help="Character between the cells of CSV, or tab; by default found in the header among "
            "comma, semicolon, tab and |.",
        ),
    ] = None,
    decimal: Annotated[
        str | None,
        typer.Option(
            "--decimal",
            rich_help_panel=_COLUMNS,
            metavar="MARK",
            help="Mark before the decimals of numbers in CSV: a point (the default) or a comma.",
        ),
    ] = None,
    max_categories: Annotated[
        int | None,
        typer.Option(
            "--max-categories",
            rich_help_panel=_COLUMNS,
            metavar="N",
            min=1,
            help="Maximum number of distinct texts in a column that is encoded as categories; "
            "1,000 by default.",
        ),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(
            "--env",
            metavar="ID",
            help="Environment to check spaces against and, where possible, dynamics: Gymnasium id "
            "or module:function.",
        ),
    ] = None,
    env_arg: EnvArgsOption = None,
    action_scale: Annotated[
        float | None,
        typer.Option(
            "--action-scale",
            rich_help_panel=_ACTIONS,
            metavar="F",
            help="Factor to multiply logged actions by.",
        ),
    ] = None,
    action_low: Annotated[
        float | None,
        typer.Option(
            "--action-low",
            rich_help_panel=_ACTIONS,
            metavar="F",
            help="Lower bound of the range that logged actions in [-1, 1] are scaled to.",
        ),
    ] = None,
    action_high: Annotated[
        float | None,
        typer.Option(
            "--action-high",
            rich_help_panel=_ACTIONS,
            metavar="F",
            help="Upper bound of the range that logged actions in [-1, 1] are scaled to.",
        ),
    ] = None,
    time_limit: Annotated[
        int | None,
        typer.Option(
            "--time-limit",
            rich_help_panel=_EPISODES,
            metavar="N",
            min=1,
            help="Mark episodes of exactly N steps as truncated, even where the log says "
            "terminated.",
        ),
    ] = None,
    no_reward: Annotated[
        bool,
        typer.Option(
            "--no-reward",
            rich_help_panel=_COLUMNS,
            help="Store rewards that the log lacks as unknown, instead of refusing the log.",
        ),
    ] = False,
    reward_scale: Annotated[
        float | None,
        typer.Option(
            "--reward-scale",
            rich_help_panel=_COLUMNS,
            metavar="F",
            help="Factor to multiply logged rewards by, for example -1 for costs.",
        ),
    ] = None,
    gaps: Annotated[
        Gaps | None,
        typer.Option(
            "--gaps",
            rich_help_panel=_EPISODES,
            help="Reject an episode with missing steps (default), or split it at the gap.",
        ),
    ] = None,
    open_ends: Annotated[
        OpenEnds | None,
        typer.Option(
            "--open-ends",
            rich_help_panel=_EPISODES,
            help="Record an episode without an end as open (default), as truncated, or by "
            "--time-limit: truncated at it, terminated before it.",
        ),
    ] = None,
    on_invalid: Annotated[
        OnInvalid,
        typer.Option(
            "--on-invalid",
            help="Put invalid episodes into quarantine, or refuse the whole source.",
        ),
    ] = OnInvalid.reject,
    readmit: Annotated[
        bool,
        typer.Option(
            "--readmit",
            help="Also commit what was deleted from the dataset; it counts as deleted no more.",
        ),
    ] = False,
    unique: Annotated[
        str | None,
        typer.Option(
            "--unique",
            rich_help_panel=_KEYS,
            metavar="COLUMNS",
            help="Columns whose values no two rows share, for example event_id. The dataset "
            "remembers them; a row whose key is there is left out as a duplicate.",
        ),
    ] = None,
    late: Annotated[
        str | None,
        typer.Option(
            "--late",
            rich_help_panel=_KEYS,
            metavar="COLUMNS",
            help="Columns that, like the reward, a stored row without a value takes from a later "
            "row of its key.",
        ),
    ] = None,
    on_conflict: Annotated[
        OnConflict,
        typer.Option(
            "--on-conflict",
            rich_help_panel=_KEYS,
            help="Put rows that differ from the stored ones of their keys into quarantine, or in "
            "the place of those.",
        ),
    ] = OnConflict.SET_ASIDE,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            rich_help_panel=_STREAM,
            help="Commit JSON lines as they arrive on standard input or in a growing file: steps, "
            "decisions (--format bandit or dsjson), dialogues (--format transcripts) or rollouts "
            "(--format nemorl, verifiers or verl).",
        ),
    ] = False,
    flush_every: Annotated[
        str | None,
        typer.Option(
            "--flush-every",
            rich_help_panel=_STREAM,
            metavar="TIME",
            help="Maximum time before a line is committed; 10s by default. Requires --follow.",
        ),
    ] = None,
    stream: Annotated[
        str | None,
        typer.Option(
            "--stream",
            rich_help_panel=_STREAM,
            metavar="NAME",
            help="Name of the stream of lines, the same at each start; by default the dataset's "
            "name. Requires --follow.",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Read the first rows only, and print how they would be stored and what would be "
            "refused; change nothing.",
        ),
    ] = False,
    from_quarantine: Annotated[
        bool,
        typer.Option(
            "--from-quarantine",
            rich_help_panel=_QUARANTINE,
            help="Read the dataset's quarantined rows again, instead of files; those that pass "
            "leave the quarantine.",
        ),
    ] = False,
    fix: Annotated[
        str | None,
        typer.Option(
            "--fix",
            rich_help_panel=_QUARANTINE,
            metavar="SQL",
            help="SELECT over the table quarantine that returns the corrected rows, for example "
            "SELECT * REPLACE (0 AS click) FROM quarantine. Requires --from-quarantine.",
        ),
    ] = None,
    reason: ReasonOption = None,
    file: FileOption = None,
    episode: EpisodeOption = None,
    lake: LakeOption = DEFAULT_LAKE,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="After the receipt, print the time and bytes of each link (stage) of the ingest, "
            "and the throughput of its limiting operation alone on this machine.",
        ),
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Read log files into a dataset.

    Each episode is validated, and the same content is committed only once. Creates the lake if
    there is none. --json prints the receipt: the numbers of episodes and steps that were read,
    committed, rejected and already present.

    Example:
      replaylake ingest logs/ --dataset cartpole --env CartPole-v1
      replaylake ingest log.csv --dataset ads --map observation=age,hour --map reward=click
      tail -F app.jsonl | replaylake ingest - --dataset app --follow --flush-every 10s
      replaylake ingest --from-quarantine --dataset ads --map reward=payoff
    """
    started = time.perf_counter()
    from replaylake.datastore.interchange.ingest.ingest import NothingValidError
    from replaylake.datastore.interchange.ingest.ingest import ingest as run
    from replaylake.datastore.storage.arrow_values import keep_pandas_unloaded

    if env is None:  # the environment's code may need pandas
        keep_pandas_unloaded()
    report = CommandOutput(as_json)
    env_args = parse_env_args(env_arg, has_env=env is not None)
    flags = {
        "map": parse_pairs(mapping or [], "--map"),
        "fill": parse_pairs(fill or [], "--fill"),
        "episode_by": episode_by,
        "order_by": order_by,
        "time_limit": time_limit,
        "gaps": gaps.value if gaps else None,
        "open_ends": open_ends.value if open_ends else None,
        "action_scale": action_scale,
        "action_low": action_low,
        "action_high": action_high,
        "reward_scale": reward_scale,
        "timezone": timezone,
        "delimiter": delimiter,
        "decimal": decimal,
        "no_reward": no_reward,
        "max_categories": max_categories,
        "format": form,
    }
    options, form = resolve(flags, mapping_file)
    keys: dict[str, Any] = {
        "unique": _split(unique),
        "late": _split(late),
        "on_conflict": on_conflict.value,
    }
    for hint in iter_misspellings(options.mapping):
        report.print_message(hint)
    if from_quarantine:
        for flag, is_given in (
            ("SOURCE", bool(source)),
            ("--format", form != "auto"),
            ("--follow", follow),
            ("--flush-every", flush_every is not None),
            ("--stream", stream is not None),
            ("--profile", profile),
        ):
            if is_given:
                raise typer.BadParameter("cannot be used with --from-quarantine.", param_hint=flag)
        chosen = selection(reason, file, episode)
        spaces = None if env is None else _spaces(env, env_args)
        _repair(report, lake, dataset, chosen, fix, options, spaces, dry_run=check)
        return
    for flag, is_given in (
        ("--fix", fix is not None),
        ("--reason", bool(reason)),
        ("--file", bool(file)),
        ("--episode", bool(episode)),
    ):
        if is_given:
            raise typer.BadParameter("requires --from-quarantine.", param_hint=flag)
    if not source:
        raise typer.BadParameter(
            "expected at least one file, or --from-quarantine.", param_hint="SOURCE"
        )
    if profile and (check or follow):
        other = "--check" if check else "--follow"
        raise typer.BadParameter(f"cannot be used with {other}.", param_hint="--profile")
    if check:
        if follow:
            raise typer.BadParameter("cannot be used with --follow.", param_hint="--check")
        from replaylake.datastore.interchange.ingest.preview import preview

        spaces = None if env is None else _spaces(env, env_args)
        with report.waiting(f"reading the first rows of {source[0]}"):
            seen = preview(
                _lake(lake), source, dataset, format=form, options=options, spaces=spaces
            )
        report.print_result(seen.to_json(), preview_lines(seen))
        return
    if follow:
        follow_lines(
            report,
            _lake(lake),
            source,
            dataset,
            format=form,
            options=options,
            spaces=None if env is None else _spaces(env, env_args),
            flush_every_s=parse_duration(flush_every or "10s", "--flush-every"),
            stream=stream,
            readmit=readmit,
            **keys,
        )
        return
    for flag, value in (("--flush-every", flush_every), ("--stream", stream)):
        if value is not None:
            raise typer.BadParameter("requires --follow.", param_hint=flag)
    observation_space, action_space = (None, None) if env is None else _spaces(env, env_args)
    handle = _lake(lake)
    measurement = _SpanMeasurement(started) if profile else None
    with (
        nullcontext() if measurement is None else measurement.record(),
        report.progress(*_STAGES["hash"]) as progress,
    ):
        try:
            receipt = run(
                handle,
                source,
                dataset,
                format=form,
                options=options,
                observation_space=observation_space,
                action_space=action_space,
                on_invalid=on_invalid.value,
                on_progress=partial(_print_progress, progress),
                align=None if env is None else _alignment(env, env_args),
                readmit=readmit,
                **keys,
            )
        except NothingValidError as error:
            if not as_json:  # main() prints the checks with the error
                report.print_result({}, check_lines(error.checks))
            raise
    body, lines = receipt.to_json(), receipt_lines(receipt)
    if measurement is not None:
        from replaylake.datastore.lake.runs.bounds import measure_bounds

        links = measurement.build_profile()
        with report.waiting("measuring the bounds"):
            links = replace(links, links=measure_bounds(links.links, handle.storage))
        body["profile"] = links.to_json()
        lines = chain(lines, link_lines(links.links))
    report.print_result(body, lines)


class _SpanMeasurement:
    """Measures the spans of an ingest; what came before it, since the command began, is `start`."""

    def __init__(self, started: float) -> None:
        from replaylake.datastore.lake.runs.timings import ThreadTimings, Timings

        self._timings = Timings("process", started_at=started)
        self._threads = ThreadTimings(self._timings)
        self._timings.add("start", time.perf_counter() - started, items=0)

    @contextmanager
    def record(self) -> Iterator[None]:
        """Measure the spans in the block."""
        from replaylake.datastore.storage.spans import record_spans

        with record_spans(self._threads):
            yield

    def build_profile(self) -> ProcessProfile:
        """Return the profile from the beginning of the command until now."""
        from replaylake.datastore.lake.runs.run_profile import build_process_profile

        wall_s = time.perf_counter() - self._timings.started_at
        return build_process_profile(self._threads.merge(), wall_s)


def _repair(
    report: CommandOutput,
    lake: str,
    dataset: str,
    chosen: QuarantineSelection,
    fix: str | None,
    options: ReadOptions,
    spaces: tuple[Space, Space] | None,
    *,
    dry_run: bool,
) -> None:
    from replaylake.datastore.interchange.ingest.repair import repair
    from replaylake.datastore.lake.lake import open_lake

    handle = open_lake(lake).dataset(dataset)
    with report.waiting(f"reading the quarantine of {dataset}"):
        done = repair(
            handle, selection=chosen, fix=fix, options=options, spaces=spaces, dry_run=dry_run
        )
    report.print_result(done.to_json(), repair_lines(done))


def _split(columns: str | None) -> tuple[str, ...]:
    return () if columns is None else tuple(name.strip() for name in columns.split(","))


def _print_progress(progress: ProgressReport, now: IngestProgress) -> None:
    verb, unit = _STAGES[now.stage]
    progress.stage(verb, unit)
    if unit == "bytes":
        progress(now.num_bytes, now.total_bytes)
        return
    note = count(now.num_episodes, "episode") if now.num_episodes else ""
    share = now.num_bytes / now.total_bytes if now.total_bytes else None
    progress(now.num_steps, now.total_steps, note, share=share)


def _lake(url: str) -> Lake:
    """Open the lake, or return one that `ingest` makes once it has accepted the source."""
    from replaylake.datastore.lake.lake import Lake
    from replaylake.datastore.storage.locations import open_storage

    lake = Lake(open_storage(url))
    if lake.registry.exists():
        lake.registry.check()
    return lake


def _spaces(env: str, env_args: Mapping[str, Any]) -> tuple[Space, Space]:
    from replaylake.offline.environments.ids import spaces_of

    return spaces_of(env, env_args)


def _alignment(env: str, env_args: Mapping[str, Any]) -> Align:
    from replaylake.offline.evaluation.alignment import check_alignment

    return partial(check_alignment, env, env_args=env_args)
