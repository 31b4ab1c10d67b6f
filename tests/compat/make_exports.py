"""Write exports for every target, and beside them what the lake's own SQL says of their rows.

    python tests/compat/make_exports.py FOLDER

`open_exports.py` opens them with the frameworks' own readers, in an environment without ReplayLake.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import replaylake as rl
from replaylake.datastore.interchange.export.trainers.targets import TARGETS

_NUM_PROMPTS, _NUM_SAMPLES = 12, 4
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
# Those whose rows are of token ids; and those that hold single texts alone.
_OF_TOKENS = ("areal-dpo", "areal-sft", "slime", "trl-tokens")
_OF_TEXTS = ("easyr1", "nemo-rl-prompts", "roll-dpo", "verl-rm", "vlm-r1")


def _make_chats() -> list[dict[str, Any]]:
    """Samples of prompts: single turns and, in every third sample, a call of a tool."""
    rng = np.random.default_rng(7)
    records = []
    for prompt in range(_NUM_PROMPTS):
        a, b = rng.integers(1, 50, 2).tolist()
        asked = [{"role": "user", "content": f"What is {a} + {b}? Ü €"}]
        if prompt % 2:
            asked.insert(0, {"role": "system", "content": "Answer with a number."})
        for sample in range(_NUM_SAMPLES):
            answer = a + b + int(rng.integers(0, 2)) * (sample > 0)
            messages = [*asked]
            if sample == 2:
                arguments = json.dumps({"a": a})
                call = {"name": "add", "arguments": arguments}
                calls = [{"id": "call_1", "type": "function", "function": call}]
                messages += [
                    {"role": "assistant", "content": "I add.", "tool_calls": calls},
                    {"role": "tool", "tool_call_id": "call_1", "content": str(a + b)},
                ]
            messages.append({"role": "assistant", "content": f"It is {answer}."})
            records.append(
                {
                    "id": f"{prompt:02}-{sample}",
                    "group_id": f"sum-{prompt:02}",
                    "messages": messages,
                    "reward": float(answer == a + b) - 0.5 + sample / 100,
                    "answer": str(a + b),
                    "tools": _TOOLS,
                    "status": "completed",
                }
            )
    return records


def _make_token_episodes() -> list[rl.Episode]:
    """Dialogues of two generations with ids below 250, log-probs and a filtered token."""
    rng = np.random.default_rng(11)
    episodes = []
    for number in range(24):
        observed = [rng.integers(0, 250, int(rng.integers(1, 9))).tolist() for _ in range(2)]
        acted = [rng.integers(0, 250, int(rng.integers(1, 9))).tolist() for _ in range(2)]
        log_probs = [np.round(-rng.exponential(1, len(ids)), 3).tolist() for ids in acted]
        mask = [[True] * len(acted[0]), [bool(i) for i in range(len(acted[1]))]]
        episodes.append(
            rl.Episode(
                f"tokens/{number:02}",
                observations=np.array([f"Task {number // 4}?", "Go on."], object),
                actions=np.array(["First.", f"Then {number}."], object),
                rewards=np.array([0.0, float(number % 4)]),
                terminated=number % 3 > 0,
                truncated=number % 3 == 0,
                policy_versions=np.array([5, 6]),
                extras={
                    "observation_tokens": observed,
                    "action_tokens": acted,
                    "action_log_probs": log_probs,
                    "action_loss_mask": mask,
                    "group_id": [f"task-{number // 4}"] * 2,
                },
            )
        )
    return episodes


# Of the tokens that the loss is over, by the functions of docs/SQL.md.
_CORRECTIONS = """
    WITH kept AS (
        SELECT *, mask_values(proximal_log_probs, loss_mask) AS trained FROM tokens.sequences
    )
    SELECT episode_id, mismatch_kl(trained, log_probs) AS kl,
           mismatch_kl_k3(trained, log_probs) AS k3_kl,
           list_transform(importance_weights(trained, log_probs),
                          lambda w: if(w > 1.2, 1.2, w)) AS token,
           least(exp(list_sum(log_ratios(trained, log_probs))), 1.2) AS sequence,
           list_transform(importance_weights(trained, log_probs),
                          lambda w: if(w BETWEEN 0.8 AND 1.2, w, 0)) AS band
    FROM kept ORDER BY episode_id
"""
_MESSAGES = """
    SELECT source_episode_id AS id, any_value(group_id) AS group_id, sum(reward) AS reward,
           list({prompt} ORDER BY step) AS prompts, list({completion} ORDER BY step) AS completions,
           any_value(metadata ORDER BY step) AS metadata
    FROM chats.steps GROUP BY ALL ORDER BY min(episode_id), id
