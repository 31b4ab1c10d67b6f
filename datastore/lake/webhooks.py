"""Webhooks: URLs that are notified of changes to policies, aliases and tags.

The lake's log is the queue: its commits are the events, in order, and each webhook has a position
in it, up to which they were delivered. Entries of the log, beside policies and aliases:

    webhook/<name>          URL, events, and the id that names the secret's file
    webhook-state/<name>    position in the log, attempts for the next event, and counts

Events and their data have the names and fields of MLflow's webhooks, so that receivers of MLflow's
webhooks need no change. MLflow has no `model_version.deleted` and no events of dataset tags.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from replaylake.datastore.errors import (
    AlreadyExistsError,
    CommitConflictError,
    ConfigInvalidError,
    NotFoundError,
    StorageError,
)
from replaylake.datastore.lake.policies.entries import now_ms
from replaylake.datastore.names import LAKE_ROOT, check_alias, new_ulid
from replaylake.datastore.storage.log.commit_file import Intent
from replaylake.datastore.storage.log.commit_log import CommitLog
from replaylake.datastore.storage.log.state import Change, LogState
from replaylake.datastore.storage.seals import read_json, seal_json
from replaylake.datastore.storage.storage import Storage

# Each event with example data, for test requests.
EVENTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "registered_model.created": {"name": "example", "tags": {}, "description": None},
    "model_version.created": {
        "name": "example",
        "version": "1",
        "source": "_lake/policies/example/01J00000000000000000000000",
        "run_id": "01J00000000000000000000000",
        "tags": {},
        "description": None,
    },
    "model_version.deleted": {"name": "example", "version": "1", "by": "ada"},
    "model_version_tag.set": {
        "name": "example",
        "version": "1",
        "key": "note",
        "value": "an example",
    },
    "model_version_tag.deleted": {"name": "example", "version": "1", "key": "protected"},
    "model_version_alias.created": {
        "name": "example",
        "alias": "champion",
        "version": "2",
        "previous_version": "1",
        "kind": "promote",
        "by": "ada",
        "forced": False,
    },
    "dataset_tag.set": {"name": "example", "tag": "golden", "version": "12"},
    "dataset_tag.deleted": {"name": "example", "tag": "golden"},
}
ACTIVE: Final = "active"
DISABLED: Final = "disabled"
_MIN_SECRET_CHARS: Final = 16
_MAX_URL_CHARS: Final = 2048
# Commits read from the log at once.
_CHUNK: Final = 64


@dataclass(frozen=True)
class Webhook:
    """A URL and the events that it receives. id: unique to this registration."""

    name: str
    url: str
    events: tuple[str, ...]
    created_ms: int
    id: str


@dataclass(frozen=True)
class WebhookState:
    """The state of a webhook's delivery.

    version and index: the next event is at `index` of the events of that version of the lake's log,
    or in a later version. attempts, first_attempt_ms, next_attempt_ms: of that next event. status:
    `disabled` after the receiver answered 410. num_given_up: events that were not delivered in
    time; num_unreadable: commits that the log no longer has. Times are ms since 1970.
    """

    version: int
    index: int = 0
    status: str = ACTIVE
    attempts: int = 0
    first_attempt_ms: int | None = None
    next_attempt_ms: int | None = None
    last_attempt_ms: int | None = None
    last_status: int | None = None
    last_error: str | None = None
    num_delivered: int = 0
    num_given_up: int = 0
    num_unreadable: int = 0


@dataclass(frozen=True)
class Event:
    """A change by a commit of the lake's log. version and index: its position in the log."""

    kind: str
    data: Mapping[str, Any]
    version: int
    index: int
    at_ms: int


@dataclass(frozen=True)
class AddedWebhook:
    """A new webhook with its secret, which is returned only once."""

    webhook: Webhook
    secret: str = field(repr=False)


