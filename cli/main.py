"""The `replaylake` command: registers the verbs, and turns what they raise into exit codes.

Exit codes: 0; 1 an error of ours or in the user's data, one line on stderr; 2 wrong usage; 3 the
answer is no; 130 interrupted.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from replaylake.cli.commands import (
    algorithms,
    annotate,
    compact,
    copy,
    datasets,
    delete,
    diff,
    evaluate,
    export,
    feedback,
    formats,
    fsck,
    history,
    ingest,
    lineage,
    maintain,
    ope,
    package,
    policies,
    profile_run,
    promote,
    replay_decisions,
    retention,
    rollout,
    runs,
    serve,
    sql,
    tag,
    train,
    train_online,
    trim,
    tune,
    vacuum,
)
from replaylake.cli.commands import join_feedback as sessionise
from replaylake.cli.options import Invocation, name_options, to_usage_error
from replaylake.cli.output.command_output import escape_controls, print_json, reserve_stdout
from replaylake.datastore.errors import ConfigInvalidError, ExtraMissingError, ReplayLakeError
from replaylake.datastore.version import VERSION

_INTERRUPTED: Final = 130

# The headings of `replaylake --help`, each with its commands.
GROUPS: Final = {
    "Put episodes in": ("ingest", "rollout", "sessionise", "feedback", "annotate"),
    "Look at them": ("list", "show", "sql", "history", "diff", "tag", "lineage"),
    "Take them elsewhere": ("export", "formats"),
    "Learn and serve": (
        "train",
        "tune",
        "algorithms",
        "runs",
        "profile",
        "evaluate",
        "ope",
        "policies",
        "replay-decisions",
        "promote",
        "rollback",
        "package",
        "serve",
    ),
    "Keep the lake": (
        "maintain",
        "retention",
        "compact",
        "trim",
        "delete",
        "vacuum",
        "fsck",
        "copy",
    ),
}


class _Commands(TyperGroup):
    """The commands under their headings."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(len(name) for name in self.commands)
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [
                        (name.ljust(width), self.commands[name].get_short_help_str(64))
                        for name in names
                    ]
                )


