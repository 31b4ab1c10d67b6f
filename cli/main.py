"""The `replaylake` command: registers the verbs, and turns what they raise into exit codes.

Exit codes: 0; 1 an error of ours or in the user's data, one line on stderr; 2 wrong usage; 3 the
answer is no; 130 interrupted.
"""

from __future__ import annotations

import atexit
import copy
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from replaylake.cli.commands import (
    algorithms,
    annotate,
    columns,
    compact,
    completion,
    datasets,
    delete,
    diff,
    doctor,
    engine,
    evaluate,
    explore,
    export,
    feedback,
    formats,
    fsck,
    gateway,
    history,
    import_policy,
    ingest,
    lineage,
    maintain,
    ope,
    package,
    policies,
    profile_run,
    promote,
    quarantine,
    register_policy,
    replay_decisions,
    retention,
    rollout,
    runs,
    score,
    serve,
    set_reference,
    split,
    sql,
    tag,
    train,
    train_language,
    train_online,
    trim,
    tune,
    vacuum,
    webhooks,
)
from replaylake.cli.commands.copy import copy as copy_dataset
from replaylake.cli.options import COMMON_OPTIONS, Invocation, name_options, to_usage_error
from replaylake.cli.output.command_output import escape_controls, print_json, reserve_stdout
from replaylake.datastore.errors import ConfigInvalidError, ExtraMissingError, ReplayLakeError
from replaylake.datastore.version import VERSION

_INTERRUPTED: Final = 130
# Typer has its own copy of click, and of its errors exports none but the heirs of this one.
_UsageError: Final[Any] = typer.BadParameter.__bases__[0]

# The headings of `replaylake --help`, each with its commands.
GROUPS: Final = {
    "Write data": ("ingest", "quarantine", "rollout", "gateway", "feedback", "annotate", "score"),
    "Read data": ("datasets", "explore", "sql", "lineage"),
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
    "Manage and serve policies": ("policies", "serve", "engine", "webhooks"),
    "Maintain a lake": ("maintain", "fsck"),
    "Set up": ("doctor", "completion"),
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
_quarantine = typer.Typer(help="Work with rejected rows: list, show, clear.", **_SETTINGS)
_feedback = typer.Typer(help="Join served decisions with rewards, or count them.", **_SETTINGS)
_datasets = typer.Typer(
    help="Work with datasets: list, show, tag, merge, split, delete.", **_SETTINGS
)
_train = typer.Typer(help="Train a policy, offline or online, or a language model.", **_SETTINGS)
_runs = typer.Typer(help="Work with training runs: list, show, diff, profile.", **_SETTINGS)
_policies = typer.Typer(
    help="Work with policies: list, show, promote, package, delete.", **_SETTINGS
)
_webhooks = typer.Typer(help="Report new policy versions and moved aliases to URLs.", **_SETTINGS)
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
app.add_typer(_quarantine, name="quarantine")
_register(_quarantine, "list", quarantine.list_rows)
_register(_quarantine, "show", quarantine.show)
_register(_quarantine, "clear", quarantine.clear)
_register(app, "rollout", rollout.rollout)
_register(app, "gateway", gateway.gateway)
app.add_typer(_feedback, name="feedback")
_register(_feedback, "join", feedback.join_feedback)
_register(_feedback, "status", feedback.status)
_register(app, "annotate", annotate.annotate)
_register(app, "score", score.score)
app.add_typer(_datasets, name="datasets")
_register(_datasets, "list", datasets.list_datasets, has_short_form=True)
_register(_datasets, "show", datasets.show, has_short_form=True)
_register(_datasets, "history", history.history, has_short_form=True)
_register(_datasets, "diff", diff.diff, has_short_form=True)
_register(_datasets, "tag", tag.tag)
_register(_datasets, "copy", copy_dataset)
_register(_datasets, "merge", split.merge)
_register(_datasets, "split", split.split)
_register(_datasets, "rename-column", columns.rename_column)
_register(_datasets, "drop-column", columns.drop_column)
_register(_datasets, "set-reference", set_reference.set_reference)
_register(_datasets, "delete", delete.delete)
_register(app, "explore", explore.explore)
_register(app, "sql", sql.sql)
_register(app, "lineage", lineage.lineage)
_register(app, "export", export.export)
_register(app, "formats", formats.formats)
app.add_typer(_train, name="train")
_register(_train, "offline", train.offline)
_register(_train, "online", train_online.online)
_register(_train, "language", train_language.language)
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
_register(_policies, "import", import_policy.import_policy)
_register(_policies, "register", register_policy.register_policy)
_register(_policies, "package", package.package)
_register(app, "serve", serve.serve)
_register(app, "engine", engine.engine)
app.add_typer(_webhooks, name="webhooks")
_register(_webhooks, "add", webhooks.add_webhook)
_register(_webhooks, "list", webhooks.list_webhooks)
_register(_webhooks, "remove", webhooks.remove_webhook)
_register(_webhooks, "test", webhooks.send_example)
_register(_webhooks, "deliver", webhooks.deliver_webhooks)
app.add_typer(_maintain, name="maintain")
_register(_maintain, "run", maintain.maintain)
_register(_maintain, "compact", compact.compact)
_register(_maintain, "trim", trim.trim)
_register(_maintain, "vacuum", vacuum.vacuum)
_register(_maintain, "retention", retention.retention)
_register(app, "fsck", fsck.fsck)
_register(app, "doctor", doctor.doctor)
_register(app, "completion", completion.completion)


def _print_version(value: bool) -> None:
    if not value:
        return
    from replaylake.cli.installation import describe_platform, find_extras, find_packages

    print(f"replaylake {VERSION}")
    print(describe_platform())
    print(", ".join(f"{package.name} {package.version}" for package in find_packages()))
    extras = {extra: all(p.version for p in find_packages(extra)) for extra in find_extras()}
    for what, is_whole in (("extras", True), ("extras not installed", False)):
        if names := [extra for extra, whole in extras.items() if whole is is_whole]:
            print(f"{what}: {', '.join(names)}")
    raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and what is installed, and exit.",
        ),
    ] = False,
) -> None: ...


