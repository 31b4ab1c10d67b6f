"""Images of messages: drawn beside the message, sent as what their own bytes say they are."""

import base64
import hashlib
import json

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.lake.lake import open_lake
from replaylake.serve.explorer.episodes.frames import encode_png

_PNG = encode_png(np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8))
_SVG = b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>" + b" " * 100
# Of 50,000 x 50,000 pixels, as its header says.
_BOMB = _PNG[:16] + (50_000).to_bytes(4, "big") * 2 + _PNG[24:]
_HOSTILE_TYPE = "image/svg+xml"


def digest_of(content):
    return hashlib.sha256(content).hexdigest()


def see(content, media_type="image/png"):
    encoded = base64.b64encode(content).decode()
    return {
        "role": "tool",
        "content": [
            {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{encoded}"}}
        ],
    }


def call(name, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


@pytest.fixture(scope="module")
def seen(tmp_path_factory, reader_type):
    """An agent that clicks and types: it sees an image twice, and files that are none."""
    lake = open_lake(tmp_path_factory.mktemp("seen") / "lake", create=True)
    prompts = [
        [{"role": "user", "content": "Buy milk."}, see(_PNG)],
        # The bytes are an image, whatever type the message states; and the other way round.
        [see(_PNG, _HOSTILE_TYPE), see(_SVG)],
        [see(_BOMB)],
    ]
    answers = [
        call("click", x=12, y=4),
        call("press", keys=["ctrl", "a"]),
        call("note", t="x" * 300),
    ]
    lake.dataset("screens").append(
        [
            Episode(
                "s/0",
                observations=np.array(["?"] * 3, object),
                actions=np.array(["!"] * 3, object),
                rewards=np.zeros(3),
                terminated=True,
                extras={
                    "prompt_messages": [json.dumps(one) for one in prompts],
                    "completion_messages": [json.dumps([one]) for one in answers],
                },
            )
        ]
    )
    return reader_type(lake)


def address_of(content, episode="s/0"):
    return f"/datasets/screens/image?id={episode}&sha256={digest_of(content)}&at=1"


def test_images_are_beside_their_message_and_actions_are_texts(seen):
    page = seen.page("/datasets/screens/episode?id=s/0")
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert [one["src"] for one in images] == [
        f"/datasets/screens/image?id=s%2F0&sha256={digest_of(_PNG)}&at=1"
    ] * 2
    assert (images[0]["width"], images[0]["height"]) == ("40", "30")
    size = f"{len(_PNG):,} bytes, 40 x 30 pixels, sha256 {digest_of(_PNG)[:16]}]"
    assert images[0]["alt"] == f"[image_url image/png: {size}"
    assert 'click({"x": 12, "y": 4})' in page.texts
    assert 'press({"keys": ["ctrl", "a"]})' in page.texts
    # What is no image, or too large, is described.
    assert f"[image_url image/png: {len(_SVG)} bytes, sha256 {digest_of(_SVG)[:16]}]" in page.texts
    assert any("50000 x 50000 pixels" in text for text in page.texts)


def test_an_image_is_sent_with_the_type_of_its_bytes(seen):
    answer = seen.client.get(address_of(_PNG))
    assert answer.content == _PNG
    assert answer.headers["content-type"] == "image/png"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert answer.headers["etag"] == f'"{digest_of(_PNG)}"'
    known = {"if-none-match": f'"x", "{digest_of(_PNG)}"'}
    again = seen.client.get(address_of(_PNG), headers=known)
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == answer.headers["etag"]


@pytest.mark.parametrize("content", [_SVG, _BOMB, b"not there"])
def test_what_is_no_image_is_not_sent(seen, content):
    answer = seen.client.get(address_of(content))
    assert answer.status_code == 404
    assert answer.headers["content-type"].startswith("text/html")
    assert "found no PNG, JPEG, GIF or WebP of at most 8 MiB" in answer.text


def test_a_large_image_is_not_sent(seen, monkeypatch):
    monkeypatch.setattr(
        "replaylake.serve.explorer.episodes.conversation_panel._MAX_IMAGE_BYTES", len(_PNG) - 1
    )
    assert seen.client.get(address_of(_PNG)).status_code == 404
    assert not [1 for tag, _ in seen.page("/datasets/screens/episode?id=s/0").tags if tag == "img"]


def test_an_image_of_another_episode_or_dataset_is_not_sent(seen, explored):
    assert seen.client.get(address_of(_PNG, "s/1")).status_code == 404
    address = f"/datasets/walks/image?id=w/00&sha256={digest_of(_PNG)}"
    assert explored.client.get(address).status_code == 404
    answer = explored.client.get("/datasets/walks/image?id=w/00&sha256=<b>")
    assert answer.status_code == 400
    assert "expected 64 hexadecimal digits" in answer.text


def test_damaged_bytes_are_not_sent(seen, monkeypatch):
    damaged = _PNG[:-1] + bytes([_PNG[-1] ^ 1])
    monkeypatch.setattr(
        "replaylake.serve.explorer.episodes.conversation_panel._read_image", lambda *_: damaged
    )
    answer = seen.client.get(address_of(_PNG))
    assert answer.status_code == 400
    assert "its bytes have another sha256" in answer.text
