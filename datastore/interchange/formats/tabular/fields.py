"""Fields: which of a log's columns is which of ours, by known aliases or an explicit mapping."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Final

from replaylake.datastore.episodes.schema import STANDARD_COLUMNS
from replaylake.datastore.errors import ConfigInvalidError, SourceInvalidError
from replaylake.datastore.interchange.sources.source_errors import format_names
from replaylake.datastore.names import is_column_name

# What a misspelled name is compared with.
_MAX_COMPARED: Final = 1000
_MAX_COMPARED_LENGTH: Final = 64

# Minari, RLlib, d3rlpy, D4RL, LeRobot and ReAgent call them so.
ALIASES: Final[dict[str, tuple[str, ...]]] = {
    "observation": ("observation", "observations", "obs"),
    "action": ("action", "actions"),
    "reward": ("reward", "rewards", "next.reward"),
    "terminated": (
        "terminated",
        "terminateds",
        "terminations",
        "terminal",
        "terminals",
        "is_terminal",
    ),
    "truncated": ("truncated", "truncateds", "truncations", "timeouts"),
    "episode_id": ("episode_id", "eps_id", "episode_index", "mdp_id"),
    "step": ("step", "t", "frame_index", "sequence_number"),
    "env_step": ("env_step",),
    "agent_id": ("agent_id", "agent_index"),
    "final_observation": ("final_observation",),
    "next_observation": ("next_observation", "next_observations", "new_obs", "next_obs"),
    "behavior_log_prob": ("behavior_log_prob", "action_logp"),
    "behavior_prob": (
        "behavior_prob",
        "action_prob",
        "action_probability",
        "pscore",
        "propensity",
        "propensity_score",
    ),
    "policy": ("policy",),
    "policy_version": ("policy_version",),
    "action_mask": ("action_mask",),
    "timestamp": ("timestamp",),
}
# One flag for both ends: taken as terminated where nothing better is there, and said so.
DONE_ALIASES: Final = ("dones", "done", "next.done")
HEAD_COLUMNS: Final = ("action_dist_inputs", "action_logits", "q_values")
VECTOR_FIELDS: Final = (
    "observation",
    "action",
    "final_observation",
    "next_observation",
    "action_mask",
)
# A hidden column that several columns make up; the NUL keeps it apart from any that a log has.
EPISODE: Final = "\0episode"
_PATTERN: Final = re.compile(r"[*?\[]")
_REQUIRED: Final = ("observation", "action", "reward")


@dataclass(frozen=True)
class ColumnLayout:
    """The columns of a source: `fields` maps ours to theirs, `extras` theirs to our column name.

    episode_by: the columns that EPISODE is made of. order_by: what puts an episode's rows in order.
    """

    fields: Mapping[str, tuple[str, ...]]
    extras: Mapping[str, str]
    done: str | None = None
    renames: Mapping[str, str] = field(default_factory=dict)
    rewards_optional: bool = False
    episode_by: tuple[str, ...] = ()
    order_by: tuple[str, ...] = ()

    def one(self, ours: str) -> str | None:
        """Return their column for a field of one column, or None where the log lacks it."""
        theirs = self.fields.get(ours)
        return theirs[0] if theirs else None

    def mapping(self) -> dict[str, str]:
        """Return ours to theirs for each field that is one column of the log."""
        return {
            ours: theirs[0]
            for ours, theirs in self.fields.items()
            if len(theirs) == 1 and theirs[0] != EPISODE
        }

    def columns(self) -> list[str]:
        """Return every column of theirs that an episode cannot be built without."""
        needed = [
            theirs
            for ours, theirs in self.fields.items()
            if not (ours == "reward" and self.rewards_optional)
        ]
        used = [name for theirs in needed for name in theirs]
        used += [*self.episode_by, *self.order_by, *([self.done] if self.done else [])]
        return [name for name in dict.fromkeys(used) if name != EPISODE]


def lay_out(
    names: Sequence[str],
    mapping: Mapping[str, str],
    where: str,
    *,
    rewards_optional: bool = False,
    episode_by: Sequence[str] = (),
    order_by: Sequence[str] = (),
) -> ColumnLayout:
    """Assign columns to fields.

    Args:
        names: the source's columns.
        mapping: ours=theirs; wins over aliases.
        where: the source's name for messages.
        rewards_optional: rewards that are not there are unknown.
        episode_by: the columns that together tell episodes apart; wins over `mapping`.
        order_by: the columns that put an episode's rows in order; a step column is then one only
            where `mapping` names it.

    Raises: SourceInvalidError if a mapped or required column is absent, two columns are one field's
    aliases, or two names collide; ConfigInvalidError if `mapping` itself is wrong.
    """
    _check_present(names, episode_by, "episode_by", where)
    _check_present(names, order_by, "order_by", where)
    explicit, renamed = _parse_mapping(names, mapping, where, episode_by)
    if episode_by:
        explicit["episode_id"] = tuple(episode_by) if len(episode_by) == 1 else (EPISODE,)
    in_use = {name for theirs in explicit.values() for name in theirs} | set(renamed)
    free = [name for name in names if name not in in_use]
    fields = dict(explicit)
    replaced = set()
    for ours, aliases in ALIASES.items():
        candidates = [name for name in aliases if name in free]
        if (ours == "step" and order_by) or (ours == "episode_id" and episode_by):
            replaced |= {*candidates, ours}
            continue
        if ours in fields or not candidates:
            continue
        if len(candidates) > 1:
            raise SourceInvalidError(
                f"{where}: found the columns {candidates}, expected one that is the {ours}. "
                f"Name it with `mapping` {ours}={candidates[0]}."
            )
        fields[ours] = (candidates[0],)
    if {"behavior_prob", "behavior_log_prob"} <= fields.keys():
        # What is named wins; of two that are only found, the logarithm is the more exact.
        is_named = "behavior_prob" in explicit and "behavior_log_prob" not in explicit
        fields.pop("behavior_log_prob" if is_named else "behavior_prob")
    for ours in _REQUIRED:
        if ours not in fields and not (ours == "reward" and rewards_optional):
            hint = ", or say `reward_unknown` where the log has none" if ours == "reward" else ""
            raise SourceInvalidError(
                f"{where}: found the columns {_quote_names(names)}, expected one that is the "
                f"{ours}. "
                f"Name it with `mapping` {ours}=COLUMN{hint}."
            )
    done = None
    if "terminated" not in fields:
        done = next((name for name in DONE_ALIASES if name in free), None)
    used = {name for theirs in fields.values() for name in theirs} | {done}
    extras, renames = _extras(names, used, renamed, replaced, where)
    by = tuple(episode_by) if len(episode_by) > 1 else ()
    return ColumnLayout(fields, extras, done, renames, rewards_optional, by, tuple(order_by))


def _find_meant(ours: str) -> str | None:
    """Return the field that a name of a log stands for; None for a field's own name and others."""
    if ours in ALIASES:
        return None
    return next((name for name, aliases in ALIASES.items() if ours in aliases), None)


