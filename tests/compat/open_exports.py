"""Open exports with the frameworks' own readers, and compare their rows with the lake's.

    python tests/compat/open_exports.py FOLDER [FRAMEWORK...]

Runs in an environment that has the frameworks, and not ReplayLake; FOLDER is what `make_exports.py`
wrote. Exits with 1 where a row differs, none was compared, or a framework cannot be opened.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="disabled",
    LITELLM_LOCAL_MODEL_COST_MAP="true",
)
os.environ.setdefault("HF_HOME", tempfile.mkdtemp(prefix="compat-"))

_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] or '' }}"
    "{% if m.get('tool_calls') %}{% for c in m['tool_calls'] %}<|call|>"
    "{{ c['function']['name'] }}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ["<|end|>", "<|call|>", *(f"<|{r}|>" for r in ("system", "user", "assistant", "tool"))]


class Exports:
    """The exports in a folder, and what the lake's SQL says of their rows."""

    def __init__(self, folder: Path) -> None:
        expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
        self.folder, self._exports = folder, expected["exports"]
        self.dialogues, self.sequences = expected["dialogues"], expected["sequences"]
        self.corrections, self.branches = expected["corrections"], expected["branches"]

    def path(self, name: str) -> str:
        return str(self.folder / self._exports[name]["path"])

    def lines(self, name: str) -> list[Any]:
        text = Path(self.path(name)).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def prompts(self) -> list[Any]:
        """The first dialogue of each prompt."""
        return list({d["group_id"]: d for d in reversed(self.dialogues)}.values())[::-1]

    def pairs(self, *, are_single: bool = False) -> list[tuple[Any, Any]]:
        """The best and the worst sample of each prompt; are_single: of those of one message."""
        groups: dict[str, list[Any]] = {}
        for dialogue in self.dialogues:
            if not are_single or len(dialogue["completion"]) == 1:
                groups.setdefault(dialogue["group_id"], []).append(dialogue)
        pairs = []
        for group in groups.values():
            ordered = sorted(group, key=lambda d: d["reward"])
            if not are_single or len(ordered[0]["prompt"]) == 1:
                pairs.append((ordered[-1], ordered[0]))
        return pairs


class Comparison:
    """Counts rows that are equal, and remembers the first that is not."""

    def __init__(self) -> None:
        self.num_rows = 0

    def same(self, found: Any, expected: Any) -> None:
        found, expected = list(found), list(expected)
        if len(found) != len(expected):
            raise AssertionError(f"found {len(found)} rows, expected {len(expected)}")
        for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            if ours != theirs:
                raise AssertionError(f"row {number}: found {ours!r}, expected {theirs!r}")
        self.num_rows += len(found)


