"""Names of calls: from headers and paths, and as columns."""

import itertools

import pytest

from replaylake.serve.gateway.conversations import CallIdentity
from replaylake.serve.gateway.identity import read_identity
from replaylake.serve.messages import RequestRefusedError


def test_headers_may_be_utf8_or_latin1():
    headers = {b"x-replaylake-run": "ünï".encode(), b"x-user": "ünï".encode("latin-1")}
    identity = read_identity({}, headers, b"x-user")
    assert (identity.run, identity.user) == ("ünï", "ünï")


def test_only_the_name_of_an_agent_has_no_tilde():
    headers = {b"x-user": b"~ada", b"x-replaylake-parent-agent": b"~1", b"x-replaylake-run": b"a~b"}
    identity = read_identity({}, headers, b"x-user")
    assert (identity.user, identity.parent_agent, identity.run) == ("~ada", "~1", "a~b")
    with pytest.raises(RequestRefusedError, match="printable characters without ~"):
        read_identity({"agent": "a~1"}, {}, None)


def test_different_names_are_different_columns():
    names = [None, "a", "3", "a/3", "a%2F3", "-", "%2D"]
    episodes, groups = set(), set()
    identities = list(itertools.product(names, [None, 3], names, names[1:]))
    for run, iteration, group, episode in identities:
        identity = CallIdentity(run, iteration, group, episode)
        episodes.add(identity.source_episode_id)
        groups.add((identity.group_id, group is None))
    assert len(episodes) == len(identities)
    assert len(groups) == 7 * 2 * 6 + 1
    assert CallIdentity("r", 3, "g", "e").source_episode_id == "r/3/g/e"
    assert CallIdentity("r", None, "3", "z").source_episode_id == "r/-/3/z"
    assert CallIdentity("r", None, "g", "0").source_episode_id == "r/g/0"
    assert CallIdentity("r", None, "g", "0").group_id == "r/g"
    assert CallIdentity(None, None, "g", "0").source_episode_id == "-/g/0"
    assert CallIdentity("r", 3, None, "z").source_episode_id == "r/3/z"
