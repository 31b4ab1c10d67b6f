"""Sandbox: the process in which SQL from others runs. untrusted.py starts it and speaks with it.

Frames over stdin and stdout: first the query comes in and the names of its tables go out; then come
the views that stand for them, and the rows go out. All that reads the query happens in here, its
parsing too. Three walls stand behind each other: what we refuse by the parse tree, what DuckDB's
locked configuration refuses, and what the kernel refuses the process.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, BinaryIO, Final

import duckdb
import numpy as np
import pyarrow as pa

from replaylake.datastore.errors import QueryError, QueryRefusedError, ReplayLakeError
from replaylake.datastore.query.connections import connect
from replaylake.datastore.query.list_functions import define_list_functions
from replaylake.datastore.query.statements import (
    check_select,
    execute,
    find_tables,
    literal,
    parse,
    walk,
)

_TABLE_FUNCTIONS: Final = {"generate_series", "json_each", "json_tree", "range", "unnest"}
_REFUSED_FUNCTIONS: Final = {"current_setting", "getenv", "getvariable", "write_log"}
_BATCH_ROWS: Final = 2048
_OPEN_FILES: Final = 256
# Of the memory, what DuckDB may use knowingly; it then says what was too large. The rest is for the
# result, stacks and what it does not count.
_DUCKDB_SHARE: Final = 0.6
_SIZE_BYTES: Final = 8
_ORPHAN_MARGIN_S: Final = 2
_QUERY_VERSION: Final = 1
_RULE_PATH_BENEATH: Final = 1
_FILE_RIGHTS: Final = {1: 13, 2: 14, 3: 15, 5: 16}  # version: number of rights, from bit 0 up
_TCP_RIGHTS: Final = 0b11
_TCP_VERSION: Final = 4
_NO_NEW_PRIVILEGES: Final = 38  # prctl(PR_SET_NO_NEW_PRIVS)


def read_frame(stream: BinaryIO, high: int) -> bytes | None:
    """Read one frame of at most `high` bytes; None if the other side is gone or breaks the rule."""
    head = stream.read(_SIZE_BYTES)
    size = int.from_bytes(head, "little")
    if len(head) < _SIZE_BYTES or size > high:
        return None
    body = stream.read(size)
    return body if len(body) == size else None


def write_frame(stream: BinaryIO, body: bytes | memoryview) -> None:
    stream.write(len(body).to_bytes(_SIZE_BYTES, "little"))
    stream.write(body)
    stream.flush()


def to_ipc(table: pa.Table) -> memoryview:
    """Return a table as an Arrow stream, compressed: it may be the summary of a million episodes.

    That of 1M takes 100 MiB, and took 300 while the stream grew (2026-11).
    """
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return memoryview(sink.getvalue())


def main() -> None:
    """Answer one query, then end."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # Nothing else may write into the frames.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        _answer(source, sink)
    except ReplayLakeError as error:
        _send(sink, {"error": type(error).__name__, "message": str(error)})
    except MemoryError:
        _send(sink, {"error": "QueryError", "message": "query: out of memory"})
    except Exception as error:  # said, since nobody reads this process's stderr
        message = f"query: {type(error).__name__}: {error}"
        _send(sink, {"error": "QueryError", "message": message})


def _answer(source: BinaryIO, sink: BinaryIO) -> None:
    request = _receive(source)
    limits = request["limits"]
    limit_resources(
        memory_bytes=limits["memory_bytes"],
        cpu_s=limits["cpu_s"],
        wall_s=limits["wall_s"],
        num_files=_OPEN_FILES,
    )
    query = request["query"]
    with connect() as connection:
        connection.execute("SET threads = 1")
        lock_down(connection, [])
        check_select(connection, query)
        names = _check_names(connection, query)
    _send(sink, {"names": names})
    granted = _receive(source)
    relations = {name: _table(source) for name in granted["relations"]}
    parameters = _table(source).to_pylist()[0] if granted["has_parameters"] else None
    with connect() as connection:
        # The kernel binds this thread and those that it starts later: DuckDB's come after it.
        connection.execute("SET threads = 1")
        restrict_access(granted["paths"], _library_folders())
        connection.execute(f"SET threads = {limits['num_threads']}")
        connection.execute(
            f"SET memory_limit = '{int(limits['memory_bytes'] * _DUCKDB_SHARE)} bytes'"
        )
        for name, table in relations.items():
            connection.register(name, table)
        for statement in granted["statements"]:
            execute(connection, statement)
        define_list_functions(connection, query)
        _check_granted(names, granted["names"])
        lock_down(connection, granted["paths"])
        rows, truncated = _rows(connection, query, parameters, limits)
    _send(sink, {"truncated": truncated})
    write_frame(sink, rows)


