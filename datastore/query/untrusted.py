"""SQL from others: one SELECT in a process of its own, with limits that it cannot lift.

The process gets exactly the files of the datasets that the query names, and nothing else: no other
file, no network, none of our environment, no way to write. Where the kernel has Landlock it holds
the process to that too. Costs the start of an interpreter: about 0.4 s.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, BinaryIO, Final

import pyarrow as pa

from replaylake.datastore.errors import (
    ConfigInvalidError,
    QueryError,
    QueryRefusedError,
    ReplayLakeError,
)
from replaylake.datastore.query.sandbox import read_frame, to_ipc, write_frame
from replaylake.datastore.query.statements import Cancellation
from replaylake.datastore.query.views import Catalog, Views, plan_views
from replaylake.datastore.storage.table.table import TableSnapshot

# What people outside need not know: where the lake lies, and what its runs met with.
_WITHHELD_COLUMNS: Final = {"policies": ("path",), "runs": ("record",)}
_MAX_QUERY_BYTES: Final = 100_000
_MAX_FRAME_BYTES: Final = 1 << 20
_MAX_MESSAGE: Final = 2000
# Arrow's framing around the rows.
_FRAMING_BYTES: Final = 16 << 20
# Of our environment nothing but where the loader finds libraries. One malloc arena and one BLAS
# thread: each further one takes address space that the query is then short of.
_INHERITED_VARIABLES: Final = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
_ENVIRONMENT: Final = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class QueryLimits:
    """Resource limits of one query from an untrusted author."""

    wall_s: float = 10.0
    cpu_s: int = 20  # of all threads together
    memory_bytes: int = 1 << 30  # address space beyond the interpreter and its libraries
    num_threads: int = 2
    max_rows: int = 10_000
    max_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        minima = {"wall_s": 0.1, "memory_bytes": 128 << 20}
        for name, value in asdict(self).items():
            if value < minima.get(name, 1):
                raise ConfigInvalidError(
                    f"query limits: {name}: found {value}, expected {minima.get(name, 1)} or more."
                )


@dataclass(frozen=True)
class UntrustedResult:
    """Rows, and what cut them short: "rows" or "bytes", the cap that was reached; None if nothing.

    Which rows of a cut result are there is not defined without ORDER BY.
    """

    rows: pa.Table
    truncated: str | None


def run_untrusted(
    query: str,
    catalog: Catalog,
    parameters: Mapping[str, object] | None = None,
    *,
    limits: QueryLimits | None = None,
    cancellation: Cancellation | None = None,
) -> UntrustedResult:
    """Run one SELECT that somebody else wrote.

    A result over `max_rows` or `max_bytes` is cut there, and says so. Absent in it: where policies
    lie (`policies.path`), the records of runs (`runs.record`). cancellation: ends the query from
    another thread.

    Raises: QueryRefusedError for what is not one SELECT over the lake's views, QueryError with
    DuckDB's own words, with the limit that was reached or as it was cancelled, NotFoundError for a
    dataset that does not exist.
    """
    limits = limits or QueryLimits()
    if len(query.encode(errors="replace")) > _MAX_QUERY_BYTES:
        raise QueryRefusedError(
            f"query: found {len(query):,} characters, expected at most {_MAX_QUERY_BYTES:,} bytes."
        )
    with _Sandbox(limits) as sandbox, (cancellation or Cancellation()).watching(sandbox.cancel):
        sandbox.send(json.dumps({"query": query, "limits": asdict(limits)}).encode())
        names = [(str(dataset), str(view)) for dataset, view in sandbox.receive()["names"]]
        views = plan_views(names, _PublicCatalog(catalog, sandbox))
        try:
            _grant(sandbox, views, parameters)
            truncated = sandbox.receive()["truncated"]
            rows = sandbox.rows()
        finally:
            views.release()
        return UntrustedResult(rows, truncated if truncated is None else str(truncated))


def _grant(sandbox: _Sandbox, views: Views, parameters: Mapping[str, object] | None) -> None:
    granted = {
        "names": views.names,
        "statements": views.statements,
        "paths": views.paths,
        "relations": list(views.relations),
        "has_parameters": bool(parameters),
    }
    sandbox.send(json.dumps(granted).encode())
    for relation in views.relations.values():
        sandbox.send(to_ipc(relation))
    if parameters:
        sandbox.send(to_ipc(_row(parameters)))


class _PublicCatalog:
    """A catalog that withholds some columns from untrusted queries.

    The clock counts in here too: a query may name every dataset of a wide lake.
    """

    def __init__(self, catalog: Catalog, sandbox: _Sandbox) -> None:
        self._catalog = catalog
        self._sandbox = sandbox

    def datasets(self) -> list[str]:
        self._sandbox.check_clock()
        return self._catalog.datasets()

    def table(self, dataset: str, view: str) -> TableSnapshot | None:
        self._sandbox.check_clock()
        return self._catalog.table(dataset, view)

    def columns(self, dataset: str) -> Set[str] | None:
        return self._catalog.columns(dataset)

    def relation(self, name: str) -> pa.Table | None:
        self._sandbox.check_clock()
        relation = self._catalog.relation(name)
        if relation is None:
            return None
        for column in _WITHHELD_COLUMNS.get(name, ()):
            index = relation.schema.get_field_index(column)
            field = relation.schema.field(index)
            relation = relation.set_column(index, field, pa.nulls(relation.num_rows, field.type))
        return relation


class _Sandbox:
    """The process; killed on leaving, or by the clock."""

    def __init__(self, limits: QueryLimits) -> None:
        self._limits = limits
        self._process = _spare.take()
        self._out_of_time = threading.Event()
        self._is_cancelled = False
        self._clock = threading.Timer(limits.wall_s, self._stop)
        self._clock.daemon = True
        self._clock.start()

    def __enter__(self) -> _Sandbox:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._clock.cancel()
        _end(self._process)
        _spare.renew()

    def check_clock(self) -> None:
        """Refuse to go on once the time is over. Raises: QueryError."""
        if self._out_of_time.is_set():
            raise self._exit_error()

    def send(self, body: bytes | memoryview) -> None:
        """Send a frame. Raises: QueryError."""
        try:
            write_frame(_stream(self._process.stdin), body)
        except BrokenPipeError:
            raise self._exit_error() from None

    def receive(self) -> dict[str, Any]:
        """Return what the process says. Raises: what it says that it met with; QueryError."""
        body = read_frame(_stream(self._process.stdout), _MAX_FRAME_BYTES)
        if body is None:
            raise self._exit_error()
        answer: dict[str, Any] = json.loads(body)
        if "error" in answer:
            raise _rebuild_error(str(answer["error"]), str(answer["message"])[:_MAX_MESSAGE])
        return answer

    def rows(self) -> pa.Table:
        """Return the result. Raises: QueryError."""
        limit = self._limits.max_bytes + _FRAMING_BYTES
        body = read_frame(_stream(self._process.stdout), limit)
        if body is None:
            raise self._exit_error()
        try:
            table = pa.ipc.open_stream(body).read_all()
            table.validate(full=True)
        except (pa.ArrowException, OSError) as error:
            raise QueryError(f"query: its result is no Arrow stream ({error}).") from error
        return table

    def cancel(self) -> None:
        """End the process, as its query is no longer wanted."""
        self._is_cancelled = True
        self._process.kill()

    def _stop(self) -> None:
        self._out_of_time.set()
        self._process.kill()

    def _exit_error(self) -> QueryError:
        """Return the error that says why the process no longer answers."""
        self._process.kill()
        code = self._process.wait()
        limits = self._limits
        if self._is_cancelled:
            return QueryError("query: it was cancelled. Run it again if it is wanted.")
        if self._out_of_time.is_set():
            reason = f"it was still running after {limits.wall_s:g} s"
        elif code == -signal.SIGXCPU:
            reason = f"it took {limits.cpu_s} s of CPU"
        else:
            reason = f"it ended its process, most likely beyond {limits.memory_bytes >> 20} MiB"
        return QueryError(
            f"query: {reason}, expected a smaller one. Select fewer rows or columns, or aggregate."
        )


def _start() -> subprocess.Popen[bytes]:
    # Isolated (-I), then with the paths that this process imports from, as it may not be installed.
    paths = [os.path.abspath(path) for path in sys.path]
    code = (
        f"import sys; sys.path[:] = {paths!r}\n"
        "from replaylake.datastore.query.sandbox import main; main()"
    )
    environment = {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-I", "-B", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**environment, **_ENVIRONMENT},
        cwd="/",
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        with suppress(BrokenPipeError):
            _stream(stream).close()
    process.wait()


class _SpareProcess:
    """A process that has started before it is needed. It ends when this one does: by its stdin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_wanted = False
        self._process: subprocess.Popen[bytes] | None = None

    def want(self) -> None:
        """Have one from now on."""
        self._is_wanted = True
        self.renew()

    def take(self) -> subprocess.Popen[bytes]:
        """Return it, or a new one if there is none, or if it has died."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None and process.poll() is not None:
            _end(process)
            process = None
        return _start() if process is None else process

    def renew(self) -> None:
        """Start one if it is wanted and not there."""
        with self._lock:
            if self._is_wanted and self._process is None:
                self._process = _start()

    def discard(self) -> None:
        """End it, and have none from now on."""
        with self._lock:
            process, self._process, self._is_wanted = self._process, None, False
        if process is not None:
            _end(process)


_spare: Final = _SpareProcess()


@contextmanager
def keep_spare_sandbox() -> Iterator[None]:
    """Let a process of the sandbox wait for the next query of this one, until the block ends.

    Starting takes most of the time of a small query: 0.2 of 0.25 s (2 cores, 2026-11). Cost: 60 MiB
    of another process.
    """
    _spare.want()
    try:
        yield
    finally:
        _spare.discard()


def _stream(stream: Any) -> BinaryIO:
    binary: BinaryIO = stream
    return binary


def _row(parameters: Mapping[str, object]) -> pa.Table:
    """Return the parameters as a table of one row. Raises: QueryRefusedError."""
    try:
        return pa.table({name: pa.array([value]) for name, value in parameters.items()})
    except (pa.ArrowException, OverflowError) as error:
        raise QueryRefusedError(f"parameters: {error}, expected numbers, texts, times.") from error


def _rebuild_error(kind: str, message: str) -> ReplayLakeError:
    return QueryRefusedError(message) if kind == QueryRefusedError.__name__ else QueryError(message)
