"""Record a GRPO run of TRL while it is killed, and train a second run from the lake alone.

    python tests/compat/record_trl.py FOLDER

Runs in an environment with TRL and ReplayLake's base. A run of `GRPOTrainer` on this machine's CPU,
unchanged but for the hook, is killed (SIGKILL) three times and started again from its checkpoint.
Then every rollout that the trainer had is in the lake once, with its ids and log-probs, and a
second run trains from the lake, without generating. Exits with 1 where that is not so.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_NUM_KILLS, _MAX_STEPS, _NUM_SAMPLES = 3, 24, 4


def _make_trainer(folder: Path, rows: list[dict[str, Any]], cls: Any = None, **more: Any) -> Any:
    import torch
    import trl
    from datasets import Dataset
    from open_exports import make_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=256,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip
    options = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": [], "seed": 7,
        "max_steps": _MAX_STEPS, "num_generations": _NUM_SAMPLES, "num_iterations": 2,
        "per_device_train_batch_size": 8, "max_completion_length": 12, "disable_tqdm": True,
        "save_steps": 2, "save_total_limit": 2, "learning_rate": 0.01, **more.pop("options", {}),
    }  # fmt: skip
    return (cls or trl.GRPOTrainer)(
        model=model, args=trl.GRPOConfig(**options), train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer, **more,
    )  # fmt: skip


def run_recorded(folder: Path) -> None:
    """Train with the hook; beside it, write down what the trainer itself has, batch by batch."""
    import trl

    import replaylake as rl
    from replaylake.online.recorders.trl import GrpoHook

    def letters(completions: Any, **_: Any) -> list[float]:
        return [sum(c.isalpha() for c in text[0]["content"]) / 12 for text in completions]

    def brevity(completion_ids: Any, **_: Any) -> list[float | None]:
        return [None if len(ids) < 2 else -len(ids) / 12 for ids in completion_ids]

    class Trainer(trl.GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            rows = [_cut(output, place) for place in range(len(inputs))]
            line = json.dumps({"step": self.state.global_step, "rows": rows}) + "\n"
            os.write(truth, line.encode())
            return output

    truth = os.open(folder / "truth.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    with rl.record_language(
        folder / "lake", "rollouts", producer="grpo/0", policy="tiny", flush_interval_s=0.5
    ) as recorder:
        hook = GrpoHook(recorder, [letters, brevity], run_id="grpo")
        asked = [f"Say {word}." for word in ("red", "green", "blue", "black", "white", "grey")]
        trainer = _make_trainer(
            folder / "run",
            [{"prompt": [{"role": "user", "content": text}]} for text in asked],
            Trainer,
            reward_funcs=hook.reward_funcs,
            rollout_func=hook.rollout_func,
            options={"reward_weights": [1.0, 0.5]},
        )
        # A kill may leave a checkpoint without its last file.
        saved = (folder / "run").glob("checkpoint-*/trainer_state.json")
        newest = max(
            (path.parent for path in saved), key=lambda one: int(one.name[11:]), default=None
        )
        trainer.train(resume_from_checkpoint=newest and str(newest))
    (folder / "finished").touch()


def _cut(output: Any, place: int) -> dict[str, Any]:
    asked = output["prompt_mask"][place].bool()
    said = output["completion_mask"][place].bool()
    return {
        "prompt_ids": output["prompt_ids"][place][asked].tolist(),
        "completion_ids": output["completion_ids"][place][said].tolist(),
        "log_probs": output["old_per_token_logps"][place][said].tolist(),
        "advantage": output["advantages"][place].item(),
    }


def run_replayed(folder: Path) -> None:
    """Train on the stored rollouts alone: no generation, no reward function of its own."""
    import torch

    import replaylake as rl

    rows = (
        rl.open(folder / "lake")
        .sql(
            "select group_id, observation_tokens, action_tokens, action_log_probs, reward, "
            "prompt_messages from rollouts.steps order by group_id, episode_id"
        )
        .to_pylist()
    )
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row)
    if any(len(group) > _NUM_SAMPLES for group in groups.values()):
        sys.exit(f"found groups of more than the {_NUM_SAMPLES} samples that were generated")
    # A kill may leave a part of a batch: what is generated then completes it, or is another one.
    stored = {name: group for name, group in groups.items() if len(group) == _NUM_SAMPLES}

    def replay(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        samples = [stored[prompts[i][0]["name"]][i % _NUM_SAMPLES] for i in range(len(prompts))]
        return {
            "prompt_ids": [one["observation_tokens"] for one in samples],
            "completion_ids": [one["action_tokens"] for one in samples],
            "logprobs": [one["action_log_probs"] for one in samples],
            "stored_reward": [one["reward"] for one in samples],
        }

    def reward(stored_reward: Any, **_: Any) -> list[float]:
        return list(stored_reward)

    def score(model: Any, one: dict[str, Any]) -> float:
        ids = torch.tensor([one["observation_tokens"] + one["action_tokens"]])
        with torch.no_grad():
            log_probs = model(ids).logits.log_softmax(-1)[0, :-1]
        picked = log_probs.gather(1, ids[0, 1:, None])[:, 0]
        return float(picked[len(one["observation_tokens"]) - 1 :].sum())

    asked = [
        {"prompt": [{**json.loads(group[0]["prompt_messages"])[0], "name": name}]}
        for name, group in stored.items()
    ]
    trainer = _make_trainer(
        folder / "second", asked, reward_funcs=reward, rollout_func=replay,
        options={"save_strategy": "no", "max_steps": 2 * len(asked) // 2, "num_iterations": 1},
    )  # fmt: skip

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("generated, expected stored rollouts alone")

    trainer._generate_single_turn = refuse
    before = {name: [score(trainer.model, one) for one in group] for name, group in stored.items()}
    trainer.train()
    risen = 0.0
    for name, group in stored.items():
        mean = sum(one["reward"] for one in group) / len(group)
        for one, old in zip(group, before[name], strict=True):
            risen += (one["reward"] - mean) * (score(trainer.model, one) - old)
    if not risen > 0:
        sys.exit(f"found a covariance of rewards and changes of log-probs of {risen}, expected > 0")
    print(
        f"a second run of {trainer.state.global_step} steps trained on {len(asked)} stored groups"
    )


def run_killed(folder: Path) -> None:
    """Start the recorded run, kill it three times, let it end, and look at the lake."""
    rng, known, killed = random.Random(3), 0, 0
    while not (folder / "finished").exists():
        command = [sys.executable, __file__, str(folder), "recorded"]
        child = subprocess.Popen(command)
        while child.poll() is None:
            if killed < _NUM_KILLS and _count_lines(folder) > known + killed:
                time.sleep(rng.uniform(0, 0.3))  # anywhere in what comes next
                os.kill(child.pid, signal.SIGKILL)
                child.wait()
                killed, known = killed + 1, _count_lines(folder)
                break
            time.sleep(0.01)
        if child.returncode not in (0, -signal.SIGKILL):
            sys.exit(f"the run ended with {child.returncode}, expected 0")
    _compare(folder, killed)
    subprocess.run([sys.executable, __file__, str(folder), "replayed"], check=True)


def _count_lines(folder: Path) -> int:
    path = folder / "truth.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _compare(folder: Path, killed: int) -> None:
    from open_exports import make_tokenizer

    import replaylake as rl

    rows = (
        rl.open(folder / "lake")
        .sql(
            "select episode_id, attempt, train_step, observation_tokens, action_tokens, "
            "action_log_probs, reward, terminated, truncated, terminated or truncated as ended "
            "from rollouts.steps"
        )
        .to_pylist()
    )
    stored: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        key = row["train_step"], (*row["observation_tokens"],), (*row["action_tokens"],)
        stored.setdefault(key, []).append(row)
    batches = [json.loads(line) for line in (folder / "truth.jsonl").read_text().splitlines()]
    num, worst = 0, 0.0
    for batch in batches:
        for place, one in enumerate(batch["rows"]):
            key = batch["step"], (*one["prompt_ids"],), (*one["completion_ids"],)
            offs = []
            for row in stored.get(key, []):
                if row["episode_id"].partition("#")[0].endswith(f"-{batch['step']}-{place}"):
                    pairs = zip(row["action_log_probs"], one["log_probs"], strict=True)
                    offs.append(max(abs(a - b) for a, b in pairs))
            if not offs or min(offs) > 1e-4:
                where = f"step {batch['step']}, sample {place}"
                sys.exit(f"{where}: found log-probs {offs} away, expected its rollout")
            num, worst = num + 1, max(worst, min(offs))
    ids = [row["episode_id"] for row in rows]
    attempts: dict[Any, list[str]] = {}
    for row in rows:
        name = row["episode_id"].partition("#")[0]
        content = json.dumps([name, row["action_tokens"], row["action_log_probs"], row["reward"]])
        attempts.setdefault((name.rpartition("-")[0], row["attempt"]), []).append(content)
    different = {(key[0], *sorted(contents)) for key, contents in attempts.items()}
    if len({*ids}) != len(ids) or len(different) != len(attempts):
        sys.exit(f"found {len(attempts)} batches, {len(different)} different, expected each once")
    eos = make_tokenizer().eos_token_id
    if any(row["truncated"] is not (row["action_tokens"][-1] != eos) for row in rows):
        sys.exit("found a rollout that ends a text and is truncated, or the other way round")
    if not all(row["ended"] and row["reward"] is not None for row in rows):
        sys.exit("found rollouts without an end or a reward, expected whole ones")
    # Recorded, and killed before the trainer had written them down: at most a batch a kill.
    if len(rows) > num + 8 * killed:
        sys.exit(f"found {len(rows)} rollouts, expected at most {num + 8 * killed}")
    again = sum(row["attempt"] > 0 for row in rows)
    print(
        f"{num} rollouts of the trainer are in the lake's {len(rows)} after {killed} kills, "
        f"{again} of them as further attempts; log-probs differ by at most {worst:.1e}"
    )


if __name__ == "__main__":
    where = Path(sys.argv[1]).absolute()
    where.mkdir(parents=True, exist_ok=True)
    modes = {"recorded": run_recorded, "replayed": run_replayed}
    modes.get(sys.argv[2] if len(sys.argv) > 2 else "", run_killed)(where)
