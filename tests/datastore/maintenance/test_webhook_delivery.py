"""Events reach a real receiver: signed, in order, at least once, and to allowed addresses alone."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from replaylake.datastore.errors import ConfigInvalidError, NotFoundError, StorageError
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.webhooks import EVENTS, Webhook, Webhooks
from replaylake.datastore.maintenance import webhook_delivery
from replaylake.datastore.maintenance.webhook_delivery import (
    GIVE_UP_MS,
    AddressRefusedError,
    check_address,
    deliver_webhooks,
    try_webhook,
)

SECRET = "a secret of many letters"


def answer(status: int) -> Callable[[int], bytes]:
    return lambda number: f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n".encode()


@pytest.fixture
def registered(lake: Lake, package: Path, receiver: Any) -> Lake:
    """A lake whose webhook `ci` has two events before it: a policy and its version."""
    lake.webhooks.add("ci", receiver.url, secret=SECRET)
    lake.registry.register("p", package, run_id="r", lineage={})
    return lake


def test_events_are_sent_once_in_order_and_signed_as_mlflow_does(
    registered: Lake, receiver: Any
) -> None:
    (result,) = deliver_webhooks(registered, allow_private=True)
    assert (result.num_delivered, result.is_waiting, result.last_status) == (2, False, 204)
    assert receiver.events == ["registered_model.created", "model_version.created"]
    ids = set()
    for path, headers, body in receiver.requests:
        assert path == "/hooks?from=lake"
        assert headers["Host"] == f"127.0.0.1:{receiver.port}"
        content = json.loads(body)
        assert content.keys() == {"entity", "action", "timestamp", "data"}
        assert abs(datetime.fromisoformat(content["timestamp"]).timestamp() - time.time()) < 600
        given, timestamp = headers["X-MLflow-Delivery-Id"], headers["X-MLflow-Timestamp"]
        assert abs(int(timestamp) - time.time()) < 600
        ids.add(given)
        # As MLflow's documentation has a receiver verify it.
        signed = f"{given}.{timestamp}.{body.decode()}"
        digest = hmac.new(SECRET.encode(), signed.encode(), hashlib.sha256).digest()
        expected = f"v1,{base64.b64encode(digest).decode()}"
        assert hmac.compare_digest(headers["X-MLflow-Signature"], expected)
    assert len(ids) == 2
    assert deliver_webhooks(registered, allow_private=True)[0].num_delivered == 0
    registered.registry.set_alias("p", "champion", 1)
    deliver_webhooks(open_lake(registered.path), allow_private=True)
    assert receiver.events[2:] == ["model_version_alias.created"]
    state = registered.webhooks.state("ci")
    assert (state.num_delivered, state.attempts, state.last_error) == (3, 0, None)


def test_a_webhook_gets_its_events_alone(registered: Lake, receiver: Any, package: Path) -> None:
    registered.webhooks.remove("ci")
    registered.webhooks.add("moves", receiver.url, events=["model_version_alias.created"])
    registered.registry.register("p", package, run_id="r", lineage={})
    registered.registry.set_alias("p", "champion", 2)
    deliver_webhooks(registered, allow_private=True)
    assert receiver.events == ["model_version_alias.created"]


def test_a_failed_request_is_repeated_under_its_id_until_it_is_given_up(
    registered: Lake, receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_delivery, "GIVE_UP_MS", 6 * 3_600_000)
    clock = [1_000_000]

    def deliver() -> Any:
        (result,) = deliver_webhooks(registered, allow_private=True, now_ms=lambda: clock[0])
        return result

    receiver.reply = answer(503)
    assert deliver().is_waiting
    assert deliver().is_waiting
    assert len(receiver.requests) == 1  # the pause is not over
    pauses = []
    while registered.webhooks.state("ci").num_given_up == 0:
        state = registered.webhooks.state("ci")
        assert state.next_attempt_ms is not None
        pauses.append(state.next_attempt_ms - clock[0])
        clock[0] = state.next_attempt_ms
        deliver()
    assert 500 <= pauses[0] <= 1_000
    assert pauses[3] >= 4_000
    assert max(pauses) <= 3_600_000
    assert clock[0] - 1_000_000 >= 6 * 3_600_000
    assert GIVE_UP_MS == 3 * 86_400_000
    ids = [headers["X-MLflow-Delivery-Id"] for _, headers, _ in receiver.requests]
    assert len(set(ids[:-1])) == 1
    # The next event follows at once, and a good answer ends its attempts.
    assert receiver.events[-1] == "model_version.created"
    receiver.reply = answer(200)
    clock[0] += 3_600_000
    assert deliver().num_delivered == 1
    state = registered.webhooks.state("ci")
    assert (state.num_given_up, state.num_delivered, state.attempts) == (1, 1, 0)


def test_a_crash_after_the_answer_repeats_the_request_under_its_id(
    registered: Lake, receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*arguments: object) -> bool:
        raise StorageError("the machine stops here")

    with monkeypatch.context() as patch:
        patch.setattr(Webhooks, "save_state", crash)
        (result,) = deliver_webhooks(registered, allow_private=True)
        assert (result.is_waiting, result.num_delivered) == (True, 0)
        assert "the machine stops here" in str(result.last_error)
    deliver_webhooks(registered, allow_private=True)
    assert receiver.events[:2] == ["registered_model.created"] * 2
    ids = [headers["X-MLflow-Delivery-Id"] for _, headers, _ in receiver.requests]
    assert ids[0] == ids[1] != ids[2]


def test_what_one_webhook_raises_stops_no_other(
    registered: Lake, receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered.webhooks.add("broken", receiver.url, secret=SECRET)
    registered.registry.set_alias("p", "champion", 1)
    save = Webhooks.save_state

    def save_some(webhooks: Webhooks, webhook: Webhook, *states: Any) -> bool:
        if webhook.name == "broken":
            raise KeyError("an entry of another version")
        return save(webhooks, webhook, *states)

    monkeypatch.setattr(Webhooks, "save_state", save_some)
    broken, other = deliver_webhooks(registered, allow_private=True)
    assert (broken.name, broken.is_waiting, broken.num_delivered) == ("broken", True, 0)
    assert "another version" in str(broken.last_error)
    assert (other.name, other.num_delivered, other.is_waiting) == ("ci", 3, False)


def test_processes_side_by_side_leave_out_no_event(
    registered: Lake, receiver: Any, package: Path
) -> None:
    for _ in range(5):
        registered.registry.register("p", package, run_id="r", lineage={})
    lakes = [open_lake(registered.path) for _ in range(3)]
    threads = [
        threading.Thread(target=deliver_webhooks, args=(lake,), kwargs={"allow_private": True})
        for lake in lakes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deliver_webhooks(registered, allow_private=True)
    versions = [json.loads(body)["data"].get("version") for _, _, body in receiver.requests]
    assert {*versions} == {None, "1", "2", "3", "4", "5", "6"}
    assert registered.webhooks.state("ci").num_delivered == 7


def test_a_receiver_that_is_gone_for_good_is_left_alone(registered: Lake, receiver: Any) -> None:
    receiver.reply = answer(410)
    (result,) = deliver_webhooks(registered, allow_private=True)
    assert (result.is_waiting, result.last_status) == (True, 410)
    assert registered.webhooks.state("ci").status == "disabled"
    deliver_webhooks(registered, allow_private=True)
    assert len(receiver.requests) == 1


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n", None),
        (b"HTTP/1.1 404 Not Found\r\n\r\nsecret of the network", None),
        (b"SSH-2.0-OpenSSH\r\n", "the answer is not HTTP"),
        (b"", "closed without an answer"),
        (b"HTTP/1.1 2", "closed without an answer"),
    ],
)
def test_other_answers_are_failures_of_which_nothing_is_kept(
    registered: Lake, receiver: Any, reply: bytes, error: str | None
) -> None:
    receiver.reply = lambda number: reply
    deliver_webhooks(registered, allow_private=True)
    assert len(receiver.requests) == 1
    state = registered.webhooks.state("ci")
    assert state.attempts == 1
    assert state.last_error == error
    assert (state.last_status is None) == (error is not None)


def test_a_receiver_that_trickles_holds_up_no_other(
    registered: Lake, receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is over once the other one has its event, however long that takes."""
    passed_s = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + passed_s[0], time=time.time, time_ns=time.time_ns
    )
    monkeypatch.setattr(webhook_delivery, "time", clock)
    monkeypatch.setattr(webhook_delivery, "_TIMEOUT_S", 60.0)

    def trickle(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):
            while True:
                connection.sendall(b"H")
                time.sleep(0.02)
                if registered.webhooks.state("ci").num_delivered == 3:
                    passed_s[0] = 61.0

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=trickle, args=(server,))
        thread.start()
        registered.webhooks.add("late", f"http://127.0.0.1:{server.getsockname()[1]}/")
        registered.registry.set_alias("p", "champion", 1)
        quick, late = deliver_webhooks(registered, allow_private=True)
        thread.join()
    assert (late.name, late.num_delivered, late.is_waiting) == ("late", 0, True)
    assert (quick.num_delivered, receiver.events[-1]) == (3, "model_version_alias.created")
    error = registered.webhooks.state("late").last_error
    assert error is not None
    assert "timed out" in error or "no answer within" in error