class _Command(TyperCommand):
    """A command whose options stand under the headings that they name, the others first."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigInvalidError as error:
            options = {option for parameter in self.params for option in parameter.opts}
            usage = to_usage_error(error, options)
            if usage is None:
                raise
            usage.ctx = ctx
            raise usage from error

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[Any]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_argument = parameter.param_type_name == "argument"
                heading = getattr(parameter, "rich_help_panel", None)
                kind = "Arguments" if is_argument else heading or "Options"
                groups.setdefault(kind, []).append(record)
        # Lake, --json and the like are of every command: what is this one's own comes first.
        common = groups.pop("Options")
        ordered = {**groups, ("Of every command" if len(groups) > 1 else "Options"): common}
        for heading, records in ordered.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


# Plain help: rich's panels cost 0.1 s of start-up and say no more.
_SETTINGS: Final[dict[str, Any]] = {"rich_markup_mode": None, "no_args_is_help": True}
app = typer.Typer(
    help="A lake of episodes: record, query, learn offline, serve, and learn from what was served.",
    epilog="Each command has --help with an example. docs/CLI.md has them all.",
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
    **_SETTINGS,
)
_train = typer.Typer(help="Train a policy.", **_SETTINGS)
_feedback = typer.Typer(help="What became of what was served.", **_SETTINGS)
_tag = typer.Typer(help="Name versions of datasets.", **_SETTINGS)
_runs = typer.Typer(help="List, show and compare training runs.", **_SETTINGS)
_policies = typer.Typer(help="List, show, name and delete policies.", **_SETTINGS)


def _register(group: typer.Typer, name: str, function: Callable[..., None]) -> None:
    """Add a command; its docstring is its help, and the example in it keeps its lines."""

    @functools.wraps(function)
    def command(**arguments: Any) -> None:
        with reserve_stdout():
            function(**arguments)

    text = inspect.getdoc(function) or ""
    text = text.replace("\nExample:\n", "\n\b\nExample:\n")
    group.command(name, help=text, cls=_Command)(command)


_register(app, "ingest", ingest.ingest)
_register(app, "rollout", rollout.rollout)
_register(app, "sessionise", sessionise.join_feedback)
app.add_typer(_feedback, name="feedback")
_register(_feedback, "status", feedback.status)
_register(app, "annotate", annotate.annotate)
_register(app, "list", datasets.list_datasets)
_register(app, "show", datasets.show)
_register(app, "sql", sql.sql)
_register(app, "history", history.history)
_register(app, "diff", diff.diff)
app.add_typer(_tag, name="tag")
_register(_tag, "set", tag.set_tag)
_register(_tag, "list", tag.list_tags)
_register(_tag, "remove", tag.remove_tag)
_register(app, "lineage", lineage.lineage)
_register(app, "export", export.export)
_register(app, "formats", formats.formats)
app.add_typer(_train, name="train")
_register(_train, "offline", train.offline)
_register(_train, "online", train_online.online)
_register(app, "tune", tune.tune)
_register(app, "algorithms", algorithms.list_algorithms)
app.add_typer(_runs, name="runs")
_register(_runs, "list", runs.list_runs)
_register(_runs, "show", runs.show_run)
_register(_runs, "compare", runs.compare_runs)
_register(app, "profile", profile_run.profile)
_register(app, "evaluate", evaluate.evaluate)
_register(app, "ope", ope.ope)
app.add_typer(_policies, name="policies")
_register(_policies, "list", policies.list_policies)
_register(_policies, "show", policies.show_policy)
_register(_policies, "alias", policies.alias_policy)
_register(_policies, "history", policies.policy_history)
_register(_policies, "note", policies.note_policy)
_register(_policies, "protect", policies.protect_policy)
_register(_policies, "unprotect", policies.unprotect_policy)
_register(_policies, "delete", policies.delete_policy)
_register(app, "replay-decisions", replay_decisions.replay_decisions)
_register(app, "promote", promote.promote)
_register(app, "rollback", promote.rollback)
_register(app, "package", package.package)
_register(app, "serve", serve.serve)
_register(app, "maintain", maintain.maintain)
_register(app, "retention", retention.retention)
_register(app, "compact", compact.compact)
_register(app, "trim", trim.trim)
_register(app, "delete", delete.delete)
_register(app, "vacuum", vacuum.vacuum)
_register(app, "fsck", fsck.fsck)
_register(app, "copy", copy.copy)


def _print_version(value: bool) -> None:
    if value:
        print(f"replaylake {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    invocation = Invocation()
    try:
        code = _run(arguments, invocation)
        sys.stdout.flush()
    except ReplayLakeError as error:
        code = _fail(error, invocation)
    except BrokenPipeError:
        _close_stdout()
        code = 1
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except Exception as error:
        missing = _missing_extra(error)
        code = _fail(missing or error, invocation)
    if code == _INTERRUPTED:
        print("interrupted", file=sys.stderr)
    return code


def _run(arguments: Sequence[str] | None, invocation: Invocation) -> int:
    command = typer.main.get_command(app)
    try:
        command(args=arguments, prog_name="replaylake", obj=invocation)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return 0


def _fail(error: Exception, invocation: Invocation) -> int:
    if invocation.debug:
        traceback.print_exception(error)
    message = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if isinstance(error, ReplayLakeError):
        message = name_options(message)
    else:
        message = (
            f"{type(error).__name__}: {message}. This is a fault in ReplayLake or a library below "
            "it: run again with --debug for the traceback."
        )
    print(f"error: {escape_controls(message)}", file=sys.stderr)
    if invocation.as_json:
        details = getattr(error, "details", {})
        print_json({"error": {"kind": type(error).__name__, "message": message, **details}})
    return 1


def _missing_extra(error: Exception) -> ExtraMissingError | None:
    """Return the error that names the extra, if an optional dependency was not found."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    # Here, as it imports the libraries of mail, which every --help would wait for.
    from importlib import metadata

    module = error.name.partition(".")[0]
    for requirement in metadata.requires("replaylake") or []:
        match = re.match(r"([\w.-]+).*\bextra == ['\"](\w+)['\"]", requirement)
        if match and re.sub(r"[-.]", "_", match.group(1)).lower() == module:
            missing = ExtraMissingError(
                f"this command needs {module}, which is not installed. "
                f"Install it: pip install 'replaylake[{match.group(2)}]'."
            )
            missing.__cause__ = error
            return missing
    return None


def _close_stdout() -> None:
    """Let the interpreter's last flush go nowhere: the reader of our output has left."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
