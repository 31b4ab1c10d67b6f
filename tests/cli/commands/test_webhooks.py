"""`webhooks`: the secret is shown once, exit codes tell what was delivered, a process delivers."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.policies.manifest import GRAPH, MANIFEST, manifest_bytes
from replaylake.datastore.lake.policies.policy import PolicySpec


@pytest.fixture
def store(lake: Path) -> Lake:
    return open_lake(lake, create=True)


@pytest.fixture
def register(store: Lake, tmp_path: Path) -> Callable[[], None]:
    folder = tmp_path / "package"
    folder.mkdir()
    files = {GRAPH: b"graph"}
    spec = PolicySpec(Box((2,)), Discrete(2), "categorical")
    for name, data in {**files, MANIFEST: manifest_bytes(spec, {}, files)}.items():
        (folder / name).write_bytes(data)
    return lambda: store.registry.register("p", folder, run_id="r", lineage={}) and None


def test_a_secret_is_shown_once(run: Any, store: Lake, receiver: Any) -> None:
    added = run("webhooks", "add", "ci", receiver.url, "--json")
    assert added.code == 0
    secret = added.json["secret"]
    assert store.webhooks.secret(store.webhooks.get("ci")) == secret
    text = run("webhooks", "add", "other", receiver.url).out
    assert (
        f"secret, which is not shown again: {store.webhooks.secret(store.webhooks.get('other'))}"
        in text
    )
    for command in (("list",), ("list", "--json"), ("remove", "ci")):
        shown = run("webhooks", *command)
        assert shown.code == 0
        assert secret not in shown.out + shown.err


def test_a_given_secret_is_never_shown(
    run: Any, store: Lake, receiver: Any, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text("a secret of many letters\n")
    options = ("--secret-file", str(file), "--event", "model_version.created")
    added = run("webhooks", "add", "ci", receiver.url, "--json", *options)
    assert added.json == {
        "webhook": "ci",
        "url": receiver.url,
        "events": ["model_version.created"],
    }
    assert store.webhooks.secret(store.webhooks.get("ci")) == "a secret of many letters"
    file.write_text("short")
    refused = run("webhooks", "add", "new", receiver.url, *options)
    assert refused.code == 2
    assert "--secret-file" in refused.err
    assert "short" not in refused.err
    assert run("webhooks", "add", "new", receiver.url, "--event", "x").code == 2
    assert run("webhooks", "add", "ci", receiver.url).code == 1
    absent = run("webhooks", "add", "new", receiver.url, "--secret-file", str(tmp_path / "no"))
    assert absent.code == 2


def test_deliver_and_list_tell_what_became_of_events(
    run: Any, store: Lake, receiver: Any, register: Any
) -> None:
    assert run("webhooks", "list").code == 0
    assert run("webhooks", "deliver").code == 0
    run("webhooks", "add", "ci", receiver.url)
    register()
    private = run("webhooks", "deliver")
    assert private.code == 3
    assert "ci: 0 events delivered, some waiting" in private.out
    assert "Allow it with --allow-private" in private.out
    assert "expected https" in run("webhooks", "list").out
    store.webhooks.remove("ci")
    run("webhooks", "add", "ci", receiver.url)
    register()
    delivered = run("webhooks", "deliver", "--allow-private")
    assert (delivered.code, delivered.out) == (0, "ci: 1 event delivered\n")
    (row,) = run("webhooks", "list", "--json").json["webhooks"]
    assert (row["delivered"], row["status"], row["last_status"]) == (1, "active", 204)
    assert row["next_attempt_at"] is None
    assert receiver.events == ["model_version.created"]


def test_an_example_is_delivered_or_not(run: Any, store: Lake, receiver: Any) -> None:
    run("webhooks", "add", "ci", receiver.url)
    event = ("--event", "dataset_tag.set")
    sent = run("webhooks", "test", "ci", *event, "--allow-private")
    assert (sent.code, sent.out) == (0, "ci: delivered, answered 204\n")
    assert receiver.events == ["dataset_tag.set"]
    receiver.reply = lambda number: b"HTTP/1.1 500 X\r\n\r\n"
    refused = run("webhooks", "test", "ci", "--allow-private", "--json")
    assert refused.code == 3
    assert refused.json == {"webhook": "ci", "delivered": False, "status": 500, "error": None}
    assert run("webhooks", "test", "ci").code == 3
    assert run("webhooks", "test", "ci", "--event", "x").code == 2
    assert run("webhooks", "test", "absent").code == 1


@pytest.mark.slow
def test_a_process_delivers_until_it_is_stopped(
    fork_command: Any, store: Lake, receiver: Any, register: Any, tmp_path: Path
) -> None:
    store.webhooks.add("ci", receiver.url)
    arguments = ["webhooks", "deliver", "--every", "0.05s", "--allow-private"]
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        process = fork_command([*arguments, "--lake", str(store.path)], out, err)
        deadline = time.monotonic() + 60
        for num in (2, 3):
            register()
            while len(receiver.requests) < num:
                assert time.monotonic() < deadline, (tmp_path / "err").read_text()
                time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert receiver.events[-1] == "model_version.created"
    assert "delivered" in (tmp_path / "out").read_text()
