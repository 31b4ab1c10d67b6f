"""The units, crontab and container file of examples/deploy do what docs/OPERATIONS.md says."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

import replaylake as rl

_ROOT = Path(__file__).parents[1]
_DEPLOY = _ROOT / "examples" / "deploy"
_UNITS = sorted(path.name for path in _DEPLOY.glob("*.service"))
_COMMAND = Path(sys.executable).with_name("replaylake")
_INSTALLED = "/srv/replaylake/venv/bin/replaylake"


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """A lake with a policy `bc` and a dataset `served` of decisions."""
    return Path(shutil.copytree(_ROOT / "tests" / "fixtures" / "lake_0_1", tmp_path / "lake"))


def unit(name: str) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(_DEPLOY / name)
    return parser["Service"]


def cron_lines() -> list[tuple[list[str], str]]:
    """Return the five fields and the command of each line."""
    lines = (_DEPLOY / "replaylake.cron").read_text().splitlines()
    found = []
    for line in lines:
        if line and not line.startswith(("#", "REPLAYLAKE_LAKE=")):
            *fields, user, command = line.split(None, 6)
            assert user == "replaylake"
            found.append((fields, command))
    return found


def run(command: str, lake: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of the crontab with the program and the lake of this test."""
    words = shlex.split(command.replace(_INSTALLED, str(_COMMAND)))
    return subprocess.run(
        words,
        env={**os.environ, "REPLAYLAKE_LAKE": str(lake)},
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.parametrize("name", _UNITS)
def test_units_are_confined_and_name_what_the_page_installs(name: str) -> None:
    service = unit(name)
    assert service["ExecStart"].startswith(f"{_INSTALLED} ")
    assert service["User"] == "replaylake"
    assert service["ProtectSystem"] == "strict"
    assert service["Environment"] == f"REPLAYLAKE_LAKE={service['ReadWritePaths']}"


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="not run: systemd-analyze is not installed"
)
@pytest.mark.parametrize("name", _UNITS)
def test_systemd_accepts_the_units(name: str, tmp_path: Path) -> None:
    text = (_DEPLOY / name).read_text().replace(_INSTALLED, str(_COMMAND))
    path = tmp_path / name
    path.write_text(text.replace("User=replaylake", "User=daemon"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True, check=False
    )
    # What it says of this machine's other units is not ours.
    assert not [line for line in done.stderr.splitlines() if name in line], done.stderr


@pytest.mark.slow
def test_the_server_starts_answers_and_ends_at_sigterm(lake: Path, held_port: int) -> None:
    command = unit("replaylake-serve.service")["ExecStart"]
    command = command.replace(_INSTALLED, str(_COMMAND)).replace("clone@", "bc@")
    words = [str(held_port) if word == "3000" else word for word in shlex.split(command)]
    server = subprocess.Popen(words, env={**os.environ, "REPLAYLAKE_LAKE": str(lake)})
    try:
        for _ in range(600):
            try:
                url = f"http://127.0.0.1:{held_port}/readyz"
                with urllib.request.urlopen(url, timeout=5) as answer:
                    assert answer.status == 200
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.1)
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_maintenance_ends_at_sigterm(lake: Path) -> None:
    command = unit("replaylake-maintain.service")["ExecStart"].replace(_INSTALLED, str(_COMMAND))
    child = subprocess.Popen(
        shlex.split(command),
        env={**os.environ, "REPLAYLAKE_LAKE": str(lake)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline()  # the first round has ended, and it waits for the next
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=60) == 0


def test_the_crontab_has_valid_times() -> None:
    lines = cron_lines()
    assert len(lines) == 3
    limits = (59, 23, 31, 12, 7)
    for fields, _ in lines:
        assert all(
            field == "*" or (field.isdigit() and int(field) <= limit)
            for field, limit in zip(fields, limits, strict=True)
        )


@pytest.mark.slow
def test_the_crontab_can_run_every_night(lake: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    rows = "".join(f"e{n},{20 + n % 40},{n % 24},{n % 2},0.5,{n % 3 % 2}\n" for n in range(60))
    (logs / "monday.csv").write_text("event_id,age,hour,shown,chance,click\n" + rows)
    ingest, join, fsck = (command for _, command in cron_lines())
    ingest = ingest.replace("/srv/replaylake/logs", str(logs))
    for _ in range(2):
        run(ingest, lake)
        assert rl.open(lake).sql("select count(*) as n from ads.steps")["n"][0].as_py() == 60
    run(join.replace(" live", " served"), lake)
    run(fsck, lake)


def test_the_container_runs_without_rights() -> None:
    text = (_DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    steps = [line.split(None, 1) for line in text.splitlines() if line and line[0] not in "# "]
    # All that needs rights is done before the user changes.
    assert [name for name, _ in steps].index("USER") > [name for name, _ in steps].index("RUN")
    assert dict(steps)["USER"] == "10001"
    (copied,) = (rest.split() for name, rest in steps if name == "COPY")
    assert copied[1:-1] == ["constraints.txt"]
    assert (_ROOT / "constraints.txt").is_file()
    extras = re.search(r"\[([a-z,]+)\]", text)
    assert extras is not None
    known = (_ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{name} = \[", known, re.M) for name in extras[1].split(","))