def lock_down(connection: duckdb.DuckDBPyConnection, paths: list[str]) -> None:
    """Leave a connection nothing but these files, for good."""
    # Else DuckDB adds this folder to what it allows, writing included.
    connection.execute("SET temp_directory = ''")
    allowed = ", ".join(map(literal, paths))
    connection.execute(f"SET allowed_paths = [{allowed}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET python_enable_replacements = false")
    connection.execute("SET lock_configuration = true")


def _check_names(connection: duckdb.DuckDBPyConnection, query: str) -> list[tuple[str, str]]:
    """Refuse by the parse tree, and return the tables that are to be granted."""
    nodes = list(walk(parse(connection, query)))
    own = {str(entry["key"]).lower() for node in nodes for entry in _with_entries(node)}
    # A name of WITH counts in the whole query for us, and for DuckDB only below it.
    if hidden := sorted(own & _builtin_views(connection)):
        raise QueryRefusedError(
            f"query: found WITH {hidden[0]}, a name of DuckDB's own. Choose another."
        )
    for node in nodes:
        kind = node.get("type")
        if kind == "SHOW_REF":
            raise QueryRefusedError("query: found DESCRIBE, SHOW or SUMMARIZE, expected a SELECT.")
        if kind == "BASE_TABLE" and node.get("catalog_name"):
            name = f"{node['catalog_name']}.{node['schema_name']}.{node['table_name']}"
            raise QueryRefusedError(f"query: found {name}, expected <dataset>.<view>.")
        if kind == "TABLE_FUNCTION":
            _check_function(str(node["function"].get("function_name", "")).lower())
        if node.get("class") == "FUNCTION":
            name = str(node.get("function_name", "")).lower()
            if name in _REFUSED_FUNCTIONS:
                raise QueryRefusedError(
                    f"query: found {name}(), which SQL from others may not call."
                )
    return list(dict.fromkeys(find_tables(connection, query)))


def _check_function(function: str) -> None:
    if function not in _TABLE_FUNCTIONS:
        raise QueryRefusedError(
            f"query: found FROM {function or 'an expression'}(), expected the views of the lake, "
            f"subqueries, or one of {', '.join(sorted(_TABLE_FUNCTIONS))}."
        )


def _with_entries(node: Mapping[str, Any]) -> list[dict[str, Any]]:
    entries = node.get("cte_map")
    return list(entries.get("map", ())) if isinstance(entries, dict) else []


def _builtin_views(connection: duckdb.DuckDBPyConnection) -> set[str]:
    # Those of information_schema take that word before them, and so hide behind no other name.
    rows = execute(
        connection,
        "SELECT view_name FROM duckdb_views() "
        "WHERE internal AND schema_name <> 'information_schema'",
    )
    return {str(name).lower() for name in rows["view_name"].to_pylist()}


def _check_granted(names: Iterable[tuple[str, str]], granted: Iterable[list[str]]) -> None:
    """Refuse names that no view stands for: DuckDB may have one of its own, a file, or a table.

    Views are computed from tables that the author of the query may not read.
    """
    existing = {(dataset, view) for dataset, view in granted}
    for dataset, view in names:
        if (dataset, view) not in existing:
            name = f"{dataset}.{view}" if dataset else view
            raise QueryRefusedError(
                f"query: found {name!r}, which is no view of the lake, expected such as "
                "<dataset>.steps. `replaylake list` names the datasets."
            )


def _rows(
    connection: duckdb.DuckDBPyConnection,
    query: str,
    parameters: Mapping[str, object] | None,
    limits: Mapping[str, int],
) -> tuple[memoryview, str | None]:
    """Run the query; return an Arrow stream of at most max_rows and max_bytes, and what cut it."""
    sink = pa.BufferOutputStream()
    try:
        relation = connection.sql(query, params=dict(parameters) if parameters else None)
        reader = relation.to_arrow_reader(min(_BATCH_ROWS, limits["max_rows"] + 1))
        truncated: str | None = None
        with pa.ipc.new_stream(sink, reader.schema) as writer:
            for batch, cut_by in _cut(reader, limits["max_rows"], limits["max_bytes"]):
                writer.write_batch(batch)
                truncated = cut_by
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        raise QueryError(" ".join(str(error).split("\n\n")[0].split())) from error
    return memoryview(sink.getvalue()), truncated


