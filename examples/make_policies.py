"""Make policies with the libraries that `replaylake policies import` reads, to test imports with.

    python examples/make_policies.py OUTPUT          those of examples/data/policies
    python examples/make_policies.py OUTPUT --all    one of each algorithm: `make compat-policies`

For each policy it writes the file that the library itself saves, `NAME.observations.npy`, and what
the library's own policy does for them without exploration, `NAME.expect.npy`. For policies that
draw actions it also writes `NAME.actions.npy` and their log-probabilities, `NAME.log_probs.npy`.
`policies.json` lists the policies with their spaces. Run it where stable-baselines3, sb3-contrib,
d3rlpy, xgboost, scikit-learn and skl2onnx are installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

NUM = 200
POLICIES: dict[str, dict[str, Any]] = {}


class Vectors(gymnasium.Env):
    """Random observations of any spaces, to train on for a moment."""

    def __init__(self, observations: gymnasium.Space, actions: gymnasium.Space) -> None:
        self.observation_space, self.action_space = observations, actions

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        ends = bool(self.np_random.random() < 0.1)
        return self.observation_space.sample(), float(self.np_random.random()), ends, False, {}


def box(*shape: int, low: float = -1.0, high: float = 1.0) -> spaces.Box:
    """Return a float Box."""
    return spaces.Box(low, high, shape, np.float32)


def sample(space: gymnasium.Space) -> np.ndarray:
    """Return NUM values of a space."""
    space.seed(0)
    if isinstance(space, spaces.Box) and space.dtype == np.float32:
        bounded = np.clip(space.low, -2, 2), np.clip(space.high, -2, 2)
        space = spaces.Box(*bounded, dtype=np.float32, seed=0)
    return np.stack([space.sample() for _ in range(NUM)])


def space_json(space: gymnasium.Space) -> dict[str, Any]:
    """Return a space as ReplayLake stores it."""
    if isinstance(space, spaces.Discrete):
        return {"type": "discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"type": "multi_discrete", "nvec": space.nvec.tolist()}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "multi_binary", "n": int(space.n)}
    is_bounded = np.isfinite(space.low).all() and np.isfinite(space.high).all()
    return {
        "type": "box",
        "shape": list(space.shape),
        "dtype": str(space.dtype),
        "low": float(space.low.min()) if is_bounded else None,
        "high": float(space.high.max()) if is_bounded else None,
    }


def write(
    folder: Path,
    name: str,
    file: str,
    env: gymnasium.Env,
    observations: np.ndarray,
    expect: np.ndarray,
    **options: Any,
) -> None:
    """Write what a policy does for observations, and list it."""
    np.save(folder / f"{name}.observations.npy", observations)
    np.save(folder / f"{name}.expect.npy", expect)
    POLICIES[name] = {
        "file": file,
        "observation_space": space_json(env.observation_space),
        "action_space": space_json(env.action_space),
        **options,
    }


def strip(archive: Path) -> None:
    """Take the pickles, the optimizer and the description of this machine out of an archive.

    `policies import` reads none of them, and they contain paths of the machine.
    """
    with zipfile.ZipFile(archive) as source:
        entries = {name: source.read(name) for name in source.namelist()}
    data = json.loads(entries["data"])
    for value in data.values():
        if isinstance(value, dict):
            value.pop(":serialized:", None)
    entries["data"] = json.dumps(data, indent=1).encode()
    left_out = ("system_info.txt", "pytorch_variables.pth")
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
        for name, content in entries.items():
            if name not in left_out and not name.endswith("optimizer.pth"):
                target.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), content)


def vary(modules: list[torch.nn.Module], predict: Callable[[], np.ndarray]) -> None:
    """Change weights until actions depend on observations, which takes longer training.

    predict: returns what the policy does for the observations.
    """
    for _ in range(200):
        with torch.no_grad():
            for module in modules:
                for tensor in module.parameters():
                    tensor.add_((tensor.std(correction=0) + 0.02) * torch.randn_like(tensor) / 2)
        _, counts = np.unique(predict(), axis=0, return_counts=True)
        if len(counts) > 1 and counts.max() < 0.8 * NUM:
            return
    raise ValueError("the policy takes nearly the same action for all observations")


def make_sb3(
    folder: Path,
    name: str,
    kind: Any,
    env: gymnasium.Env,
    policy: str = "MlpPolicy",
    **options: Any,
) -> None:
    """Train with Stable-Baselines3 for a moment, save, and write what the policy does."""
    policy_kwargs = {"net_arch": [8, 8], **options.pop("policy_kwargs", {})}
    num_steps = options.pop("num_steps", 200)
    model = kind(policy, env, policy_kwargs=policy_kwargs, seed=0, device="cpu", **options)
    model.learn(num_steps)
    observations = sample(env.observation_space)
    if num_steps == 200:
        vary([model.policy], lambda: model.predict(observations, deterministic=True)[0])
    model.save(folder / f"{name}.zip")
    expect, _ = model.predict(observations, deterministic=True)
    write(folder, name, f"{name}.zip", env, observations, expect)
    if hasattr(model.policy, "get_distribution"):
        tensor, _ = model.policy.obs_to_tensor(observations)
        distribution = model.policy.get_distribution(tensor)
        actions = distribution.get_actions()
        np.save(folder / f"{name}.actions.npy", actions.detach().numpy())
        np.save(folder / f"{name}.log_probs.npy", distribution.log_prob(actions).detach().numpy())


def sb3_policies(everything: bool) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield names of policies of Stable-Baselines3, and what makes them."""
    from stable_baselines3 import A2C, DDPG, DQN, PPO, SAC, TD3

    vector = Vectors(box(4), spaces.Discrete(3))
    control = Vectors(box(3), box(2, low=-2.0, high=2.0))
    image = Vectors(spaces.Box(0, 255, (40, 36, 3), np.uint8), spaces.Discrete(4))
    ppo = {"n_steps": 64}
    off_policy = {"buffer_size": 500, "learning_starts": 64}

    def sb3(name: str, *args: Any, **options: Any) -> tuple[str, Callable[[Path], None]]:
        return name, lambda folder: make_sb3(folder, name, *args, **options)

    pole = gymnasium.make("CartPole-v1")
    yield sb3("sb3_cartpole", PPO, pole, num_steps=20_000, n_steps=512, n_epochs=5)
    yield sb3("sb3_ppo", PPO, vector, **ppo)
    yield sb3("sb3_ppo_box", PPO, control, **ppo)
    yield sb3("sb3_dqn", DQN, vector, **off_policy)
    yield sb3("sb3_sac", SAC, control, **off_policy)
    yield sb3("sb3_td3", TD3, control, **off_policy)
    if not everything:
        return
    from sb3_contrib import QRDQN, TQC, TRPO

    yield sb3("sb3_a2c", A2C, vector, policy_kwargs={"activation_fn": torch.nn.ELU})
    yield sb3("sb3_ddpg", DDPG, control, **off_policy)
    yield sb3("sb3_trpo", TRPO, control, n_steps=64)
    yield sb3("sb3_qrdqn", QRDQN, vector, **off_policy)
    yield sb3("sb3_tqc", TQC, control, **off_policy)
    yield sb3("sb3_ppo_sde", PPO, control, use_sde=True, **ppo)
    yield sb3("sb3_sac_sde", SAC, control, use_sde=True, **off_policy)
    yield sb3("sb3_ppo_cnn", PPO, image, "CnnPolicy", **ppo)
    separate = {"share_features_extractor": False}
    yield sb3("sb3_ppo_cnn_separate", PPO, image, "CnnPolicy", policy_kwargs=separate, **ppo)
    yield sb3("sb3_dqn_cnn", DQN, image, "CnnPolicy", **off_policy)
    pixels = Vectors(image.observation_space, control.action_space)
    yield sb3("sb3_sac_cnn", SAC, pixels, "CnnPolicy", **off_policy)
    several = Vectors(box(4), spaces.MultiDiscrete([2, 3]))
    yield sb3("sb3_ppo_multi_discrete", PPO, several, **ppo)
    yield sb3("sb3_ppo_multi_binary", PPO, Vectors(box(4), spaces.MultiBinary(3)), **ppo)
    yield sb3(
        "sb3_dqn_discrete", DQN, Vectors(spaces.Discrete(5), spaces.Discrete(3)), **off_policy
    )
    counted = Vectors(spaces.MultiDiscrete([3, 4]), spaces.Discrete(3))
    yield sb3("sb3_ppo_counted", PPO, counted, **ppo)