class Webhooks:
    """The webhooks of one lake."""

    def __init__(self, storage: Storage, log: CommitLog) -> None:
        self._storage, self._log = storage, log

    def add(
        self, name: str, url: str, *, events: Sequence[str] = (), secret: str | None = None
    ) -> AddedWebhook:
        """Add a webhook; it receives the events from now on.

        events: by default all of EVENTS. secret: the key that signs requests, at least 16
        characters; by default a generated one. Raises: InvalidNameError, ConfigInvalidError;
        AlreadyExistsError for a name that is taken.
        """
        check_alias(name)
        _check_url(url)
        chosen = _check_events(events)
        secret = secrets.token_urlsafe(32) if secret is None else _check_secret(secret)
        webhook = Webhook(name, url, chosen, now_ms(), new_ulid())

        def build(state: LogState) -> Intent:
            intent = Intent(f"webhook/{webhook.id}", 0, "ADD WEBHOOK")
            if _key(name) in state.entries and intent.transaction not in state.transactions:
                raise AlreadyExistsError(
                    f"webhook {name}: found one of that name, expected a new name. Remove it "
                    "first, or choose another name."
                )
            entries: dict[str, str | None] = {
                _key(name): json.dumps(asdict(webhook)),
                _state_key(name): json.dumps(asdict(WebhookState(state.version + 1))),
            }
            return Intent(f"webhook/{webhook.id}", 0, "ADD WEBHOOK", entries=entries)

        build(self._log.newest())  # refuses a taken name before the secret is written
        # Before the commit, so that every process that sees the webhook finds its secret.
        sealed = seal_json({"secret": secret})
        self._storage.put_if_absent(_secret_path(webhook), sealed, private=True)
        try:
            self._log.commit(build)
        except AlreadyExistsError:
            self._storage.delete([_secret_path(webhook)])
            raise
        return AddedWebhook(webhook, secret)

    def remove(self, name: str) -> Webhook:
        """Remove a webhook and its secret. Raises: NotFoundError."""
        webhook = self.get(name)
        producer = f"webhook/{new_ulid()}"

        def build(state: LogState) -> Intent:
            entries = {_key(name): None, _state_key(name): None}
            return Intent(producer, 0, "REMOVE WEBHOOK", entries=entries)

        self._log.commit(build)
        self._storage.delete([_secret_path(webhook)])
        return webhook

    def get(self, name: str) -> Webhook:
        """Return a webhook. Raises: NotFoundError."""
        state = self._log.newest()
        text = state.entries.get(_key(name))
        if text is None:
            known = ", ".join(webhook.name for webhook in self.list())
            raise NotFoundError(
                f"webhook {name}: found none of that name, expected one of {known or 'none'}. "
                "Add it first."
            )
        return _read_webhook(text)

    def list(self) -> list[Webhook]:
        """Return the webhooks, by name."""
        return [
            _read_webhook(text)
            for key, text in sorted(self._log.newest().entries.items())
            if key.startswith("webhook/")
        ]

    def secret(self, webhook: Webhook) -> str:
        """Return the secret of a webhook.

        Raises: NotFoundError if its file is missing, StorageError if it is damaged.
        """
        data = self._storage.get(_secret_path(webhook))
        if data is None:
            raise NotFoundError(
                f"webhook {webhook.name}: found no secret in {_secret_path(webhook)}, expected "
                "one. Remove the webhook and add it again."
            )
        try:
            secret: str = read_json(data)["secret"]
        except ValueError as error:
            raise StorageError(
                f"{_secret_path(webhook)}: found {error}, expected the secret of webhook "
                f"{webhook.name}. Remove the webhook and add it again."
            ) from error
        return secret

    def state(self, name: str) -> WebhookState:
        """Return the state of a webhook's delivery. Raises: NotFoundError."""
        text = self._log.newest().entries.get(_state_key(name))
        if text is None:
            self.get(name)
            raise NotFoundError(
                f"webhook {name}: found no delivery state, expected one. Remove it, then add it "
                "again."
            )
        return WebhookState(**json.loads(text))

    def save_state(self, webhook: Webhook, before: WebhookState, after: WebhookState) -> bool:
        """Record a state; False if the webhook was removed or another process has recorded one."""
        key = _state_key(webhook.name)
        texts = json.dumps(asdict(before)), json.dumps(asdict(after))
        expected = {key: texts[0], _key(webhook.name): json.dumps(asdict(webhook))}
        producer = f"webhook-state/{new_ulid()}"
        try:
            self._log.commit(
                lambda state: Intent(
                    producer, 0, "DELIVER WEBHOOK", entries={key: texts[1]}, expected=expected
                )
            )
        except CommitConflictError:
            return False
        return True

    def read_events(
        self, version: int, index: int = 0
    ) -> Iterator[tuple[int, Sequence[Event] | None]]:
        """Yield (version, events) of the lake's commits from `version` on.

        events is None for a commit that the log no longer has. Events of the first commit before
        `index` are left out.
        """
        newest = self._log.newest().version
        for begin in range(version, newest + 1, _CHUNK):
            versions = range(begin, min(begin + _CHUNK, newest + 1))
            for number, change in zip(
                versions, self._log.folder.read_changes(versions), strict=True
            ):
                events = None if change is None else _find_events(change)
                if events is not None and number == version:
                    events = events[index:]
                yield number, events


