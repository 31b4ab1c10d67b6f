"""Fields: which of a log's columns is which of ours, by known aliases or an explicit mapping."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from replaylake.datastore.errors import ConfigInvalid, SourceInvalid
from replaylake.datastore.names import is_column_name
from replaylake.datastore.schema import STANDARD_COLUMNS

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
_REQUIRED: Final = ("observation", "action", "reward")


@dataclass(frozen=True)
class Layout:
    """The columns of a source: `fields` maps ours to theirs, `extras` theirs to our column name."""

    fields: Mapping[str, tuple[str, ...]]
    extras: Mapping[str, str]
    done: str | None = None
    renames: Mapping[str, str] = field(default_factory=dict)

    def one(self, ours: str) -> str | None:
        """Return their column for a field of one column, or None where the log lacks it."""
        theirs = self.fields.get(ours)
        return theirs[0] if theirs else None

    def columns(self) -> list[str]:
        """Return every column of theirs that an episode cannot be built without."""
        used = [name for theirs in self.fields.values() for name in theirs]
        return list(dict.fromkeys([*used, self.done] if self.done else used))


def lay_out(names: Sequence[str], mapping: Mapping[str, str], where: str) -> Layout:
    """Assign columns to fields.

    Args:
        names: the source's columns.
        mapping: ours=theirs; wins over aliases.
        where: the source's name for messages.

    Raises: SourceInvalid if a mapped or required column is absent, two columns are one field's
    aliases, or two names collide; ConfigInvalid if `mapping` itself is wrong.
    """
    explicit, renamed = _explicit(names, mapping, where)
    taken = {name for theirs in explicit.values() for name in theirs} | set(renamed)
    free = [name for name in names if name not in taken]
    fields = dict(explicit)
    for ours, aliases in ALIASES.items():
        found = [name for name in aliases if name in free]
        if ours in fields or not found:
            continue
        if len(found) > 1:
            raise SourceInvalid(
                f"{where}: found the columns {found}, expected one that is the {ours}. "
                f"Say which with --map {ours}={found[0]}."
            )
        fields[ours] = (found[0],)
    if "behavior_log_prob" in fields:
        fields.pop("behavior_prob", None)
    for ours in _REQUIRED:
        if ours not in fields:
            raise SourceInvalid(
                f"{where}: found the columns {_listed(names)}, expected one that is the {ours}. "
                f"Name it with --map {ours}=COLUMN."
            )
    done = None
    if "terminated" not in fields:
        done = next((name for name in DONE_ALIASES if name in free), None)
    used = {name for theirs in fields.values() for name in theirs} | {done}
    extras, renames = _extras(names, used, renamed, where)
    return Layout(fields, extras, done, renames)


def _explicit(
    names: Sequence[str], mapping: Mapping[str, str], where: str
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    fields: dict[str, tuple[str, ...]] = {}
    renamed: dict[str, str] = {}
    for ours, spelled in mapping.items():
        theirs = (spelled,) if spelled in names else tuple(p.strip() for p in spelled.split(","))
        for name in theirs:
            if name not in names:
                raise SourceInvalid(
                    f"{where}: found the columns {_listed(names)}, expected {name!r}, which the "
                    f"mapping {ours}={spelled} names. Correct --map."
                )
        if ours not in ALIASES and (not is_column_name(ours) or ours in STANDARD_COLUMNS):
            raise ConfigInvalid(
                f"--map {ours}={spelled}: found {ours!r}, expected one of {', '.join(ALIASES)}, or "
                "a new name for a further column ([A-Za-z_][A-Za-z0-9_]*)."
            )
        if len(theirs) > 1 and ours not in VECTOR_FIELDS:
            raise ConfigInvalid(
                f"--map {ours}={spelled}: found {len(theirs)} columns, expected one. Only "
                f"{', '.join(VECTOR_FIELDS)} are built from several."
            )
        if ours in ALIASES:
            fields[ours] = theirs
        else:
            renamed[theirs[0]] = ours
    return fields, renamed


def _extras(
    names: Sequence[str], used: set[str | None], renamed: Mapping[str, str], where: str
) -> tuple[dict[str, str], dict[str, str]]:
    extras: dict[str, str] = {}
    taken = {name.lower(): "a column of ours" for name in (*STANDARD_COLUMNS, "next_observation")}
    for position, name in enumerate(names):
        if name in used:
            continue
        ours = renamed.get(name) or column_name(name, position)
        if (other := taken.get(ours.lower())) is not None:
            raise SourceInvalid(
                f"{where}: column {name!r} would be stored as {ours!r}, which {other} is already "
                f"(names differ by more than case). Rename it with --map NEW={name}."
            )
        taken[ours.lower()] = repr(name)
        extras[name] = ours
    renames = {name: ours for name, ours in extras.items() if ours != name}
    return extras, renames


def column_name(name: str, position: int) -> str:
    """Return the nearest name that a further column may have."""
    if not name:
        return f"column_{position}"
    # A leading digit is kept behind an underscore: with it replaced, `0` and `1` would collide.
    cleaned = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return f"_{cleaned}" if cleaned[0].isdigit() else cleaned


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:20])
    return f"{shown} and {len(names) - 20} more" if len(names) > 20 else shown
