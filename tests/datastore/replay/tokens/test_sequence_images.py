"""SequenceImages: the images of each sequence, in the order of its messages."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

import replaylake as rl
from replaylake.datastore.episodes.message_media import MESSAGE_MEDIA
from replaylake.datastore.errors import SchemaMismatchError, ShardCorruptError
from replaylake.datastore.replay.tokens.sequence_images import SequenceImages

IMAGES = [np.random.default_rng(seed).bytes(200) for seed in range(3)]
SMALL = b"an image of few bytes"  # stays in its message


@pytest.fixture
def lake(tmp_path):
    return rl.open(tmp_path / "lake", create=True)


def url(image):
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def show(*images):
    """OpenAI's two forms in turn, and Anthropic's."""
    parts = [
        {"type": "image_url", "image_url": {"url": url(images[0])}},
        *({"type": "input_image", "image_url": url(one)} for one in images[1:2]),
        *(
            {
                "type": "image",
                "source": {
                    "type": "base64",
                    "media_type": "image/png",
                    "data": base64.b64encode(one).decode(),
                },
            }
            for one in images[2:]
        ),
    ]
    return {"role": "user", "content": [{"type": "text", "text": "an image"}, *parts]}


def read(lake, where=None):
    """Return the images by episode, agent and last step, and how many different ones there are."""
    snapshot = lake.snapshot("agents")
    sequences = snapshot.token_sequences(where)
    keys = [sequences.table[name].to_pylist() for name in ("episode_id", "agent_id", "last_step")]
    chosen = np.arange(len(sequences))
    with SequenceImages(snapshot.table, sequences.table, chosen) as images:
        found = images.read_sequences(chosen)
        return dict(zip(zip(*keys, strict=True), found, strict=True)), len(images)


def record(lake, name, messages, **given):
    with rl.record_language(lake, "agents", producer=name) as recorder:
        recorder.record(
            prompt=messages, completion="one", prompt_ids=[1, 2], completion_ids=[3], **given
        )


def test_each_form_of_an_image_in_the_order_of_the_messages(lake):
    record(lake, "a", [show(*IMAGES), {"role": "assistant", "content": "ok"}, show(SMALL)])
    record(lake, "b", [{"role": "user", "content": "no image"}])
    record(lake, "c", [show(IMAGES[1], IMAGES[1])])
    found, num = read(lake)
    assert found == {
        ("a/0", "", 0): [*IMAGES, SMALL],
        ("b/0", "", 0): [],
        ("c/0", "", 0): [IMAGES[1], IMAGES[1]],
    }
    assert num == 4


def test_a_sequence_has_the_images_of_all_steps_on_its_path(lake):
    with rl.record_language(lake, "agents", producer="p") as recorder:
        rollout = recorder.begin("one")
        first = {"prompt": [show(IMAGES[0])], "prompt_ids": [1, 2], "completion_ids": [3]}
        rollout.step(completion="one", **first)
        recorder.flush()  # the other steps are in another shard
        again = {"prompt_ids": [1, 2, 3, 4], "completion_ids": [5]}
        rollout.step(prompt=[show(IMAGES[1], IMAGES[0])], completion="two", **again)
        fork = {"agent_id": "~1", "parent": ("", 0), "terminated": True}
        rollout.step(prompt=[show(IMAGES[2])], completion="three", **again, **fork)
        rollout.step(
            prompt=[show(IMAGES[2])],
            completion="rewritten",
            prompt_ids=[7, 8],
            completion_ids=[9],
            terminated=True,
        )
    assert read(lake)[0] == {
        ("p/one", "", 1): [IMAGES[0], IMAGES[1], IMAGES[0]],
        ("p/one", "~1", 0): [IMAGES[0], IMAGES[2]],
        ("p/one", "", 2): [IMAGES[2]],
    }
    # The second step's messages refer to bytes that the first step has.
    rows = lake.sql(
        f"select m.bytes is not null as here from (select unnest({MESSAGE_MEDIA}) as m "
        "from agents.steps where step = 1 and agent_id = '')"
    )
    assert sorted(rows["here"].to_pylist()) == [False, True]


def test_sequences_that_are_not_wanted_are_not_read(lake):
    record(lake, "a", [show(IMAGES[0])])
    record(lake, "b", [{"role": "user", "content": [{"type": "image_url", "image_url": "no.png"}]}])
    assert read(lake, where="episode_id like 'a%'")[1] == 1


def test_an_image_that_is_only_named_is_refused(lake):
    part = {"type": "image_url", "image_url": {"url": "https://example.com/one.png"}}
    record(lake, "a", [{"role": "user", "content": [part]}])
    with pytest.raises(SchemaMismatchError, match=r"step 0: found an image .*one\.png.*Record"):
        read(lake)


def test_lost_bytes_are_named(lake):
    message = {"type": "input_image", "image_url": f"data:image/png;base64,sha256:{'0' * 64}"}
    record(lake, "a", json.loads(json.dumps([{"role": "user", "content": [message]}])))
    with pytest.raises(ShardCorruptError, match=f"sha256 {'0' * 64}, whose bytes no step"):
        read(lake)
