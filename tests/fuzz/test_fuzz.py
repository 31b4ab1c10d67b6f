"""Readers take any bytes: a case ends with data or with an error of ours, within its limits.

`make chaos` runs each target for REPLAYLAKE_FUZZ_MINUTES (10); `python tests/fuzz/run.py` runs one,
or repeats a case that is named here.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from mutations import mutate_lines
from pool import run_target
from reverted import REVERTED, find_again
from targets import TARGETS

_MINUTES = float(os.environ.get("REPLAYLAKE_FUZZ_MINUTES", "10"))


class _Broken:
    """A target whose cases end in each way that a fault may."""

    name = "broken"

    def seeds(self) -> list[str]:
        return ["x"]

    def run(self, seed: str, number: int, folder: Path) -> None:
        if number == 1:
            raise KeyError("x")
        if number == 2:
            os.abort()
        if number == 3:
            bytearray(3 << 30)
        if number == 4:
            bytearray(6 << 30)


@pytest.mark.slow
def test_the_pool_tells_every_kind_of_fault(tmp_path: Path) -> None:
    report = run_target(_Broken(), tmp_path, num_cases=6)
    assert report.num_cases == 6
    found = {ids[0]: fault for fault, ids in report.faults.items()}
    assert [*found] == [f"broken:x:{number}" for number in (1, 2, 3, 4)]
    assert found["broken:x:1"].startswith("KeyError at ")
    assert found["broken:x:2"] == "the process ended by -6"
    assert found["broken:x:3"].startswith("takes 3 GiB")
    assert found["broken:x:4"].startswith("MemoryError")


def test_a_case_is_known_by_its_number() -> None:
    from random import Random

    data = b"a,b\n1,2\n3,4\n"
    cases = [mutate_lines(data, Random(f"x:{n}")) for n in range(20)]
    assert cases == [mutate_lines(data, Random(f"x:{n}")) for n in range(20)]
    assert len({*cases}) > 15


@pytest.mark.slow
@pytest.mark.parametrize("name", ["formats", "packages", "journals", "caches", "checkpoints"])
def test_every_seed_is_read(name: str, tmp_path: Path) -> None:
    """A seed that is refused would hide its reader from every case that is made of it."""
    target = _prepare(name, tmp_path)
    run_case = importlib.import_module("pool").run_case
    said = {seed: run_case(target, seed, 0, tmp_path / "case") for seed in target.seeds()}
    assert {seed: text for seed, text in said.items() if text} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_some_cases_of_each_target(name: str, tmp_path: Path) -> None:
    target = _prepare(name, tmp_path)
    first = len(target.seeds())  # the first case of each seed is the seed itself
    report = run_target(target, tmp_path / "cases", first=first, num_cases=120, max_s=30)
    assert not report.faults, report.text()


@pytest.mark.chaos
@pytest.mark.parametrize("name", TARGETS)
def test_minutes_of_each_target(name: str, tmp_path: Path) -> None:
    report = run_target(_prepare(name, tmp_path), tmp_path / "cases", max_s=_MINUTES * 60)
    print(report.text())
    assert not report.faults, report.text()


@pytest.mark.chaos
@pytest.mark.parametrize("name", REVERTED)
def test_a_reverted_fix_is_found_again(name: str, tmp_path: Path) -> None:
    """In the number of cases that is stated; the same case has no fault with the fix in place."""
    report, fixed, case = find_again(name, _prepare("formats", tmp_path), tmp_path / "cases")
    assert case, report.text()
    assert not fixed.faults, fixed.text()


def _prepare(name: str, folder: Path) -> Any:
    return importlib.import_module("pool").prepare(TARGETS[name], folder)