"""


def _make_trees() -> list[rl.Episode]:
    """Episodes in which a second agent goes on from the middle, or history is rewritten."""
    rng = np.random.default_rng(17)

    def make(name: str, agent: str, num: int, **more: Any) -> rl.Episode:
        def ids() -> list[list[int]]:
            return [rng.integers(0, 250, int(rng.integers(1, 6))).tolist() for _ in range(num)]

        acted = ids()
        log_probs = [[-0.5] * len(tokens) for tokens in acted]
        tokens = {"observation_tokens": ids(), "action_tokens": acted}
        return rl.Episode(
            name,
            agent_id=agent,
            observations=np.array([f"{agent} sees {t}" for t in range(num)], object),
            actions=np.array([f"{agent} does {t}" for t in range(num)], object),
            rewards=np.ones(num),
            terminated=True,
            extras={**tokens, "action_log_probs": log_probs, **more},
        )

    episodes = []
    for number in range(8):
        name = f"trees/{number}"
        forks = {"parent_agent_id": ["solver", None], "parent_step": [number % 3, None]}
        episodes.append(make(name, "solver", 4))
        episodes.append(make(name, "solver~1", 2, **forks))
        rewritten = [None, number % 2 == 0, None]
        episodes.append(make(f"rewritten/{number}", "", 3, is_continuation=rewritten))
    return episodes


def _annotate(lake: rl.Lake) -> None:
    """Add a trainer's log-probs to all generations."""
    rng = np.random.default_rng(13)
    query = "SELECT episode_id, step, action_log_probs FROM tokens.steps ORDER BY ALL"
    steps = lake.sql(query)
    drift = [
        [min(value + float(rng.normal(0, 0.3)), 0.0) for value in row]
        for row in steps["action_log_probs"].to_pylist()
    ]
    labels = steps.select(["episode_id", "step"]).append_column("trainer", pa.array(drift))
    added = {"proximal_log_probs": "trainer"}
    rl.annotate(lake, "tokens", labels, on=["episode_id", "step"], add=added)


def _read_dialogues(lake: rl.Lake) -> list[dict[str, Any]]:
    """Return the dialogues as the columns of `steps` have them."""
    query = _MESSAGES.format(prompt="prompt_messages", completion="completion_messages")
    dialogues = []
    for row in lake.sql(query).to_pylist():
        parts = zip(row["prompts"], row["completions"], strict=True)
        turns = [json.loads(text) for pair in parts for text in pair]
        dialogues.append(
            {
                "id": row["id"],
                "group_id": row["group_id"],
                "reward": row["reward"],
                "prompt": turns[0],
                "completion": [message for turn in turns[1:] for message in turn],
                "answer": json.loads(row["metadata"])["answer"],
                "tools": json.loads(row["metadata"])["tools"],
            }
        )
    return dialogues


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    lake = rl.open(str(folder / "lake"), create=True)
    log = folder / "chats.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in _make_chats()), encoding="utf-8")
    rl.ingest(lake, [log], "chats")
    lake.dataset("tokens").append(_make_token_episodes())
    _annotate(lake)
    lake.dataset("trees").append(_make_trees())
    rows = {}
    for name, target in TARGETS.items():
        dataset = "tokens" if name in _OF_TOKENS else "chats"
        # What these hold is found by the shape of the prompt and the answer.
        where = "num_steps = 1" if name in _OF_TEXTS and target.unit == "pair" else None
        suffix = "" if target.is_folder else ".parquet" if target.is_parquet else ".jsonl"
        path = folder / f"{name}{'.pt' if name == 'slime' else suffix}"
        receipt = rl.export(lake, dataset, path, format=name, where=where)
        rows[name] = {"path": path.name, "num_rows": receipt.num_rows, "notes": receipt.notes}
    # With tokens, too: documents and what SFT trains on.
    for name in ("atif", "verifiers"):
        path = folder / f"{name}-tokens{'' if name == 'atif' else '.jsonl'}"
        receipt = rl.export(lake, "tokens", path, format=name)
        rows[f"{name}-tokens"] = {"path": path.name, "num_rows": receipt.num_rows}
    for name in ("atif", "verifiers"):
        path = folder / f"{name}-trees{'' if name == 'atif' else '.jsonl'}"
        receipt = rl.export(lake, "trees", path, format=name)
        rows[f"{name}-trees"] = {"path": path.name, "num_rows": receipt.num_rows}
    branches = lake.sql("SELECT * FROM trees.sequences").to_pylist()
    sequences = lake.sql("SELECT * FROM tokens.sequences ORDER BY episode_id").to_pylist()
    corrections = lake.sql(_CORRECTIONS).to_pylist()
    expected = {
        "exports": rows,
        "dialogues": _read_dialogues(lake),
        "sequences": sequences,
        "corrections": corrections,
        "branches": branches,
    }
    (folder / "expected.json").write_text(json.dumps(expected), encoding="utf-8")
    print(f"exported {len(rows)} files to {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
