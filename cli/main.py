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
from replaylake.cli.options import COMMON_OPTIONS, Invocation, name_options, to_usage_error
from replaylake.cli.output.command_output import escape_controls, print_json, reserve_stdout
from replaylake.datastore.errors import ConfigInvalidError, ExtraMissingError, ReplayLakeError
from replaylake.datastore.version import VERSION

_INTERRUPTED: Final = 130

# The headings of `replaylake --help`, each with its commands.
GROUPS: Final = {
    "Write data": ("ingest", "rollout", "feedback", "annotate"),
    "Read data": ("datasets", "sql", "lineage"),
    "Export data": ("export", "formats"),
    "Train and evaluate": (
        "train",
        "tune",
        "algorithms",
        "runs",
        "evaluate",
        "ope",
        "replay-decisions",
    ),
    "Manage and serve policies": ("policies", "serve"),
    "Maintain a lake": ("maintain", "fsck"),
}
# By the name at the top level, the whole name of the command that it is short for.
SHORT_FORMS: Final[dict[str, str]] = {}


class _Commands(TyperGroup):
    """The commands under their headings, and last the short forms."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(len(name) for name in self.commands)
        limit = formatter.width - width - 4
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [
                        (name.ljust(width), self.commands[name].get_short_help_str(limit))
                        for name in names
                    ]
                )
        with formatter.section("Short forms"):
            formatter.write_dl([(name.ljust(width), full) for name, full in SHORT_FORMS.items()])


class _Command(TyperCommand):
    """A command whose help has its own options first, then its panels, then the common options."""

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
        sections: dict[str, list[Any]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            sections.setdefault(_heading(parameter), []).append(parameter)
        sections[COMMON_OPTIONS] = sections.pop(COMMON_OPTIONS)
        for heading, parameters in sections.items():
            required_first = sorted(parameters, key=lambda one: not one.required)
            records = [_help_record(one, ctx) for one in required_first]
            if records_shown := [record for record in records if record is not None]:
                with formatter.section(heading):
                    formatter.write_dl(records_shown)


def _help_record(parameter: Any, ctx: Any) -> tuple[str, str] | None:
    """Return a parameter's line; of an argument without the Python type that Typer appends."""
    record: tuple[str, str] | None = parameter.get_help_record(ctx)
    if record is None or parameter.param_type_name != "argument":
        return record
    name, text = record
    return name.partition(" <")[0], text


def _heading(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return "Arguments"
    if parameter.name == "help":  # click adds it, and knows no panels
        return COMMON_OPTIONS
    return getattr(parameter, "rich_help_panel", None) or "Options"


# Plain help: rich's panels cost 0.1 s of start-up and say no more.
_SETTINGS: Final[dict[str, Any]] = {"rich_markup_mode": None, "no_args_is_help": True}
app = typer.Typer(
    help="Record and query episodes, train policies on them, evaluate and serve the policies.",
    epilog="Each command has --help with an example. docs/CLI.md describes all commands.",
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
    **_SETTINGS,
)
_feedback = typer.Typer(help="Join served decisions with rewards, or count them.", **_SETTINGS)
_datasets = typer.Typer(
    help="Work with datasets: list, show, diff, tag, copy, delete.", **_SETTINGS
)
_train = typer.Typer(help="Train a policy, offline or online.", **_SETTINGS)
_runs = typer.Typer(help="Work with training runs: list, show, diff, profile.", **_SETTINGS)
_policies = typer.Typer(
    help="Work with policies: list, show, promote, package, delete.", **_SETTINGS
)
_maintain = typer.Typer(help="Compact, trim and vacuum, together or one by one.", **_SETTINGS)


def _register(
    group: typer.Typer, name: str, function: Callable[..., None], *, has_short_form: bool = False
) -> None:
    """Add a command; its docstring is its help, and the example in it keeps its lines."""

    @functools.wraps(function)
    def command(**arguments: Any) -> None:
        with reserve_stdout():
            function(**arguments)

    text = inspect.getdoc(function) or ""
    text = text.replace("\nExample:\n", "\n\b\nExample:\n")
    group.command(name, help=text, cls=_Command)(command)
    if has_short_form:
        app.registered_commands.append(group.registered_commands[-1])
        (full,) = [known.name for known in app.registered_groups if known.typer_instance is group]
        SHORT_FORMS[name] = f"{full} {name}"


_register(app, "ingest", ingest.ingest)
_register(app, "rollout", rollout.rollout)
app.add_typer(_feedback, name="feedback")
_register(_feedback, "join", feedback.join_feedback)
_register(_feedback, "status", feedback.status)
_register(app, "annotate", annotate.annotate)
app.add_typer(_datasets, name="datasets")
_register(_datasets, "list", datasets.list_datasets, has_short_form=True)
_register(_datasets, "show", datasets.show, has_short_form=True)
_register(_datasets, "history", history.history, has_short_form=True)
_register(_datasets, "diff", diff.diff, has_short_form=True)
_register(_datasets, "tag", tag.tag)
_register(_datasets, "copy", copy.copy)
_register(_datasets, "delete", delete.delete)
_register(app, "sql", sql.sql)
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
_register(_runs, "diff", runs.diff_runs)
_register(_runs, "profile", profile_run.profile)
_register(app, "evaluate", evaluate.evaluate)
_register(app, "ope", ope.ope)
_register(app, "replay-decisions", replay_decisions.replay_decisions)
app.add_typer(_policies, name="policies")
_register(_policies, "list", policies.list_policies)
_register(_policies, "show", policies.show_policy)
_register(_policies, "history", policies.policy_history)
_register(_policies, "diff", policies.diff_policies)
_register(_policies, "promote", promote.promote, has_short_form=True)
_register(_policies, "rollback", promote.rollback, has_short_form=True)
_register(_policies, "note", policies.note_policy)
_register(_policies, "protect", policies.protect_policy)
_register(_policies, "unprotect", policies.unprotect_policy)
_register(_policies, "delete", policies.delete_policy)
_register(_policies, "package", package.package)
_register(app, "serve", serve.serve)
app.add_typer(_maintain, name="maintain")
_register(_maintain, "run", maintain.maintain)
_register(_maintain, "compact", compact.compact)
_register(_maintain, "trim", trim.trim)
_register(_maintain, "vacuum", vacuum.vacuum)
_register(_maintain, "retention", retention.retention)
_register(app, "fsck", fsck.fsck)


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
        parameter = error.parameter if isinstance(error, ReplayLakeError) else None
        said = {"kind": type(error).__name__, "message": message, "parameter": parameter}
        print_json({"error": said | getattr(error, "details", {})})
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
