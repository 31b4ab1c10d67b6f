"""Every fenced block of every page runs as it is written, in the order of the page.

Each page has an empty directory of its own, one shell and one Python process. `replaylake` in the
shell is a fork of a process that has imported all of it (`fork_server.py`):

- `python` runs in one namespace per page. A block that begins with `# name.py` is written to that
  file instead.
- `bash` runs in the page's shell and has to succeed, or to exit with 3 where the block says
  "exit code 3"; either, where it says "exit code 3 if". After a server was started in the
  background, the next block waits for it. What follows a `sleep` waits for no time: it is run
  until it succeeds and prints what is shown.
- `console` runs each line after `$ `. `$ cat FILE` of a file that is not there writes the file.
- `sql` runs through `lake.sql` on the lake that the page's entry in `_PAGES` prepares.
- `text` directly below one of these is its output. Other `text` is only shown.
- `json`, `jsonl`, `toml`, `yaml` and `csv` are parsed.

Output is compared without times, sizes and rates, and `...` stands for anything. After the comment
`<!-- figures vary -->` no figures are compared: they depend on training or on random actions.
`d-F...` in a command is the page's first decision. An id in an output, as of a run, stands for the
one that is printed in its place; also in later commands, and by its first letters. Ports are
replaced by free ones.

Logs of others that a page names (`data` of its entry) are linked into its directory. These pages
are left out where the logs are not.

A block after `<!-- not run: REASON -->` is not run. `_REASONS` lists the reasons, and `_PAGES` has
the number of these blocks of each page.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from replaylake.cli.output.command_output import table_lines
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.interchange.formats.checks import Finding, RowLocations
from replaylake.datastore.interchange.formats.format import RejectedEpisode
from replaylake.datastore.interchange.ingest.quarantine import quarantine
from replaylake.datastore.lake.commit import DropCounts
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.policies.manifest import GRAPH, MANIFEST, manifest_bytes
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.lake.runs.metrics import MetricsLog

_ROOT = Path(__file__).parents[1]
_BIN = Path(sys.executable).parent
_FORK_SERVER = Path(__file__).with_name("fork_server.py")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!-- (not run|figures vary)(?:: ([^>]+))? -->\n\Z")
_PORTS = re.compile(
    r"(?<=[: ])(?:3000|3001|9000|9105)\b"
    r"|(?<=localhost:)(?:4000|8000)\b|(?<=--port )4000\b|(?<=engine\.py )8000\b"
)
_UNITS = r"(?:ms|us|s|min|minutes|h|B|kB|MB|GB|updates/s|steps/s|rows/s|episodes/s|files scanned)"
_VARYING = re.compile(rf"\b\d[\d,.]* {_UNITS}(?![\w/])|127\.0\.0\.1:\d+")
_TIME = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)")
# A version between releases (0.2.0.dev0) is a figure too.
_FIGURE = re.compile(r"(?<![\w.])-?\d[\d,.]*(?:dev\d+[,.]?|e[+-]?\d+)?")
_ID = re.compile(r"\b0[0-9a-z]{25}\b")
_ID_OR_PREFIX = re.compile(r"\b0[0-9a-z]{7,25}\b")
_TIMEOUT_S = 280
_REASONS = {
    "installs packages",
    "needs a cluster",
    "needs a container engine",
    "needs a proxy",
    "needs an account",
    "needs root",
    "needs rsync",
    "needs Spark",
    "needs the framework",
    "needs TransferQueue",
    "needs a token",
    "needs Trino",
    "serves until it is interrupted",
    "the checks of this repository",
}
# Ray has settings of its own that it has deprecated.
_PYTHON = ("-W", "error", "-W", "ignore::DeprecationWarning:ray.data.context")
# Runs one file after the other in one namespace, and answers with what each printed.
_DRIVER = """
import contextlib, io, json, os, sys, traceback
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.path.insert(0, "")
namespace = {"__name__": "__main__"}
for line in sys.stdin:
    name, text = json.loads(line)
    printed, error = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(text, name, "exec"), namespace)
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps([printed.getvalue(), error]), file=answers, flush=True)
"""


class Block(NamedTuple):
    """A fenced block; `line` is that of its first line in the page."""

    language: str
    text: str
    line: int
    not_run: str | None
    figures_vary: bool
    before: str  # the paragraph before it
    is_output: bool  # of the block before it


@dataclass(frozen=True)
class Page:
    """How a page is run: what its directory holds first, and how much of it cannot run here."""

    prepare: Callable[[Path], object] | None = None
    not_run: int = 0
    slow: bool = True
    data: tuple[str, ...] = ()  # other people's logs that the page names


def _blocks(text: str) -> list[Block]:
    found: list[Block] = []
    end = 0
    for match in _FENCE.finditer(text):
        between = text[end : match.start()]
        comment = _COMMENT.search(between)
        what, reason = comment.groups() if comment else (None, None)
        is_output = match[1] == "text" and bool(found) and not _COMMENT.sub("", between).strip()
        paragraph = between.rstrip().rsplit("\n\n", 1)[-1]
        line = text.count("\n", 0, match.start(2)) + 1
        found.append(
            Block(
                match[1],
                match[2],
                line,
                reason if what == "not run" else None,
                what == "figures vary",
                paragraph,
                is_output,
            )
        )
        end = match.end()
    return found


def _indented(text: str) -> list[str]:
    """Return the first lines of blocks that are only indented, and so name no language."""
    found, before, was_blank = [], "", True
    for line in _FENCE.sub("", text).splitlines():
        if line.startswith("    ") and was_blank and not re.match(r"\s*(?:[-*]|\d+\.) |  ", before):
            found.append(line)
        if line.strip():
            before = line
        was_blank = not line.strip()
    return found


def _commands(text: str) -> list[tuple[str, str]]:
    """Return each command of a console block, and what is shown below it."""
    found: list[tuple[str, str]] = []
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("$ "):
            command = line[2:]
            while command.endswith("\\"):
                command += "\n" + next(lines)
            found.append((command, ""))
        else:
            assert found, f"console block without a command: {line}"
            command, shown = found[-1]
            found[-1] = (command, f"{shown}{line}\n")
    return found


def _comparable(text: str, figures_vary: bool) -> str:
    text, num_varying = _VARYING.subn(
        "#", "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
    )
    if num_varying:
        # A table's columns are as wide as the widest figure.
        text = re.sub(r"(?<=\S)  +", "  ", text)
    if figures_vary:
        text = _TIME.sub("#", text)
        text = re.sub(r"#(?:, #)*", "#", _FIGURE.sub("#", text))
        text = re.sub(r"[ \t]+", " ", text)
    return text


def _match_ids(shown: str, printed: str, figures_vary: bool) -> dict[str, str] | None:
    """Return the printed id of each that is shown; None if this is not what is shown."""
    found = _ID.findall(printed)
    # No figures, which may vary.
    names = iter("".join("abcdefghij"[int(digit)] for digit in str(i)) for i in range(len(found)))
    comparable = _comparable(_ID.sub(lambda _: f"<id {next(names)}>", printed), figures_vary)
    parts = _comparable(_ID.sub("<id>", shown), figures_vary).split("...")
    pattern = ".*".join(map(re.escape, parts)).replace("<id>", r"<id (\w+)>")
    # A line of dots also stands for no line: progress is printed by time.
    pattern = pattern.replace("\\\n.*\\\n", "\\\n(?:.*\\\n)?")
    match = re.fullmatch(pattern, comparable, re.DOTALL)
    if match is None:
        return None
    places = (
        "".join(str("abcdefghij".index(letter)) for letter in name) for name in match.groups()
    )
    return dict(zip(_ID.findall(shown), (found[int(place)] for place in places), strict=True))


class Commands:
    """A directory with `replaylake`, which runs in forks of a process that the first one starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._socket = folder / "socket"
        self._server: subprocess.Popen[str] | None = None
        command = folder / "replaylake"
        words = f'{sys.executable} -SE {_FORK_SERVER} run {self._socket} "$@"'
        command.write_text(f"#!/bin/bash\nexec {words}\n")
        command.chmod(0o755)

    def start(self) -> None:
        """Start the server, unless it runs."""
        if self._server is None:
            words = [sys.executable, _FORK_SERVER, "serve", self._socket]
            self._server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
            assert self._server.stdout is not None
            assert self._server.stdout.readline() == "ready\n"

    def close(self) -> None:
        if self._server is not None and self._server.stdout is not None:
            self._server.kill()
            self._server.wait()
            self._server.stdout.close()


