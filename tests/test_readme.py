"""The Python of README.md and the tutorial runs; the figures of README.md are the benchmarks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_README = _ROOT / "README.md"
_TUTORIAL = _ROOT / "docs" / "TUTORIAL.md"


def _blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def _run(blocks: list[str], folder: Path) -> None:
    """Run the blocks in order, as one program, in a folder that has the clone's examples."""
    (folder / "examples").symlink_to(_ROOT / "examples")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_tutorial_runs_and_is_light_until_it_trains(tmp_path):
    blocks = _blocks(_TUTORIAL)
    assert len(blocks) >= 4
    (learning,) = [i for i, block in enumerate(blocks) if "rl.train" in block]
    light = (
        "import sys\nfor name in ('torch', 'ray', 'd3rlpy', 'bentoml'):\n"
        "    assert name not in sys.modules, name\n"
    )
    _run([*blocks[:learning], light, *blocks[learning:]], tmp_path)
    assert (tmp_path / "lake" / "random_play" / "_delta_log").is_dir()


def test_figures_are_those_of_the_benchmarks():
    section = _README.read_text().split("## Benchmarks")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)[1:]
    results = (_ROOT / "benchmarks" / "RESULTS.md").read_text()
    figures = [figure for row in rows for figure in re.findall(r"\d[\d.,]*\d", " ".join(row[1:]))]
    assert len(figures) >= 2 * len(rows) > 10
    assert [figure for figure in figures if figure not in results] == []
