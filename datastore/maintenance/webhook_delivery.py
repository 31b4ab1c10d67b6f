"""Webhook delivery: signed requests for the events of a lake's log, until each is acknowledged.

A webhook's events are delivered in order, each at least once: its position is recorded after the
receiver answered with 2xx, so after a crash in between, a request is repeated with the same
delivery id. A failed one is retried with exponential backoff for three days, then given up.

The signature is that of MLflow's webhooks: HMAC-SHA256 of `delivery id.timestamp.body`.

Whoever adds a webhook must not reach, through this machine, hosts that they cannot reach themselves
(server-side request forgery). Each address of the URL's host is checked, and the connection is made
to a checked address; redirects are not followed, no proxy is used, and only the status is stored.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import json
import logging
import random
import re
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from replaylake.datastore.errors import ConfigInvalidError, ReplayLakeError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.webhooks import (
    ACTIVE,
    DISABLED,
    EVENTS,
    Event,
    Webhook,
    Webhooks,
    WebhookState,
)
from replaylake.datastore.version import VERSION

DELIVERY_ID_HEADER: Final = "X-MLflow-Delivery-Id"
TIMESTAMP_HEADER: Final = "X-MLflow-Timestamp"
SIGNATURE_HEADER: Final = "X-MLflow-Signature"
GIVE_UP_MS: Final = 3 * 86_400_000
_TIMEOUT_S: Final = 10.0
_MIN_PAUSE_MS: Final = 1_000
_MAX_PAUSE_MS: Final = 3_600_000
_GONE: Final = 410
_MAX_HEAD_BYTES: Final = 1 << 14
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?: [^\r\n]*)?\r?\n")
# Commits without an event, after which the position in the log is recorded anyway.
_MAX_SKIPPED: Final = 1_000
_MAX_THREADS: Final = 8
_logger = logging.getLogger(__name__)
_Addresses = list[tuple[Any, ...]]
# Lookups that have not ended, by host and port. A resolver that does not answer holds one thread
# for each host, however often it is retried.
_lookups: dict[tuple[str, int], Future[_Addresses]] = {}
_lookups_lock: Final = threading.Lock()
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# IPv4 addresses as a NAT64 gateway translates them (RFC 6052).
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
# Cloud metadata services, which return credentials; 169.254.169.254 is link-local.
_METADATA: Final = frozenset(map(ipaddress.ip_address, ("fd00:ec2::254", "100.100.100.200")))


class AddressRefusedError(ReplayLakeError):
    """A webhook's host has an address to which requests are not sent."""


@dataclass(frozen=True)
class Attempt:
    """The result of one request. status: of the answer; error: why there is no answer."""

    status: int | None = None
    error: str | None = None

    @property
    def is_delivered(self) -> bool:
        """Whether the receiver has acknowledged the event."""
        return self.status is not None and 200 <= self.status < 300


@dataclass(frozen=True)
class DeliveryResult:
    """The result of a round for one webhook.

    is_waiting: an event is left that could not be delivered yet, or the webhook is disabled.
    """

    name: str
    num_delivered: int
    num_given_up: int
    is_waiting: bool
    last_status: int | None
    last_error: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def deliver_webhooks(
    lake: Lake,
    *,
    allow_private: bool = False,
    stop: threading.Event | None = None,
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
) -> list[DeliveryResult]:
    """Deliver the events that are due; return one result for each webhook, sorted by name.

    allow_private: also send to loopback and private addresses, and by plain http. stop: ends the
    round between two requests. Several processes may do this at once; receivers tell a repeat by
    its delivery id. What one webhook raises is the `last_error` of its result, and its place stays:
    an event that cannot be described stops that one alone. Raises: StorageError, LogCorruptError
    where the webhooks cannot be listed.
    """
    webhooks = lake.webhooks.list()

    def deliver(webhook: Webhook) -> DeliveryResult:
        try:
            return _Round(lake.webhooks, webhook, allow_private, stop, now_ms).run()
        except Exception as error:  # such as a full disk: the others go on
            fault = f"{type(error).__name__}: {error}"
            _logger.exception(
                "webhook %s: its round ended early, the next repeats it", webhook.name
            )
            return DeliveryResult(webhook.name, 0, 0, True, None, fault)

    if not webhooks:
        return []
    # In parallel, so that a receiver that does not answer does not delay the others.
    with ThreadPoolExecutor(min(len(webhooks), _MAX_THREADS)) as threads:
        return list(threads.map(deliver, webhooks))


