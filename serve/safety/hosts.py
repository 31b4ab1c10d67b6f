"""Hosts: the names and addresses that a server answers to, and the pages that may use it.

A page of any website can send requests to a server on the reader's own machine, and a name that its
owner lets point at that server (DNS rebinding) makes them look like requests of the same site. The
browser names both: the Host header is the name that was requested, Origin that of the page. An
address in Host cannot be rebound, so the one that the request came to is allowed.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.serve.messages import RequestRefusedError

ANY: Final = "*"
# RFC 9110, section 7.2: a name or an address, those of IPv6 in brackets, and perhaps a port. A zone
# (`%eth0`, or `%25eth0` as in RFC 6874) names an interface of the machine that sends it.
_AUTHORITY: Final = re.compile(
    rb"(\[[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9._~%-]{1,32})?\]|[A-Za-z0-9._~-]{1,255})(?::[0-9]{0,5})?"
)
_CACHED: Final = 256
_MAX_BYTES: Final = 264  # nothing longer is an authority; the cache would hold up to 64 KiB of each
_SHOWN: Final = 120


class AllowedHosts:
    """The names and addresses that one server answers to, whatever the port."""

    def __init__(self, hosts: Iterable[str] = ()) -> None:
        """Allow those beside loopback. Raises: ConfigInvalidError where one is no host."""
        self._hosts = frozenset(_parse_host(host) for host in hosts)
        # Each request asks, and nearly all with the same few values.
        self._is_allowed = lru_cache(maxsize=_CACHED)(self._look_up)

    def check(self, host: bytes | None, origin: bytes | None, address: str | None) -> None:
        """Let a request in by its headers; address is the one that it came to, where known.

        Raises: RequestRefusedError: 400 without one valid Host, 421 of another's (RFC 9110, section
        15.5.20), 403 where a page of another host sent it. Cost: 0.2 us where it was seen before.
        """
        if host is None or len(host) > _MAX_BYTES or not self._is_allowed(host, address):
            raise _refuse_host(host)
        if origin is not None:
            # Without a scheme it is `null`, of a page that hides where it is from.
            _, scheme, authority = origin.partition(b"://")
            is_known = scheme and len(authority) <= _MAX_BYTES
            if ANY not in self._hosts and not (is_known and self._is_allowed(authority, address)):
                message = (
                    f"origin {_show(origin)} is not allowed; add its host to the server's "
                    "`allowed_hosts`"
                )
                raise RequestRefusedError(403, "origin", message)

    def _look_up(self, authority: bytes, address: str | None) -> bool:
        name = _name_in(authority)
        if name is None:
            return False
        if ANY in self._hosts or name == "localhost" or name in self._hosts:
            return True
        try:
            number = ipaddress.ip_address(name)
        except ValueError:
            return False
        return number.is_loopback or (address is not None and name == _plain(address))


def check_host(host: str) -> None:
    """Refuse what is neither a name, an address nor `*`. Raises: ConfigInvalidError."""
    _parse_host(host)


def _parse_host(host: str) -> str:
    if host == ANY:
        return ANY
    raw = host.encode("utf-8", "replace")
    bare = raw if b":" not in raw or raw.startswith(b"[") else b"[%b]" % raw
    name = None if bare.rpartition(b"]")[2].count(b":") else _name_in(bare)
    if name is None:
        raise ConfigInvalidError(
            f"serve: allowed_hosts: found {host!r}, expected a host name or an address without "
            "scheme and port, such as policy.example.com, or * for any host.",
            parameter="allowed_hosts",
        )
    return name


def _name_in(authority: bytes) -> str | None:
    """Return the host of `host:port`, in one spelling; None if it is none."""
    match = _AUTHORITY.fullmatch(authority)
    if match is None:
        return None
    name = match[1].decode("ascii")
    if name.startswith("["):
        try:
            return _plain(str(ipaddress.IPv6Address(name[1:-1].partition("%")[0])))
        except ValueError:
            return None
    return _plain(name.lower().removesuffix(".")) or None


def _plain(name: str) -> str:
    """Return an address as Python writes it, one of IPv4 in IPv6 as itself; a name as it is.

    The zone of a link-local address is dropped: the socket's address has this machine's (`%eth0`),
    and clients send their own or none.
    """
    try:
        number = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    return str(mapped or number)


def _refuse_host(host: bytes | None) -> RequestRefusedError:
    if not host:
        message = "the header Host is missing; send the name or address of the server in it"
        return RequestRefusedError(400, "host", message)
    if _name_in(host) is None:
        expected = "one header Host with a host name or an address, optionally with a port"
        return RequestRefusedError(400, "host", found=_show(host), expected=expected)
    message = (
        f"unknown host {_show(host)}; use localhost or the server's address, or add this host "
        "to the server's `allowed_hosts`"
    )
    return RequestRefusedError(421, "host", message)


def _show(value: bytes) -> str:
    text = value.decode("latin-1")
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
