"""Import the policies of examples/make_policies.py, and compare them with the libraries' own.

    .venv/bin/python tests/compat/import_policies.py FOLDER

A line `passed: NAME` or `failed: NAME` for each: its best actions are those of the library to 1e-5,
and where the library draws actions, their log-probabilities to 1e-4. Exits with 1 if one failed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import replaylake as rl
from replaylake.datastore.episodes.spaces import empty_values, from_json, value_shape
from replaylake.datastore.lake.policies.package import load_policy
from replaylake.offline.importing.import_policy import ImportOptions, import_policy

_OPTIONS = ("format", "head", "outputs", "activation", "frame_stack", "normalization")


def compare_policy(lake: rl.Lake, folder: Path, name: str, entry: dict[str, Any]) -> str:
    """Import a policy with the actions that are expected of it; returns what was compared."""
    observation_space = parse_space(entry["observation_space"])
    action_space = parse_space(entry["action_space"])
    observations = np.load(folder / f"{name}.observations.npy")
    dataset = lake.dataset(name)
    dataset.create(observation_space, action_space)
    actions = empty_values(action_space, len(observations))
    actions[...] = getattr(action_space, "start", 0)
    dataset.append(
        [
            rl.Episode(
                episode_id=f"{name}/0",
                observations=observations,
                actions=actions,
                rewards=np.zeros(len(observations)),
                terminated=True,
            )
        ]
    )
    options = {key: entry[key] for key in _OPTIONS if key in entry}
    if "normalization" in options:
        options["normalization"] = folder / options["normalization"]
    if "outputs" in options:
        options["outputs"] = tuple(options["outputs"])
    result = import_policy(
        lake,
        name,
        name,
        folder / entry["file"],
        options=ImportOptions(**options),
        expect=folder / f"{name}.expect.npy",
    )
    if result.num_distinct == 1:
        raise ValueError("all actions are the same, which tests nothing")
    what = f"{result.algorithm}, head {result.head}, {result.num_compared} actions"
    if result.max_difference is not None:
        what += f", greatest difference {result.max_difference:.1e}"
    if (folder / f"{name}.log_probs.npy").exists():
        what += f", {compare_log_probs(result.policy.path, folder, name)}"
    return what


def compare_log_probs(package: Path, folder: Path, name: str) -> str:
    """Compare log-probabilities of drawn actions; of a gaussian those within the bounds.

    What the library clips to a bound has another density here: it is truncated.
    """
    policy = load_policy(package)
    space = policy.spec.action_space
    observations = np.load(folder / f"{name}.observations.npy")
    actions, expected = (
        np.load(folder / f"{name}.{kind}.npy") for kind in ("actions", "log_probs")
    )
    actions = actions.reshape(len(actions), *value_shape(space))
    if policy.spec.head == "gaussian":
        parameters = policy._run({"observations": observations})
        means, log_stds = parameters["means"], parameters["log_stds"]
        noise = (actions - means) / np.exp(log_stds)
        found = (-0.5 * noise**2 - log_stds - 0.5 * np.log(2 * np.pi)).sum(axis=1)
    else:
        found = policy.log_probs(observations, actions, deterministic=False)
    difference = float(np.abs(found - expected).max())
    if difference > 1e-4:
        raise ValueError(f"log-probabilities differ by {difference:.1e}")
    return f"log-probabilities to {difference:.1e}"


def parse_space(data: dict[str, Any]) -> Any:
    """Return a space of policies.json."""
    if data["type"] != "box":
        return from_json(data)
    bounds = {key: data[key] for key in ("low", "high") if data.get(key) is not None}
    return rl.Box(tuple(data["shape"]), data["dtype"], **bounds)


def main() -> int:
    """Compare all of them."""
    folder = Path(sys.argv[1])
    entries = json.loads((folder / "policies.json").read_text())
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        lake = rl.open(Path(scratch) / "lake", create=True)
        for name, entry in sorted(entries.items()):
            try:
                print(f"passed: {name}, {compare_policy(lake, folder, name, entry)}")
            except (rl.ReplayLakeError, ValueError) as error:
                failed += 1
                print(f"failed: {name}: {type(error).__name__}: {error}")
    return 1 if failed or not entries else 0


if __name__ == "__main__":
    sys.exit(main())
