"""The tokens that a policy sampled in an episode, each with the shade of one of its values.

A page has a window of tokens, read by SQL that cuts the lists: an episode of any length costs the
browser the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from replaylake.datastore.episodes import schema, tokens
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.serve.explorer.visits.page import Panel
from replaylake.serve.explorer.visits.visit import Visit
from replaylake.serve.pages.markup import Child, Markup, tag
from replaylake.serve.pages.texts import count

_WINDOW: Final = 2_000
_ANCHOR: Final = "#tokens"
# What the addresses of an episode's page may have, which its links to other windows keep.
_KEPT: Final = ("id", "agent", "at", "where", "sort", "order", "queue", "shade")
_UNKNOWN: Final = ("s-unknown", "unknown")
# Lower bounds of the probability, upper bounds of the mismatch: class and words of each shade.
_PROBABILITIES: Final = (
    (0.9, "s0", "above 0.9"),
    (0.5, "s1", "0.5 to 0.9"),
    (0.1, "s2", "0.1 to 0.5"),
    (0.01, "s3", "0.01 to 0.1"),
    (0.0, "s4", "below 0.01"),
)
_MISMATCHES: Final = (
    (0.01, "s0", "below 0.01"),
    (0.1, "s1", "0.01 to 0.1"),
    (0.5, "s2", "0.1 to 0.5"),
    (1.0, "s3", "0.5 to 1"),
    (math.inf, "s4", "1 or more"),
)
_MASKS: Final = (("s0", "in the loss"), ("s-out", "left out"))
_NUM_COLORS: Final = 8


@dataclass(frozen=True)
class _Token:
    """A sampled token. mismatch: its log-prob under the proximal policy minus the behavior's."""

    id: int
    text: str | None
    log_prob: float | None
    is_trained: bool
    version: int | None
    mismatch: float | None


@dataclass(frozen=True)
class _Step:
    """A step's tokens in the window. first: the place of the first of them among its `total`."""

    step: int
    first: int
    total: int
    num_observed: int
    tokens: Sequence[_Token]


@dataclass(frozen=True)
class _Shade:
    """A value that tokens are shaded by. find: a token's class, and words for the legend.

    known: these in the order of the legend; others follow as they occur.
    """

    title: str
    find: Callable[[_Token], tuple[str, str]]
    known: Sequence[tuple[str, str]] = ()


def draw_tokens(visit: Visit, snapshot: Snapshot, episode_id: str, agent_id: str) -> Panel | None:
    """Show a window of the tokens of an episode's agent: from `token` on, shaded by `shade`.

    None where it has no tokens. Raises: ConfigInvalidError for another window or shade.
    """
    names = snapshot.table.schema.names
    if not tokens.has_tokens(names):
        return None
    key = {"id": episode_id, "agent": agent_id}
    (counted,) = visit.sql(
        f"""SELECT CAST(coalesce(sum(len({tokens.ACTION_TOKENS})), 0) AS BIGINT) AS num_tokens
        FROM {snapshot.dataset}.steps WHERE episode_id = $id AND agent_id = $agent""",
        snapshot,
        **key,
    )
    total = counted["num_tokens"]
    if not total:
        return None
    first = _read_place(visit, total)
    shades = _list_shades(names)
    shade = visit.values.get("shade") or next(iter(shades))
    if shade not in shades:
        raise ConfigInvalidError(
            f"shade: found {shade!r}, expected one of {', '.join(shades)}.", parameter="shade"
        )
    rows = visit.sql(_window_sql(snapshot, names), snapshot, **key, first=first, num=_WINDOW)
    texts = visit.token_texts.find(snapshot.spec.tokenizer)
    steps = [_read_step(row, texts) for row in rows]
    num = sum(len(step.tokens) for step in steps)
    note = f"Tokens {first + 1:,} to {first + num:,} of {total:,}."
    if any(token.text is None for step in steps for token in step.tokens):
        note += " Ids whose text is not known are numbers."
    body = [
        _shade_links(visit, shades, shade),
        _legend(steps, shades[shade]),
        [_draw_step(step, shades[shade]) for step in steps],
        # The tooltip's text of the token that is selected by keys or touch.
        tag("output", "", id="token-facts", hidden=True),
        _window_links(visit, first, total) if total > _WINDOW else None,
    ]
    return Panel("Sampled tokens", tag("div", body, id=_ANCHOR[1:]), note=note)


