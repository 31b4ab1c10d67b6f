"""Copy rows: which rows of shards a target has already, by episode, agent and step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Final

from replaylake.datastore.episodes.schema import AGENT_ID, EPISODE_ID, STEP
from replaylake.datastore.query.table_files import fetched, located, rows_of, scanning
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.shard import verify_shard
from replaylake.datastore.storage.table.table import TableSnapshot

_KEY: Final = (EPISODE_ID, AGENT_ID, STEP)


class RowsPresent:
    """The keys of a target's rows, and of those that an earlier copy had. A context manager.

    Cost: a scan of three columns of them for each question. Nothing is held in memory.
    """

    def __init__(
        self, source: TableSnapshot, target: TableSnapshot, before: TableSnapshot | None
    ) -> None:
        self._source = source
        self._known = [one for one in (target, before) if one is not None and one.files]
        self._stack = ExitStack()

    def __enter__(self) -> RowsPresent:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def among(self, entries: Sequence[FileEntry]) -> dict[str, list[int]]:
        """Return the rows that are known, for each shard that shares an episode with them.

        Raises: ShardCorrupt.
        """
        if not entries or not self._known:
            return {}
        with ExitStack() as stack:
            paths = stack.enter_context(fetched(self._source, entries))
            for path, entry in zip(paths, entries, strict=True):
                verify_shard(path, entry)  # DuckDB reads flipped bits as other ids
            sources = []
            for one in self._known:
                files = stack.enter_context(fetched(one, one.files))
                sources.append(f"SELECT {', '.join(_KEY)} FROM {located(one, files)}")
            known = " UNION ALL ".join(sources)
            connection = stack.enter_context(scanning())
            shared = rows_of(
                connection,
                f"SELECT DISTINCT file_index FROM {located(self._source, paths)} "
                f"SEMI JOIN ({known}) USING ({EPISODE_ID}, {AGENT_ID})",
            )
            found = {}
            for (index,) in sorted(shared):
                rows = rows_of(
                    connection,
                    f"SELECT file_row_number FROM {located(self._source, [paths[index]])} "
                    f"SEMI JOIN ({known}) USING ({', '.join(_KEY)}) ORDER BY 1",
                )
                found[entries[index].path] = [row for (row,) in rows]
            return found

    def num_episodes(self, entries: Sequence[FileEntry]) -> int:
        """Count the episodes and agents of shards."""
        if not entries:
            return 0
        columns = (EPISODE_ID, AGENT_ID)
        with fetched(self._source, entries) as paths, scanning() as connection:
            ((num,),) = rows_of(
                connection,
                f"SELECT count(*) FROM (SELECT DISTINCT {', '.join(columns)} "
                f"FROM {located(self._source, paths)})",
            )
        return int(num)
