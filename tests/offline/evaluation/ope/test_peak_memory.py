"""Peak resident memory of `replaylake ope` for each decision of a log."""

import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest

from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import open_lake

# ru_maxrss of a child is at least what its parent had when it forked: VmHWM is the child's alone.
COMMAND = """
from replaylake.cli.main import main
try:
    main()
finally:
    print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def write_decisions(path, num):
    rng = np.random.default_rng(num)
    chances = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    actions = rng.choice(5, num, p=chances)
    columns = {f"x{i}": rng.normal(size=num).round(4) for i in range(4)}
    columns |= {"action": actions, "propensity": chances[actions]}
    columns["reward"] = (rng.random(num) < 0.05 + 0.1 * (actions == 2)).astype(int)
    pa_csv.write_csv(pa.table(columns), path)


def peak_bytes(*arguments):
    """Run a command in a process of its own; return its peak resident memory."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.split("VmHWM:")[1].split()[0]) * 1024


@pytest.mark.slow
def test_a_decision_takes_a_few_hundred_bytes(tmp_path):
    """What 200,000 more of them take: 420 bytes each, where it was 790 (2 cores, 2026-11-27)."""
    lake = open_lake(tmp_path / "lake", create=True)
    options = ReadOptions({"observation": "x0,x1,x2,x3"})
    peaks = []
    for num in (50_000, 250_000):
        write_decisions(tmp_path / f"{num}.csv", num)
        ingest(lake, [tmp_path / f"{num}.csv"], f"log{num}", format="bandit", options=options)
        asked = [option for name in ("ips", "snips", "dr") for option in ("--estimator", name)]
        peaks.append(
            peak_bytes(
                *("ope", f"log{num}", "--policy", "random", "--unseen"),
                *(*asked, "--lake", tmp_path / "lake"),
            )
        )
    assert (peaks[1] - peaks[0]) / 200_000 < 550
