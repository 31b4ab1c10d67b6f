"""Make checkpoints of RLlib, and export their policies by examples/export_rllib.py.

    PYTHON tests/compat/make_rllib.py OUTPUT

OUTPUT is as examples/make_policies.py writes it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig

_POLE = {"type": "box", "shape": [4], "dtype": "float32"}
_PENDULUM = {"type": "box", "shape": [3], "dtype": "float32"}
_TORQUE = {"type": "box", "shape": [1], "dtype": "float32", "low": -2.0, "high": 2.0}
_TWO = {"type": "discrete", "n": 2, "start": 0}
_EXPORT = Path(__file__).parents[2] / "examples" / "export_rllib.py"


def main() -> None:
    """Make the policies."""
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    policies: dict[str, Any] = {}
    for name, config, env, head in (
        ("rllib_ppo", PPOConfig(), "CartPole-v1", "categorical"),
        ("rllib_ppo_box", PPOConfig(), "Pendulum-v1", "gaussian"),
        ("rllib_sac", SACConfig(), "Pendulum-v1", "squashed_gaussian"),
        ("rllib_dqn", DQNConfig(), "CartPole-v1", "q_values"),
    ):
        algo = config.environment(env).env_runners(num_env_runners=0).build_algo()
        with tempfile.TemporaryDirectory() as checkpoint:
            algo.save_to_path(checkpoint)
            algo.stop()
            command = [sys.executable, str(_EXPORT), checkpoint, str(folder / f"{name}.onnx")]
            subprocess.run(command, check=True)
        is_pole = env == "CartPole-v1"
        policies[name] = {
            "file": f"{name}.onnx",
            "head": head,
            "observation_space": _POLE if is_pole else _PENDULUM,
            "action_space": _TWO if is_pole else _TORQUE,
        }
    (folder / "policies.json").write_text(json.dumps(policies, indent=1) + "\n")


if __name__ == "__main__":
    main()