def _key(name: str) -> str:
    return f"webhook/{name}"


def _state_key(name: str) -> str:
    return f"webhook-state/{name}"


def _secret_path(webhook: Webhook) -> str:
    return f"{LAKE_ROOT}/keys/webhook-{webhook.id}"


def _read_webhook(text: str) -> Webhook:
    fields = json.loads(text)
    return Webhook(**{**fields, "events": tuple(fields["events"])})


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigInvalidError(
            f"url: found {url[:200]!r}, expected a URL of https or http, for example "
            "https://ci.example.com/hooks/replaylake.",
            parameter="url",
        )
    if parts.username is not None or parts.password is not None:
        raise ConfigInvalidError(
            "url: found a user or password in it, expected none: the URL is shown in lists. The "
            "receiver knows us by the signature.",
            parameter="url",
        )
    if len(url) > _MAX_URL_CHARS:
        raise ConfigInvalidError(
            f"url: found {len(url)} characters, expected at most {_MAX_URL_CHARS}.",
            parameter="url",
        )


def _check_events(events: Sequence[str]) -> tuple[str, ...]:
    for kind in events:
        if kind not in EVENTS:
            raise ConfigInvalidError(
                f"events: found {kind!r}, expected some of {', '.join(EVENTS)}.",
                parameter="events",
            )
    return tuple(kind for kind in EVENTS if not events or kind in events)


def _check_secret(secret: str) -> str:
    if len(secret) < _MIN_SECRET_CHARS or not secret.isprintable():
        raise ConfigInvalidError(
            f"secret: found {len(secret)} characters, expected at least {_MIN_SECRET_CHARS} "
            "printable ones in one line.",
            parameter="secret",
        )
    return secret


def _find_events(change: Change) -> list[Event]:
    """Return what a commit did, as events; of most commits, such as a run's record, nothing."""
    found = [] if change.operation is None else list(_describe(change.operation, change.entries))
    return [
        Event(kind, data, change.version, index, change.timestamp_ms)
        for index, (kind, data) in enumerate(found)
    ]


def _describe(
    operation: str, entries: Mapping[str, str | None]
) -> Iterator[tuple[str, dict[str, Any]]]:
    bodies: dict[str, Any] = {
        key: None if text is None else json.loads(text) for key, text in entries.items()
    }
    for key, body in bodies.items():
        kind, *names = key.split("/")
        match operation, kind:
            case "REGISTER POLICY", "policy":
                yield from _describe_registration(names[0], names[1], body)
            case "DELETE POLICY", "deleted":
                about = dict(zip(("name", "version"), names, strict=True))
                yield "model_version.deleted", {**about, "by": body["deleted_by"]}
            case "SET ALIAS", "alias":
                moves = (value for other, value in bodies.items() if other.startswith("promotion/"))
                data = _describe_move(names[0], names[1], body, next(moves, None))
                yield "model_version_alias.created", data
            case "NOTE POLICY", "note":
                about = {"name": names[0], "version": names[1]}
                yield "model_version_tag.set", {**about, "key": "note", "value": body["text"]}
            case (("PROTECT POLICY" | "UNPROTECT POLICY"), "protect"):
                about = {"name": names[0], "version": names[1], "key": "protected"}
                if body is None:
                    yield "model_version_tag.deleted", about
                else:
                    yield "model_version_tag.set", {**about, "value": "true"}
            case "SET TAG", "tag":
                about = {"name": names[0], "tag": names[1]}
                yield "dataset_tag.set", {**about, "version": str(body["version"])}
            case "REMOVE TAG", "tag":
                yield "dataset_tag.deleted", {"name": names[0], "tag": names[1]}


def _describe_registration(
    name: str, version: str, body: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    about: dict[str, Any] = {"tags": {}, "description": None}
    if version == "1":  # a number is never given again
        yield "registered_model.created", {"name": name, **about}
    data = {"name": name, "version": version, "source": body["path"], "run_id": body["run_id"]}
    yield "model_version.created", {**data, **about}


def _describe_move(
    name: str, alias: str, body: Mapping[str, Any], move: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the data of a moved alias; `move` is its record, None from before moves had one."""
    data: dict[str, Any] = {"name": name, "alias": alias, "version": str(body["version"])}
    if move is None:
        return data
    before = move["from_version"]
    return {
        **data,
        "previous_version": None if before is None else str(before),
        "kind": move["kind"],
        "by": move["by"],
        "forced": move["forced"],
    }