def _parse_mapping(
    names: Sequence[str], mapping: Mapping[str, str], where: str, episode_by: Sequence[str]
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    fields: dict[str, tuple[str, ...]] = {}
    renamed: dict[str, str] = {}
    by_field = {
        ours: (spelled,) if spelled in names else tuple(p.strip() for p in spelled.split(","))
        for ours, spelled in mapping.items()
    }
    # What is named is not meant by a pattern as well.
    in_use = {name for theirs in by_field.values() for name in theirs} | set(episode_by)
    for ours, spelled in mapping.items():
        theirs = _expand_patterns(by_field[ours], names, in_use, f"{ours}={spelled}", where)
        if (meant := _find_meant(ours)) is not None:
            raise ConfigInvalidError(
                f"mapping {ours}={spelled}: found {ours!r}, which is a name of logs for the field "
                f"{meant!r}. Write {meant}={spelled}; a further column needs another name.",
                parameter="mapping",
            )
        if ours not in ALIASES and (not is_column_name(ours) or ours in STANDARD_COLUMNS):
            raise ConfigInvalidError(
                f"mapping {ours}={spelled}: found {ours!r}, expected one of {', '.join(ALIASES)}, "
                "or a new name for a further column ([A-Za-z_][A-Za-z0-9_]*).",
                parameter="mapping",
            )
        if len(theirs) > 1 and ours not in VECTOR_FIELDS:
            raise ConfigInvalidError(
                f"mapping {ours}={spelled}: found {len(theirs)} columns, expected one. Only "
                f"{', '.join(VECTOR_FIELDS)} are built from several.",
                parameter="mapping",
            )
        if ours in ALIASES:
            fields[ours] = theirs
            continue
        if (other := renamed.get(theirs[0])) is not None:
            raise ConfigInvalidError(
                f"mapping {ours}={spelled}: found the column also stored as {other}, expected "
                "one name. Leave one out.",
                parameter="mapping",
            )
        renamed[theirs[0]] = ours
    return fields, renamed


def _expand_patterns(
    spelled: Sequence[str], names: Sequence[str], in_use: set[str], text: str, where: str
) -> tuple[str, ...]:
    """Return the columns that are meant: patterns in the source's order, names as they come."""
    found: list[str] = []
    for part in spelled:
        if part in names:
            if part in found:
                raise ConfigInvalidError(
                    f"mapping {text}: found {part!r} twice, expected it once.", parameter="mapping"
                )
            found.append(part)
            continue
        matched = []
        if _PATTERN.search(part):
            free = [name for name in names if name not in in_use and name not in found]
            matched = [name for name in free if fnmatchcase(name, part)]
        if not matched:
            what = "columns that match" if _PATTERN.search(part) else "the column"
            raise SourceInvalidError(
                f"{where}: found the columns {_quote_names(names)}, expected {what} {part!r}, "
                f"which the "
                f"mapping {text} names.{suggest_name(part, names)} Correct `mapping`."
            )
        found += matched
    return tuple(found)


def _check_present(names: Sequence[str], theirs: Sequence[str], option: str, where: str) -> None:
    for name in theirs:
        if name not in names:
            raise SourceInvalidError(
                f"{where}: found the columns {_quote_names(names)}, expected {name!r}, which "
                f"`{option}` "
                f"names.{suggest_name(name, names)} Correct it."
            )
    if len(set(theirs)) < len(theirs):
        raise ConfigInvalidError(
            f"{option} {','.join(theirs)}: found a column twice, expected it once.",
            parameter=option,
        )


def _extras(
    names: Sequence[str],
    used: set[str | None],
    renamed: Mapping[str, str],
    replaced: set[str],
    where: str,
) -> tuple[dict[str, str], dict[str, str]]:
    extras: dict[str, str] = {}
    in_use = {name.lower(): "a column of ours" for name in (*STANDARD_COLUMNS, "next_observation")}
    for position, name in enumerate(names):
        # A field's column that is given a name of its own is kept under it as well.
        if name in used and name not in renamed:
            continue
        ours = renamed.get(name) or column_name(name, position)
        if name in replaced and ours in STANDARD_COLUMNS:
            ours = f"logged_{ours}"  # `episode_by` or `order_by` stands in its place
        if (other := in_use.get(ours.lower())) is not None:
            raise SourceInvalidError(
                f"{where}: column {name!r} would be stored as {ours!r}, which {other} is already "
                f"(names differ by more than case). Rename it with `mapping` NEW={name}."
            )
        in_use[ours.lower()] = repr(name)
        extras[name] = ours
    renames = {name: ours for name, ours in extras.items() if ours != name}
    return extras, renames


def without_fields(layout: ColumnLayout, unread: Sequence[str]) -> ColumnLayout:
    """Return the layout with the columns of some fields as further columns.

    One whose name is a column of ours is called `logged_NAME`.
    """
    names = [name for ours in unread for name in layout.fields.get(ours, ())]
    if "terminated" in unread and layout.done is not None:
        names.append(layout.done)
    fields = {ours: theirs for ours, theirs in layout.fields.items() if ours not in unread}
    done = None if "terminated" in unread else layout.done
    # Of two fields from one column, the other one still has it.
    left = {name for theirs in fields.values() for name in theirs}
    rest = [name for name in dict.fromkeys(names) if name not in left]
    return retain_columns(replace(layout, fields=fields, done=done), rest, rest)


def retain_columns(layout: ColumnLayout, used: Sequence[str], names: Sequence[str]) -> ColumnLayout:
    """Return the layout with columns that fields are made of as further columns too.

    One whose name is a column of ours is called `logged_NAME`.
    """
    ours = {**layout.extras}
    in_use = {name.lower() for name in (*ours.values(), *STANDARD_COLUMNS, "next_observation")}
    for name in dict.fromkeys(used):
        if name not in ours:
            own = column_name(name, names.index(name))
            ours[name] = f"logged_{own}" if own.lower() in in_use else own
    extras = {name: ours[name] for name in dict.fromkeys([*names, *ours]) if name in ours}
    renames = {name: own for name, own in extras.items() if own != name}
    return replace(layout, extras=extras, renames=renames)


def column_name(name: str, position: int) -> str:
    """Return the nearest name that a further column may have."""
    if not name:
        return f"column_{position}"
    # A leading digit is kept behind an underscore: with it replaced, `0` and `1` would collide.
    cleaned = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return f"_{cleaned}" if cleaned[0].isdigit() else cleaned


def suggest_name(name: str, names: Sequence[str]) -> str:
    """Return ` Did you mean 'reward'?` if one of the names is nearly this one, else nothing."""
    # Comparing takes time that grows with the square of a name's length.
    candidates = [other for other in names[:_MAX_COMPARED] if len(other) <= _MAX_COMPARED_LENGTH]
    near = get_close_matches(name[:_MAX_COMPARED_LENGTH], candidates, n=1, cutoff=0.75)
    return f" Did you mean {near[0]!r}?" if near else ""


def _quote_names(names: Sequence[str]) -> str:
    return format_names([*map(repr, names)], 20)