def make_tokenizer() -> Any:
    """Return a tokenizer of bytes, with a chat template of these roles."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in (*_SPECIAL, "<|pad|>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def _without_nulls(value: Any) -> Any:
    """Return a value without the keys that `datasets` and Parquet fill in."""
    if isinstance(value, dict):
        return {key: _without_nulls(v) for key, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _texts(tokenizer: Any, messages: list[Any], **more: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **more))


def compare_trl(exports: Exports, seen: Comparison) -> None:
    """The data sets that its trainers prepare, and a step of training on each."""
    import torch
    import trl
    from datasets import load_dataset
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    tokenizer = make_tokenizer()
    folder = tempfile.mkdtemp(prefix="compat-trl-")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=1024, num_labels=1,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip

    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)

    def train(kind: str, name: str, is_scorer: bool = False, **more: Any) -> Any:
        # With a path, from which a reference model is loaded.
        model = LlamaForCausalLM.from_pretrained(folder)
        if is_scorer:
            model = LlamaForSequenceClassification(config)
        arguments = getattr(trl, f"{kind}Config")(
            output_dir=folder, use_cpu=True, bf16=False, report_to=[], max_steps=1,
            per_device_train_batch_size=2, save_strategy="no", disable_tqdm=True, **more,
        )  # fmt: skip
        data = load_dataset("json", data_files=exports.path(name), split="train")
        trainer = getattr(trl, f"{kind}Trainer")(
            model=model, args=arguments, train_dataset=data, processing_class=tokenizer
        )
        rows = list(trainer.train_dataset)
        trainer.train()
        return rows

    def decode(row: Any, *names: str) -> str:
        return "".join(tokenizer.decode(row[name]) for name in names)

    dialogues, pairs = exports.dialogues, exports.pairs()
    whole = [_texts(tokenizer, d["prompt"] + d["completion"]) for d in dialogues]
    rows = train("SFT", "trl-sft", max_length=1024)
    seen.same([decode(row, "input_ids") for row in rows], whole)
    rows = train("SFT", "trl-tokens", max_length=1024)
    seen.same([row["input_ids"] for row in rows], [s["token_ids"] for s in exports.sequences])
    masks = [[int(label != -100) for label in row["labels"]] for row in rows]
    seen.same(masks, [s["loss_mask"] for s in exports.sequences])
    sides = [[_texts(tokenizer, d["prompt"] + d["completion"]) for d in pair] for pair in pairs]
    rows = train("DPO", "trl-dpo", max_length=1024)
    found = [[decode(r, "prompt_ids", f"{s}_ids") for s in ("chosen", "rejected")] for r in rows]
    seen.same(found, sides)
    rows = train("Reward", "trl-reward", is_scorer=True, max_length=1024)
    found = [[decode(row, f"{s}_ids") for s in ("chosen", "rejected")] for row in rows]
    seen.same(found, sides)
    margins = [round(c["reward"] - r["reward"], 9) for c, r in pairs]
    seen.same([round(row["margin"], 9) for row in rows], margins)
    rows = train("KTO", "trl-kto", max_length=1024)
    found = sorted((decode(row, "prompt_ids", "completion_ids"), row["label"]) for row in rows)
    seen.same(found, sorted((t, d["reward"] > 0) for t, d in zip(whole, dialogues, strict=True)))
    # GRPO takes prompts as they are; the right answer goes to a reward function of the user's.
    data = load_dataset("json", data_files=exports.path("trl-grpo"), split="train")
    asked: list[Any] = []

    def is_right(prompts: Any, ground_truth: Any, **_: Any) -> list[float]:
        asked.extend(zip(prompts, ground_truth, strict=True))
        return [float(len(asked) % 2)] * len(prompts)

    arguments = trl.GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, report_to=[], max_steps=1, num_generations=2,
        per_device_train_batch_size=4, max_completion_length=4, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    data = data.remove_columns("tools")  # its model is asked for texts
    trainer = trl.GRPOTrainer(
        model=LlamaForCausalLM(config), reward_funcs=is_right, args=arguments, train_dataset=data,
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    known = {json.dumps(d["prompt"]): d["answer"] for d in exports.prompts()}
    seen.same([known[json.dumps(_without_nulls(p))] for p, _ in asked], [a for _, a in asked])
    seen.same(
        [(_without_nulls(row["prompt"]), row["ground_truth"]) for row in trainer.train_dataset],
        [(d["prompt"], d["answer"]) for d in exports.prompts()],
    )


def compare_verl(exports: Exports, seen: Comparison) -> None:
    from omegaconf import OmegaConf
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.utils.dataset.rm_dataset import RMDataset

    tokenizer = make_tokenizer()
    cache = tempfile.mkdtemp(prefix="compat-verl-")
    config = OmegaConf.create(
        {"cache_dir": cache, "max_prompt_length": 1024, "filter_overlong_prompts_workers": 1}
    )
    data = RLHFDataset(exports.path("verl-rl"), tokenizer, config)
    rows = [data[number] for number in range(len(data))]
    seen.same(
        [
            (_without_nulls(row["raw_prompt"]), row["reward_model"]["ground_truth"], row["index"])
            for row in rows
        ],
        [(d["prompt"], d["answer"], d["id"]) for d in exports.prompts()],
    )
    config = OmegaConf.create({"max_length": 1024, "truncation": "error", "pad_mode": "no_padding"})
    sft = MultiTurnSFTDataset(exports.path("verl-sft"), tokenizer, config)
    rows = [sft[number] for number in range(len(sft))]
    seen.same(
        [tokenizer.decode(row["input_ids"]) for row in rows],
        [_texts(tokenizer, d["prompt"] + d["completion"]) for d in exports.dialogues],
    )
    rewards = RMDataset(exports.path("verl-rm"), tokenizer, max_length=256, cache_dir=cache)
    found = []
    for number in range(len(rewards)):
        row = rewards[number]
        ids = zip(row["input_ids"], row["attention_mask"], strict=True)
        found.append([tokenizer.decode(one[mask.bool()]) for one, mask in ids])
    seen.same(
        found,
        [
            [f"{d['prompt'][0]['content']}{d['completion'][0]['content']}<|end|>" for d in pair]
            for pair in exports.pairs(are_single=True)
        ],
    )


def compare_corrections(exports: Exports, seen: Comparison) -> None:
    """SQL's mismatch and importance weights with verl's, to 1e-6."""
    import torch
    from verl.trainer.ppo.rollout_corr_helper import (
        compute_offpolicy_metrics,
        compute_rollout_correction_weights,
    )

    length = max(len(sequence["token_ids"]) for sequence in exports.sequences)

    def read(name: str) -> Any:
        rows = [[v or 0.0 for v in sequence[name]] for sequence in exports.sequences]
        padded = [row + [0.0] * (length - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.float64)

    mask, trained, sampled = map(read, ("loss_mask", "proximal_log_probs", "log_probs"))
    weights = {
        name: compute_rollout_correction_weights(trained - sampled, mask, level, threshold)[0]
        for name, level, threshold in (
            ("token", "token", 1.2),
            ("sequence", "sequence", 1.2),
            ("band", "token", "0.8_1.2"),
        )
    }
    for number, ours in enumerate(exports.corrections):
        one = slice(number, number + 1)
        metrics = compute_offpolicy_metrics(trained[one], sampled[one], mask[one])
        pairs = [(ours["kl"], metrics["kl"]), (ours["k3_kl"], metrics["k3_kl"])]
        for name, rows in weights.items():
            kept = exports.sequences[number]["loss_mask"]
            own = [ours[name] * flag for flag in kept] if name == "sequence" else ours[name]
            pairs += [(v or 0.0, w) for v, w in zip(own, rows[number].tolist(), strict=False)]
        worst = max(abs(value - other) for value, other in pairs)
        seen.same([worst < 1e-6], [True])


def compare_openrlhf(exports: Exports, seen: Comparison) -> None:
    from datasets import load_dataset
    from openrlhf.datasets import PromptDataset, RewardDataset, SFTDataset

    tokenizer = make_tokenizer()

    def strategy(**data: Any) -> Any:
        names = SimpleNamespace(apply_chat_template=True, **data)
        return SimpleNamespace(args=SimpleNamespace(data=names), is_rank_0=lambda: True)

    def load(name: str) -> Any:
        return load_dataset("json", data_files=exports.path(name), split="train")

    own = strategy(input_key="input", label_key="label")
    prompts = PromptDataset(load("openrlhf-prompts"), tokenizer, own)
    seen.same(
        [prompts[number][:3] for number in range(len(prompts))],
        [
            ("chats", _texts(tokenizer, d["prompt"], add_generation_prompt=True), d["answer"])
            for d in exports.prompts()
        ],
    )
    own = strategy(prompt_key="prompt", chosen_key="chosen", rejected_key="rejected")
    data = load("openrlhf-preference")
    pairs = RewardDataset(data, tokenizer, 1024, own, num_processors=1)
    found = [
        (
            [pairs.prompts[number] + side[number] for side in (pairs.chosens, pairs.rejects)],
            round(pairs.extras[number], 9),
        )
        for number in range(len(pairs))
    ]
    seen.same(
        found,
        [
            (
                [_texts(tokenizer, d["prompt"] + d["completion"]) for d in pair],
                round(pair[0]["reward"] - pair[1]["reward"], 9),
            )
            for pair in exports.pairs()
        ],
    )
    own = strategy(input_key="input", output_key="output")
    sft = SFTDataset(load("openrlhf-sft"), tokenizer, 1024, own, num_processors=1)
    seen.same(
        [sft.prompts[number] + sft.responses[number] for number in range(len(sft))],
        [_texts(tokenizer, d["prompt"] + d["completion"]) for d in exports.dialogues],
    )


def compare_harbor(exports: Exports, seen: Comparison) -> None:
    from harbor.models.trajectories import Trajectory

    def read(name: str) -> list[Any]:
        files = sorted(Path(exports.path(name)).iterdir())
        return [Trajectory.model_validate_json(file.read_text(encoding="utf-8")) for file in files]

    found = read("atif")
    seen.same([one.session_id for one in found], [d["id"] for d in exports.dialogues])
    texts = []
    for one in found:
        said = [(step.source, step.message) for step in one.steps]
        said += [
            ("tool", result.content)
            for step in one.steps
            if step.observation
            for result in step.observation.results
        ]
        texts.append(sorted(said))
    sources = {"assistant": "agent"}
    seen.same(
        texts,
        [
            sorted(
                (sources.get(m["role"], m["role"]), m["content"])
                for m in d["prompt"] + d["completion"]
            )
            for d in exports.dialogues
        ],
    )
    for one, sequence in zip(read("atif-tokens"), exports.sequences, strict=True):
        metrics = [step.metrics for step in one.steps if step.metrics]
        last = metrics[-1]
        seen.same([last.prompt_token_ids + last.completion_token_ids], [sequence["token_ids"]])
        log_probs = [value for value in sequence["log_probs"] if value is not None]
        seen.same([[v for m in metrics for v in m.logprobs]], [log_probs])

    # A sub-agent's tokens are those of its branch, with what it goes on from.
    branches = {(b["episode_id"], b["agent_id"]): b["token_ids"] for b in exports.branches}
    for one in read("atif-trees"):
        agents = [("solver" if "trees" in one.session_id else "", one)]
        for sub in one.subagent_trajectories or ():
            agents.append((sub.trajectory_id.removeprefix(f"{one.session_id}/"), sub))
        for agent, trajectory in agents:
            last = [step.metrics for step in trajectory.steps if step.metrics][-1]
            tokens = last.prompt_token_ids + last.completion_token_ids
            seen.same([tokens], [branches[one.session_id, agent]])


def compare_verifiers(exports: Exports, seen: Comparison) -> None:
    from verifiers.v1 import WireTrace

    traces = [WireTrace.model_validate(line) for line in exports.lines("verifiers")]
    found = []
    for trace in traces:
        (branch,) = trace.branches
        found.append(([(m.role, m.content) for m in branch.messages], round(trace.reward, 9)))
    expected = []
    for d in exports.dialogues:
        said = [(m["role"], m["content"]) for m in d["prompt"] + d["completion"]]
        expected.append((said, round(d["reward"], 9)))
    seen.same(found, expected)
    branches = [
        WireTrace.model_validate(line).branches for line in exports.lines("verifiers-tokens")
    ]
    for (branch,), sequence in zip(branches, exports.sequences, strict=True):
        mask = sequence["loss_mask"]
        pairs = zip(sequence["log_probs"], mask, strict=True)
        seen.same(
            [(branch.token_ids, [int(flag) for flag in branch.sampled_mask], branch.logprobs)],
            [(sequence["token_ids"], mask, [v if flag else 0.0 for v, flag in pairs])],
        )
    # Its own branches of a tree are those of the lake; what they share, it counts in each.
    found = []
    for line in exports.lines("verifiers-trees"):
        for branch in WireTrace.model_validate(line).branches:
            found.append((branch.token_ids, branch.logprobs))
    known = [(b["token_ids"], [v or 0.0 for v in b["log_probs"]]) for b in exports.branches]
    seen.same(sorted(found), sorted(known))


def compare_art(exports: Exports, seen: Comparison) -> None:
    from art.utils.trajectory_logging import read_trajectory_groups_parquet

    def show(messages: Any) -> list[Any]:
        return [
            (m["role"], m["content"] or "", m.get("tool_calls"), m.get("tool_call_id"))
            for m in messages
        ]

    found: dict[Any, list[Any]] = {}
    for group in read_trajectory_groups_parquet(exports.path("art")):
        for one in group.trajectories:
            row = (one.metadata["episode_id"], round(one.reward, 9), show(one.messages()))
            found.setdefault(group.metadata["group_id"], []).append(row)
    expected: dict[Any, list[Any]] = {}
    for d in exports.dialogues:
        row = (d["id"], round(d["reward"], 9), show(d["prompt"] + d["completion"]))
        expected.setdefault(d["group_id"], []).append(row)
    seen.same(
        [(name, row) for name in sorted(found) for row in sorted(found[name])],
        [(name, row) for name in sorted(expected) for row in sorted(expected[name])],
    )


def compare_datasets(exports: Exports, seen: Comparison) -> None:
    """What AReaL opens by `load_from_disk`, and ROLL, NeMo-RL and EasyR1 by `load_dataset`."""
    from datasets import load_dataset, load_from_disk

    found = load_from_disk(exports.path("areal-sft"))
    seen.same(
        [(row["input_ids"], row["loss_mask"]) for row in found],
        [(s["token_ids"], s["loss_mask"]) for s in exports.sequences],
    )
    by_episode = {s["episode_id"]: s for s in exports.sequences}
    pairs = load_from_disk(exports.path("areal-dpo"))
    for number, row in enumerate(pairs):
        # Of four samples a task, the fourth is best and the first is worst.
        best, worst = (by_episode[f"tokens/{4 * number + place:02}"] for place in (3, 0))
        sides = (("chosen", best), ("rejected", worst))
        seen.same(
            [(row[f"{side}_ids"], row[f"{side}_loss_mask"]) for side, _ in sides],
            [(sequence["token_ids"], sequence["loss_mask"]) for _, sequence in sides],
        )

    def load(name: str) -> list[Any]:
        return list(load_dataset("json", data_files=exports.path(name), split="train"))

    prompts = exports.prompts()
    seen.same(
        [(json.loads(row["messages"]), row["ground_truth"]) for row in load("roll-rlvr")],
        [(d["prompt"], d["answer"]) for d in prompts],
    )
    single = [d for d in prompts if len(d["prompt"]) == 1]
    for name, asked, answer in (
        ("easyr1", "problem", "answer"),
        ("nemo-rl-prompts", "input", "output"),
    ):
        seen.same(
            [(row[asked], row[answer]) for row in load(name)],
            [(d["prompt"][0]["content"], d["answer"]) for d in single],
        )
    seen.same(
        [
            [_without_nulls(side["completion"]) for side in row["completions"]]
            for row in load("nemo-rl-preference")
        ],
        [[best["completion"], worst["completion"]] for best, worst in exports.pairs()],
    )
    seen.same(
        [_without_nulls(row["messages"]) for row in load("nemo-rl-sft")],
        [d["prompt"] + d["completion"] for d in exports.dialogues],
    )


def compare_slime(exports: Exports, seen: Comparison) -> None:
    """By its own loader; no package has it, so its source tree has to be on the path."""
    import torch

    try:
        from slime.observability.rollout_data_utils import load_debug_rollout_data
    except ImportError as error:
        raise RuntimeError(
            f"slime: {error}. Name its source tree, SLIME=PATH make compat, or name the other "
            "frameworks in ONLY."
        ) from error
    assert torch.load(exports.path("slime"), weights_only=True).keys() == {"rollout_id", "samples"}
    samples = load_debug_rollout_data(exports.path("slime"), rollout_id=0)
    for sample, sequence in zip(
        [sample.to_dict() for sample in samples], exports.sequences, strict=True
    ):
        start = sequence["action_starts"][0]
        log_probs = [value or 0.0 for value in sequence["log_probs"][start:]]
        seen.same(
            [(sample["tokens"], sample["loss_mask"], sample["rollout_log_probs"])],
            [(sequence["token_ids"], sequence["loss_mask"][start:], log_probs)],
        )
        seen.same([sample["reward"]], [sequence["return"]])


_FRAMEWORKS: dict[str, Callable[[Exports, Comparison], None]] = {
    "trl": compare_trl,
    "verl": compare_verl,
    "verl-corrections": compare_corrections,
    "openrlhf": compare_openrlhf,
    "harbor": compare_harbor,
    "verifiers": compare_verifiers,
    "art": compare_art,
    "datasets": compare_datasets,
    "slime": compare_slime,
}


def _version(name: str) -> str:
    try:
        return metadata.version({"art": "openpipe-art"}.get(name, name.partition("-")[0]))
    except metadata.PackageNotFoundError:
        return "from its source"


def main(folder: Path, names: list[str]) -> int:
    exports = Exports(folder)
    num_failed = 0
    for name in names or _FRAMEWORKS:
        seen = Comparison()
        try:
            _FRAMEWORKS[name](exports, seen)
        except Exception:  # whatever a framework raises: the others are opened, too
            traceback.print_exc()
            print(f"failed: {name} {_version(name)}, after {seen.num_rows} rows", flush=True)
            num_failed += 1
            continue
        verdict = "passed" if seen.num_rows else "failed"
        num_failed += not seen.num_rows
        print(f"{verdict}: {name} {_version(name)}: {seen.num_rows} rows equal", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
