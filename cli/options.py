"""Options: those that commands share, and the parsing of `key=value`."""

from __future__ import annotations

import getpass
import json
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from replaylake.cli.name_completion import complete_datasets, complete_policies
from replaylake.datastore.errors import ConfigInvalidError

DEFAULT_LAKE: Final = "lake"
# The last heading of each command's --help, with the options that all commands have.
COMMON_OPTIONS: Final = "Common options"
# How `datasets delete`, `quarantine clear`, `maintain trim` and `maintain vacuum` end without
# --yes.
NOTHING_CHANGED: Final = "nothing was changed; use --yes to delete"
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
# As a text, False would be true.
_PYTHON_WORDS: Final = {"True": True, "False": False, "None": None}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?")


@dataclass
class Invocation:
    """What main() has to know of a command that failed: how to report it."""

    as_json: bool = False
    debug: bool = False


def _remember_option(context: typer.Context, parameter: typer.CallbackParam, value: bool) -> bool:
    invocation = context.find_root().obj
    if isinstance(invocation, Invocation) and parameter.name is not None:
        setattr(invocation, parameter.name, value)
    return value


LakeOption = Annotated[
    str,
    typer.Option(
        "--lake",
        envvar="REPLAYLAKE_LAKE",
        metavar="LAKE",
        rich_help_panel=COMMON_OPTIONS,
        help="Path or URL of the lake (for example s3://bucket/prefix).",
    ),
]
ByOption = Annotated[
    str | None,
    typer.Option(
        "--by",
        metavar="NAME",
        help="Name of the person responsible, for the record; by default the user name on this "
        "machine.",
    ),
]
NoteOption = Annotated[
    str | None, typer.Option("--note", metavar="TEXT", help="Reason, for the record.")
]
# Eager, so that they are known when another option's value turns out to be wrong.
JsonOption = Annotated[
    bool,
    typer.Option(
        "--json",
        callback=_remember_option,
        is_eager=True,
        rich_help_panel=COMMON_OPTIONS,
        help="Print the result as one JSON object.",
    ),
]
DebugOption = Annotated[
    bool,
    typer.Option(
        "--debug",
        callback=_remember_option,
        is_eager=True,
        rich_help_panel=COMMON_OPTIONS,
        help="Print the traceback of an error.",
    ),
]
# Of the commands that listen: who may connect.
ACCESS_OPTIONS: Final = "Access options"
RolesFileOption = Annotated[
    Path | None,
    typer.Option(
        "--roles-file",
        rich_help_panel=ACCESS_OPTIONS,
        metavar="FILE",
        help="TOML file with the role table: hashes of tokens, and their roles by dataset.",
    ),
]
InsecureOption = Annotated[
    bool,
    typer.Option(
        "--insecure",
        rich_help_panel=ACCESS_OPTIONS,
        help="Allow other machines to connect without tokens.",
    ),
]
AllowedHostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-host",
        rich_help_panel=ACCESS_OPTIONS,
        metavar="HOST",
        help="Host name to answer to, besides loopback and the listening address. Repeatable.",
    ),
]
AccessLogOption = Annotated[
    str | None,
    typer.Option(
        "--access-log",
        rich_help_panel=ACCESS_OPTIONS,
        metavar="FILE|-",
        help="File for one JSON line per request; - for standard output.",
    ),
]
DatasetsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="DATASET",
        autocompletion=complete_datasets,
        show_default=False,
        help="Datasets; by default all, and files that crashes left in the lake itself.",
    ),
]
EnvArgsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--env-arg",
        metavar="KEY=VALUE",
        help="Argument of the environment, parsed as JSON, else as text. Repeatable.",
    ),
]
PolicyArgument = Annotated[
    str,
    typer.Argument(
        metavar="POLICY",
        autocompletion=complete_policies,
        show_default=False,
        help="Policy, as name:version, name@alias, or name (its champion if set, else its "
        "newest version).",
    ),
]