def _read_place(visit: Visit, total: int) -> int:
    text = visit.values.get("token") or "0"
    place = int(text) if text.isascii() and text.isdigit() and len(text) < 16 else -1
    if not 0 <= place < total:
        raise ConfigInvalidError(
            f"token: found {text[:80]!r}, expected the place of a sampled token, from 0 to "
            f"{total - 1}.",
            parameter="token",
        )
    return place


def _window_sql(snapshot: Snapshot, names: Sequence[str]) -> str:
    """Return the query of the steps in a window of `num` tokens from `first` on."""

    def cut(column: str) -> str:
        return f"{column}[low + 1 : high] AS {column}" if column in names else f"NULL AS {column}"

    def known(column: str) -> str:
        return column if column in names else f"NULL AS {column}"

    lists = (
        tokens.ACTION_TOKENS,
        tokens.ACTION_LOG_PROBS,
        tokens.PROXIMAL_LOG_PROBS,
        tokens.ACTION_LOSS_MASK,
    )
    # Ids that are the code points of the text: as many as it has characters.
    piece = (
        f"CASE WHEN length({schema.ACTION}) = total "
        f"THEN substr({schema.ACTION}, low + 1, high - low) END"
    )
    is_text = str(snapshot.table.schema.field(schema.ACTION).type) == "string"
    return f"""
        SELECT step, policy_version, {known(tokens.IS_TRAINABLE)}, {known(tokens.ACTION_VERSIONS)},
            low AS first, total, len({tokens.OBSERVATION_TOKENS}) AS num_observed,
            {", ".join(map(cut, lists))}, {piece if is_text else "NULL"} AS piece
        FROM (
            SELECT *, len({tokens.ACTION_TOKENS}) AS total,
                CAST(sum(len({tokens.ACTION_TOKENS})) OVER (ORDER BY step) AS BIGINT) AS until,
                greatest(0, $first - (until - total)) AS low,
                least(total, $first + $num - (until - total)) AS high
            FROM {snapshot.dataset}.steps
            WHERE episode_id = $id AND agent_id = $agent AND {tokens.ACTION_TOKENS} IS NOT NULL
        ) WHERE low < high ORDER BY step"""


def _read_step(row: Mapping[str, Any], texts: Sequence[str | None]) -> _Step:
    ids = row[tokens.ACTION_TOKENS]
    num, first = len(ids), row["first"]
    behavior = row[tokens.ACTION_LOG_PROBS] or [None] * num
    proximal = row[tokens.PROXIMAL_LOG_PROBS] or [None] * num
    mask = row[tokens.ACTION_LOSS_MASK] or [True] * num
    runs = row[tokens.ACTION_VERSIONS] or [{"start": 0, "version": row[schema.POLICY_VERSION]}]
    piece = row["piece"] or ""
    if [ord(letter) for letter in piece] != ids:
        piece = ""
    found = []
    run = 0
    for place, token in enumerate(ids):
        while run + 1 < len(runs) and runs[run + 1]["start"] <= first + place:
            run += 1
        text = texts[token] if token < len(texts) else None
        mine, other = behavior[place], proximal[place]
        found.append(
            _Token(
                id=token,
                text=piece[place] if text is None and piece else text,
                log_prob=mine,
                is_trained=bool(mask[place]) and row[tokens.IS_TRAINABLE] is not False,
                version=runs[run]["version"],
                mismatch=None if mine is None or other is None else other - mine,
            )
        )
    return _Step(row[schema.STEP], first, row["total"], row["num_observed"] or 0, found)


def _list_shades(names: Sequence[str]) -> dict[str, _Shade]:
    """Return the shades that a dataset's columns allow, by their names in an address."""
    shades: dict[str, _Shade] = {}
    if tokens.ACTION_LOG_PROBS in names:
        known = [pair[1:] for pair in _PROBABILITIES]
        shades["log_prob"] = _Shade("probability", _shade_probability, known)
    shades["mask"] = _Shade("loss mask", _shade_mask, _MASKS)
    shades["version"] = _Shade("policy version", _shade_version)
    if tokens.ACTION_LOG_PROBS in names and tokens.PROXIMAL_LOG_PROBS in names:
        known = [pair[1:] for pair in _MISMATCHES]
        shades["mismatch"] = _Shade("mismatch", _shade_mismatch, known)
    return shades


def _shade_probability(token: _Token) -> tuple[str, str]:
    if token.log_prob is None:
        return _UNKNOWN
    probability = math.exp(token.log_prob)
    return next((name, words) for least, name, words in _PROBABILITIES if probability >= least)


