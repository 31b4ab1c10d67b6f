"""Export a policy of RLlib to ONNX, for `replaylake policies import`. Run it where RLlib is.

    python examples/export_rllib.py CHECKPOINT policy.onnx [--module default_policy]

A checkpoint of RLlib is made of pickles, which RLlib alone should read, and only your own. Of
`Algorithm.save_to_path` (the new API stack, 2.60) the module is exported: its logits, values of
actions, or mean and log standard deviation. The command that imports it is printed.
`policy.observations.npy` and `policy.expect.npy` are random observations and the best actions of
the module, for --observations and --expect.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.torch.torch_distribution import TorchSquashedGaussian
from ray.rllib.core.rl_module import RLModule
from ray.rllib.utils.spaces.space_utils import unsquash_action

NUM = 200


class Outputs(torch.nn.Module):
    """The outputs for the head of a policy package, and the name of the head."""

    def __init__(self, module: Any, actions: spaces.Space, is_normalized: bool) -> None:
        super().__init__()
        self.module = module
        self.is_values = hasattr(module, "compute_q_values") and isinstance(
            actions, spaces.Discrete
        )
        is_squashed = not self.is_values and issubclass(
            module.get_inference_action_dist_cls(), TorchSquashedGaussian
        )
        if isinstance(actions, spaces.Discrete):
            self.head = "q_values" if self.is_values else "categorical"
            self.names = ["q_values" if self.is_values else "logits"]
            return
        self.head = "squashed_gaussian" if is_squashed else "gaussian"
        self.names = ["means", "log_stds"]
        # RLlib's gaussians are in [-1, 1]; the head squashed_gaussian scales to the bounds itself.
        low, high = (torch.as_tensor(bound) for bound in (actions.low, actions.high))
        is_scaled = is_normalized and not is_squashed
        self.center = (high + low) / 2 if is_scaled else torch.zeros_like(low)
        self.scale = (high - low) / 2 if is_scaled else torch.ones_like(low)

    def forward(self, observations: torch.Tensor) -> Any:
        batch = {Columns.OBS: observations}
        if self.is_values:
            return self._values(batch)
        inputs = self.module._forward_inference(batch)[Columns.ACTION_DIST_INPUTS]
        if self.head == "categorical":
            return inputs
        means, log_stds = inputs.chunk(2, dim=-1)
        return self.center + self.scale * means, log_stds + torch.log(self.scale)

    def _values(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the values of actions; of the module's own, nanmean has no operator in ONNX."""
        encoded = self.module.encoder(batch)["encoder_out"]
        values = self.module.af(encoded)
        if not self.module.uses_dueling:
            return values
        return values - values.mean(dim=-1, keepdim=True) + self.module.vf(encoded)


def act(outputs: Outputs, observations: torch.Tensor, actions: spaces.Space, scaled: bool) -> Any:
    """Return the best actions of the module, by RLlib's own distribution."""
    module = outputs.module
    with torch.no_grad():
        result = module.forward_inference({Columns.OBS: observations})
    if Columns.ACTIONS in result:
        return result[Columns.ACTIONS].numpy()
    inputs = result[Columns.ACTION_DIST_INPUTS]
    if outputs.head == "squashed_gaussian":
        # RLlib 2.60 leaves the tanh out where it does not explore, but draws with it.
        chosen = torch.tanh(inputs.chunk(2, dim=-1)[0]).numpy()
    else:
        kind = module.get_inference_action_dist_cls()
        chosen = kind.from_logits(inputs).to_deterministic().sample().numpy()
    if isinstance(actions, spaces.Box):
        chosen = unsquash_action(chosen, actions) if scaled else chosen
        return np.clip(chosen, actions.low, actions.high).astype(np.float32)
    return chosen


def main() -> None:
    """Export."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--module", default="default_policy")
    parser.add_argument(
        "--unnormalized", action="store_true", help="config.normalize_actions=False"
    )
    arguments = parser.parse_args()
    folder = arguments.checkpoint.resolve() / "learner_group" / "learner" / "rl_module"
    module = RLModule.from_checkpoint(folder / arguments.module)
    module.eval()
    actions, space = module.action_space, module.observation_space
    outputs = Outputs(module, actions, not arguments.unnormalized)
    rng = np.random.default_rng(0)
    low, high = np.clip(space.low, -2, 2), np.clip(space.high, -2, 2)
    observations = rng.uniform(low, high, (NUM, *space.shape)).astype(np.float32)
    torch.onnx.export(
        outputs.eval(),
        (torch.from_numpy(observations[:2]),),
        arguments.output,
        input_names=["observations"],
        output_names=outputs.names,
        dynamic_axes={name: {0: "N"} for name in ("observations", *outputs.names)},
        opset_version=17,
        dynamo=False,
    )
    stem = arguments.output.with_suffix("")
    scaled = not arguments.unnormalized
    expect = act(outputs, torch.from_numpy(observations), actions, scaled)
    np.save(f"{stem}.observations.npy", observations)
    np.save(f"{stem}.expect.npy", expect)
    print(
        f"replaylake policies import {arguments.output} --policy NAME --dataset DATASET "
        f"--head {outputs.head} --observations {stem}.observations.npy --expect {stem}.expect.npy"
    )


if __name__ == "__main__":
    main()
