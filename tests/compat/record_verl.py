"""Run an agent loop of verl with the recording worker, and compare the lake with what verl returns.

    python tests/compat/record_verl.py FOLDER

Runs in an environment with verl and ReplayLake's base, on the CPU. The worker, the loop, the
tokenizer and the batch are verl's and transformers' own; in the place of vLLM, a random model of
transformers generates. Exits with 1 where a rollout differs.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", RAY_DEDUP_LOGS="0")

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from open_exports import make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import replaylake as rl
from replaylake.online.recorders.verl import record_worker

LENGTH, _NUM_SAMPLES = 12, 2


class TransformersEngine:
    """Generates as verl's client of an engine does: ids, and a log-prob for each."""

    def __init__(self, model: Any, eos: int) -> None:
        self._model, self._eos, self._num_cut = model, eos, 0

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        ids, log_probs = [], []
        with torch.no_grad():
            while len(ids) < LENGTH and self._eos not in ids:
                logits = self._model(torch.tensor([prompt_ids + ids])).logits[0, -1]
                one = int(torch.multinomial(logits.softmax(-1), 1))
                ids.append(one)
                if len(ids) == LENGTH and one != self._eos:
                    self._num_cut += 1
                    if self._num_cut % 2 == 0:  # its end comes with the last id that it may have
                        one = ids[-1] = self._eos
                log_probs.append(float(logits.log_softmax(-1)[one]))
        extra = {"global_steps": 3, "min_global_steps": 3, "max_global_steps": 3}
        return TokenOutput(token_ids=ids, log_probs=log_probs, extra_fields=extra)


def configure(folder: Path, *more: str) -> tuple[Any, Any, Any]:
    """Return verl's config, with further overrides, a tokenizer, and a random model."""
    import verl

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=256,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rollout = "actor_rollout_ref.rollout"
    with initialize_config_dir(
        str(Path(verl.__file__).parent / "trainer" / "config"), version_base="1.3"
    ):
        config = compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={folder / 'model'}", f"{rollout}.name=vllm",
                f"{rollout}.prompt_length=64", f"{rollout}.response_length={LENGTH}",
                f"{rollout}.calculate_log_probs=true",
                f"{rollout}.agent.default_agent_loop=single_turn_agent", *more,
            ],
        )  # fmt: skip
    return config, tokenizer, model


def main(folder: Path) -> None:
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
    from verl.protocol import DataProto

    config, tokenizer, model = configure(folder)

    class ScoredLoop(SingleTurnAgentLoop):
        """As agents do that score themselves; else workers of a reward loop do, in Ray."""

        async def run(self, *args: Any, **kwargs: Any) -> Any:
            output = await super().run(*args, **kwargs)
            output.reward_score = len(output.response_ids) / LENGTH
            output.extra_fields["reward_extra_info"] = {"length": len(output.response_ids)}
            return output

    def open_recorder() -> Any:
        return rl.record_language(folder / "lake", "math", producer="verl/0", policy="tiny")

    Worker = record_worker(AgentLoopWorker, open_recorder, run_id="verl")
    worker = Worker(config, TransformersEngine(model, tokenizer.eos_token_id))
    sys.modules[__name__].ScoredLoop = ScoredLoop  # type: ignore[attr-defined]
    from verl.experimental.agent_loop import agent_loop

    agent_loop._agent_loop_registry["single_turn_agent"] = {"_target_": f"{__name__}.ScoredLoop"}
    asked = [[{"role": "user", "content": f"Say {word}."}] for word in ("red", "green", "blue")]
    fields = {
        "raw_prompt": [one for one in asked for _ in range(_NUM_SAMPLES)],
        "uid": [f"u{number}" for number in range(len(asked)) for _ in range(_NUM_SAMPLES)],
        "index": [number for number in range(len(asked)) for _ in range(_NUM_SAMPLES)],
    }
    arrays = {name: np.empty(len(values), object) for name, values in fields.items()}
    for name, values in fields.items():
        arrays[name][:] = values
    batch = DataProto.from_dict(non_tensors=arrays, meta_info={"global_steps": 3})
    loop = worker.loop if hasattr(worker, "loop") else asyncio.get_event_loop()
    done = loop.run_until_complete(worker.generate_sequences(batch))
    worker._recorder.close()
    rows = rl.open(folder / "lake").sql(
        "select observation_tokens, action_tokens, action_log_probs, reward, group_id, split, "
        "policy_version, terminated, truncated, finish_reason, action, reward_components "
        "from math.steps"
    ).to_pylist()  # fmt: skip
    found = sorted((r["group_id"], r["observation_tokens"], r["action_tokens"]) for r in rows)
    returned, worst = [], 0.0
    for place in range(len(done)):
        one = {name: done.batch[name][place] for name in done.batch.keys()}  # noqa: SIM118
        width = len(one["prompts"])
        asked_ids = one["prompts"][one["attention_mask"][:width].bool()].tolist()
        mask = one["response_mask"].bool()
        said = one["responses"][mask].tolist()
        returned.append((f"verl/{fields['uid'][place]}", asked_ids, said))
        (row,) = [
            r for r in rows if (r["group_id"], r["action_tokens"]) == (returned[-1][0], said)
        ][:1]
        pairs = zip(row["action_log_probs"], one["rollout_log_probs"][mask].tolist(), strict=True)
        worst = max(worst, *(abs(a - b) for a, b in pairs))
        if row["reward"] != float(one["rm_scores"].sum()):
            sys.exit(f"found the reward {row['reward']}, expected {one['rm_scores'].sum()}")
    if found != sorted(returned) or worst > 1e-6:
        sys.exit(f"found the rollouts {found}, {worst} away, expected {sorted(returned)}")
    eos = tokenizer.eos_token_id
    for row in rows:
        ends = row["action_tokens"][-1] == eos
        reason = "stop" if ends else "length"
        if (row["terminated"], row["truncated"], row["finish_reason"]) != (ends, not ends, reason):
            sys.exit(f"found {row}, expected the end of {reason}")
    at_limit = {row["truncated"] for row in rows if len(row["action_tokens"]) == LENGTH}
    if at_limit != {True, False}:
        sys.exit(f"found {at_limit} of rollouts of {LENGTH} ids, expected ended and cut ones")
    if {row["policy_version"] for row in rows} != {3} or {row["split"] for row in rows} != {
        "train"
    }:
        sys.exit(f"found {rows}, expected version 3 and the split train")
    print(
        f"{len(rows)} rollouts of verl's agent loop are in the lake, with ids, log-probs, rewards"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