def _shade_mask(token: _Token) -> tuple[str, str]:
    return _MASKS[0] if token.is_trained else _MASKS[1]


def _shade_version(token: _Token) -> tuple[str, str]:
    if token.version is None:
        return _UNKNOWN
    return f"v{token.version % _NUM_COLORS}", f"version {token.version:,}"


def _shade_mismatch(token: _Token) -> tuple[str, str]:
    # NaN and infinite log-probs differ from any other.
    size = math.nan if token.mismatch is None else abs(token.mismatch)
    if math.isnan(size):
        return _UNKNOWN
    found = (pair[1:] for pair in _MISMATCHES if size < pair[0])
    return next(found, _MISMATCHES[-1][1:])


def _legend(steps: Sequence[_Step], shade: _Shade) -> Markup:
    """Return the shades that occur, each with its number of tokens in the window."""
    numbers = Counter(shade.find(token) for step in steps for token in step.tokens)
    shown = [one for one in shade.known if one in numbers]
    shown += [one for one in numbers if one not in shown]
    items = [
        tag(
            "li",
            tag("span", words, class_=f"token {name}"),
            tag("span", f"{numbers[name, words]:,}"),
        )
        for name, words in shown
    ]
    return tag("ul", items, class_="legend", aria_label="Shades, with their numbers of tokens")


def _draw_step(step: _Step, shade: _Shade) -> Markup:
    facts = [f"step {step.step}", f"{count(step.num_observed, 'token')} before"]
    if len(step.tokens) < step.total:
        last = step.first + len(step.tokens)
        facts.append(f"tokens {step.first + 1:,} to {last:,} of {step.total:,}")
    else:
        facts.append(count(step.total, "token"))
    return tag(
        "div",
        tag("p", " \N{MIDDLE DOT} ".join(facts), class_="meta"),
        tag(
            "div",
            [_draw_token(token, shade) for token in step.tokens],
            class_="tokens",
            role="group",
            tabindex=0,
            aria_label=f"Tokens of step {step.step}: select one with the arrow keys",
        ),
        class_="turn sampled",
    )


def _draw_token(token: _Token, shade: _Shade) -> Markup:
    name, _ = shade.find(token)
    text: Child = f"{token.id} " if token.text is None else token.text
    if token.text is not None and "\n" in token.text:
        # A token that is a line break would have no area of its own.
        text = token.text.replace("\n", "\N{DOWNWARDS ARROW WITH TIP LEFTWARDS}\n")
    if token.text == "":
        text = "\N{OPEN BOX}"
    return tag("span", text, class_=f"token {name}", title=", ".join(_describe_token(token)))


def _describe_token(token: _Token) -> Iterator[str]:
    yield f"id {token.id}"
    if token.log_prob is not None:
        yield f"log-prob {token.log_prob:.4g}, probability {math.exp(token.log_prob):.3g}"
    if token.mismatch is not None:
        yield f"mismatch {token.mismatch:+.4g}"
    if token.version is not None:
        yield f"version {token.version}"
    if not token.is_trained:
        yield "left out of the loss"


def _shade_links(visit: Visit, shades: Mapping[str, _Shade], chosen: str) -> Markup:
    links = [
        tag(
            "a",
            one.title,
            href=_link(visit, shade=name, token=visit.values.get("token")),
            class_="pill good" if name == chosen else "pill",
            aria_current="true" if name == chosen else None,
        )
        for name, one in shades.items()
    ]
    return tag("p", "Shade: ", links)


def _window_links(visit: Visit, first: int, total: int) -> Markup:
    last = (total - 1) // _WINDOW * _WINDOW
    places = (
        ("First tokens", 0 if first > 0 else None),
        ("Previous tokens", max(0, first - _WINDOW) if first > 0 else None),
        ("Next tokens", first + _WINDOW if first + _WINDOW < total else None),
        ("Last tokens", last if first < last else None),
    )
    links = [
        tag("span", words, class_="button", aria_disabled="true")
        if place is None
        else tag("a", words, href=_link(visit, token=place or None), class_="button")
        for words, place in places
    ]
    return tag("div", links, class_="more")


def _link(visit: Visit, **changed: object) -> str:
    """Return the address of this page with other values, at this panel."""
    kept = {name: visit.values.get(name) for name in _KEPT}
    address = visit.link("datasets", visit.path["name"], "episode", **{**kept, **changed})
    return f"{address}{_ANCHOR}"
