"""Copy plan: which shards of a snapshot hold rows that came after an earlier copy.

A shard is not its rows: between two copies the source may have been compacted, annotated or
trimmed. So the commits in between are followed, and where they mix rows that were copied with rows
that were not, the rows themselves have to be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from replaylake.datastore.errors import LogCorrupt, NotFound
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.table import Table, TableSnapshot

_OLD, _MIXED, _FRESH = range(3)
# Changes of which every row was in a shard that they took out.
_REWRITES: Final = frozenset(
    ("ANNOTATE", "COMPACT", "DELETE", "LATE REWARDS", "PURGE", "REPAIR", "TRIM")
)


@dataclass(frozen=True)
class CopyPlan:
    """What is live at the version to copy and was not, or perhaps not all, copied before.

    `fresh` shards hold only rows that came after `base`, the version copied before (None: nothing
    was); of `mixed` ones that is not known. `changed_at` are the versions since that changed or
    removed rows which were copied.
    """

    base: int | None
    fresh: tuple[FileEntry, ...]
    mixed: tuple[FileEntry, ...] = ()
    changed_at: tuple[int, ...] = ()


def plan_copy(source: Table, snapshot: TableSnapshot, base: int | None) -> CopyPlan:
    """Sort the shards of a snapshot by what was copied at `base`. Cost: reads the commits since."""
    if base is None:
        return CopyPlan(None, snapshot.files)
    kinds: dict[str, int] = {}
    changed: list[int] = []
    for version in range(base + 1, snapshot.version + 1):
        try:
            actions = source.log.actions(version)
        except (NotFound, LogCorrupt):
            # Expired since: nothing is known, so everything is compared.
            return CopyPlan(None, (), snapshot.files)
        if _follow(kinds, actions):
            changed.append(version)
    return CopyPlan(
        base,
        fresh=tuple(e for e in snapshot.files if kinds.get(e.path, _OLD) == _FRESH),
        mixed=tuple(e for e in snapshot.files if kinds.get(e.path, _OLD) == _MIXED),
        changed_at=tuple(changed),
    )


def notes_of(plan: CopyPlan, forgotten: int | None) -> tuple[str, ...]:
    """Say what may surprise; `forgotten` is the version copied last where it is not there now."""
    notes = []
    if plan.changed_at:
        versions = ", ".join(map(str, plan.changed_at[:5]))
        notes.append(
            f"the source changed or removed rows since they were copied (version {versions}): the "
            "target keeps them as they were; copy into a new dataset for the newest values"
        )
    if forgotten is not None:
        notes.append(
            f"the source keeps version {forgotten}, copied last, no longer: what the target "
            "removed of it may have been copied again; copy more often than `keep versions` of "
            "`replaylake retention`"
        )
    return tuple(notes)


def _follow(kinds: dict[str, int], actions: Sequence[Mapping[str, Any]]) -> bool:
    """Note what a commit's shards hold; return whether it changed rows that were copied."""
    added = [action["add"] for action in actions if "add" in action]
    removed = [action["remove"] for action in actions if "remove" in action]
    is_change = any(one.get("dataChange", True) for one in (*added, *removed))
    sources = {kinds.get(one["path"], _OLD) for one in removed}
    if sources <= {_FRESH}:  # or nothing was removed: rows that are new
        kind = _FRESH
    elif sources == {_OLD} and (not is_change or _operation(actions) in _REWRITES):
        kind = _OLD
    else:
        kind = _MIXED
    kinds |= {one["path"]: kind for one in added}
    return is_change and bool(sources - {_FRESH})


def _operation(actions: Sequence[Mapping[str, Any]]) -> str | None:
    return next((a["commitInfo"].get("operation") for a in actions if "commitInfo" in a), None)
