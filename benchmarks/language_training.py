"""Whether language training learns: a tiny model that reverses digits, from its own samples.

A model is cloned from logged answers (SFT) for a short time, so that some answers are right. Then,
in each round, it samples four answers to each prompt, a checker rewards them, they are recorded in
a lake, and the next model is trained from the lake alone. Exact match is that of greedy answers to
500 prompts that no round has seen. With `--staleness N` the samples of a round are those of the
model N rounds before. `dpo` makes one round: pairs of samples of the cloned model.

    python -m benchmarks.language_training --folder /tmp/language
    python -m benchmarks.language_training --folder /tmp/stale --staleness 4 --rounds 12 ...
    python -m benchmarks.language_training --plot staleness.png --results stale.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import replaylake as rl
from replaylake.offline.language.pretrained import check_model_folder, load_pretrained
from replaylake.offline.language.sampling import sample_completions

METHODS: Final = ("dpo", "grpo", "rloo", "reinforce++", "ppo")
DIGITS: Final = 4
EQUALS, END, VOCABULARY = 10, 11, 12
NUM_LOGGED, NUM_HELD_OUT, NUM_SAMPLES = 400, 500, 4
# Two-sided 95% quantiles of Student's t by degrees of freedom.
T95: Final = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="an empty or absent folder")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the lines of --results")
    parser.add_argument("--results", type=Path, nargs="+", metavar="JSONL")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=64, help="in each round")
    parser.add_argument("--prompts", type=int, default=512, help="in each round")
    parser.add_argument("--staleness", type=int, default=0, help="rounds")
    parser.add_argument("--correction", default="truncate", choices=("truncate", "mask", "none"))
    options = parser.parse_args()
    if options.plot is not None:
        plot([json.loads(line) for p in options.results for line in p.open()], options.plot)
        return
    for method in options.methods:
        begin = time.perf_counter()
        rows = [
            run(options.folder / f"{method}-{seed}", method, seed, options)
            for seed in range(options.seeds)
        ]
        gains = np.array([row[-1] - row[0] for row in rows])
        line = {
            "method": method,
            "staleness": options.staleness,
            "correction": options.correction,
            "exact_match": np.mean(rows, axis=0).round(3).tolist(),
            "gains": gains.round(3).tolist(),
            "gain": round(float(gains.mean()), 3),
            "gain_95": [round(float(x), 3) for x in interval(gains)],
            "seconds_a_seed": round((time.perf_counter() - begin) / options.seeds, 1),
        }
        print(json.dumps(line), flush=True)


def run(folder: Path, method: str, seed: int, options: argparse.Namespace) -> list[float]:
    """Return the exact match of the cloned model and after each round."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    prompts = rng.permutation(10**DIGITS)
    held_out, logged = prompts[:NUM_HELD_OUT], prompts[NUM_HELD_OUT:][:NUM_LOGGED]
    others = prompts[NUM_HELD_OUT + NUM_LOGGED :]
    make_model(folder / "random", seed)
    lake = rl.open(folder / "lake", create=True)
    record_answers(lake, "logged", logged)
    train(lake, "logged", folder / "random", folder / "round-0", "sft", seed, updates=80)
    scores = [measure(folder / "round-0", held_out)]
    for number in range(1, 1 + (1 if method == "dpo" else options.rounds)):
        sampler = folder / f"round-{max(0, number - 1 - options.staleness)}"
        asked = others[(number - 1) * options.prompts : number * options.prompts]
        generate(lake, "sampled", sampler, asked, seed * 100 + number, number)
        train(
            lake,
            "sampled",
            folder / f"round-{number - 1}",
            folder / f"round-{number}",
            method,
            seed,
            updates=options.updates,
            where=f"min_policy_version = {number}",
            **({} if method == "dpo" else {"correction": options.correction}),
        )
        scores.append(measure(folder / f"round-{number}", held_out))
    return scores


def make_model(folder: Path, seed: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=16,
        bos_token_id=None, eos_token_id=END,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {**{str(digit): digit for digit in range(10)}, "=": EQUALS, "<end>": END}
    tokenizer = Tokenizer(models.WordLevel(words))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)


def prompt_ids(number: int) -> list[int]:
    return [*map(int, f"{number:0{DIGITS}}"), EQUALS]