def _cut(
    batches: Any, max_rows: int, max_bytes: int
) -> Iterator[tuple[pa.RecordBatch, str | None]]:
    """Yield the batches that both caps hold; with the last one, which cap cut it.

    Raises: QueryError if not even one row fits.
    """
    num_rows = num_bytes = 0
    for batch in batches:
        rest, truncated = batch, None
        if num_rows + batch.num_rows > max_rows:
            rest, truncated = batch.slice(0, max_rows - num_rows), "rows"
        if num_bytes + rest.nbytes > max_bytes:
            rest, truncated = _truncate_batch(rest, max_bytes - num_bytes), "bytes"
            if num_rows + rest.num_rows == 0:
                raise QueryError(
                    f"query: its first row takes {batch.slice(0, 1).nbytes:,} bytes, expected at "
                    f"most {max_bytes:,} for the result. Select fewer columns."
                )
        num_rows, num_bytes = num_rows + rest.num_rows, num_bytes + rest.nbytes
        yield rest, truncated
        if truncated:
            return


def _truncate_batch(batch: pa.RecordBatch, limit: int) -> pa.RecordBatch:
    low, high = 0, batch.num_rows
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if batch.slice(0, middle).nbytes <= limit else (low, middle - 1)
    return batch.slice(0, low)


def _library_folders() -> list[str]:
    """Return where the modules lie that are imported late."""
    packages = [os.path.dirname(module.__file__ or "") for module in (duckdb, np, pa)]
    return [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *packages]


def _receive(source: BinaryIO) -> dict[str, Any]:
    body = read_frame(source, sys.maxsize)
    if body is None:
        sys.exit(0)  # the parent gave up
    request: dict[str, Any] = json.loads(body)
    return request


def _table(source: BinaryIO) -> pa.Table:
    body = read_frame(source, sys.maxsize)
    return pa.ipc.open_stream(body).read_all()


def _send(sink: BinaryIO, body: Mapping[str, Any]) -> None:
    write_frame(sink, json.dumps(body).encode())


# Linux's Landlock (linux/landlock.h): system calls, the version that first knew each right.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3


def limit_resources(*, memory_bytes: int, cpu_s: int, wall_s: float, num_files: int) -> None:
    """Cap this process: address space beyond what it has now, CPU, time, open files, no writing.

    The clock is for a parent that died: a living one stops the process before.
    """
    space = _address_space() + memory_bytes
    limits = {
        resource.RLIMIT_AS: (space, space),
        # Apart, so that the signal says which limit it was: SIGXCPU, not SIGKILL.
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
        resource.RLIMIT_NOFILE: (num_files, num_files),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_CORE: (0, 0),
    }
    for kind, (soft, hard) in limits.items():
        _, limit = resource.getrlimit(kind)
        limit = hard if limit == resource.RLIM_INFINITY else min(hard, limit)
        resource.setrlimit(kind, (min(soft, limit), limit))
    signal.alarm(math.ceil(wall_s) + _ORPHAN_MARGIN_S)


def restrict_access(files: Iterable[str], folders: Iterable[str]) -> bool:
    """Take away all files but these, all writing and all TCP; False where the kernel cannot.

    Holds for this thread and those that it starts from now on.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _QUERY_VERSION)
    if version < 1:
        return False
    num_rights = max(number for since, number in _FILE_RIGHTS.items() if since <= version)
    handled = [(1 << num_rights) - 1, *([_TCP_RIGHTS] if version >= _TCP_VERSION else [])]
    attributes = struct.pack(f"={len(handled)}Q", *handled)
    ruleset = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        return False
    try:
        for path in files:
            _allow(libc, ruleset, path, _READ_FILE)
        for path in folders:
            _allow(libc, ruleset, path, _READ_FILE | _READ_DIR)
        libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        return bool(libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    # What is not there cannot be read either.
    with suppress(OSError):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            rule = struct.pack("=Qi", rights, descriptor)
            libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0)
        finally:
            os.close(descriptor)


def _address_space() -> int:
    """Return the bytes of address space that this process has now; 0 where the kernel hides it."""
    with suppress(OSError), open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
    return 0