def make_d3rlpy(folder: Path, name: str, kind: str, **options: Any) -> None:
    """Fit an algorithm of d3rlpy on random episodes, save, and write what its policy does."""
    import d3rlpy

    d3rlpy.seed(0)
    config = getattr(d3rlpy.algos, kind)
    is_discrete = "Discrete" in kind or kind in ("DQNConfig", "DoubleDQNConfig", "NFQConfig")
    actions = spaces.Discrete(3) if is_discrete else box(2, low=-2.0, high=2.0)
    env = Vectors(box(4), actions)
    rng = np.random.default_rng(0)
    num = 256
    logged = rng.integers(0, 3, num) if is_discrete else rng.uniform(-2, 2, (num, 2))
    dataset = d3rlpy.dataset.MDPDataset(
        observations=rng.standard_normal((num, 4)).astype(np.float32),
        actions=logged.astype(np.int64 if is_discrete else np.float32),
        rewards=rng.random(num).astype(np.float32),
        terminals=(np.arange(num) % 16 == 15).astype(np.float32),
    )
    encoder = d3rlpy.models.VectorEncoderFactory([8, 8])
    for field in config.__dataclass_fields__:
        if field.endswith("encoder_factory"):
            options.setdefault(field, encoder)
    options.setdefault("batch_size", 32)
    if not is_discrete:
        scaler = d3rlpy.preprocessing.MinMaxActionScaler(minimum=[-2.0] * 2, maximum=[2.0] * 2)
        options.setdefault("action_scaler", scaler)
    scaler = d3rlpy.preprocessing.StandardObservationScaler()
    options.setdefault("observation_scaler", scaler)
    algo = config(**options).create(device="cpu:0")
    algo.fit(
        dataset,
        n_steps=8,
        n_steps_per_epoch=8,
        logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
        show_progress=False,
    )
    observations = sample(env.observation_space)
    modules = [m for m in vars(algo.impl.modules).values() if isinstance(m, torch.nn.Module)]
    vary(modules, lambda: algo.predict(observations))
    algo.save(str(folder / f"{name}.d3"))
    write(folder, name, f"{name}.d3", env, observations, algo.predict(observations))