class Processes:
    """The shell and the Python of a page, in its directory."""

    def __init__(self, folder: Path, commands: Commands) -> None:
        self.folder = folder
        self._commands = commands
        self._logs = folder.parent / f"{folder.name}-logs"
        self._logs.mkdir()
        self._ports: dict[str, int] = {}
        self._num_commands = 0
        self._python: subprocess.Popen[str] | None = None
        self.decision_id = "d-F..."
        self.ids: dict[str, str] = {}
        self._environment = {
            **os.environ,
            "PATH": f"{commands.folder}:{_BIN}:{os.environ['PATH']}",
            "HOME": str(self._logs),
            "LOGNAME": "ada",
            "COLUMNS": "200",
            "BENTOML_DO_NOT_TRACK": "True",
        }
        self._environment.pop("PYTHONPATH", None)
        self._environment["REPLAYLAKE_SERVE_PORT"] = str(self._port("3000"))
        self._shell = self._start(["bash", "--noprofile", "--norc"], subprocess.DEVNULL)

    def _start(self, words: list[str], output: int) -> subprocess.Popen[str]:
        with (self._logs / "stderr").open("a") as errors:
            return subprocess.Popen(
                words,
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def _port(self, documented: str) -> int:
        if documented not in self._ports:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self._ports[documented] = free.getsockname()[1]
        return self._ports[documented]

    def _replace_id(self, match: re.Match[str]) -> str:
        found = (real for shown, real in self.ids.items() if shown.startswith(match[0]))
        return next(found, match[0])

    def replace_ports(self, text: str) -> str:
        """Return the text with free ports in place of those that the pages name."""
        return _PORTS.sub(lambda match: str(self._port(match[0])), text)

    def run_shell(self, text: str) -> tuple[str, str, list[int]]:
        """Return stdout, stderr and the exit codes of what failed."""
        if "replaylake " in text:
            self._commands.start()
        text = self.replace_ports(text.replace("d-F...", self.decision_id))
        text = _ID_OR_PREFIX.sub(self._replace_id, text)
        text = re.sub(
            r"replaylake serve (?!.*--port)", f"replaylake serve --port {self._port('3000')} ", text
        )
        served = re.findall(
            r"(?:(?:replaylake|bentoml) serve|replaylake gateway) (?!.*--check)(.*)", text
        )
        self._num_commands += 1
        script, out, err, failed, done = (
            self._logs / f"{self._num_commands}.{name}"
            for name in ("sh", "out", "err", "failed", "done")
        )
        script.write_text(f"trap 'echo $? >>{failed}' ERR\n{text}\ntrap - ERR\n")
        failed.touch()
        assert self._shell.stdin is not None
        self._shell.stdin.write(f". {script} >{out} 2>{err} </dev/null\ntouch {done}\n")
        self._shell.stdin.flush()
        until = time.monotonic() + _TIMEOUT_S
        while not done.exists():
            assert self._shell.poll() is None, f"the shell ended: {text}: {err.read_text()}"
            assert time.monotonic() < until, f"still running: {text}: {err.read_text()}"
            time.sleep(0.01)
        for port in re.findall(r"engine\.py (\d+) &", text):
            self._wait_listening(int(port))
        for options in served:
            port = re.search(r"--port (\d+)", options)
            self._wait_ready(port[1] if port else str(self._port("3000")), err)
        codes = [int(code) for code in failed.read_text().split()]
        stdout = out.read_text()
        if "d-F-" in stdout and self.decision_id == "d-F...":
            self.decision_id = re.findall(r"d-F-[\w.-]+", stdout)[0]
        return stdout, err.read_text(), codes

    def _wait_listening(self, port: int) -> None:
        """Wait until an engine that the page started in the background listens."""
        until = time.monotonic() + 60
        with socket.socket() as probe:
            while probe.connect_ex(("127.0.0.1", port)) != 0:
                assert time.monotonic() < until, f"nothing listens on port {port}"
                time.sleep(0.02)

    def _wait_ready(self, port: str, err: Path) -> None:
        """Wait until the server that the page started in the background answers."""
        until = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz"):
                    return
            except OSError:
                assert time.monotonic() < until, err.read_text()
                time.sleep(0.05)

    def run_python(self, name: str, text: str) -> str:
        if self._python is None:
            self._python = self._start([sys.executable, *_PYTHON, "-c", _DRIVER], subprocess.PIPE)
        assert self._python.stdin is not None
        assert self._python.stdout is not None
        print(json.dumps([name, text]), file=self._python.stdin, flush=True)
        answer = self._python.stdout.readline()
        assert answer, (self._logs / "stderr").read_text()
        printed, error = json.loads(answer)
        assert error is None, error
        return str(printed)

    def close(self) -> None:
        """End the page's processes, and what they started."""
        for process in (self._python, self._shell):
            if process is None:
                continue
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                    process.wait(20)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


class Runner:
    """Runs the blocks of a page, and compares what they print."""

    def __init__(self, page: str, processes: Processes) -> None:
        self._page = page
        self._processes = processes

    def run(self, block: Block, shown: str) -> None:
        where = f"{self._page}:{block.line}"
        if block.language == "python":
            module = re.match(r"# (\w+\.py)\n", block.text)
            if module:
                (self._processes.folder / module[1]).write_text(block.text)
                return
            # Lines of a traceback are those of the page.
            text = "\n" * (block.line - 1) + self._processes.replace_ports(block.text)
            printed = self._processes.run_python(self._page, text)
            self._compare(where, shown, printed, "", block.figures_vary)
        elif block.language == "bash":
            self._run_command(where, block.text, shown, block.figures_vary, block.text)
        elif block.language == "console":
            for command, below in _commands(block.text):
                file = re.fullmatch(r"cat (\S+)", command)
                path = self._processes.folder / (file[1] if file else "")
                if file and not path.exists():
                    path.write_text(below)
                    _parse(path.suffix[1:], below)
                    continue
                self._run_command(where, command, below, block.figures_vary, command + below)
        elif block.language == "sql":
            at = dict(pair.split("=") for pair in re.findall(r"`--at (\S+)`:", block.before))
            with contextlib.chdir(self._processes.folder):
                rows = open_lake("lake").sql(block.text, at=at)
            values = rows.to_pylist(maps_as_pydicts="lossy")
            printed = "\n".join(table_lines(values, rows.column_names))
            self._compare(where, shown or "\n", printed, "", False)
        else:
            _parse(block.language, block.text)

    def _run_command(
        self, where: str, command: str, shown: str, figures_vary: bool, text: str
    ) -> None:
        says_no = "exit code 3" in text or "not supported: " in text
        allowed = {3} if says_no else {1} if re.search(r"(?m)^error: ", shown) else set()
        may_pass = "exit code 3 if " in text
        first, *later = re.split(r"(?m)^sleep \d+\n", command, maxsplit=1)
        out, err, codes = self._processes.run_shell(first)
        if later:
            # A reader waits for what servers do in the background; here it is seen that they did.
            until = time.monotonic() + 60
            while True:
                told, said, failed = self._processes.run_shell(later[0])
                if not {*codes, *failed} - allowed and self._match(
                    shown, out + told, err + said, figures_vary
                ):
                    break
                assert time.monotonic() < until, f"{where}: {command}\n{out}{told}\n{err}{said}"
            out, err, codes = out + told, err + said, codes + failed
        is_expected = {*codes} <= allowed if may_pass else {*codes} == allowed
        assert is_expected, f"{where}: {command}\nexit codes {codes}\n{out}\n{err}"
        self._compare(f"{where}: {command}", shown, out, err, figures_vary)

    def _match(self, shown: str, out: str, err: str, figures_vary: bool) -> bool:
        """Return whether that is what a page shows, and remember its ids."""
        for text in (out, err, err + out):
            ids = _match_ids(shown, text, figures_vary) if shown else {}
            if ids is not None:
                self._processes.ids |= ids
                return True
        return False

    def _compare(self, where: str, shown: str, out: str, err: str, figures_vary: bool) -> None:
        if not self._match(shown, out, err, figures_vary):
            pytest.fail(f"{where}\nshown:\n{shown}\nprinted:\n{out}\nstderr:\n{err}", pytrace=False)


def _parse(language: str, text: str) -> None:
    """Raises: the format's error where the text is not of the format that it claims to be."""
    if language == "json":
        json.loads(text)
    elif language == "jsonl":
        for line in text.splitlines():
            json.loads(line)
    elif language == "toml":
        tomllib.loads(text)
    elif language == "yaml":
        yaml.safe_load(text)
    elif language == "csv":
        header, *rows = csv.reader(text.splitlines())
        assert {len(row) for row in rows} == {len(header)}, text


_HOUR_US = 3_600_000_000


def _sql_episode(
    name: str, rewards: list[float], version: int, hour: int, **fields: Any
) -> Episode:
    steps = np.arange(len(rewards))
    given = {
        "observations": np.stack([steps / 10, steps, -steps, 0 * steps], axis=1).astype(np.float32),
        "actions": steps % 2,
        "rewards": np.array(rewards),
        "behavior_log_probs": np.log(np.where(steps % 2, 0.25, 0.75)),
        "policies": ["ppo"] * len(rewards),
        "policy_versions": [version] * len(rewards),
        "timestamps": hour * _HOUR_US + steps * 60_000_000,
        "final_observation": np.zeros(4, np.float32),
        "terminated": True,
    }
    return Episode(f"rollout/{name}", **(given | fields))


def _prepare_sql(folder: Path) -> None:
    """A lake with the two datasets that the page describes, a policy, two runs and labels."""
    lake = open_lake(folder / "lake", create=True)
    cartpole = lake.dataset("cartpole")
    cartpole.append(
        [
            _sql_episode("a1", [1, 1, 1, 1], 1, 0),
            _sql_episode("a2", [1, 1], 1, 1),
            _sql_episode("a3", [1, 1, 1], 2, 1, terminated=False, truncated=True),
        ],
        producer="rollout/a",
        sequence=0,
        drops=DropCounts(num_rejected=1, num_rejected_steps=2),
    )
    lake.tags.set("cartpole", "paper", 1)
    quarantine(cartpole, _sql_refused(), producer="ingest/1f", sequence=0)
    cartpole.append(
        [_sql_episode("b1", [1, 1, 1, 1, 1], 2, 2), _sql_episode("b2", [1], 2, 2)],
        producer="rollout/b",
        sequence=0,
        drops=DropCounts(num_already_present=2, num_already_present_steps=7),
    )
    lake.dataset("duel").append(
        [
            _sql_episode(name, rewards, 1, 3, agent_id=agent, terminated=ended, truncated=not ended)
            for name, agent, rewards, ended in [
                ("g1", "left", [0.0, 1.0], True),
                ("g1", "right", [0.0, -1.0], True),
                ("g2", "left", [0.0, 0.0, -2.0], False),
                ("g2", "right", [0.0, 0.0, 2.0], True),
            ]
        ],
        producer="league",
        sequence=0,
    )
    _register_policy(lake, folder)
    (folder / "labels.csv").write_text("episode_id,judged\nrollout/a1,good\nrollout/b2,bad\n")
    table = {"episode_id": ["rollout/a1", "rollout/a2", "rollout/b1"], "quality": [1, 2, 1]}
    pq.write_table(pa.table(table), folder / "labels.parquet")


def _sql_refused() -> list[RejectedEpisode]:
    def places(first: int, num: int) -> RowLocations:
        rows = np.arange(first, first + num)
        return RowLocations(rows, lambda found: (["log.csv"] * len(found), found.tolist()))

    payoffs = pa.table({"user": ["u7", "u7"], "payoff": [1.0, float("nan")]})
    finding = Finding("not_finite", "log.csv row 5, column 'payoff': found NaN or infinity")
    faults = (Finding("gap", "log.csv row 12"), Finding("shape", "log.csv row 12"))
    return [
        RejectedEpisode("u7", 2, (finding,), rows=payoffs, places=places(4, 2)),
        RejectedEpisode("u9", 1, faults, rows=payoffs.slice(0, 1), places=places(12, 1)),
    ]


def _register_policy(lake: Lake, folder: Path) -> None:
    package = folder / "package"
    package.mkdir()
    files = {GRAPH: b"graph"}
    spec = PolicySpec(Box((4,)), Discrete(2), "categorical")
    for name, data in {**files, MANIFEST: manifest_bytes(spec, {}, files)}.items():
        (package / name).write_bytes(data)
    lineage = {"algorithm": "bc", "datasets": [{"dataset": "cartpole", "version": 1}]}
    lake.registry.register("clone", package, run_id="r1", lineage=lineage)
    _record_runs(lake)


def _record_runs(lake: Lake) -> None:
    for run_id, algorithm, status, version in [
        ("r1", "bc", "done", 1),
        ("r2", "cql", "running", 2),
    ]:
        datasets = [{"dataset": "cartpole", "version": version}]
        record = {"algorithm": algorithm, "status": status, "datasets": datasets}
        lake.registry.record_run(run_id, record)
    with MetricsLog(lake.storage, "r1") as log:
        log.add(100, {"policy_loss": 0.5, "evaluation/return": 150.0}, 0.0)
        log.add(200, {"policy_loss": 0.3, "evaluation/return": 187.0}, 1.0)
    with MetricsLog(lake.storage, "r2") as log:
        log.add(100, {"policy_loss": 1.1}, 0.0)


def _prepare_formats(folder: Path) -> None:
    """Files of the formats that no public log of this repository has."""
    for name, target in {
        ".art/models/train": "art",
        "captured": "tinker",
        "debug": "slime",
        "dumped": "roll",
        "dumps": "verl/legacy",
        "jobs/build-7": "atif/trial",
        "lerobot/pusht": "lerobot/v3_0/arm",
        "logs/rollouts/step_12/train/effective": "verifiers/run",
        "output/completions": "trl/chat",
        "traces": "otlp",
        "checkpoints": "easyr1",
        "exports/dumped_evals": "skyrl/dumped_evals",
        "trial/rollout": "areal/rollout",
        "open_x/bridge/0.1.0": "rlds/arm",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(_ROOT / "tests" / "fixtures" / target)
    plain = (folder / "cartpole_training_data.json").read_bytes()
    (folder / "cartpole_training_data.json.bz2").write_bytes(bz2.compress(plain))
    pq.write_table(
        pa.table(
            {
                "age": [31, 25, 40],
                "segment": ["a", "b", "a"],
                "hour": [1, 2, 3],
                "banner": ["x", "y", "x"],
                "paid": [0.0, 1.0, 0.0],
                "chance": [0.5, 0.25, 0.5],
            }
        ),
        folder / "ads.parquet",
    )
    with h5py.File(folder / "hopper-medium-v2.hdf5", "w") as file:
        file["observations"] = np.zeros((4, 11), np.float32)
        file["actions"] = np.zeros((4, 3), np.float32)
        file["rewards"] = np.ones(4)
        file["terminals"] = np.array([False, True, False, True])
        file["timeouts"] = np.zeros(4, bool)
    with h5py.File(folder / "buffer.h5", "w") as file:
        for key, value in {
            "observations_0": np.zeros((2, 4), np.float32),
            "actions_0": np.zeros((2, 1), np.float32),
            "rewards_0": np.zeros((2, 1), np.float32),
            "terminated_0": True,
            "columns": ["observations", "actions", "rewards", "terminated"],
            "num_episodes": 1,
            "version": "2.1",
        }.items():
            file[key] = value
    sample = {
        "content": ["What is it? It is 4."],
        "rewards": [1.0],
        "input_lengths": [4],
        "token_ids": [[11, 12, 21, 22]],
        "token_loss_mask": [[0.0, 0.0, 1.0, 1.0]],
        "sample_loss_mask": [1.0],
        "advantages": [[0.5] * 4],
        "generation_logprobs": [[0.0, 0.0, -0.1, -0.2]],
        "prev_logprobs": [[0.0, 0.0, -0.2, -0.3]],
        "idx": 0,
    }
    (folder / "logs" / "exp_001").mkdir()
    (folder / "logs" / "exp_001" / "train_data_step1.jsonl").write_text(json.dumps(sample) + "\n")
    (folder / "exported").mkdir()


_PAGES: dict[str, Page] = {
    "ARCHITECTURE.md": Page(slow=False),
    "CONTRIBUTING.md": Page(not_run=1, slow=False),
    "README.md": Page(not_run=1),
    "docs/ALGORITHMS.md": Page(),
    "docs/API.md": Page(),
    "docs/BACKUP.md": Page(not_run=1),
    "docs/BANDITS.md": Page(data=("obd",)),
    "docs/CLI.md": Page(lambda folder: open_lake(folder / "lake", create=True), data=("obd",)),
    "docs/CLUSTER.md": Page(not_run=2, slow=False),
    "docs/COLLECT.md": Page(not_run=1),
    "docs/DATA_MODEL.md": Page(slow=False),
    "docs/DELETION.md": Page(),
    "docs/DEPENDENCIES.md": Page(not_run=1, slow=False),
    "docs/ENGINES.md": Page(not_run=2),
    "docs/ENVIRONMENTS.md": Page(),
    "docs/FORMATS.md": Page(
        _prepare_formats,
        data=(
            "rllib_pendulum/pendulum-v1_enormous",
            "minari/lab/cartpole-hdf5-v0",
            "imitation/cartpole_0_final.npz",
            "reagent/cartpole_training_data.json",
            "reagent/dqn_workflow.zip",
            "obd",
        ),
    ),
    "docs/EXPLORER.md": Page(not_run=2, slow=False),
    "docs/GATEWAY.md": Page(not_run=1),
    "docs/IMPORT.md": Page(not_run=6),
    "docs/HTTP.md": Page(),
    "docs/LABELS.md": Page(),
    "docs/LANGUAGE.md": Page(),
    "docs/LANGUAGE_SERVING.md": Page(not_run=5, slow=False),
    "docs/LANGUAGE_TRAINING.md": Page(),
    "docs/MAINTENANCE.md": Page(),
    "docs/MONITORING.md": Page(not_run=2),
    "docs/NIGHTLY.md": Page(),
    "docs/ONLINE.md": Page(),
    "docs/OPE.md": Page(data=("obd",)),
    "docs/OPERATIONS.md": Page(not_run=2, slow=False),
    "docs/PACKAGE.md": Page(not_run=6),
    "docs/RECORDING.md": Page(not_run=10),
    "docs/REPLAY.md": Page(slow=False),
    "docs/SERVING.md": Page(),
    "docs/SQL.md": Page(_prepare_sql, not_run=2, slow=False),
    "docs/STORAGE.md": Page(not_run=1),
    "docs/TRAINING.md": Page(),
    "docs/TRANSFERQUEUE.md": Page(not_run=2, slow=False),
    "docs/TUNING.md": Page(),
    "docs/TUTORIAL.md": Page(not_run=1),
    "docs/WEBHOOKS.md": Page(not_run=1),
}


def _texts() -> Iterator[tuple[str, str]]:
    """Yield every page that the mechanism is for, with its text."""
    for pattern in ("*.md", "docs/*.md", "docs/decisions/*.md", "examples/**/*.md"):
        for path in sorted(_ROOT.glob(pattern)):
            yield str(path.relative_to(_ROOT)), path.read_text(encoding="utf-8")


def test_pages_with_blocks_are_those_that_are_run() -> None:
    with_blocks = {page for page, text in _texts() if _blocks(text) or _indented(text)}
    assert with_blocks == {*_PAGES}


@pytest.mark.parametrize("page", [*_PAGES])
def test_blocks_name_a_language_and_why_they_are_not_run(page: str) -> None:
    text = (_ROOT / page).read_text(encoding="utf-8")
    blocks = _blocks(text)
    assert len(blocks) * 2 == len(re.findall(r"(?m)^\s*```", text))
    assert {block.language for block in blocks} <= {
        *("python", "bash", "console", "sql", "text"),
        *("json", "jsonl", "toml", "yaml", "csv"),
    }
    assert _indented(text) == []
    reasons = [block.not_run for block in blocks if block.not_run is not None]
    assert {*reasons} <= _REASONS
    assert len(re.findall("(?m)^<!-- not run", text)) == len(reasons)
    assert len(reasons) == _PAGES[page].not_run


def _run_page(page: str, folder: Path, commands: Commands) -> None:
    (folder / "examples").symlink_to(_ROOT / "examples")
    prepare = _PAGES[page].prepare
    if prepare is not None:
        prepare(folder)
    blocks = _blocks((_ROOT / page).read_text(encoding="utf-8"))
    processes = Processes(folder, commands)
    try:
        runner = Runner(page, processes)
        for block, after in zip(blocks, [*blocks[1:], None], strict=True):
            if block.not_run is None and not block.is_output:
                shown = after.text if after is not None and after.is_output else ""
                varies = block.figures_vary or (after is not None and after.figures_vary)
                runner.run(block._replace(figures_vary=varies), shown)
    finally:
        processes.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "page"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    commands = Commands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if entry.slow else [])
        for page, entry in _PAGES.items()
        if not entry.data
    ],
)
def test_blocks_run(page: str, folder: Path, commands: Commands) -> None:
    _run_page(page, folder, commands)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, entry in _PAGES.items() if entry.data])
def test_blocks_with_other_logs_run(
    page: str, folder: Path, commands: Commands, shared_data: Path
) -> None:
    for name in _PAGES[page].data:
        (folder / Path(name).name).symlink_to(shared_data / name)
    _run_page(page, folder, commands)
