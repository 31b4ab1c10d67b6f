"""Which Host and Origin headers a server takes, and how each of the others is refused."""

import pytest

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.serve.config import ServeConfig
from replaylake.serve.messages import RequestRefusedError
from replaylake.serve.safety.hosts import AllowedHosts
from replaylake.serve.safety.limits import Safety


def status(hosts, host, origin=None, address=None):
    try:
        hosts.check(host, origin, address)
    except RequestRefusedError as error:
        return error.status, error.field
    return None


@pytest.mark.parametrize(
    "host",
    [b"localhost", b"LOCALHOST:3000", b"localhost.", b"127.0.0.1:3000", b"127.9.8.7", b"[::1]:80",
     b"[::ffff:127.0.0.1]", b"localhost:"],
)  # fmt: skip
def test_loopback_is_always_allowed(host):
    assert status(AllowedHosts(), host) is None
    assert status(AllowedHosts(), host, b"http://" + host) is None


@pytest.mark.parametrize(
    "host",
    [b"evil.example", b"localhost.evil.example", b"10.0.0.7:3000", b"[2001:db8::1]", b"127.1",
     b"2130706433", b"0x7f.0.0.1", b"1localhost"],
)  # fmt: skip
def test_another_host_is_misdirected(host):
    assert status(AllowedHosts(), host) == (421, "host")
    assert status(AllowedHosts(), b"localhost", b"http://" + host) == (403, "origin")


@pytest.mark.parametrize(
    "host",
    [None, b"", b" ", b":3000", b"localhost,evil.example", b"localhost evil", b"http://localhost",
     b"user@localhost", b"localhost:port", b"[::1", b"[::g]", b"localhost/", b"\xff"],
)  # fmt: skip
def test_no_host_is_a_bad_request(host):
    assert status(AllowedHosts(), host) == (400, "host")
    assert status(AllowedHosts(("*",)), host) == (400, "host")


@pytest.mark.parametrize("origin", [b"null", b"", b"file://", b"localhost", b"https://localhost/x"])
def test_an_origin_of_nowhere_is_refused(origin):
    assert status(AllowedHosts(), b"localhost", origin) == (403, "origin")


def test_the_address_that_it_came_to_is_allowed():
    hosts = AllowedHosts()
    assert status(hosts, b"10.0.0.7:3000", address="10.0.0.7") is None
    assert status(hosts, b"10.0.0.7:3000", address="::ffff:10.0.0.7") is None
    assert status(hosts, b"[2001:DB8:0::1]", address="2001:db8::1") is None
    assert status(hosts, b"10.0.0.7:3000", address="10.0.0.8") == (421, "host")
    assert status(hosts, b"10.0.0.7", b"http://10.0.0.7:8080", "10.0.0.7") is None


@pytest.mark.parametrize("host", [b"[fe80::1]:3000", b"[FE80::1%25eth1]", b"[fe80::1%eth0]:80"])
def test_the_zone_of_a_link_local_address_does_not_matter(host):
    hosts = AllowedHosts()
    assert status(hosts, host, b"http://" + host, "fe80::1%eth0") is None
    assert status(hosts, host, address="fe80::2%eth0") == (421, "host")
    assert status(AllowedHosts(("fe80::1%eth0",)), host) is None


@pytest.mark.parametrize("host", [b"[fe80::1%]", b"[fe80::1%a/b]", b"fe80::1%eth0", b"name%eth0"])
def test_a_zone_that_is_none_is_a_bad_request(host):
    assert status(AllowedHosts(), host) == (400, "host")


def test_hosts_that_are_named_are_allowed():
    hosts = AllowedHosts(("Policy.Example.com", "policy", "10.1.2.3", "2001:db8::5", "[::2]"))
    for host in (b"policy.example.com:443", b"POLICY", b"10.1.2.3", b"[2001:db8::5]:1", b"[::2]"):
        assert status(hosts, host, b"https://" + host) is None
    assert status(hosts, b"other.example.com") == (421, "host")
    assert status(hosts, b"policy", b"https://other.example.com") == (403, "origin")
    assert status(AllowedHosts(("*",)), b"anything.example", b"null") is None


@pytest.mark.parametrize(
    "host", ["http://policy", "policy:80", "", "a b", "*.example.com", "[::1]:80", "a,b", "pol/icy"]
)
def test_what_is_no_host_cannot_be_allowed(host):
    with pytest.raises(ConfigInvalidError, match="allowed_hosts: found"):
        Safety(allowed_hosts=(host,))


def test_a_worker_is_told_of_them(tmp_path):
    safety = Safety(allowed_hosts=("policy.example.com", "10.0.0.7"))
    config = ServeConfig(tmp_path, "p", 1, host="fe80::1%eth0", safety=safety)
    told = ServeConfig.from_environment(config.to_environment())
    assert told.safety == safety
    hosts = told.allowed_hosts
    for host in (b"policy.example.com", b"10.0.0.7:3000", b"[fe80::1]:3000", b"localhost"):
        assert status(hosts, host) is None
    assert Safety.from_environment(Safety().to_environment()) == Safety()


def test_many_hosts_take_no_memory():
    hosts = AllowedHosts()
    for number in range(2000):
        assert status(hosts, b"h%d.example" % number) == (421, "host")
    assert hosts._is_allowed.cache_info().currsize <= 256


def test_a_long_host_is_refused_and_not_cached():
    hosts = AllowedHosts(("localhost",))
    longest = b"h" * 255 + b":65535"
    assert status(hosts, longest) == (421, "host")
    before = hosts._is_allowed.cache_info().currsize
    for num_bytes in (265, 65_000):
        assert status(hosts, b"h" * num_bytes) == (400, "host")
        assert status(hosts, b"h" * 255 + b":" + b"1" * num_bytes) == (400, "host")
        assert status(hosts, b"localhost", b"http://" + b"h" * num_bytes) == (403, "origin")
    assert hosts._is_allowed.cache_info().currsize == before + 1  # localhost