def test_a_lookup_that_does_not_end_holds_up_nobody(
    registered: Lake, receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_delivery, "_TIMEOUT_S", 0.5)
    look_up, ended, hosts = socket.getaddrinfo, threading.Event(), []

    def answer_late(host: str, *arguments: Any, **options: Any) -> Any:
        hosts.append(host)
        if host != "slow.example":
            return look_up(host, *arguments, **options)
        ended.wait(60)
        return look_up("127.0.0.1", *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", answer_late)
    registered.webhooks.add("slow", f"http://slow.example:{receiver.port}/", secret=SECRET)
    for _ in range(2):
        attempt = try_webhook(registered, "slow", allow_private=True)
        assert attempt.error == "slow.example: the name was not looked up within 0.5 s"
    monkeypatch.setattr(webhook_delivery, "_TIMEOUT_S", 60.0)
    assert deliver_webhooks(registered, allow_private=True)[0].num_delivered == 2
    # The second attempt waited for the lookup of the first.
    assert hosts.count("slow.example") == 1
    lookups = [one for one in threading.enumerate() if one.name == "webhook-lookup"]
    ended.set()
    for lookup in lookups:
        lookup.join()
    assert try_webhook(registered, "slow", allow_private=True).is_delivered
    assert hosts.count("slow.example") == 2


def test_a_lookup_that_cannot_begin_is_begun_by_the_next_attempt(
    registered: Lake, receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "webhook-lookup":
            raise RuntimeError("can't start new thread")
        start(thread)

    registered.webhooks.add("busy", f"http://localhost:{receiver.port}/", secret=SECRET)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        attempt = try_webhook(registered, "busy", allow_private=True)
    assert attempt.error == "localhost: the name was not looked up: can't start new thread"
    assert try_webhook(registered, "busy", allow_private=True).is_delivered


def test_a_lookup_that_ends_with_another_error_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("embedded null character")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(ValueError, match="embedded null character"):
        webhook_delivery._look_up("wrong.example", 80, time.monotonic() + 60)
    assert ("wrong.example", 80) not in webhook_delivery._lookups


def test_a_handshake_that_trickles_ends_at_the_deadline(
    registered: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_delivery, "_TIMEOUT_S", 0.5)
    ended = threading.Event()

    def trickle() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            # A handshake record of 12,288 bytes, one after the other; 1,000 take over 10 s.
            connection.sendall(b"\x16\x03\x03\x30\x00\x02")
            for _ in range(1000):
                if ended.wait(0.01):
                    return
                connection.sendall(b"\x00")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=trickle)
        thread.start()
        registered.webhooks.add("tls", f"https://127.0.0.1:{server.getsockname()[1]}/")
        attempt = try_webhook(registered, "tls", allow_private=True)
        ended.set()
        thread.join()
    error = str(attempt.error)
    assert "handshake operation timed out" in error or "no answer within" in error


def test_nothing_is_sent_to_a_private_address_unless_it_is_allowed(
    registered: Lake, receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver_webhooks(registered)
    assert "expected https" in str(registered.webhooks.state("ci").last_error)
    registered.webhooks.add("tls", f"https://localhost:{receiver.port}/")
    assert "Allow it with `allow_private`" in str(try_webhook(registered, "tls").error)
    # A name with a public and a private address: it may be either when it is asked again.
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, receiver.port))
        for address in ("93.184.215.14", "127.0.0.1")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: found)
    registered.webhooks.add("both", "https://both.example/")
    assert "127.0.0.1" in str(try_webhook(registered, "both").error)
    assert receiver.requests == []


