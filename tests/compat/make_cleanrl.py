"""Run scripts of CleanRL, and write what their networks do, to test imports with.

    PYTHON tests/compat/make_cleanrl.py SOURCE OUTPUT

SOURCE is CleanRL's source tree, which no package of a newer Python has; PYTHON has what its scripts
import. Five scripts run for a moment with `--save-model` and save the file themselves; of PPO and
SAC, which save none, the networks of the scripts are saved as the others are. OUTPUT is as
examples/make_policies.py writes it.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

NUM = 200
CART = spaces.Box(-2, 2, (4,), np.float32)
PENDULUM = spaces.Box(-1, 1, (3,), np.float32)
TORQUE = spaces.Box(-2, 2, (1,), np.float32)
FRAMES = spaces.Box(0, 255, (4, 84, 84), np.uint8)
POLICIES: dict[str, dict[str, Any]] = {}


def make_envs(observations: Any, actions: Any) -> Any:
    """Return what a network's constructor looks at; scripts that save have vectors of one."""
    vector = actions
    if isinstance(actions, spaces.Box):
        vector = spaces.Box(actions.low[None], actions.high[None], dtype=np.float32)
    return SimpleNamespace(
        single_observation_space=observations,
        single_action_space=actions,
        observation_space=observations,
        action_space=vector,
    )


def run_script(source: Path, name: str, env_id: str, *arguments: str) -> Path:
    """Run a script in a temporary folder, and return the file that it saved there."""
    folder = Path(tempfile.mkdtemp(prefix=f"cleanrl-{name}-"))
    command = [sys.executable, str(source / "cleanrl" / f"{name}.py"), "--save-model"]
    command += ["--env-id", env_id, *arguments]
    # What comes after saving records a video, for which a library may be missing.
    environment = {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    (file,) = folder.glob("runs/*/*.cleanrl_model")
    return file


def save(folder: Path, name: str, tensors: Any, observations: Any, actions: Any, act: Any) -> None:
    """Write a policy and what its network does; varied until it depends on observations."""
    if isinstance(tensors, Path):
        (folder / f"{name}.cleanrl_model").write_bytes(tensors.read_bytes())
    else:
        torch.save(tensors, folder / f"{name}.cleanrl_model")
    observations.seed(0)
    values = np.stack([observations.sample() for _ in range(NUM)])
    with torch.no_grad():
        expect = act(torch.from_numpy(values).float()).numpy()
    if len(np.unique(expect, axis=0)) == 1:
        raise ValueError(f"{name}: takes one action for all observations, which tests nothing")
    np.save(folder / f"{name}.observations.npy", values)
    np.save(folder / f"{name}.expect.npy", expect)
    POLICIES[name] = {
        "file": f"{name}.cleanrl_model",
        "observation_space": space_json(observations),
        "action_space": space_json(actions),
    }


def space_json(space: Any) -> dict[str, Any]:
    """Return a space as ReplayLake stores it."""
    if isinstance(space, spaces.Discrete):
        return {"type": "discrete", "n": int(space.n), "start": 0}
    low, high = float(space.low.min()), float(space.high.max())
    body = {"type": "box", "shape": list(space.shape), "dtype": str(space.dtype)}
    return {**body, "low": low, "high": high}


def clip(actions: torch.Tensor) -> torch.Tensor:
    """Return actions as ClipAction gives them to the environment."""
    return actions.clamp(-2, 2)


def main() -> None:
    """Make the policies."""
    source, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(source))
    torch.manual_seed(0)
    cart = make_envs(CART, spaces.Discrete(2))
    pendulum = make_envs(PENDULUM, TORQUE)
    atari = make_envs(FRAMES, spaces.Discrete(6))
    pole = ("CartPole-v1", "--total-timesteps", "3000", "--learning-starts", "500")
    torque = ("Pendulum-v1", "--total-timesteps", "400", "--learning-starts", "100")

    def network(script: str, kind: str) -> Any:
        return getattr(importlib.import_module(f"cleanrl.{script}"), kind)

    def load(file: Path) -> Any:
        return torch.load(file, weights_only=True)

    file = run_script(source, "dqn", *pole)
    dqn = network("dqn", "QNetwork")(cart)
    dqn.load_state_dict(load(file))
    save(folder, "cleanrl_dqn", file, CART, spaces.Discrete(2), lambda x: dqn(x).argmax(1))

    file = run_script(source, "c51", *pole)
    c51 = network("c51", "QNetwork")(cart)
    c51.load_state_dict(load(file)["model_weights"])
    save(folder, "cleanrl_c51", file, CART, spaces.Discrete(2), lambda x: c51.get_action(x)[0])

    file = run_script(source, "ppo_continuous_action", "Pendulum-v1", "--total-timesteps", "4096")
    ppo = network("ppo_continuous_action", "Agent")(pendulum)
    ppo.load_state_dict(load(file))
    save(folder, "cleanrl_ppo_box", file, PENDULUM, TORQUE, lambda x: clip(ppo.actor_mean(x)))

    for name in ("td3", "ddpg"):
        file = run_script(source, f"{name}_continuous_action", *torque)
        actor = network(f"{name}_continuous_action", "Actor")(pendulum)
        actor.load_state_dict(load(file)[0])
        save(folder, f"cleanrl_{name}", file, PENDULUM, TORQUE, actor)

    sac = network("sac_continuous_action", "Actor")(pendulum)
    save(
        folder,
        "cleanrl_sac",
        sac.state_dict(),
        PENDULUM,
        TORQUE,
        lambda x: sac.get_action(x)[2],
    )
    agent = network("ppo", "Agent")(cart)
    torch.nn.init.normal_(agent.actor[-1].weight)
    save(
        folder,
        "cleanrl_ppo",
        agent.state_dict(),
        CART,
        spaces.Discrete(2),
        lambda x: agent.actor(x).argmax(1),
    )
    for script, kind, name in (
        ("ppo_atari", "Agent", "cleanrl_ppo_atari"),
        ("dqn_atari", "QNetwork", "cleanrl_dqn_atari"),
        ("c51_atari", "QNetwork", "cleanrl_c51_atari"),
    ):
        module = network(script, kind)(atari)
        last = module.actor if kind == "Agent" else module.network[-1]
        torch.nn.init.normal_(last.weight)

        def act(x: torch.Tensor, module: Any = module, name: str = name) -> torch.Tensor:
            if name == "cleanrl_ppo_atari":
                return module.actor(module.network(x / 255.0)).argmax(1)
            return module.get_action(x)[0] if "c51" in name else module(x).argmax(1)

        save(folder, name, module.state_dict(), FRAMES, spaces.Discrete(6), act)
    text = json.dumps(POLICIES, indent=1, sort_keys=True)
    (folder / "policies.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
