"""Webhooks are entries of the lake's log, their secrets are none, and commits are their events."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from replaylake.datastore.errors import (
    AlreadyExistsError,
    ConfigInvalidError,
    InvalidNameError,
    NotFoundError,
    StorageError,
)
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.webhooks import EVENTS, WebhookState

URL = "https://ci.example.com/hooks"
SECRET = "s" * 16


def read_events(lake: Lake, version: int, index: int = 0) -> list[tuple[str, dict[str, object]]]:
    return [
        (event.kind, dict(event.data))
        for _, events in lake.webhooks.read_events(version, index)
        for event in events or ()
    ]


def test_a_webhook_is_added_listed_and_removed(lake: Lake) -> None:
    added = lake.webhooks.add("ci", URL, events=["model_version.created"])
    assert len(added.secret) >= 32
    assert added.secret not in repr(added)
    again = open_lake(lake.path)
    (webhook,) = again.webhooks.list()
    assert webhook == added.webhook
    assert (webhook.url, webhook.events) == (URL, ("model_version.created",))
    assert again.webhooks.secret(webhook) == added.secret
    assert lake.webhooks.add("all", URL).webhook.events == tuple(EVENTS)

    lake.webhooks.remove("ci")
    assert [one.name for one in again.webhooks.list()] == ["all"]
    with pytest.raises(NotFoundError, match=r"webhook ci: found none of that name.*one of all"):
        again.webhooks.get("ci")
    with pytest.raises(NotFoundError, match="no secret"):
        again.webhooks.secret(webhook)


def test_a_secret_is_in_a_file_of_its_own_that_others_cannot_read(lake: Lake) -> None:
    added = lake.webhooks.add("ci", URL, secret=SECRET)
    (path,) = (lake.path / "_lake" / "keys").glob("webhook-*")
    assert json.loads(path.read_text())["secret"] == added.secret == SECRET
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    others = [file for file in lake.path.rglob("*") if file.is_file() and file != path]
    assert not any(SECRET.encode() in file.read_bytes() for file in others)


def test_a_damaged_secret_signs_nothing(lake: Lake) -> None:
    webhook = lake.webhooks.add("ci", URL, secret=SECRET).webhook
    (path,) = (lake.path / "_lake" / "keys").glob("webhook-*")
    path.chmod(0o600)
    path.write_bytes(path.read_bytes().replace(b"sss", b"sst"))
    with pytest.raises(StorageError, match="expected the secret of webhook ci") as caught:
        lake.webhooks.secret(webhook)
    assert "sst" not in str(caught.value)


def test_a_taken_name_is_refused_and_leaves_no_secret(lake: Lake) -> None:
    lake.webhooks.add("ci", URL)
    with pytest.raises(AlreadyExistsError, match="webhook ci"):
        lake.webhooks.add("ci", URL)
    assert len(list((lake.path / "_lake" / "keys").glob("webhook-*"))) == 1


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("ftp://h/x", "expected a URL of https or http"),
        ("https://", "expected a URL"),
        ("https://h:70000/", "expected a URL"),
        ("https://h/\r\nX-A: b", "expected a URL"),
        ("https://höst/", "expected a URL"),
        ("https://user:word@h/", "found a user or password"),
        (f"https://h/{'x' * 2048}", "at most 2048"),
    ],
)
def test_urls_that_are_refused(lake: Lake, url: str, text: str) -> None:
    with pytest.raises(ConfigInvalidError, match=text) as caught:
        lake.webhooks.add("ci", url)
    assert caught.value.parameter == "url"
    assert "word" not in str(caught.value).replace("password", "")


def test_events_names_and_secrets_that_are_refused(lake: Lake) -> None:
    with pytest.raises(ConfigInvalidError, match="events: found 'alias', expected some of regis"):
        lake.webhooks.add("ci", URL, events=["alias"])
    with pytest.raises(InvalidNameError):
        lake.webhooks.add("C/I", URL)
    for secret in ("short", "x" * 20 + "\n"):
        with pytest.raises(ConfigInvalidError, match="secret: found") as caught:
            lake.webhooks.add("ci", URL, secret=secret)
        assert secret.strip() not in str(caught.value)
    assert lake.webhooks.list() == []


def test_commits_are_events_with_mlflows_names(lake: Lake, package: Path) -> None:
    registry = lake.registry
    version = lake.webhooks.state(lake.webhooks.add("ci", URL).webhook.name).version
    assert read_events(lake, version) == []
    ref = registry.register("p", package, run_id="r", lineage={})
    registry.register("p", package, run_id="r", lineage={}, run={"status": "finished"})
    registry.set_alias("p", "champion", 1)
    registry.aliases.move("p", "champion", 2, kind="promote", by="ada", forced=True)
    registry.marks.add_note("p", 1, "an old one", by="ada")
    registry.marks.protect("p", 1)
    registry.marks.protect("p", 1, False)
    registry.marks.delete("p", 1, by="ada")
    registry.record_run("r", {"status": "running"})
    lake.tags.set("d", "golden", 3)
    lake.tags.remove("d", "golden")

    empty = {"tags": {}, "description": None}
    one, two = {"name": "p", "version": "1"}, {"name": "p", "version": "2"}
    alias = {"name": "p", "alias": "champion"}
    found = read_events(lake, version)
    assert found[1] == (
        "model_version.created",
        {**one, "source": ref.folder, "run_id": "r", **empty},
    )
    assert found[2][0] == "model_version.created"
    assert found[2][1]["version"] == "2"
    assert [found[0], *found[3:]] == [
        ("registered_model.created", {"name": "p", **empty}),
        (
            "model_version_alias.created",
            {**alias, "version": "1", "previous_version": None, "kind": "alias"}
            | {"by": None, "forced": False},
        ),
        (
            "model_version_alias.created",
            {**alias, **two, "previous_version": "1", "kind": "promote"}
            | {"by": "ada", "forced": True},
        ),
        ("model_version_tag.set", {**one, "key": "note", "value": "an old one"}),
        ("model_version_tag.set", {**one, "key": "protected", "value": "true"}),
        ("model_version_tag.deleted", {**one, "key": "protected"}),
        ("model_version.deleted", {**one, "by": "ada"}),
        ("dataset_tag.set", {"name": "d", "tag": "golden", "version": "3"}),
        ("dataset_tag.deleted", {"name": "d", "tag": "golden"}),
    ]
    # Examples, which a test of a webhook sends, have the fields of the events.
    for kind, data in found:
        assert data.keys() == EVENTS[kind].keys()
    first = lake.webhooks.read_events(version + 1, 1)
    assert [event.kind for event in next(first)[1] or ()] == ["model_version.created"]


def test_a_state_is_saved_by_compare_and_set(lake: Lake) -> None:
    webhook = lake.webhooks.add("ci", URL).webhook
    before = lake.webhooks.state("ci")
    after = WebhookState(before.version, attempts=1)
    assert lake.webhooks.save_state(webhook, before, after)
    assert not open_lake(lake.path).webhooks.save_state(webhook, before, WebhookState(99))
    assert lake.webhooks.state("ci") == after
    lake.webhooks.remove("ci")
    lake.webhooks.add("ci", URL)
    assert not lake.webhooks.save_state(webhook, after, before)