@pytest.mark.parametrize(
    ("address", "is_allowed"),
    [
        ("93.184.215.14", "always"),
        ("2606:4700::1111", "always"),
        ("64:ff9b::5db8:d70e", "always"),  # of 93.184.215.14
        ("127.0.0.1", "private"),
        ("::1", "private"),
        ("10.1.2.3", "private"),
        ("192.168.0.1", "private"),
        ("100.64.0.1", "private"),
        ("fd00::1", "private"),
        ("fec0::1", "private"),
        ("::ffff:127.0.0.1", "private"),
        ("64:ff9b::7f00:1", "private"),
        ("2002:7f00:1::", "private"),
        ("169.254.169.254", "never"),
        ("::ffff:169.254.169.254", "never"),
        ("64:ff9b::a9fe:a9fe", "never"),
        ("fe80::1%eth0", "never"),
        ("fd00:ec2::254", "never"),
        ("100.100.100.200", "never"),
        ("0.0.0.0", "never"),
        ("::", "never"),
        ("224.0.0.1", "never"),
        ("ff02::1", "never"),
    ],
)
def test_addresses_that_requests_go_to(address: str, is_allowed: str) -> None:
    for allow_private in (False, True):
        if is_allowed == "always" or (is_allowed == "private" and allow_private):
            check_address("h", address, allow_private)
        else:
            with pytest.raises(AddressRefusedError, match=r"h: found the address"):
                check_address("h", address, allow_private)