def answer(number: int) -> list[int]:
    return [*map(int, reversed(f"{number:0{DIGITS}}")), END]


def record_answers(lake: Any, dataset: str, numbers: Any) -> None:
    with rl.record_language(lake, dataset, producer="answers") as recorder:
        for number in map(int, numbers):
            ids = answer(number)
            recorder.record(
                prompt=f"{number:0{DIGITS}}=",
                completion="".join(map(str, ids[:-1])),
                prompt_ids=prompt_ids(number),
                completion_ids=ids,
                reward=1.0,
            )


async def reverse(task: Any, chat: Any) -> float:
    """Ask for the digits of a number in reverse order."""
    reply = await chat(f"{task['number']:0{DIGITS}}=")
    # Each digit that is right counts, as does the end, and the whole once more.
    expected = [*f"{task['number']:0{DIGITS}}"[::-1], None]
    digits = [*reply["content"], None]
    right = sum(a == b for a, b in zip(digits, expected, strict=False))
    return right / len(expected) / 2 + float(digits == expected) / 2


def generate(lake: Any, dataset: str, folder: Path, numbers: Any, seed: int, version: int) -> None:
    num = len(numbers) * NUM_SAMPLES
    config = rl.LanguageRolloutConfig(
        env=reverse,
        tasks=[{"id": int(number), "number": int(number)} for number in numbers],
        samples=NUM_SAMPLES,
        concurrency=num,
        seed=seed,
        sampling={"max_tokens": DIGITS + 2},
        producer=f"sampler-{version}",
    )
    model = rl.LocalModel(folder, policy_version=version, max_batch_size=num)
    rl.rollout_language(lake, dataset, model, config)


def train(
    lake: Any, dataset: str, model: Path, output: Path, method: str, seed: int, *,
    updates: int, where: str | None = None, **options: Any,
) -> None:  # fmt: skip
    needs_groups = method in ("dpo", "grpo", "rloo")
    # PPO's advantages are of unit spread even where the values explain nearly all of the returns.
    rate = {"sft": 2e-3, "ppo": 3e-5}.get(method, 1e-4)
    if method == "dpo":
        options["beta"] = 0.5
    config = rl.LanguageConfig(
        model=str(model),
        output=str(output),
        method=method,
        where_sequences=where,
        updates=updates,
        # Groups of four, or as many sequences.
        batch_size=16 if needs_groups else 64 if where else 32,
        seed=seed,
        options={"learning_rate": rate, **options},
    )
    rl.train_language(lake, dataset, config)


def measure(folder: Path, numbers: Any) -> float:
    model, _ = load_pretrained(check_model_folder(folder), "causal language model")
    found = sample_completions(
        model, [prompt_ids(int(number)) for number in numbers], max_new_tokens=DIGITS + 2,
        stop_ids=[END], temperature=0,
    )  # fmt: skip
    right = [one.token_ids == answer(int(n)) for one, n in zip(found, numbers, strict=True)]
    return float(np.mean(right))


def interval(values: Any) -> tuple[float, float]:
    if len(values) < 2:
        return math.nan, math.nan
    half = T95[len(values) - 1] * values.std(ddof=1) / math.sqrt(len(values))
    return values.mean() - half, values.mean() + half


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the exact match by round, a picture for each method."""
    import matplotlib.pyplot as plt

    names = {
        (0, "truncate"): "staleness 0",
        (4, "truncate"): "staleness 4, corrected",
        (4, "none"): "staleness 4, not corrected",
    }
    methods = list(dict.fromkeys(row["method"] for row in rows))
    _, axes = plt.subplots(
        1, len(methods), figsize=(3.2 * len(methods), 3), sharey=True, squeeze=False
    )
    for axis, method in zip(axes[0], methods, strict=True):
        for row in rows:
            if row["method"] == method:
                name = names[row["staleness"], row["correction"]]
                axis.plot(row["exact_match"], marker=".", label=name)
        axis.set_title(method)
        axis.set_xlabel("round")
        axis.set_xticks(range(0, max(len(row["exact_match"]) for row in rows), 3))
    axes[0][0].set_ylabel("exact match, mean of 5 seeds")
    axes[0][0].legend(fontsize=7)
    plt.tight_layout()
    plt.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
