"""The README's Python runs, in order, as one program; its figures are the benchmarks'."""

import re
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_README = _ROOT / "README.md"


def test_python_blocks_run(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", _README.read_text(), re.DOTALL)
    assert len(blocks) >= 4
    (learning,) = [i for i, block in enumerate(blocks) if "rl.train" in block]
    light = (
        "import sys\nfor name in ('torch', 'ray', 'd3rlpy', 'bentoml'):\n"
        "    assert name not in sys.modules, name\n"
    )
    program = "\n".join([*blocks[:learning], light, *blocks[learning:]])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "lake" / "random_play" / "_delta_log").is_dir()


def test_figures_are_those_of_the_benchmarks():
    section = _README.read_text().split("## What was measured")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)[1:]
    results = (_ROOT / "benchmarks" / "RESULTS.md").read_text()
    figures = [figure for row in rows for figure in re.findall(r"\d[\d.,]*\d", " ".join(row[1:]))]
    assert len(figures) >= 2 * len(rows) > 10
    assert [figure for figure in figures if figure not in results] == []
