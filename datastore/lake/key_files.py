"""Key files: the index of a dataset's unique keys, as maintenance checks and cleans it."""

from __future__ import annotations

from collections.abc import Iterator

from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.unique_keys import find_doubled, find_null
from replaylake.datastore.storage.table.key_index import FOLDER as FOLDER
from replaylake.datastore.storage.table.shard import FOLDER as SHARDS


def drop_gone_keys(dataset: Dataset) -> None:
    """Take the keys of shards that are deleted out of the index, hashes though they are.

    Raises: StorageError.
    """
    if not dataset.exists() or (unique := dataset.spec.unique) is None:
        return
    names = dataset.table.storage.names(f"{dataset.name}/{SHARDS}")
    there = {f"{SHARDS}/{name}" for name in names}
    dataset.key_index(unique).drop_shards(lambda path: path not in there)


def check_keys(dataset: Dataset) -> Iterator[tuple[str, str]]:
    """Yield the path of what is wrong with a dataset's unique key, and how: index files and rows.

    Cost: reads the index, and the key's columns. Raises: ShardCorruptError.
    """
    unique = dataset.spec.unique
    if unique is None:
        return
    snapshot = dataset.table.snapshot()
    # A new index: what this process has read before may be damaged since.
    index = dataset.new_key_index(unique)
    damaged = list(index.check(snapshot))
    yield from damaged
    names = ", ".join(unique.columns)
    if num := find_null(snapshot, unique):
        yield (
            dataset.name,
            f"found {num:,} rows with NULL in {names}, expected a value: it is unique",
        )
    if damaged:
        return  # what it says of rows is not known
    if doubled := find_doubled(snapshot, index, unique):
        found = "; ".join(doubled)
        yield dataset.name, f"found several rows of one key, such as {found}, expected each once"