def try_webhook(
    lake: Lake, name: str, kind: str | None = None, *, allow_private: bool = False
) -> Attempt:
    """Send an example event, by default the first of the webhook's; nothing is recorded.

    Raises: NotFoundError, ConfigInvalidError.
    """
    webhook = lake.webhooks.get(name)
    kind = webhook.events[0] if kind is None else kind
    if kind not in EVENTS:
        raise ConfigInvalidError(
            f"event: found {kind!r}, expected one of {', '.join(EVENTS)}.", parameter="event"
        )
    event = Event(kind, EVENTS[kind], -1, 0, time.time_ns() // 1_000_000)
    secret = lake.webhooks.secret(webhook)
    return _attempt(webhook.url, secret, str(uuid.uuid4()), event, allow_private)


def sign(secret: str, delivery_id: str, timestamp: str, body: bytes) -> str:
    """Return the signature of a request: `v1,` followed by the HMAC-SHA256 in base64.

    timestamp: seconds since 1970, as in the header.
    """
    signed = f"{delivery_id}.{timestamp}.".encode() + body
    digest = hmac.new(secret.encode(), signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


class _Round:
    """One webhook's part of a round."""

    def __init__(
        self,
        webhooks: Webhooks,
        webhook: Webhook,
        allow_private: bool,
        stop: threading.Event | None,
        now_ms: Callable[[], int],
    ) -> None:
        self._webhooks, self._webhook, self._allow_private = webhooks, webhook, allow_private
        self._stop, self._now_ms = stop, now_ms

    def run(self) -> DeliveryResult:
        try:
            before = self._webhooks.state(self._webhook.name)
            secret = self._webhooks.secret(self._webhook)
        except ReplayLakeError as error:  # removed meanwhile, or its secret is gone
            return DeliveryResult(self._webhook.name, 0, 0, True, None, str(error))
        state, is_waiting = self._deliver_all(before, secret)
        return DeliveryResult(
            self._webhook.name,
            state.num_delivered - before.num_delivered,
            state.num_given_up - before.num_given_up,
            is_waiting,
            state.last_status,
            state.last_error,
        )

    def _deliver_all(self, state: WebhookState, secret: str) -> tuple[WebhookState, bool]:
        """Return the new state, and whether events are left."""
        if state.status != ACTIVE:
            return state, True
        recorded = state
        for version, events in self._webhooks.read_events(state.version, state.index):
            if events is None:
                state = replace(state, version=version + 1, index=0)
                state = replace(state, num_unreadable=state.num_unreadable + 1)
                continue
            for event in events:
                if event.kind not in self._webhook.events:
                    continue
                if state.next_attempt_ms is not None and state.next_attempt_ms > self._now_ms():
                    return state, True
                if self._stop is not None and self._stop.is_set():
                    return state, True
                state = self._deliver(state, event, secret)
                if not self._webhooks.save_state(self._webhook, recorded, state):
                    return state, False  # another process delivers
                recorded = state
                if state.status != ACTIVE or state.attempts:
                    return state, True
            state = replace(state, version=version + 1, index=0)
        if state.version - recorded.version >= _MAX_SKIPPED or (
            state.num_unreadable > recorded.num_unreadable
        ):
            self._webhooks.save_state(self._webhook, recorded, state)
        return state, False

    def _deliver(self, state: WebhookState, event: Event, secret: str) -> WebhookState:
        """Return the state after one attempt."""
        place = f"{self._webhook.id}/{event.version}/{event.index}"
        delivery_id = str(uuid.uuid5(uuid.NAMESPACE_OID, place))
        attempt = _attempt(self._webhook.url, secret, delivery_id, event, self._allow_private)
        now_ms = self._now_ms()
        state = replace(
            state,
            version=event.version,
            index=event.index,
            last_attempt_ms=now_ms,
            last_status=attempt.status,
            last_error=attempt.error,
        )
        if attempt.status == _GONE:
            return replace(state, status=DISABLED)
        first_ms = now_ms if state.first_attempt_ms is None else state.first_attempt_ms
        is_given_up = not attempt.is_delivered and now_ms - first_ms >= GIVE_UP_MS
        if attempt.is_delivered or is_given_up:
            return replace(
                state,
                index=event.index + 1,
                attempts=0,
                first_attempt_ms=None,
                next_attempt_ms=None,
                num_delivered=state.num_delivered + attempt.is_delivered,
                num_given_up=state.num_given_up + is_given_up,
            )
        # With jitter, so that webhooks that failed together are not retried together.
        pause_ms = min(_MIN_PAUSE_MS * 2**state.attempts, _MAX_PAUSE_MS)
        return replace(
            state,
            attempts=state.attempts + 1,
            first_attempt_ms=first_ms,
            next_attempt_ms=now_ms + int(pause_ms * random.uniform(0.5, 1.0)),
        )


def _attempt(url: str, secret: str, delivery_id: str, event: Event, allow_private: bool) -> Attempt:
    entity, action = event.kind.rsplit(".", 1)
    at = datetime.fromtimestamp(event.at_ms / 1000, UTC).isoformat(timespec="milliseconds")
    content = {"entity": entity, "action": action, "timestamp": at, "data": event.data}
    body = json.dumps(content).encode()
    timestamp = str(int(time.time()))
    headers = {
        "Content-Type": "application/json",
        DELIVERY_ID_HEADER: delivery_id,
        TIMESTAMP_HEADER: timestamp,
        SIGNATURE_HEADER: sign(secret, delivery_id, timestamp, body),
        "User-Agent": f"replaylake/{VERSION}",
    }
    try:
        return Attempt(status=_post(url, headers, body, allow_private))
    except (OSError, UnicodeError, ReplayLakeError) as error:  # UnicodeError: of a host's name
        return Attempt(error=str(error) or type(error).__name__)


def _post(url: str, headers: Mapping[str, str], body: bytes, allow_private: bool) -> int:
    """Send a request, and return the status of its answer, of which nothing else is read.

    Raises: AddressRefusedError; OSError, which TimeoutError and ssl.SSLError are.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme != "https" and not allow_private:
        raise AddressRefusedError(
            f"{url}: found http, expected https, because anybody on the route could read it. "
            "Allow it with `allow_private`."
        )
    port = parts.port or (443 if parts.scheme == "https" else 80)
    connection = _connect(host, port, allow_private, deadline)
    try:
        if parts.scheme == "https":
            # The timeout is that of the whole handshake, not of each read.
            connection.settimeout(_remaining(deadline))
            context = ssl.create_default_context()
            connection = context.wrap_socket(connection, server_hostname=host)
        connection.settimeout(_remaining(deadline))
        connection.sendall(_encode_request(parts, headers, body))
        return _read_status(connection, deadline)
    finally:
        connection.close()


def _connect(host: str, port: int, allow_private: bool, deadline: float) -> socket.socket:
    """Connect to a checked address; a second DNS lookup might return another one."""
    found = _look_up(host, port, deadline)
    for *_, address in found:
        check_address(host, str(address[0]), allow_private)
    error: OSError | None = None
    for family, kind, protocol, _, address in found:
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(_remaining(deadline))
            connection.connect(address)
        except OSError as failure:
            error = failure
            connection.close()
        else:
            return connection
    raise error or OSError(f"{host}: no address")


def _look_up(host: str, port: int, deadline: float) -> _Addresses:
    """Return the addresses of a host, as `socket.getaddrinfo` does, which knows no deadline.

    A lookup that does not end in time continues in its thread, and a later attempt waits for it.
    Raises: OSError, which TimeoutError is; UnicodeError.
    """
    with _lookups_lock:
        lookup = _lookups.get((host, port))
        if lookup is None:
            lookup = _lookups[host, port] = Future()
            # As a daemon: the end of the process does not wait for it.
            thread = threading.Thread(
                target=_run_lookup, args=(host, port, lookup), name="webhook-lookup", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # the limit of threads
                # Later attempts would wait for a lookup that nothing ends.
                del _lookups[host, port]
                raise OSError(f"{host}: the name was not looked up: {error}") from error
    try:
        return lookup.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError as error:
        if lookup.done():  # an error of the lookup itself
            raise
        raise TimeoutError(f"{host}: the name was not looked up within {_TIMEOUT_S:g} s") from error


def _run_lookup(host: str, port: int, lookup: Future[_Addresses]) -> None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except Exception as error:  # raised again in the thread that waits
        outcome: _Addresses | Exception = error
    else:
        outcome = list(found)
    # First, so that who reads this result begins a lookup of their own the next time.
    with _lookups_lock:
        del _lookups[host, port]
    if isinstance(outcome, Exception):
        lookup.set_exception(outcome)
    else:
        lookup.set_result(outcome)


def check_address(host: str, address: str, allow_private: bool) -> None:
    """Check an address that a webhook's host has.

    Raises: AddressRefusedError for a loopback or private address unless `allow_private`; always for
    link-local, multicast and reserved addresses, and for those of cloud metadata services.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    for one in _find_embedded_addresses(ip):
        if one.is_loopback or one.is_private:
            is_never = one.is_link_local or one.is_unspecified
        else:
            is_never = one.is_multicast or one.is_reserved or one.is_link_local
        if is_never or one in _METADATA:
            raise AddressRefusedError(
                f"{host}: found the address {address}, expected none that is link-local, "
                "multicast, reserved or a metadata service: requests are never sent there. Change "
                "the URL."
            )
        # Python takes site-local addresses (RFC 3879) for public ones.
        is_site_local = isinstance(one, ipaddress.IPv6Address) and one.is_site_local
        if (is_site_local or not one.is_global) and not allow_private:
            raise AddressRefusedError(
                f"{host}: found the address {address}, expected a public one, not this machine "
                "or a private network. Allow it with `allow_private`."
            )


def _find_embedded_addresses(ip: _Address) -> list[_Address]:
    """Return an address, and the IPv4 addresses that are embedded in an IPv6 address."""
    if ip.version == 4:
        return [ip]
    if ip.ipv4_mapped is not None:
        return [ip.ipv4_mapped]
    if ip in _NAT64:
        return [ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)]
    found: list[_Address] = [ip]
    if ip.sixtofour is not None:
        found.append(ip.sixtofour)
    if ip.teredo is not None:
        found += ip.teredo
    return found


def _encode_request(parts: SplitResult, headers: Mapping[str, str], body: bytes) -> bytes:
    target = parts.path or "/"
    if parts.query:
        target += f"?{parts.query}"
    # Without user information, which is refused when a webhook is added.
    authority = parts.netloc.rpartition("@")[2]
    lines = [
        f"POST {target} HTTP/1.1",
        f"Host: {authority}",
        *(f"{name}: {value}" for name, value in headers.items()),
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _read_status(connection: socket.socket, deadline: float) -> int:
    head = b""
    while True:
        match = _STATUS_LINE.match(head)
        if match is not None:
            return int(match[1])
        if b"\n" in head or len(head) > _MAX_HEAD_BYTES:
            raise OSError("the answer is not HTTP")
        connection.settimeout(_remaining(deadline))
        part = connection.recv(1024)
        if not part:
            raise ConnectionResetError("closed without an answer")
        head += part


def _remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"no answer within {_TIMEOUT_S:g} s")
    return left
