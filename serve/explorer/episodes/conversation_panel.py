"""Conversation: an episode of texts as its messages, with calls of tools and images."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Final

from replaylake.datastore.episodes.images import read_image_header
from replaylake.datastore.episodes.message_media import MESSAGE_MEDIA, is_media_column
from replaylake.datastore.errors import ConfigInvalidError, NotFoundError, ShardCorruptError
from replaylake.datastore.interchange.export.dialogue import (
    DialogueTurn,
    StoredImage,
    Utterance,
    read_dialogue,
)
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.storage.table.delta_schema import plain_type
from replaylake.serve.explorer.datasets.dataset_page import find_snapshot
from replaylake.serve.explorer.visits.page import Download, Panel
from replaylake.serve.explorer.visits.visit import Visit
from replaylake.serve.pages.markup import Child, Markup, join, join_list, tag
from replaylake.serve.pages.texts import number_text, size

_MAX_TURNS: Final = 500
_MAX_DIALOGUE_BYTES: Final = 8 << 20
# Larger images are described, not shown, because a browser decodes them to 4 bytes a pixel.
_MAX_IMAGE_BYTES: Final = 8 << 20
_MAX_PIXELS: Final = 40_000_000
_SHA256: Final = re.compile("[0-9a-f]{64}")
LinkImage = Callable[[StoredImage], str]
# Calls of one line, such as clicks and keys, are shown; longer ones are collapsed.
_MAX_CALL: Final = 160


def draw_conversation(visit: Visit, snapshot: Snapshot, episode_id: str, num_steps: int) -> Panel:
    """Draw the first turns of an episode. num_steps: of all its agents."""
    dialogue = read_dialogue(
        snapshot,
        episode_id,
        max_turns=_MAX_TURNS,
        max_bytes=_MAX_DIALOGUE_BYTES,
    )

    def link_image(image: StoredImage) -> str:
        name, at = snapshot.dataset, snapshot.version
        return visit.link("datasets", name, "image", id=episode_id, sha256=image.sha256, at=at)

    turns = _draw_turns(dialogue.turns, link_image)
    note = None
    if len(turns) < num_steps:
        note = f"the first {len(turns):,} of {num_steps:,} turns"
    return Panel("Conversation", turns, note=note)


def _draw_turns(turns: Sequence[DialogueTurn], link_image: LinkImage) -> list[Markup]:
    """Return turns, each with links to the turn that it branches from and to its branches."""
    places = {(turn.agent_id, turn.step): place for place, turn in enumerate(turns)}
    branches: dict[tuple[str, int], list[Markup]] = {}
    for place, turn in enumerate(turns):
        if turn.parent is not None:
            link = tag("a", _name_turn(turn.agent_id, turn.step), href=f"#turn-{place}")
            branches.setdefault(turn.parent, []).append(link)
    drawn = []
    for place, turn in enumerate(turns):
        parent: Child = None
        if turn.parent is not None:
            parent = _name_turn(*turn.parent)
            if (at := places.get(turn.parent)) is not None:
                parent = tag("a", parent, href=f"#turn-{at}")
        below = branches.get((turn.agent_id, turn.step), ())
        drawn.append(_turn(turn, place, parent, below, link_image))
    return drawn


def _name_turn(agent_id: str, step: int) -> Markup:
    # Isolated: marks of text direction in a name must not affect what follows.
    return join(tag("bdi", agent_id or "agent"), f" step {step}")


def _turn(
    turn: DialogueTurn,
    place: int,
    parent: Child,
    branches: Sequence[Markup],
    link_image: LinkImage,
) -> Markup:
    """Draw a turn. place: its number among those of the page; parent, branches: links to others."""
    facts: list[Child] = [tag("bdi", turn.agent_id)] if turn.agent_id else []
    facts += [f"step {turn.step}", f"reward {number_text(turn.reward)}"]
    facts += [
        [tag("bdi", str(one["name"])), f" {number_text(one['score'])}"]
        for one in turn.reward_components
    ]
    if turn.policy is not None:
        version = "" if turn.policy_version is None else f":{turn.policy_version}"
        facts.append(tag("bdi", f"{turn.policy}{version}"))
    if turn.num_tokens is not None:
        facts.append(f"{turn.num_tokens:,} tokens")
    if turn.mean_log_prob is not None:
        facts.append(f"mean log-prob {turn.mean_log_prob:.3g}")
    if parent is not None:
        facts.append(["branches from ", parent])
    if branches:
        facts.append(["branched to ", join_list(branches)])
    if turn.terminated or turn.truncated:
        facts.append("terminated" if turn.terminated else "truncated")
    return tag(
        "div",
        [_utterance(said, link_image) for said in turn.observation],
        tag(
            "div",
            tag("p", join_list(facts, " \N{MIDDLE DOT} "), class_="meta"),
            [_utterance(said, link_image, is_own=True) for said in turn.action],
            class_="turn sampled",
        ),
        [_utterance(said, link_image) for said in turn.final_observation],
        id=f"turn-{place}",
    )


def _utterance(said: Utterance, link_image: LinkImage, *, is_own: bool = False) -> Markup:
    role = said.role or ("policy" if is_own else "environment")
    text: Child = tag("div", said.text, class_="text") if said.text else None
    if said.role == "tool" and said.text:
        text = tag("details", tag("summary", _first_line(said.text)), text)
    if text is None and not said.calls and not said.media:
        text = tag("div", "(no text)", class_="quiet")
    return tag(
        "div",
        tag("div", role, class_="role"),
        text,
        [_call(call) for call in said.calls],
        _draw_media(said, link_image),
        class_="say own" if is_own else "say",
    )


def _call(call: str) -> Markup:
    if len(call) <= _MAX_CALL and "\n" not in call:
        return tag("div", "calls ", tag("code", call), class_="call")
    return tag(
        "details",
        tag("summary", f"calls {_first_line(call)}"),
        tag("pre", tag("code", call)),
    )


def _draw_media(said: Utterance, link_image: LinkImage) -> list[Markup]:
    """Return the media of a message: images that are not too large, else descriptions."""
    images = {one.text: one for one in said.images}
    drawn = []
    for text in said.media:
        image = images.get(text)
        if image is None or not _can_draw(image):
            drawn.append(tag("div", text, class_="quiet"))
            continue
        address = link_image(image)
        picture = tag(
            "img",
            src=address,
            alt=text,
            width=image.width,
            height=image.height,
            loading="lazy",
            decoding="async",
        )
        pixels = f"{image.width:,} x {image.height:,} pixels"
        caption = f"{image.media_type}, {pixels}, {size(image.num_bytes)}"
        drawn.append(
            tag(
                "figure",
                tag("a", picture, href=address),
                tag("figcaption", caption, class_="quiet"),
                class_="media",
            )
        )
    return drawn


def _can_draw(image: StoredImage) -> bool:
    return image.num_bytes <= _MAX_IMAGE_BYTES and image.width * image.height <= _MAX_PIXELS


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 90 else f"{line[:88]}\N{HORIZONTAL ELLIPSIS}"


def send_image(visit: Visit) -> Download:
    """Return an image of an episode's messages by its sha256, with the type of its first bytes.

    Raises: NotFoundError, including for media that are no PNG, JPEG, GIF or WebP and for images
    that are too large; ConfigInvalidError; ShardCorruptError if the sha256 of the bytes differs.
    """
    snapshot = find_snapshot(visit)
    digest = visit.values.get("sha256", "")
    if _SHA256.fullmatch(digest) is None:
        raise ConfigInvalidError(
            f"sha256: found {digest[:80]!r}, expected 64 hexadecimal digits.", parameter="sha256"
        )
    content = _read_image(visit, snapshot, digest)
    header = None if content is None else read_image_header(content)
    if content is None or header is None or header.width * header.height > _MAX_PIXELS:
        raise NotFoundError(
            f"image {digest}: found no PNG, JPEG, GIF or WebP of at most {_MAX_IMAGE_BYTES >> 20} "
            f"MiB and {_MAX_PIXELS // 1_000_000} million pixels in this episode. Export the "
            "episode to get all media."
        )
    if hashlib.sha256(content).hexdigest() != digest:
        raise ShardCorruptError(
            f"image {digest}: its bytes have another sha256. Run fsck on the lake, and restore the "
            "shard from a copy."
        )
    return Download(content, header.media_type, is_fixed=True, digest=digest)


def _read_image(visit: Visit, snapshot: Snapshot, digest: str) -> bytes | None:
    schema = snapshot.table.schema
    if not any(is_media_column(one.name, plain_type(one.type)) for one in schema):
        return None
    found = visit.table(
        f"""SELECT m.bytes AS content FROM (SELECT unnest({MESSAGE_MEDIA}) AS m
        FROM {snapshot.dataset}.steps WHERE episode_id = $id)
        WHERE m.sha256 = $digest AND octet_length(m.bytes) <= {_MAX_IMAGE_BYTES} LIMIT 1""",
        snapshot,
        id=visit.values.get("id", ""),
        digest=digest,
    )
    content: bytes | None = found.column("content")[0].as_py() if found.num_rows else None
    return content
