"""Look-ahead: what has to be known of all rows before the first episode is read from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from replaylake.datastore.interchange.formats.tabular.arrays import names_of, whole_numbers
from replaylake.datastore.interchange.formats.tabular.tables import ORIGIN


@dataclass(frozen=True)
class LookAhead:
    """The least step of a source, and each episode's last row, as its number in the source.

    Either is None where it was not looked for.
    """

    least_step: int | None = None
    last_rows: Mapping[str, int] | None = None


def look_ahead(tables: Iterable[pa.Table], episode_id: str | None, step: str | None) -> LookAhead:
    """Read the columns of ids and of steps, where they are named; memory: the ids."""
    last_rows: dict[str, int] = {}
    least: list[int] = []
    for table in tables:
        if step is not None:
            numbers = whole_numbers(table.column(step).combine_chunks())
            wrong = np.any([np.zeros(table.num_rows, bool), *numbers.faults.values()], axis=0)
            least += [] if wrong.all() else [int(numbers.values[~wrong].min())]
        if episode_id is not None:
            column = table.column(episode_id).combine_chunks()
            ids = names_of(column, episode_id).fill_null("null").dictionary_encode()
            last = np.zeros(len(ids.dictionary), np.int64)
            np.maximum.at(last, np.asarray(ids.indices), np.asarray(table.column(ORIGIN)))
            last_rows.update(zip(ids.dictionary.to_pylist(), last.tolist(), strict=True))
    return LookAhead(min(least, default=None), None if episode_id is None else last_rows)


def repeated_ids(read: Callable[[], Iterable[pa.Table]], name: str) -> frozenset[str]:
    """Return the ids that stand in several rows; `read` begins to read the column anew.

    Cost: a pass, and where two ids may be one, another; memory: 8 bytes a row, and the ids found.
    """
    parts = [np.fromiter(map(hash, _texts(table, name)), np.int64) for table in read()]
    hashes, counts = np.unique(np.concatenate(parts), return_counts=True)
    several = {*hashes[counts > 1].tolist()}
    if not several:
        return frozenset()
    found: Counter[str] = Counter()
    for table in read():
        found.update(text for text in _texts(table, name) if hash(text) in several)
    return frozenset(text for text, num in found.items() if num > 1)


def _texts(table: pa.Table, name: str) -> list[str]:
    texts: list[str] = names_of(table.column(name).combine_chunks(), name).drop_null().to_pylist()
    return texts