def make_certificate(folder: Path) -> Path:
    """Write a certificate of localhost and its key into one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    names = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "certificate.pem"
    encoded = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM) + encoded)
    return path


def test_https_needs_a_trusted_certificate(
    registered: Lake, start_receiver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    receiver = start_receiver(context)
    registered.webhooks.add("tls", f"https://localhost:{receiver.port}/hooks")
    attempt = try_webhook(registered, "tls", allow_private=True)
    assert "certificate verify failed" in str(attempt.error)
    assert receiver.requests == []
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert try_webhook(registered, "tls", allow_private=True).status == 204
    assert receiver.events == ["registered_model.created"]


def test_an_example_of_each_event_is_sent_and_not_recorded(registered: Lake, receiver: Any) -> None:
    before = registered.webhooks.state("ci")
    for kind, data in EVENTS.items():
        assert try_webhook(registered, "ci", kind, allow_private=True).is_delivered
        assert receiver.events[-1] == kind
        assert json.loads(receiver.requests[-1][2])["data"] == data
    assert registered.webhooks.state("ci") == before
    with pytest.raises(ConfigInvalidError, match="event: found 'x'"):
        try_webhook(registered, "ci", "x")
    with pytest.raises(NotFoundError):
        try_webhook(registered, "absent")


def test_a_host_that_cannot_be_looked_up_is_a_failure(registered: Lake) -> None:
    for host in ("absent.invalid", f"{'x' * 70}.invalid"):
        registered.webhooks.add("odd", f"https://{host}/")
        assert try_webhook(registered, "odd").error
        registered.webhooks.remove("odd")


def test_a_stopped_round_sends_no_more(registered: Lake, receiver: Any) -> None:
    stop = threading.Event()
    stop.set()
    assert deliver_webhooks(registered, allow_private=True, stop=stop)[0].is_waiting
    assert receiver.requests == []


def test_the_place_moves_past_many_commits_without_events(
    registered: Lake, receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_delivery, "_MAX_SKIPPED", 5)
    deliver_webhooks(registered, allow_private=True)
    before = registered.webhooks.state("ci").version
    for number in range(6):
        registered.registry.record_run("r", {"number": number})
    deliver_webhooks(registered, allow_private=True)
    assert registered.webhooks.state("ci").version > before + 5
    registered.registry.set_alias("p", "champion", 1)
    deliver_webhooks(registered, allow_private=True)
    assert receiver.events[-1] == "model_version_alias.created"
