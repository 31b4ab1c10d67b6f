"""Run a step of verl's V1 trainer on a TransferQueue with our backend, and lose the queue within.

    python tests/compat/record_verl_queue.py FOLDER

Runs in the environment of record_verl.py, with TransferQueue, in Ray and on the CPU. These are
verl's own: the worker of the agent loop that puts trajectories, the replay buffer that samples
them, and the trainer's steps that register prompts, take the rollout's log-probs for the old ones,
compute advantages and balance the batch. In the place of vLLM, a random model of transformers
generates. Not run, as they need a GPU or workers with one: the actor's and the critic's update and
the synchronization of weights. Once a batch is sampled, the controller of the queue is killed; the
trainer's next steps work on the restored queue. Exits with 1 where a value differs.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", RAY_DEDUP_LOGS="0")

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from record_verl import LENGTH, TransformersEngine, configure

from replaylake.online.recorders.transferqueue import backend

_NUM_SAMPLES, _NUM_PROMPTS = 2, 3


def main(folder: Path) -> None:
    from verl.experimental.agent_loop import agent_loop
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils import tensordict_utils as tu

    config, tokenizer, model = configure(
        folder, f"actor_rollout_ref.rollout.n={_NUM_SAMPLES}",
        f"data.train_batch_size={_NUM_PROMPTS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={_NUM_PROMPTS}",
        "algorithm.adv_estimator=grpo", "algorithm.rollout_correction.bypass_mode=true",
        f"transfer_queue.backend.storage_backend={backend.NAME}",
        f"+transfer_queue.backend.{backend.NAME}.path={folder / 'queue'}",
    )  # fmt: skip
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error")
    backend.register()
    tq.init(config.transfer_queue)

    class ScoredLoop(SingleTurnAgentLoop):
        """As agents do that score themselves; else workers of a reward loop do."""

        async def run(self, *args: Any, **kwargs: Any) -> Any:
            output = await super().run(*args, **kwargs)
            output.reward_score = len(output.response_ids) / LENGTH
            output.extra_fields["reward_extra_info"] = {"length": len(output.response_ids)}
            return output

    sys.modules[__name__].ScoredLoop = ScoredLoop  # type: ignore[attr-defined]
    agent_loop._agent_loop_registry["single_turn_agent"] = {"_target_": f"{__name__}.ScoredLoop"}
    # In this process, and not an actor: the engine is an object of it.
    Worker = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    worker = Worker(config, TransformersEngine(model, tokenizer.eos_token_id))

    async def generate(batch: Any) -> None:
        await worker.generate_sequences(batch)
        while worker.background_tasks:
            await asyncio.gather(*tuple(worker.background_tasks))

    trainer = SimpleNamespace(
        config=config, trainer_mode="sync", global_steps=1, tokenizer=tokenizer, use_critic=False,
        agent_loop_manager=SimpleNamespace(
            generate_sequences=lambda batch: asyncio.run(generate(batch))
        ),
        actor_rollout_wg=SimpleNamespace(_dispatch_info={"actor": [0]}),
    )  # fmt: skip
    trainer._get_required_batch_multiple = functools.partial(
        PPOTrainer._get_required_batch_multiple, trainer
    )

    def run(name: str, *args: Any) -> Any:
        return getattr(PPOTrainer, name)(trainer, *args)

    texts = ("red", "green", "blue")
    fields = {
        "raw_prompt": [[{"role": "user", "content": f"Say {word}."}] for word in texts],
        "uid": [f"u{number}" for number in range(_NUM_PROMPTS)],
        "index": list(range(_NUM_PROMPTS)),
    }
    arrays = {name: np.empty(_NUM_PROMPTS, object) for name in fields}
    for name, values in fields.items():
        arrays[name][:] = values
    batch = tu.get_tensordict(arrays)
    tu.assign_non_tensor_data(batch, "global_steps", 1)
    run("_submit_batch_to_rollout", batch)

    sampler = ReplayBuffer("sync", config.trainer, None, "drop", OmegaConf.create({}), 0.05)
    sampled, _ = sampler.sample(1, "train", _NUM_PROMPTS)
    fetch = functools.partial(tq.kv_batch_get, keys=sampled.keys, partition_id="train")
    names = ["prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "uid"]
    before = {name: _to_lists(fetch(select_fields=names)[name]) for name in names}
    if len(sampled.keys) != _NUM_PROMPTS * _NUM_SAMPLES:
        sys.exit(f"found {sampled.keys} sampled, expected {_NUM_PROMPTS * _NUM_SAMPLES}")

    # The queue is lost with all that it held in memory.
    ray.kill(ray.get_actor("TransferQueueController", namespace="transfer_queue"))
    tq.close()
    restored = tq.init(config.transfer_queue).backend[backend.NAME].restored
    after = {name: _to_lists(fetch(select_fields=names)[name]) for name in names}
    if restored.num_rows < len(sampled.keys) or after != before:
        sys.exit(f"found {restored} and {after}, expected {before}")
    kept = tq.kv_list("train")["train"]
    if {key: kept[key] for key in sampled.keys} != dict(
        zip(sampled.keys, sampled.tags, strict=True)
    ):
        sys.exit(f"found the tags {kept}, expected {sampled.tags}")

    # A checkpoint, as the trainer saves and loads it.
    tq.save_checkpoint(str(folder / "checkpoint"))
    tq.kv_clear(keys=sampled.keys, partition_id="train")
    tq.load_checkpoint(str(folder / "checkpoint"))

    metrics: dict[str, Any] = {}
    sampled = run("_balance_batch", sampled, metrics)
    sampled = run("_compute_old_log_prob", sampled, metrics)
    sampled = run("_compute_advantage", sampled, metrics)
    found = tq.kv_batch_get(
        keys=sampled.keys,
        partition_id="train",
        select_fields=["rm_scores", "advantages", "old_log_probs", "rollout_log_probs", "uid"],
    )
    scores = [sum(row) for row in _to_lists(found["rm_scores"])]
    groups: dict[str, list[float]] = {}
    for uid, score in zip(_to_lists(found["uid"]), scores, strict=True):
        groups.setdefault(uid, []).append(score)
    for uid, score, advantages in zip(
        _to_lists(found["uid"]), scores, _to_lists(found["advantages"]), strict=True
    ):
        # GRPO's advantage: the score within its group (verl's compute_grpo_outcome_advantage).
        group = torch.tensor(groups[uid])
        expected = float((score - group.mean()) / (group.std() + 1e-6))
        if any(abs(one - expected) > 1e-4 for one in advantages):
            sys.exit(f"found the advantages {advantages} of {uid}, expected {expected}")
    if _to_lists(found["old_log_probs"]) != _to_lists(found["rollout_log_probs"]):
        sys.exit("found old log-probs that are not the rollout's, expected those")
    tq.kv_clear(keys=sampled.keys, partition_id="train")
    left = tq.kv_list("train")
    if left and left.get("train"):
        sys.exit(f"found {left} after the step, expected nothing")
    tq.close()
    ray.shutdown()
    print(
        f"{len(scores)} rollouts of verl's V1 trainer were sampled, restored after the queue was "
        "killed and from a checkpoint, given advantages, and cleared"
    )


def _to_lists(column: Any) -> list[Any]:
    """Return the rows of a field, whether they are tensors or plain values."""
    if isinstance(column, torch.Tensor):
        return [row.tolist() for row in column.unbind()]
    return [getattr(value, "data", value) for value in column]


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
