"""Dialogue: the lines that `show --episode` prints, and the shades of its tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from replaylake.cli.output.command_output import (
    Styled,
    count,
    has_styles,
    number_text,
    one_line,
)

if TYPE_CHECKING:
    from replaylake.datastore.interchange.export.dialogue import (
        Dialogue,
        DialogueTurn,
        SampledToken,
        Utterance,
    )

_BOLD: Final = "1"
_DIM: Final = "2"
# The probability above which a token has a shade: black on an ever darker background.
_SHADES: Final = (
    (0.9, "30;48;5;255", "above 0.9"),
    (0.5, "30;48;5;230", "above 0.5"),
    (0.1, "30;48;5;223", "above 0.1"),
    (0.01, "30;48;5;216", "above 0.01"),
    (0.0, "30;48;5;209", "below"),
)
_UNKNOWN: Final = "4"
_MASKED: Final = "9"  # crossed out

# Of pieces: the texts are the user's, in which no parameter of ours is named.
Line = Sequence[Styled]


def dialogue_lines(dialogue: Dialogue, show_tokens: bool) -> Iterator[Line]:
    """Yield the lines of a dialogue: a turn each, where agents change and branch, and its end."""
    own = dialogue.source_episode_id
    named = f" ({own})" if own not in (None, dialogue.episode_id) else ""
    yield _plain(
        f"{dialogue.dataset}@{dialogue.version} episode {one_line(dialogue.episode_id + named)}"
    )
    agents = dict.fromkeys(turn.agent_id for turn in dialogue.turns)
    group = "" if dialogue.group_id is None else f"; group {one_line(dialogue.group_id)}"
    yield _plain(
        f"  {count(len(agents), 'agent')}, {count(len(dialogue.turns), 'turn')}, "
        f"return {number_text(dialogue.reward)}{group}"
    )
    num = sum(turn.num_tokens or 0 for turn in dialogue.turns)
    if num:
        trainable = sum(turn.num_trainable or 0 for turn in dialogue.turns)
        share = f"{trainable:,} trainable ({100 * trainable / num:.3g}%)"
        yield _plain(f"  {count(num, 'sampled token')}, {share}")
    if show_tokens:
        yield from _legend_lines()
    for turn in dialogue.turns:
        yield _plain("")
        yield from _turn_lines(turn, show_tokens)


def _plain(text: str) -> Line:
    return [(text, "")]


def _turn_lines(turn: DialogueTurn, show_tokens: bool) -> Iterator[Line]:
    name = f"{turn.agent_id} " if turn.agent_id else ""
    facts = [f"reward {number_text(turn.reward)}"]
    facts += [
        f"{one['name']} {number_text(one['score'])}"
        + ("" if one.get("weight") is None else f" (weight {number_text(one['weight'])})")
        for one in turn.reward_components
    ]
    if turn.policy is not None:
        facts.append(f"policy {turn.policy}")
    if turn.policy_version is not None:
        facts.append(f"version {turn.policy_version:,}")
    if turn.num_tokens is not None:
        facts.append(f"{turn.num_observation_tokens or 0:,} + {turn.num_tokens:,} tokens")
        if turn.num_trainable != turn.num_tokens:
            facts.append(f"{turn.num_trainable:,} trainable")
    if turn.mean_log_prob is not None:
        facts.append(f"mean log-prob {turn.mean_log_prob:.3g}")
    heading = f"{one_line(name)}step {turn.step}"
    yield [(heading, _BOLD), (f"  {one_line(', '.join(facts))}", "")]
    if turn.parent is not None:
        agent, step = turn.parent
        verb = "called by" if turn.is_continuation is False else "branches from"
        name = one_line(agent) if agent else "the agent without a name,"
        yield [(f"  {verb} {name} step {step}", _DIM)]
    elif turn.is_continuation is False:
        yield [("  history rewritten", _DIM)]
    for said in turn.observation:
        yield from _utterance_lines(said, "    ", _DIM)
    if show_tokens and turn.tokens:
        yield from _token_lines(turn.tokens)
    # Where tokens have texts, these are what was said.
    has_text = not show_tokens or any(token.text is None for token in turn.tokens)
    for said in turn.action:
        yield from _utterance_lines(said, "  > ", "", has_text=has_text or not turn.tokens)
    for said in turn.final_observation:
        yield from _utterance_lines(said, "    ", _DIM)
    if turn.terminated or turn.truncated:
        yield [("  terminated" if turn.terminated else "  truncated", _DIM)]


def _utterance_lines(
    said: Utterance, indent: str, style: str, *, has_text: bool = True
) -> Iterator[Line]:
    texts = [said.text] if has_text and (said.text or not (said.calls or said.media)) else []
    lines = [line for text in texts for line in text.split("\n")]
    lines += [one_line(f"call {call}") for call in said.calls] + list(map(one_line, said.media))
    role = f"{one_line(said.role)}: " if said.role else ""
    for number, line in enumerate(lines):
        start = f"{indent}{role}" if number == 0 else " " * (len(indent) + 2)
        yield [(f"{start}{line}", style)]


def _legend_lines() -> Iterator[Line]:
    if not has_styles():
        yield _plain(
            "  tokens: text(log-prob), or #id(log-prob); (-) after a token that is not trainable"
        )
        return
    pieces: list[Styled] = [("  probability ", "")]
    for _, style, text in _SHADES:
        pieces += [(f" {text} ", style), (" ", "")]
    yield [*pieces, ("unknown", _UNKNOWN), (" ", ""), ("not trainable", _MASKED)]


def _token_lines(sampled: Sequence[SampledToken]) -> Iterator[Line]:
    """Yield tokens as shades on a terminal, and with their log-probs elsewhere."""
    if not has_styles():
        yield _plain(f"  > {' '.join(map(_describe_token, sampled))}")
        return
    line: list[Styled] = [("  > ", "")]
    for token in sampled:
        style = _find_shade(token)
        *whole, rest = _token_text(token, " ").split("\n")
        for part in whole:
            yield [*line, (f"{part}\N{DOWNWARDS ARROW WITH TIP LEFTWARDS}", style)]
            line = [("    ", "")]
        if rest:
            line.append((rest, style))
    yield line


def _describe_token(token: SampledToken) -> str:
    text = _token_text(token, "")
    shown = ascii(text)[1:-1] if "\n" in text else text
    value = "" if token.log_prob is None else f"({token.log_prob:.3g})"
    return f"{shown}{value}{'' if token.is_trainable else '(-)'}"


def _token_text(token: SampledToken, end: str) -> str:
    return f"#{token.id}{end}" if token.text is None else token.text


def _find_shade(token: SampledToken) -> str:
    masked = "" if token.is_trainable else f";{_MASKED}"
    if token.log_prob is None:
        return _UNKNOWN + masked
    probability = math.exp(min(0.0, token.log_prob))
    return next(style for least, style, _ in _SHADES if probability >= least) + masked