def run() -> NoReturn:
    """Run the command of the command line, and end the process.

    It ends after the last of its threads and exit handlers: the interpreter would go on to destroy
    all modules, which takes 0.5 s with torch and 1.5 s with Ray, in an order in which DuckDB's
    binding prints some 40 lines (Ray 2.60, DuckDB 2.0).
    """
    code = 1
    # Handlers run in the reverse order: this one last.
    atexit.register(lambda: _end_process(code))
    code = main()
    sys.exit(code)


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


@functools.cache
def _build_commands(name: str) -> Any:
    """Build the command or group of this name, or all of them where there is none of it.

    Typer derives each command from its function's signature: 0.24 s for all of them, which every
    start of the program and every call of `main` would pay (2 slow cores, 2026-11-25).
    """
    part = copy.copy(app)
    part.registered_commands = [one for one in app.registered_commands if one.name == name]
    part.registered_groups = [one for one in app.registered_groups if one.name == name]
    is_known = part.registered_commands or part.registered_groups
    return typer.main.get_command(part if is_known else app)


def _run(arguments: Sequence[str] | None, invocation: Invocation) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if "_REPLAYLAKE_COMPLETE" in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    command = _build_commands(given[0] if given else "")
    try:
        code = command(
            args=arguments, prog_name="replaylake", obj=invocation, standalone_mode=False
        )
    except _UsageError as error:
        error.show()
        if "--json" in given:
            parameter = getattr(error, "param", None)
            name = getattr(error, "param_hint", None) or getattr(parameter, "opts", [None])[0]
            said = {"kind": "UsageError", "message": error.format_message(), "parameter": name}
            print_json({"error": said})
        return int(error.exit_code)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return code if isinstance(code, int) else 0


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
    details = getattr(error, "details", {})
    if "excerpt" in details:
        print(escape_controls(details["excerpt"]), file=sys.stderr)
    if invocation.as_json:
        parameter = error.parameter if isinstance(error, ReplayLakeError) else None
        said = {"kind": type(error).__name__, "message": message, "parameter": parameter}
        print_json({"error": said | details})
    return 1


def _missing_extra(error: Exception) -> ExtraMissingError | None:
    """Return the error that names the extra, if an optional dependency was not found."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    # Here, as it imports the libraries of mail, which every --help would wait for.
    from replaylake.cli.installation import extra_of

    module = error.name.partition(".")[0]
    if (extra := extra_of(module)) is None:
        return None
    missing = ExtraMissingError(
        f"this command needs {module}, which is not installed. "
        f"Run: pip install 'replaylake[{extra}]'."
    )
    missing.__cause__ = error
    return missing


def _close_stdout() -> None:
    """Let the interpreter's last flush go nowhere: the reader of our output has left."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end_process(code: int) -> NoReturn:
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
