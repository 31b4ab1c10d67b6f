"""Targets: the table of formats that trainers of language models read, and how to make rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from replaylake.datastore.interchange.export.trainers.files import (
    WriteRows,
    write_documents,
    write_grouped_parquet,
    write_json_lines,
    write_parquet,
    write_saved_dataset,
    write_torch_samples,
)
from replaylake.datastore.interchange.export.trainers.samples import Sample, SamplePair, Turn
from replaylake.datastore.interchange.export.trainers.trajectories import (
    make_atif,
    make_trace,
    read_calls,
    read_image,
    read_text,
)
from replaylake.datastore.interchange.formats.generations.json_values import dump_json
from replaylake.datastore.interchange.formats.generations.messages import Message
from replaylake.datastore.interchange.formats.transcripts.dialogues import is_generated

# Content of a row: a dialogue, the first dialogue of each prompt, a preference pair, or a branch of
# an episode as tokens.
Unit = Literal["dialogue", "prompt", "pair", "branch"]
Row = dict[str, Any]
# The label of tokens that the loss ignores.
_IGNORED: Final = -100


@dataclass(frozen=True)
class RowContext:
    """Values of the export that rows need: the dataset's name, and the name of the right answer.

    label: None for the first of `samples.LABELS`. threshold: samples with a return above it are
    desirable.
    """

    dataset: str
    label: str | None = None
    threshold: float = 0.0


@dataclass(frozen=True)
class Branch:
    """A branch of a sample, a row of `sequences`, and the numbers of its episode and group."""

    sample: Sample
    tokens: Mapping[str, Any]
    number: int
    group: int

    @property
    def path(self) -> list[Turn]:
        return self.sample.find_path(self.tokens["agent_id"], self.tokens["last_step"])


@dataclass(frozen=True)
class Target:
    """A format that one trainer reads. make: returns a row, or None for what it cannot store.

    needs_tokens: whether samples need their branches. reads_turns: whether their turns need tokens.
    takes_trees: whether it can store generations that fork or rewrite their history.
    """

    name: str
    about: str
    unit: Unit
    write_rows: WriteRows
    make: Callable[[Any, RowContext], Row | None]
    needs_tokens: bool = False
    uses_label: bool = False
    uses_threshold: bool = False
    takes_trees: bool = False
    reads_turns: bool = False

    @property
    def is_folder(self) -> bool:
        return self.write_rows in (write_documents, write_saved_dataset)

    @property
    def is_parquet(self) -> bool:
        return self.write_rows in (write_parquet, write_grouped_parquet)


def _to_plain_messages(messages: Sequence[Message]) -> list[Row]:
    """Return messages whose content is text, with their tool calls in OpenAI's form."""
    plain = []
    for message in messages:
        row: Row = {"role": message["role"], "content": read_text(message)}
        if is_generated(message):
            row["role"] = "assistant"
        if calls := read_calls(message):
            row["tool_calls"] = [
                {
                    **({} if call_id is None else {"id": call_id}),
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for call_id, name, arguments in calls
            ]
        for name in ("tool_call_id", "name"):
            if isinstance(message.get(name), str):
                row[name] = message[name]
        plain.append(row)
    return plain


def _read_single_text(messages: Sequence[Message]) -> str | None:
    """Return the text of a single message without calls and images; None for any other."""
    if len(messages) != 1 or read_calls(messages[0]) or _list_images(messages):
        return None
    return read_text(messages[0])


def _list_images(messages: Sequence[Message]) -> list[str]:
    parts = [p for m in messages if isinstance(m.get("content"), list) for p in m["content"]]
    return [image for part in parts if (image := read_image(part))]


def _add_tools(sample: Sample, row: Row) -> Row:
    return {**row, "tools": sample.tools} if sample.tools else row


def _make_messages(sample: Sample, _: RowContext) -> Row:
    return _add_tools(sample, {"messages": list(sample.messages)})


def _make_verl_sft(sample: Sample, _: RowContext) -> Row:
    # No tools: columns of Parquet would give each tool the parameters of all others.
    return {"messages": _to_plain_messages(sample.messages)}


def _make_plain_messages(sample: Sample, _: RowContext) -> Row:
    return _add_tools(sample, {"messages": _to_plain_messages(sample.messages)})


def _make_trl_pair(pair: SamplePair, _: RowContext) -> Row:
    sides = {"chosen": list(pair.chosen.completion), "rejected": list(pair.rejected.completion)}
    return _add_tools(pair.chosen, {"prompt": list(pair.chosen.prompt), **sides})


def _make_trl_reward(pair: SamplePair, context: RowContext) -> Row:
    return {**_make_trl_pair(pair, context), "margin": pair.margin}


def _make_trl_kto(sample: Sample, context: RowContext) -> Row | None:
    if sample.reward is None:
        return None
    sides = {"prompt": list(sample.prompt), "completion": list(sample.completion)}
    return _add_tools(sample, {**sides, "label": sample.reward > context.threshold})


def _make_trl_grpo(sample: Sample, context: RowContext) -> Row:
    label = {"ground_truth": sample.find_label(context.label)}
    return _add_tools(sample, {"prompt": list(sample.prompt), **label})


def _make_trl_tokens(branch: Branch, _: RowContext) -> Row | None:
    ids, mask = branch.tokens["token_ids"], branch.tokens["loss_mask"]
    if not any(mask):
        return None
    pairs = zip(ids, mask, strict=True)
    return {"input_ids": ids, "labels": [token if kept else _IGNORED for token, kept in pairs]}


def _make_verl_rl(sample: Sample, context: RowContext) -> Row:
    return {
        "data_source": context.dataset,
        "prompt": _to_plain_messages(sample.prompt),
        "ability": str(sample.values.get("ability") or ""),
        "reward_model": {"style": "rule", "ground_truth": sample.find_label(context.label)},
        "extra_info": {"index": sample.episode_id, "group_id": sample.group_id},
    }


def _make_text_pair(prompt: str, chosen: str, rejected: str) -> Callable[..., Row | None]:
    """Return a function that makes rows of three texts with these names."""

    def make(pair: SamplePair, _: RowContext) -> Row | None:
        sides = (pair.chosen.prompt, pair.chosen.completion, pair.rejected.completion)
        texts = [_read_single_text(side) for side in sides]
        if None in texts:
            return None
        return dict(zip((prompt, chosen, rejected), texts, strict=True))

    return make


def _make_openrlhf_prompt(sample: Sample, context: RowContext) -> Row:
    label = sample.find_label(context.label)
    return {
        "input": _to_plain_messages(sample.prompt),
        "label": label or "",
        "datasource": context.dataset,
    }


def _make_openrlhf_pair(pair: SamplePair, _: RowContext) -> Row:
    sides = {
        "chosen": _to_plain_messages(pair.chosen.completion),
        "rejected": _to_plain_messages(pair.rejected.completion),
    }
    return {"prompt": _to_plain_messages(pair.chosen.prompt), **sides, "margin": pair.margin}


def _make_input_output(sample: Sample, _: RowContext) -> Row:
    return {
        "input": _to_plain_messages(sample.prompt),
        "output": _to_plain_messages(sample.completion),
    }


def _make_nemo_rl_pair(pair: SamplePair, _: RowContext) -> Row:
    sides = (pair.chosen.completion, pair.rejected.completion)
    completions = [
        {"rank": rank, "completion": _to_plain_messages(side)} for rank, side in enumerate(sides)
    ]
    return {"context": _to_plain_messages(pair.chosen.prompt), "completions": completions}


def _make_nemo_rl_prompt(sample: Sample, context: RowContext) -> Row | None:
    prompt, label = _read_single_text(sample.prompt), sample.find_label(context.label)
    return None if prompt is None or label is None else {"input": prompt, "output": label}


def _make_roll_rlvr(sample: Sample, context: RowContext) -> Row:
    texts = ("source", "difficulty", "case_type", "test_case_function", "test_cases")
    known = {name: str(sample.values.get(name) or "") for name in texts}
    return {
        "id": sample.episode_id,
        "source": known.pop("source") or context.dataset,
        "prompt": "\n".join(map(read_text, sample.prompt)),
        "messages": dump_json(_to_plain_messages(sample.prompt)),
        "ground_truth": sample.find_label(context.label) or "",
        **known,
        "tag": str(sample.values.get("tag") or context.dataset),
        "domain": str(sample.values.get("domain") or "math_rule"),
    }


def _make_areal_rl(sample: Sample, context: RowContext) -> Row:
    return {
        "messages": _to_plain_messages(sample.prompt),
        "answer": sample.find_label(context.label) or "",
    }


def _make_areal_sft(branch: Branch, _: RowContext) -> Row | None:
    if not any(branch.tokens["loss_mask"]):
        return None
    return {"input_ids": branch.tokens["token_ids"], "loss_mask": branch.tokens["loss_mask"]}


def _make_areal_dpo(pair: SamplePair, _: RowContext) -> Row | None:
    sides = {"chosen": pair.chosen.branches, "rejected": pair.rejected.branches}
    if any(len(branches) != 1 for branches in sides.values()):
        return None
    ids = {f"{side}_ids": branches[0]["token_ids"] for side, branches in sides.items()}
    masks = {f"{side}_loss_mask": branches[0]["loss_mask"] for side, branches in sides.items()}
    return {**ids, **masks}


def _make_marti_prompt(sample: Sample, context: RowContext) -> Row:
    return {
        **_make_openrlhf_prompt(sample, context),
        "metadata": {"episode_id": sample.episode_id, "group_id": sample.group_id},
    }


def _make_marti_kto(sample: Sample, context: RowContext) -> Row | None:
    if sample.reward is None:
        return None
    return {**_make_input_output(sample, context), "label": sample.reward > context.threshold}


def _make_easyr1(sample: Sample, context: RowContext) -> Row | None:
    if len(sample.prompt) != 1:
        return None
    images = _list_images(sample.prompt)
    text = "<image>" * len(images) + read_text(sample.prompt[0])
    row: Row = {"problem": text, "answer": sample.find_label(context.label) or ""}
    return {**row, "images": images} if images else row


def _make_vlm_r1(sample: Sample, context: RowContext) -> Row | None:
    label = sample.find_label(context.label)
    if len(sample.prompt) != 1 or label is None:
        return None
    images = _list_images(sample.prompt)
    text = "<image>" * len(images) + read_text(sample.prompt[0])
    said = [{"from": "human", "value": text}, {"from": "gpt", "value": label}]
    row: Row = {"id": sample.episode_id, "conversations": said}
    return {**row, "image": images if len(images) > 1 else images[0]} if images else row


_SHAREGPT: Final = {
    "user": "human",
    "assistant": "gpt",
    "tool": "observation",
    "function": "observation",
    "developer": "system",
}


def _make_sharegpt(sample: Sample, _: RowContext) -> Row:
    said = []
    for message in _to_plain_messages(sample.messages):
        role = _SHAREGPT.get(message["role"], message["role"])
        calls = message.get("tool_calls", [])
        if message["content"] or not calls:
            said.append({"from": role, "value": message["content"]})
        for call in calls:
            said.append({"from": "function_call", "value": dump_json(call["function"])})
    return _add_tools(sample, {"conversations": said})


def _make_art(sample: Sample, _: RowContext) -> Row | None:
    if sample.reward is None:
        return None
    messages = []
    for message, plain in zip(sample.messages, _to_plain_messages(sample.messages), strict=True):
        calls = plain.get("tool_calls")
        messages.append(
            {
                "role": plain["role"],
                "content": None if message.get("content") is None else plain["content"],
                "tool_calls": dump_json(calls) if calls else None,
                "tool_call_id": plain.get("tool_call_id"),
                "trainable": is_generated(message),
            }
        )
    return {
        "group_id": sample.group_id,
        "group_metadata": None
        if sample.group_id is None
        else dump_json({"group_id": sample.group_id}),
        "group_metrics": None,
        "group_logs": [],
        "reward": sample.reward,
        "metrics": None,
        "metadata": dump_json({"episode_id": sample.episode_id}),
        "tools": dump_json(sample.tools) if sample.tools else None,
        "logs": [],
        "messages": messages,
    }


def _make_slime_prompt(sample: Sample, context: RowContext) -> Row:
    facts = {"episode_id": sample.episode_id, "group_id": sample.group_id}
    label = sample.find_label(context.label)
    return {"text": _to_plain_messages(sample.prompt), "label": label, "metadata": facts}


def _make_slime(branch: Branch, context: RowContext) -> Row:
    sample, tokens = branch.sample, branch.tokens
    start = tokens["action_starts"][0]
    path = branch.path
    response = [message for turn in path for message in turn.messages][len(path[0].prompt) :]
    log_probs = tokens["log_probs"][start:]
    status = "truncated" if sample.truncated else "completed" if sample.terminated else "pending"
    return {
        "group_index": branch.group,
        "index": branch.number,
        "rollout_id": branch.number,
        "prompt": _to_plain_messages(path[0].prompt),
        "tokens": tokens["token_ids"],
        "response": "\n".join(map(read_text, response)),
        "response_length": len(tokens["token_ids"]) - start,
        "label": sample.find_label(context.label),
        "reward": sample.sum_tree_rewards(tokens["agent_id"]),
        "loss_mask": tokens["loss_mask"][start:],
        "weight_versions": [str(run["version"]) for run in tokens["versions"]],
        "rollout_log_probs": None
        if all(value is None for value in log_probs)
        else [0.0 if value is None else value for value in log_probs],
        "status": status,
        "metadata": {"episode_id": sample.episode_id, "group_id": sample.group_id},
        "remove_sample": False,
    }


TARGETS: Final[Mapping[str, Target]] = {
    target.name: target
    for target in (
        Target("openai", "OpenAI's chat format: messages, tools",
               "dialogue", write_json_lines, _make_messages),
        Target("sharegpt", "ShareGPT's format, as in LLaMA-Factory: conversations, tools",
               "dialogue", write_json_lines, _make_sharegpt),
        Target("trl-sft", "TRL's SFTTrainer: messages, tools",
               "dialogue", write_json_lines, _make_messages),
        Target("trl-tokens", "TRL's SFTTrainer: input_ids, labels; one row per branch",
               "branch", write_json_lines, _make_trl_tokens, needs_tokens=True,
               takes_trees=True),
        Target("trl-dpo", "TRL's DPOTrainer: prompt, chosen, rejected",
               "pair", write_json_lines, _make_trl_pair),
        Target("trl-reward", "TRL's RewardTrainer: prompt, chosen, rejected, margin",
               "pair", write_json_lines, _make_trl_reward),
        Target("trl-kto", "TRL's KTOTrainer: prompt, completion, label",
               "dialogue", write_json_lines, _make_trl_kto, uses_threshold=True),
        Target("trl-grpo", "prompts for TRL's GRPOTrainer and RLOOTrainer: prompt, ground_truth",
               "prompt", write_json_lines, _make_trl_grpo, uses_label=True),
        Target("verl-rl", "verl's prompts, Parquet: data_source, prompt, reward_model, extra_info",
               "prompt", write_parquet, _make_verl_rl, uses_label=True),
        Target("verl-sft", "verl's SFT, Parquet: messages, without tools",
               "dialogue", write_parquet, _make_verl_sft),
        Target("verl-rm", "verl's reward model, Parquet: prompt, chosen, rejected as texts",
               "pair", write_parquet, _make_text_pair("prompt", "chosen", "rejected")),
        Target("openrlhf-prompts", "OpenRLHF's prompts: input, label, datasource",
               "prompt", write_json_lines, _make_openrlhf_prompt, uses_label=True),
        Target("openrlhf-preference", "OpenRLHF's DPO and reward model: prompt, chosen, rejected, "
               "margin", "pair", write_json_lines, _make_openrlhf_pair),
        Target("openrlhf-sft", "OpenRLHF's SFT: input, output",
               "dialogue", write_json_lines, _make_input_output),
        Target("nemo-rl-prompts", "NeMo-RL's ResponseDataset: input, output (the right answer)",
               "prompt", write_json_lines, _make_nemo_rl_prompt, uses_label=True),
        Target("nemo-rl-sft", "NeMo-RL's OpenAIFormatDataset: messages, tools",
               "dialogue", write_json_lines, _make_plain_messages),
        Target("nemo-rl-preference", "NeMo-RL's PreferenceDataset: context, completions by rank",
               "pair", write_json_lines, _make_nemo_rl_pair),
        Target("roll-rlvr", "ROLL's RLVR prompts: id, prompt, messages, ground_truth, tag, ...",
               "prompt", write_json_lines, _make_roll_rlvr, uses_label=True),
        Target("roll-dpo", "ROLL's DPO: instruction, chosen, rejected as texts",
               "pair", write_json_lines, _make_text_pair("instruction", "chosen", "rejected")),
        Target("areal-rl", "AReaL's prompts: messages, answer",
               "prompt", write_json_lines, _make_areal_rl, uses_label=True),
        Target("areal-sft", "AReaL's SFT, a saved dataset: input_ids, loss_mask; a row per branch",
               "branch", write_saved_dataset, _make_areal_sft, needs_tokens=True,
               takes_trees=True),
        Target("areal-dpo", "AReaL's DPO, a saved dataset: chosen_ids, rejected_ids, loss masks",
               "pair", write_saved_dataset, _make_areal_dpo, needs_tokens=True),
        Target("marti-prompts", "MARTI's prompts: input, label, datasource, metadata",
               "prompt", write_json_lines, _make_marti_prompt, uses_label=True),
        Target("marti-kto", "MARTI's unpaired preferences: input, output, label",
               "dialogue", write_json_lines, _make_marti_kto, uses_threshold=True),
        Target("easyr1", "EasyR1's prompts: problem, answer, images",
               "prompt", write_json_lines, _make_easyr1, uses_label=True),
        Target("vlm-r1", "VLM-R1's prompts: image, conversations",
               "prompt", write_json_lines, _make_vlm_r1, uses_label=True),
        Target("slime-prompts", "slime's prompts: text, label, metadata",
               "prompt", write_json_lines, _make_slime_prompt, uses_label=True),
        Target("slime", "slime's debug rollouts, a .pt file; one sample per branch",
               "branch", write_torch_samples, _make_slime, needs_tokens=True, uses_label=True,
               takes_trees=True),
        Target("art", "ART's trajectory groups, Parquet: group_index, reward, messages, tools, ...",
               "dialogue", write_grouped_parquet, _make_art),
        Target("atif", "ATIF v1.8, as harbor reads it: a folder with one JSON file per dialogue",
               "dialogue", write_documents, lambda sample, _: make_atif(sample),
               takes_trees=True, reads_turns=True),
        Target("verifiers", "verifiers 0.4 traces: a graph of messages with tokens, JSON lines",
               "dialogue", write_json_lines, lambda sample, _: make_trace(sample),
               takes_trees=True, reads_turns=True),
    )
}  # fmt: skip
