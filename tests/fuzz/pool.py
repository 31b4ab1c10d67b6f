"""Pool: runs cases in forked processes with limits of memory and of time, and tells their faults.

A process runs many cases and says before each which it is, so that one that aborts, hangs or takes
too much memory is known by its name, and the next process goes on behind it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from replaylake.datastore.errors import ReplayLakeError

MAX_BYTES: Final = 2 << 30
# Beyond what the process has mapped when it starts: what asks for more gets a MemoryError.
_MAX_MAPPED: Final = 4 << 30
# Seconds of the processor for a case, and of the clock on a busy machine.
MAX_CPU_S: Final = 20.0
_MAX_WALL_S: Final = 150.0
_CASES_A_PROCESS: Final = 200


class Target(Protocol):
    """What is fuzzed: a number of seeds, and what to do with a mutation of one."""

    name: str

    def seeds(self) -> list[str]: ...

    def run(self, seed: str, number: int, folder: Path) -> None:
        """Raise anything but a ReplayLakeError to tell of a fault."""
        ...


@dataclass
class Report:
    """What a run of a target found: faults by the last lines of their traceback."""

    target: str
    num_cases: int = 0
    num_refused: int = 0
    wall_s: float = 0.0
    peak_bytes: int = 0
    faults: dict[str, list[str]] = field(default_factory=dict)

    def text(self) -> str:
        lines = [
            f"{self.target}: {self.num_cases} cases in {self.wall_s / 60:.1f} min, "
            f"{self.num_refused} refused, peak {self.peak_bytes >> 20} MiB, "
            f"{len(self.faults)} faults"
        ]
        lines += [
            f"  {len(ids)}x {' '.join(ids[:4])}: {fault}" for fault, ids in self.faults.items()
        ]
        return "\n".join(lines)


def case_id(target: str, seed: str, number: int) -> str:
    return f"{target}:{seed}:{number}"


def prepare(make: Callable[[Path], Any], folder: Path) -> Any:
    """Return a target whose seeds were made in another process.

    This one then has no threads of Arrow or DuckDB, which its forks would lack.
    """
    path = folder / "target.pickle"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            path.write_bytes(pickle.dumps(make(folder)))
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("the seeds could not be made")
    return pickle.loads(path.read_bytes())


def run_target(
    target: Target,
    folder: Path,
    *,
    num_cases: int | None = None,
    max_s: float = 3600.0,
    first: int = 0,
    on_process: Callable[[], Callable[[], None]] | None = None,
) -> Report:
    """Run cases `first`, `first` + 1 ... of all seeds in turn, until either limit is reached.

    on_process: called in each process; what it returns is called at its end.
    """
    report, start, number = Report(target.name), time.monotonic(), first
    seeds = target.seeds()
    while (num_cases is None or number - first < num_cases) and time.monotonic() - start < max_s:
        left = _CASES_A_PROCESS if num_cases is None else num_cases - (number - first)
        ends = start + max_s
        batch = [
            (seeds[n % len(seeds)], n // len(seeds))
            for n in range(number, number + min(left, _CASES_A_PROCESS))
        ]
        number += _run_process(target, batch, folder, ends, report, on_process)
    report.wall_s = time.monotonic() - start
    return report


def run_case(target: Target, seed: str, number: int, folder: Path) -> str:
    """Run one case here; return "" or what was refused, or raise its fault."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        target.run(seed, number, folder)
    except ReplayLakeError as error:
        if (memory := _find_memory_error(error)) is not None:
            raise memory from error
        return f"{type(error).__name__}: {error}"
    return ""


def _run_process(
    target: Target,
    batch: list[tuple[str, int]],
    folder: Path,
    ends: float,
    report: Report,
    on_process: Callable[[], Callable[[], None]] | None,
) -> int:
    """Run a batch in a process of its own; return how many cases it got through."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        with os.fdopen(write_end, "w") as pipe:
            _run_batch(target, batch, folder, ends, pipe, on_process)
        os._exit(0)
    os.close(write_end)
    num_begun = 0
    current, is_ended = ("", 0), True
    with os.fdopen(read_end, "rb", buffering=0) as pipe:
        for event in _watch(pid, pipe):
            if event["event"] == "begin":
                current, is_ended = batch[num_begun], False
                num_begun += 1
            elif event["event"] == "end":
                is_ended = True
                report.num_cases += 1
                report.num_refused += bool(event["refused"])
                report.peak_bytes = max(report.peak_bytes, event["peak"])
                if event["fault"]:
                    report.faults.setdefault(event["fault"], []).append(
                        case_id(target.name, *current)
                    )
            elif not is_ended:
                report.num_cases += 1
                report.faults.setdefault(event["event"], []).append(case_id(target.name, *current))
    return max(num_begun, 1)


def _watch(pid: int, pipe: Any) -> Iterator[dict[str, Any]]:
    """Yield what a process says of its cases, and at last how it ended where that was no exit."""
    import selectors

    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        os.set_blocking(pipe.fileno(), False)
        pending, began, cpu, killed = b"", time.monotonic(), 0.0, ""
        while True:
            selector.select(0.5)
            if chunk := pipe.read(1 << 16):
                pending += chunk
                *lines, pending = pending.split(b"\n")
                for line in lines:
                    yield json.loads(line)
                began, cpu = time.monotonic(), _cpu_s(pid)
                continue
            if chunk == b"":
                break
            if _cpu_s(pid) - cpu > MAX_CPU_S or time.monotonic() - began > _MAX_WALL_S:
                killed = "takes too long"
                os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if status:
        yield {"event": killed or f"the process ended by {os.waitstatus_to_exitcode(status)}"}


def _run_batch(
    target: Target,
    batch: list[tuple[str, int]],
    folder: Path,
    ends: float,
    pipe: Any,
    on_process: Callable[[], Callable[[], None]] | None,
) -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + _MAX_MAPPED,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    at_end = on_process() if on_process is not None else None

    def say(**event: Any) -> None:
        pipe.write(json.dumps(event) + "\n")
        pipe.flush()

    for i, (seed, number) in enumerate(batch):
        if time.monotonic() > ends:
            break
        say(event="begin")
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        refused, fault = "", ""
        try:
            refused = run_case(target, seed, number, folder / f"{os.getpid()}-{i}")
        except BaseException as error:
            fault = _describe(error)
        peak = _peak_bytes()
        if not fault and peak > MAX_BYTES:
            fault = f"takes {peak >> 30} GiB or more"
        say(event="end", refused=refused[:100], fault=fault, peak=peak)
    if at_end is not None:
        at_end()


def _describe(error: BaseException) -> str:
    """Return the error and the deepest line of ours that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/replaylake/" in frame.filename] or frames
    where = f"{ours[-1].filename.rpartition('replaylake/')[2]}:{ours[-1].lineno}" if ours else "?"
    return f"{type(error).__name__} at {where}"


def _find_memory_error(error: BaseException) -> MemoryError | None:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
