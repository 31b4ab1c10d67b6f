"""Kill -9 of a training process, again and again at random moments, until the run is done."""

import os
import random
import re
import time

import pytest

from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import check_package, load_learner_weights
from replaylake.datastore.lake.runs.checkpoints import Checkpoints
from replaylake.datastore.lake.runs.metrics import read_curves

NUM_KILLS = int(os.environ.get("REPLAYLAKE_TRAINING_KILLS", "12"))
# Every few milliseconds something is written, so that kills come in the middle of it.
OPTIONS = {
    "bc": ("updates=3000", "checkpoint_updates=7", "log_updates=5", "hidden_sizes=[32]"),
    "iql": (
        "updates=900", "checkpoint_updates=7", "log_updates=5", "evaluate_updates=300",
        "selection_fqe_updates=50", "batch_size=32", "normalize_observations=true",
    ),
}  # fmt: skip


class Life:
    """A process of a run; what it says on stderr goes to a file."""

    def __init__(self, start, lake, folder, *arguments):
        """start: the fixture fork_command."""
        self.path = folder / "said"
        self._file = self.path.open("w")
        with open(os.devnull, "w") as nothing:
            self.process = start(
                ["train", "offline", *arguments, "--lake", str(lake.path)], nothing, self._file
            )

    def wait_for(self, pattern):
        """Wait until it says something, and return that; None if it ended before."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            has_ended = self.process.poll() is not None
            if match := re.search(pattern, self.path.read_text()):
                return match
            if has_ended:
                return None
            time.sleep(0.005)
        raise AssertionError(self.path.read_text())

    def wait_for_update(self, lake, run_id, update):
        """Wait for a checkpoint of this update or a later one, or for the end."""
        checkpoints = Checkpoints(lake.storage, run_id)
        deadline = time.monotonic() + 240
        while max(checkpoints.updates(), default=0) < update and self.process.poll() is None:
            assert time.monotonic() < deadline, self.path.read_text()
            time.sleep(0.005)

    def kill(self):
        self.process.kill()
        self.process.wait()
        self._file.close()

    def end(self):
        code = self.process.wait(timeout=300)
        self._file.close()
        assert code == 0, self.path.read_text()


def arguments(algorithm, policy):
    sets = [part for option in OPTIONS[algorithm] for part in ("--set", option)]
    held = ["--holdout", "0.25"] if algorithm == "iql" else []
    return ["line", "--algorithm", algorithm, "--policy", policy, *held, *sets]


# The larger of them a few times: values, several networks and a choice of policies are saved.
@pytest.mark.parametrize(
    ("algorithm", "most_kills"),
    [
        pytest.param("iql", 4, marks=pytest.mark.slow),
        pytest.param("iql", NUM_KILLS, marks=pytest.mark.chaos),
        pytest.param("bc", NUM_KILLS, marks=pytest.mark.chaos),
    ],
)
def test_killed_again_and_again_it_ends_with_the_same_weights(
    tmp_path, line_world, fork_command, algorithm, most_kills
):
    lake = open_lake(tmp_path / "lake", create=True)
    kind = "continuous" if algorithm == "iql" else "discrete"
    lake.dataset("line").append(line_world(num_episodes=12, action_space=kind))
    Life(fork_command, lake, tmp_path, *arguments(algorithm, "whole")).end()
    num_updates = int(OPTIONS[algorithm][0].removeprefix("updates="))
    rng = random.Random(7)
    life = Life(fork_command, lake, tmp_path, *arguments(algorithm, "killed"))
    run_id = life.wait_for(r"run (\w{26})").group(1)
    num_kills = 0
    for number in range(most_kills):
        # From before the data are read to after the policy is registered; the first two before it.
        life.wait_for_update(lake, run_id, (number + rng.random()) / (most_kills - 1) * num_updates)
        time.sleep(rng.uniform(0, 0.05))
        num_kills += life.process.poll() is None
        life.kill()
        life = Life(fork_command, lake, tmp_path, "--resume", run_id)
        if rng.random() < 0.8:
            life.wait_for(r"run \w{26}|is done")
    life.end()
    assert num_kills >= 2
    runs = {run["policy"]: run for run in lake.registry.runs()}
    assert runs["killed"]["run_id"] == run_id
    assert {run["status"] for run in runs.values()} == {"done"}
    whole, killed = (lake.registry.resolve(name) for name in ("whole", "killed"))
    assert (whole.version, killed.version) == (1, 1)
    expected, found = load_learner_weights(whole.path), load_learner_weights(killed.path)
    assert expected.keys() == found.keys()
    assert [n for n, a in expected.items() if found[n].tobytes() != a.tobytes()] == []
    bodies = [check_package(ref.path).body for ref in (whole, killed)]
    for key in ("selection", "metrics", "datasets", "normalization"):
        assert bodies[0][key] == bodies[1][key]
    curves = [read_curves(lake.storage, runs[name]["run_id"]) for name in ("whole", "killed")]
    assert curves[0].keys() == curves[1].keys()
    for name, curve in curves[0].items():
        if name.startswith("profile/"):
            # Times.
            continue
        assert curves[1][name].updates.tolist() == curve.updates.tolist()
        assert curves[1][name].values.tobytes() == curve.values.tobytes()
    assert lake.storage.names(f"_lake/runs/{run_id}/checkpoints") == []
