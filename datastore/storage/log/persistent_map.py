"""PersistentMap: an unchanging mapping whose changed copies share what did not change."""

from __future__ import annotations

import math
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Generic, TypeVar

Value = TypeVar("Value")
# A copy holds up to about as many changes as keeps both costs even: copying them for each commit,
# and merging them into all keys now and then.
_MIN_CHANGES = 64


class PersistentMap(Mapping[str, Value], Generic[Value]):
    """A dict that is never altered, and over it the few keys that have changed since.

    A commit changes one key of thousands; copying them all for each commit made up a third of its
    time at version 10,000 (2 cores, 2026-11). Looking at all keys merges the changes once. None is
    no value here: among changes it says that the key is gone.
    """

    __slots__ = ("_layers",)

    def __init__(self, base: Mapping[str, Value] | None = None) -> None:
        changes: Mapping[str, Value | None] = {}
        # One attribute, so that threads see the dict and its changes from the same moment.
        self._layers = (dict(base or {}), changes)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Value]) -> PersistentMap[Value]:
        """Return the mapping itself if it is shared already."""
        return mapping if isinstance(mapping, PersistentMap) else cls(mapping)

    def with_changes(self, changes: Mapping[str, Value | None]) -> PersistentMap[Value]:
        """Return a copy with further keys set, and those with None gone."""
        if not changes:
            return self
        base, earlier = self._layers
        copy = PersistentMap[Value]()
        copy._layers = (base, {**earlier, **changes})
        if len(copy._layers[1]) > max(_MIN_CHANGES, math.isqrt(len(base))):
            copy._merge_layers()
        return copy

    def __getitem__(self, key: str) -> Value:
        base, changes = self._layers
        value = changes[key] if key in changes else base[key]
        if value is None:
            raise KeyError(key)
        return value

    def __contains__(self, key: object) -> bool:
        base, changes = self._layers
        return changes[key] is not None if key in changes else key in base  # type: ignore[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._merge_layers())

    def __len__(self) -> int:
        return len(self._merge_layers())

    # Views of the merged dict: those that Mapping builds look every key up again.
    def keys(self) -> KeysView[str]:
        return self._merge_layers().keys()

    def values(self) -> ValuesView[Value]:
        return self._merge_layers().values()

    def items(self) -> ItemsView[str, Value]:
        return self._merge_layers().items()

    def __repr__(self) -> str:
        return f"PersistentMap({self._merge_layers()!r})"

    def _merge_layers(self) -> dict[str, Value]:
        base, changes = self._layers
        if changes:
            base = dict(base)
            for key, value in changes.items():
                if value is None:
                    base.pop(key, None)
                else:
                    base[key] = value
            self._layers = (base, {})
        return base