def d3rlpy_policies(everything: bool) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield names of policies of d3rlpy, and what makes them."""

    def one(name: str, kind: str, **options: Any) -> tuple[str, Callable[[Path], None]]:
        return name, lambda folder: make_d3rlpy(folder, name, kind, **options)

    yield one("d3rlpy_discrete_cql", "DiscreteCQLConfig")
    yield one("d3rlpy_iql", "IQLConfig")
    if not everything:
        return
    for kind in ("DQN", "DoubleDQN", "NFQ", "DiscreteSAC", "DiscreteBC", "DiscreteBCQ"):
        yield one(f"d3rlpy_{kind.lower()}", f"{kind}Config")
    for kind in ("BC", "AWAC", "CQL", "CalQL", "PLAS", "ReBRAC", "TD3PlusBC", "DDPG", "SAC", "TD3"):
        yield one(f"d3rlpy_{kind.lower()}", f"{kind}Config")
    yield one("d3rlpy_sac_unscaled", "SACConfig", action_scaler=None, observation_scaler=None)


def make_bandit(folder: Path, name: str, kind: str) -> None:
    """Fit a classifier or regressor on random numbers, save, and write what it does."""
    import xgboost

    env = Vectors(box(4), box(2, low=-4.0, high=4.0))
    observations = sample(env.observation_space)
    classes = (observations[:, 0] > 0).astype(int) + (observations[:, 1] > 0.5)
    targets = np.stack([observations[:, 0] + 0.1, observations[:, 1] * observations[:, 2]], axis=1)
    options: dict[str, Any] = {}
    if kind == "regressor":
        model = xgboost.XGBRegressor(n_estimators=5, max_depth=3).fit(observations, targets)
        expect, probabilities = model.predict(observations), None
    else:
        env.action_space = spaces.Discrete(2 if kind == "binary" else 3)
        classes = classes.clip(max=env.action_space.n - 1)
        if kind == "forest":
            from skl2onnx import to_onnx
            from sklearn.ensemble import RandomForestClassifier

            model = RandomForestClassifier(5, max_depth=3, random_state=0)
            options = {"head": "probabilities", "outputs": ["probabilities"]}
        else:
            model = xgboost.XGBClassifier(n_estimators=5, max_depth=3)
        model.fit(observations, classes)
        expect, probabilities = model.predict(observations), model.predict_proba(observations)
    if kind == "forest":
        file = f"{name}.onnx"
        made = to_onnx(model, observations[:1], options={"zipmap": False}, target_opset=17)
        (folder / file).write_bytes(made.SerializeToString())
    else:
        file = f"{name}.ubj" if kind == "binary" else f"{name}.json"
        model.save_model(folder / file)
    write(folder, name, file, env, observations, expect, **options)
    if probabilities is not None:
        likely = probabilities.max(axis=1)
        np.save(folder / f"{name}.actions.npy", probabilities.argmax(axis=1))
        np.save(folder / f"{name}.log_probs.npy", np.log(likely))


def bandit_policies(everything: bool) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield names of policies of XGBoost and scikit-learn, and what makes them."""
    for kind in ("classes", "binary", "regressor", "forest"):
        library = "sklearn" if kind == "forest" else "xgboost"
        name = f"{library}_{kind}"
        yield name, lambda folder, name=name, kind=kind: make_bandit(folder, name, kind)


def main() -> None:
    """Make the policies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--all", action="store_true", dest="everything")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for make in (sb3_policies, d3rlpy_policies, bandit_policies):
        for name, run in make(arguments.everything):
            torch.manual_seed(0)
            np.random.seed(0)  # noqa: NPY002 - what the libraries draw from
            run(arguments.output)
            if name.startswith("sb3") and not arguments.everything:
                strip(arguments.output / f"{name}.zip")
            print(name, file=sys.stderr)
    text = json.dumps(POLICIES, indent=1, sort_keys=True)
    (arguments.output / "policies.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
