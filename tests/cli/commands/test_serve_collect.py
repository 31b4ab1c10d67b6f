"""`replaylake serve --collect`: which options it refuses."""

import pytest


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "found neither"),
        (("clone", "--collect", "agents"), "found both"),
        (("--collect", "agents", "--explore", "epsilon=0.1"), "--explore"),
        (("--collect", "agents", "--workers", "2"), "a collector is one process"),
    ],
)
def test_options_of_a_policy_are_refused_with_collect(run, lake, arguments, text):
    ran = run("serve", *arguments)
    assert ran.code == 2
    assert text in " ".join(ran.err.split())
    assert not lake.exists()
