"""State tokens: what only the server can make, and any worker with its key reads."""

import base64

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from replaylake.serve.versions.state_tokens import StateSigner

SIGNER = StateSigner(b"k" * 32)


def test_a_token_carries_every_bit():
    states = np.random.default_rng(0).standard_normal((3, 7)).astype(np.float32)
    states[0, 0], states[1, 1] = -0.0, np.float32(1e-45)
    tokens = SIGNER.issue("clone", 4, states)
    for token, state in zip(tokens, states, strict=True):
        assert token.replace("-", "").replace("_", "").isalnum()
        found = StateSigner(b"k" * 32).read(token)
        assert (found.policy, found.version) == ("clone", 4)
        assert found.numbers.tobytes() == state.tobytes()
        assert found.numbers.flags.writeable


def test_a_strangers_token_is_none():
    (token,) = StateSigner(b"other").issue("clone", 4, np.zeros((1, 2), np.float32))
    assert SIGNER.read(token) is None


@pytest.mark.parametrize("text", ["", "s", "sAAAA", "é", "s" + "A" * 10_000, "s====", "s\x00"])
def test_a_text_that_is_no_token_is_none(text):
    assert SIGNER.read(text) is None


@hypothesis.given(st.data())
def test_a_token_with_any_bit_changed_is_none(data):
    (token,) = SIGNER.issue("clone", 4, np.ones((1, 3), np.float32))
    encoded = token[1:]
    raw = bytearray(base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)))
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    changed = "s" + base64.urlsafe_b64encode(bytes(raw)).decode().rstrip("=")
    assert SIGNER.read(changed) is None
