"""`replaylake doctor`: whether this installation, this machine and this lake are fit for work."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from replaylake.cli.options import DEFAULT_LAKE, DebugOption, JsonOption, LakeOption
from replaylake.cli.output.command_output import CommandOutput, count, size

if TYPE_CHECKING:
    from replaylake.datastore.storage.storage import Storage

# Below this a shard of the usual target size and its copy do not fit.
_MIN_FREE_BYTES: Final = 1 << 30
# A commit takes a few durable writes; above this, appending once a second keeps a writer busy.
_SLOW_WRITE_S: Final = 0.25


@dataclass(frozen=True)
class Check:
    """One line: what was checked, what came of it, and what was found."""

    check: str
    result: Literal["ok", "note", "failed"]
    found: str


def doctor(
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address that `serve` will listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            "--port", metavar="PORT", min=1, max=65535, help="Port that `serve` will listen on."
        ),
    ] = 3000,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check the installation, the machine and the lake.

    It checks versions and extras, free disk space, the clock, whether the lake's storage can be
    reached and keeps what is written, and whether the server's port is free. In a lake that exists
    it writes one small file and deletes it. The exit code is 3 if a check failed.

    Example:
      replaylake doctor
      replaylake doctor --lake s3://bucket/prefix --port 8080
    """
    report = CommandOutput(as_json)
    checks = [*_check_packages(), *_check_lake(lake), _check_port(host, port)]
    num_failed = sum(check.result == "failed" for check in checks)
    rows = [asdict(check) for check in checks]
    widths = [max(len(row[column]) for row in rows) for column in ("check", "result")]
    # Not a table, which cuts long cells short: what failed is told whole.
    lines = [
        f"{check.check:{widths[0]}}  {check.result:{widths[1]}}  {check.found}" for check in checks
    ]
    lines.append(f"{count(num_failed, 'check')} failed" if num_failed else "no check failed")
    report.print_result({"ok": not num_failed, "checks": rows}, lines)
    if num_failed:
        raise typer.Exit(3)


def _check_packages() -> Iterator[Check]:
    from replaylake.cli.installation import describe_platform, find_extras, find_packages
    from replaylake.datastore.version import VERSION

    yield Check("version", "ok", f"replaylake {VERSION}, {describe_platform()}")
    for extra in ("", *find_extras()):
        packages = find_packages(extra)
        name = f"extra {extra}" if extra else "packages"
        missing = [package.name for package in packages if package.version is None]
        unfit = [package for package in packages if package.is_outside_bounds]
        if unfit:
            found = ", ".join(f"{p.name} {p.version}, expected {p.bounds}" for p in unfit)
            advice = f"replaylake[{extra}]" if extra else "replaylake"
            yield Check(name, "failed", f"{found}: pip install '{advice}'")
        elif missing and not extra:
            yield Check(name, "failed", f"missing: {', '.join(missing)}: pip install replaylake")
        elif missing:
            found = f"not installed ({', '.join(missing)}): pip install 'replaylake[{extra}]'"
            yield Check(name, "note", found)
        else:
            yield Check(name, "ok", ", ".join(f"{p.name} {p.version}" for p in packages))


def _check_lake(lake: str) -> Iterator[Check]:
    from replaylake.datastore.errors import NotFoundError, ReplayLakeError
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.storage.locations import open_storage

    try:
        storage = open_storage(lake)
    except ReplayLakeError as error:
        yield Check("lake", "failed", str(error))
        return
    yield from _check_disks(storage)
    try:
        found = open_lake(lake)
        names = found.datasets()
    except NotFoundError:
        yield Check("lake", "note", f"none at {storage.url} yet: the first ingest makes it")
        return
    except ReplayLakeError as error:
        yield Check("lake", "failed", str(error))
        return
    yield Check("lake", "ok", f"{storage.url}, {count(len(names), 'dataset')}")
    yield from _check_storage(storage)


def _check_storage(storage: Storage) -> Iterator[Check]:
    from replaylake.datastore.storage.storage_check import MAX_CLOCK_OFFSET_S, check_storage

    done = check_storage(storage)
    if done.problem:
        yield Check("storage", "failed", done.problem)
        return
    is_slow = done.write_s > _SLOW_WRITE_S
    found = f"written, read and deleted; one durable write took {done.write_s * 1000:.0f} ms"
    yield Check("storage", "note" if is_slow else "ok", found)
    offset = done.clock_offset_s
    if abs(offset) > MAX_CLOCK_OFFSET_S:
        way = "behind" if offset > 0 else "ahead of"
        found = f"{abs(offset):.0f} s {way} the storage's. Synchronize it: it dates the commits"
        yield Check("clock", "failed", found)
    else:
        yield Check("clock", "ok", f"within {MAX_CLOCK_OFFSET_S:.0f} s of the storage's")


def _check_disks(storage: Storage) -> Iterator[Check]:
    from replaylake.datastore.storage.remote.shard_cache import CacheConfig
    from replaylake.datastore.storage.storage_check import inspect_disk

    folder = storage.local_folder("")
    cache = CacheConfig.from_environment(os.environ).folder
    folders = {"disk of the lake": folder, "disk of the cache": cache}
    if not storage.shares_state:
        folders["disk of the state"] = storage.state_folder("")
    for name, path in folders.items():
        if path is None:
            continue
        disk = inspect_disk(path)
        found = f"{size(disk.free_bytes)} of {size(disk.total_bytes)} free at {disk.folder}"
        if disk.file_system:
            found += f" ({disk.file_system})"
        if not os.access(disk.folder, os.W_OK):
            yield Check(name, "failed", f"{found}: this user may not write there")
        elif disk.free_bytes < _MIN_FREE_BYTES:
            yield Check(name, "failed", f"{found}: under {size(_MIN_FREE_BYTES)}, make room")
        elif path is folder and disk.is_in_memory:
            yield Check(name, "note", f"{found}: in memory, gone after a restart")
        elif path is folder and disk.is_over_network:
            yield Check(name, "note", f"{found}: over the network; an object store is faster")
        else:
            yield Check(name, "ok", found)


def _check_port(host: str, port: int) -> Check:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as server:
            # As servers do: what ended a minute ago does not keep the port.
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
        return Check("port", "note", f"{host}:{port} cannot be listened on: {reason}")
    return Check("port", "ok", f"{host}:{port} is free")
