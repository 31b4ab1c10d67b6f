"""`replaylake webhooks`: URLs that are notified of new policy versions, moved aliases and tags."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
    parse_duration,
)
from replaylake.cli.output.command_output import CommandOutput, count, result_stream, table_lines
from replaylake.cli.stop_signals import stop_on_signals

if TYPE_CHECKING:
    from replaylake.datastore.maintenance.webhook_delivery import DeliveryResult

_NEGATIVE: Final = 3
_COLUMNS: Final = ("webhook", "url", "events", "status", "delivered", "attempts", "last_error")

NameArgument = Annotated[
    str,
    typer.Argument(metavar="NAME", show_default=False, help="Name of the webhook."),
]
AllowPrivateOption = Annotated[
    bool,
    typer.Option(
        "--allow-private",
        help="Also send to loopback and private addresses, and by plain http.",
    ),
]


def add_webhook(
    name: NameArgument,
    url: Annotated[
        str,
        typer.Argument(metavar="URL", show_default=False, help="URL that receives the requests."),
    ],
    events: Annotated[
        list[str] | None,
        typer.Option(
            "--event",
            metavar="EVENT",
            show_default=False,
            help="Event to send, for example model_version.created. Repeatable; by default all.",
        ),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            "--secret-file",
            metavar="FILE",
            show_default=False,
            help="File with the secret that signs requests. By default, a secret is generated and "
            "printed once.",
        ),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Add a webhook.

    `webhooks deliver` sends it the events from now on.

    Example:
      replaylake webhooks add ci https://ci.example.com/hooks --event model_version_alias.created
    """
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    secret = None if secret_file is None else _read_secret(secret_file)
    added = open_lake(lake).webhooks.add(name, url, events=events or (), secret=secret)
    webhook = added.webhook
    body: dict[str, Any] = {
        "webhook": webhook.name,
        "url": webhook.url,
        "events": list(webhook.events),
    }
    lines = [
        f"added webhook {webhook.name}: {count(len(webhook.events), 'event')} to {webhook.url}"
    ]
    if secret is None:
        body["secret"] = added.secret
        lines.append(f"secret, which is not shown again: {added.secret}")
    report.print_result(body, lines)


def list_webhooks(
    lake: LakeOption = DEFAULT_LAKE, as_json: JsonOption = False, debug: DebugOption = False
) -> None:
    """List the webhooks and the state of their delivery.

    Example:
      replaylake webhooks list
    """
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    webhooks = open_lake(lake).webhooks
    rows: list[dict[str, Any]] = []
    for webhook in webhooks.list():
        state = webhooks.state(webhook.name)
        rows.append(
            {
                "webhook": webhook.name,
                "url": webhook.url,
                "events": list(webhook.events),
                "status": state.status,
                "created_at": _time(webhook.created_ms),
                "delivered": state.num_delivered,
                "given_up": state.num_given_up,
                "unreadable": state.num_unreadable,
                "attempts": state.attempts,
                "next_attempt_at": _time(state.next_attempt_ms),
                "last_attempt_at": _time(state.last_attempt_ms),
                "last_status": state.last_status,
                "last_error": state.last_error,
            }
        )
    if not rows:
        report.print_message(f"no webhooks in {lake}: add one with `replaylake webhooks add`")
    texts = [
        {
            **row,
            "events": ", ".join(row["events"]),
            "last_error": row["last_error"] or (row["attempts"] and row["last_status"]) or "",
        }
        for row in rows
    ]
    report.print_result({"webhooks": rows}, table_lines(texts, _COLUMNS) if rows else [])


def remove_webhook(
    name: NameArgument,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Remove a webhook and its secret.

    Example:
      replaylake webhooks remove ci
    """
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    removed = open_lake(lake).webhooks.remove(name)
    body = {"webhook": removed.name, "url": removed.url}
    report.print_result(body, [f"removed webhook {removed.name}, which was {removed.url}"])


def send_example(
    name: NameArgument,
    event: Annotated[
        str | None,
        typer.Option(
            "--event",
            metavar="EVENT",
            show_default=False,
            help="Event to send an example of; by default the first of the webhook's events.",
        ),
    ] = None,
    allow_private: AllowPrivateOption = False,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Send an example event.

    Exits with 3 if the receiver does not answer with 2xx.

    Example:
      replaylake webhooks test ci --event model_version.created
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.maintenance.webhook_delivery import try_webhook

    report = CommandOutput(as_json)
    attempt = try_webhook(open_lake(lake), name, event, allow_private=allow_private)
    result = attempt.error or f"answered {attempt.status}"
    verdict = "delivered" if attempt.is_delivered else "not delivered"
    body = {
        "webhook": name,
        "delivered": attempt.is_delivered,
        "status": attempt.status,
        "error": attempt.error,
    }
    report.print_result(body, [f"{name}: {verdict}, {result}"])
    if not attempt.is_delivered:
        raise typer.Exit(_NEGATIVE)


def deliver_webhooks(
    every: Annotated[
        str | None,
        typer.Option(
            "--every",
            metavar="TIME",
            show_default=False,
            help="Repeat at this interval, for example 5s, until SIGINT or SIGTERM.",
        ),
    ] = None,
    allow_private: AllowPrivateOption = False,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Send the events that are due.

    Each event is sent until it is acknowledged, for three days. Exits with 3 if events are
    left that could not be delivered.

    Example:
      replaylake webhooks deliver
      replaylake webhooks deliver --every 5s
    """
    from replaylake.datastore.errors import StorageError
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.maintenance.webhook_delivery import deliver_webhooks as deliver

    report = CommandOutput(as_json)
    every_s = None if every is None else parse_duration(every, "--every")
    store = open_lake(lake)
    if every_s is None:
        results = deliver(store, allow_private=allow_private)
        _print_results(report, results)
        raise typer.Exit(_NEGATIVE if any(one.is_waiting for one in results) else 0)
    if every_s <= 0:
        raise typer.BadParameter("found 0s, expected more.", param_hint="--every")
    with stop_on_signals(report) as stop:
        while not stop.is_set():
            try:
                results = deliver(store, allow_private=allow_private, stop=stop)
            except StorageError as error:
                report.print_message(f"error: {error}; the next round tries again")
            else:
                if changed := [one for one in results if one.num_delivered or one.num_given_up]:
                    _print_results(report, changed)
                    result_stream().flush()
            stop.wait(every_s)


def _print_results(report: CommandOutput, results: list[DeliveryResult]) -> None:
    lines = []
    for one in results:
        line = f"{one.name}: {count(one.num_delivered, 'event')} delivered"
        if one.num_given_up:
            line += f", {one.num_given_up:,} given up"
        if one.is_waiting:
            line += f", some waiting ({one.last_error or f'answered {one.last_status}'})"
        lines.append(line)
    report.print_result({"webhooks": [one.to_json() for one in results]}, lines)


def _read_secret(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path}: {error}", param_hint="--secret-file") from error


def _time(at_ms: int | None) -> str | None:
    if at_ms is None:
        return None
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="seconds")