# The options of what the library calls otherwise; of several, one command has one.
_OPTIONS: Final = {
    "allowed_hosts": ("--allowed-host",),
    "api_key": ("--api-key-env",),
    "action_range": ("--action-low and --action-high",),
    "as_name": ("--as",),
    "body_bytes": ("--max-body",),
    "body_timeout_s": ("--body-timeout",),
    "cache_max_bytes": ("--cache-max",),
    "deadline_s": ("--deadline",),
    "discount": ("--gamma",),
    "env_args": ("--env-arg",),
    "estimators": ("--estimator",),
    "events": ("--event",),
    "follow_s": ("--follow",),
    "files": ("--file",),
    "format": ("--format", "--to"),
    "join_every_s": ("--join-every",),
    "keep_versions_s": ("--keep-versions",),
    "mapping": ("--map",),
    "max_age_s": ("--max-age",),
    "options": ("--judge-option",),
    "older_than_s": ("--older-than",),
    "reasons": ("--reason",),
    "reward_unknown": ("--no-reward",),
    "retry_s": ("--retry",),
    "secret": ("--secret-file",),
    "roles_file": ("--roles-file", "--access"),
    "target_bytes": ("--target", "--target-shard"),
    "timeout_s": ("--timeout",),
}
# Parameters whose option has their own name.
_SAME_NAMES: Final = (
    "access_log",
    "act_token_file",
    "action_scale",
    "add",
    "address",
    "admin_token_file",
    "again",
    "allow_private",
    "agents",
    "algorithm",
    "at",
    "behavior_prob",
    "canary",
    "decimal",
    "delimiter",
    "env",
    "env_runner",
    "event",
    "episode_by",
    "explore",
    "feedback_token_file",
    "expert",
    "fill",
    "fix",
    "force",
    "gaps",
    "holdout",
    "host",
    "ignore_masks",
    "incomplete",
    "insecure",
    "k",
    "label",
    "lake",
    "late",
    "learner_gpus",
    "learners",
    "ids",
    "into",
    "log_to",
    "max_categories",
    "max_requests_per_second",
    "max_steps",
    "measure",
    "mix",
    "mlflow_source",
    "name",
    "on",
    "on_conflict",
    "on_invalid",
    "on_log_failure",
    "open_ends",
    "order_by",
    "output",
    "path_prefix",
    "port",
    "random",
    "read_only",
    "readmit",
    "repair",
    "replace",
    "revision",
    "reward",
    "reward_scale",
    "set",
    "sha256",
    "stream",
    "success",
    "target_prob",
    "task",
    "time_limit",
    "timezone",
    "to",
    "to_version",
    "unique",
    "unseen",
    "where",
    "where_steps",
    "worker_cpus",
    "workers",
)
_FLAGS: Final = _OPTIONS | {name: ("--" + name.replace("_", "-"),) for name in _SAME_NAMES}
_PARAMETER: Final = re.compile(r"`(\w+)`")


def user_name() -> str | None:
    """Return the name of who runs this; None where the system has none for them."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container's user without an entry
        return None


def name_options(text: str) -> str:
    """Return a text of the library with `parameters` as the options that set them."""
    return _PARAMETER.sub(
        lambda found: _FLAGS[found[1]][0] if found[1] in _FLAGS else found[0], text
    )


def to_usage_error(error: ConfigInvalidError, options: Set[str]) -> typer.BadParameter | None:
    """Return a refused value as wrong usage (exit 2) if one of the command's options set it."""
    if error.parameter is None:
        return None
    flags = _FLAGS.get(error.parameter, ("--" + error.parameter.replace("_", "-"),))
    flag = next((flag for flag in flags if options & set(flag.split(" and "))), None)
    if flag is None:
        return None
    # The hint says it: `training: updates: found 0` is left with what was found.
    prefix = re.match(rf"(?:[^:`]+: )?{re.escape(error.parameter)}: ", str(error))
    message = str(error)[prefix.end() :] if prefix else str(error)
    return typer.BadParameter(name_options(message), param_hint=flag)


def parse_pairs(texts: Sequence[str], option: str, form: str = "key=value") -> dict[str, str]:
    """Split `key=value` texts. Raises: typer.BadParameter (exit 2) for a text of another form."""
    pairs: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise typer.BadParameter(f"found {text!r}, expected {form}.", param_hint=option)
        if key.strip() in pairs:
            raise typer.BadParameter(f"found {key.strip()!r} twice.", param_hint=option)
        pairs[key.strip()] = value.strip()
    return pairs


def parse_env_args(texts: Sequence[str] | None, *, has_env: bool = True) -> dict[str, Any]:
    """Return what --env-arg says: `speed=2`, `goal=[1, 2]`, `is_slippery=false`, `map_name=8x8`.

    A value that is not JSON is a text, but for Python's True, False and None. has_env: whether an
    environment was named. Raises: typer.BadParameter (exit 2).
    """
    if texts and not has_env:
        raise typer.BadParameter("requires --env.", param_hint="--env-arg")
    pairs = parse_pairs(texts or [], "--env-arg", "KEY=VALUE")
    return {key: _json_or_text(value) for key, value in pairs.items()}


def _json_or_text(text: str) -> Any:
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def parse_duration(text: str, option: str) -> float:
    """Return the seconds of `30s`, `15m`, `1h` or `7d`. Raises: typer.BadParameter (exit 2)."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(
            f"found {text!r}, expected a number and s, m, h or d, such as 15m or 7d.",
            param_hint=option,
        )
    return float(match.group(1)) * _SECONDS[match.group(2)]


def parse_size(text: str, option: str) -> int:
    """Return the bytes of `20GB`, `128MiB` or `1000`. Raises: typer.BadParameter (exit 2)."""
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None:
        raise typer.BadParameter(
            f"found {text!r}, expected a number of bytes, such as 20GB or 128MiB.",
            param_hint=option,
        )
    base = 1024 if match.group(3) else 1000
    return int(float(match.group(1)) * base ** " kmgt".index(match.group(2) or " "))
