"""Ray Data: a snapshot as a dataset of Ray, its shards read by the tasks of a cluster.

Ray is imported when it is asked for, as in ray_pool.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from replaylake.datastore.errors import ExtraMissingError
from replaylake.datastore.lake.shard_rows import ShardRows, episode_keys, shard_rows
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.offline.running.local_ray import import_ray

if TYPE_CHECKING:
    from ray.data import Dataset

_NEEDS: Final = "to_ray: found no ray, expected it"


def to_ray(
    snapshot: Snapshot, columns: Sequence[str] | None = None, where: str | None = None
) -> Dataset:
    """Return a Ray Data dataset of a snapshot's steps, with one row per step.

    Its columns are those of `steps`. Nothing is read before the dataset is consumed, except for
    `where`, which is one query when this function is called. A task reads one shard (or several
    adjacent ones if there are more shards than Ray wants tasks), verifies its sha256, and yields
    one block per shard. Each node has to reach the lake at the same path or URL. A column that was
    added later is null in older shards. A local Ray is started if none runs.

    Args:
        snapshot: the snapshot to read.
        columns: columns of `steps`; all by default.
        where: SQL condition over the columns of `episodes`, as in `Snapshot.replay`; selects whole
            episodes.

    Raises: NotFoundError for a column, QueryRefusedError, QueryError, ExtraMissingError;
    ShardCorruptError in the task, which Ray wraps in its own error.
    """
    rows = shard_rows(snapshot, columns)
    ray = _import_ray_data()
    # One copy in the object store instead of one in each task.
    episodes = None if where is None else ray.put(episode_keys(snapshot, where))

    class Shards(ray.data.Datasource):  # type: ignore[name-defined, misc, unused-ignore]
        def get_name(self) -> str:
            return f"{snapshot.dataset}@{snapshot.version}"

        def estimate_inmemory_data_size(self) -> int:
            return sum(entry.size_bytes for entry in snapshot.files)

        def get_read_tasks(
            self, parallelizm: int, per_task_row_limit: int | None = None, data_context: Any = None
        ) -> list[Any]:
            return [
                ray.data.ReadTask(
                    _reader(part, episodes),
                    _metadata(part, is_whole=episodes is None),
                    schema=rows.schema,
                    per_task_row_limit=per_task_row_limit,
                )
                for part in rows.split(parallelizm)
            ]

    dataset: Dataset = ray.data.read_datasource(Shards())
    return dataset


def _reader(rows: ShardRows, episodes: Any) -> Callable[[], Iterator[Any]]:
    def read() -> Iterator[Any]:
        return rows.read(None if episodes is None else import_ray(_NEEDS).get(episodes))

    return read


def _metadata(rows: ShardRows, *, is_whole: bool) -> Any:
    from ray.data.block import BlockMetadata

    return BlockMetadata(
        num_rows=rows.num_rows if is_whole else None,
        size_bytes=sum(entry.size_bytes for entry in rows.table.files),
        input_files=tuple(entry.path for entry in rows.table.files),
        exec_stats=None,
    )


def _import_ray_data() -> Any:
    try:
        ray = import_ray(_NEEDS)
        import ray.data  # noqa: F811 - the same module, with its part for data
    except (ExtraMissingError, ImportError) as error:
        raise ExtraMissingError(
            f"to_ray: found no Ray Data ({error}), expected it. "
            "Run: pip install 'replaylake[online]'."
        ) from error
    return ray
