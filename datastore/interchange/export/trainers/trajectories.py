"""Trajectories: a dialogue as the documents that tools for agents exchange, token ids included.

ATIF (harbor) has a step for each message, verifiers a graph of messages. Both have tokens next to
the generated message; neither has fields for all values of a step, so the others are stored in
`extra` and `info`.
"""

from __future__ import annotations

import mimetypes
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from replaylake.datastore.episodes import tokens
from replaylake.datastore.interchange.export.trainers.samples import Sample, Turn
from replaylake.datastore.interchange.formats.generations.json_values import dump_json, load_json
from replaylake.datastore.interchange.formats.generations.messages import Message
from replaylake.datastore.interchange.formats.transcripts.dialogues import is_generated
from replaylake.datastore.interchange.formats.verifiers import LIMITS

_ATIF_VERSION: Final = "ATIF-v1.8"
_TRACE_VERSION: Final = 1
# Of truncated dialogues whose limit is not known.
_ANY_LIMIT: Final = "max_total_tokens"
_TOOLS: Final = ("tool", "function", "tool_response")
_IMAGES: Final = ("image/jpeg", "image/png", "image/gif", "image/webp")


def make_atif(sample: Sample) -> dict[str, Any] | None:
    """Return a dialogue as an ATIF trajectory, or None.

    None where an agent's history was rewritten, an agent other than the first was not called by one
    of them, or a generation has tokens but no message.

    Agents that continue from others, or were called by them, are embedded as its sub-agents. The
    steps that an agent continues from precede its own steps as copied context.
    """
    if any(_has_tokens(turn) and _find_generated(turn) is None for turn in sample.turns):
        return None
    if not sample.is_tree:
        steps = _make_steps(sample.turns, 0, {})
        return _make_trajectory(sample, sample.episode_id, steps)
    chains = _split_agents(sample)
    if chains is None:
        return None
    root = sample.turns[0].agent_id
    names = {agent: sample.episode_id if agent == root else f"{sample.episode_id}/{agent}"
             for agent in chains}  # fmt: skip
    called: dict[tuple[str, int], list[str]] = {}
    for agent, turns in chains.items():
        if agent != root and (caller := turns[0].caller) is not None:
            called.setdefault(caller, []).append(names[agent])
    trajectories = {}
    for agent, turns in chains.items():
        path = sample.find_path(agent, turns[-1].step)
        num_copied = len(path) - len(turns)
        steps = _make_steps(path, num_copied, called)
        trajectories[agent] = _make_trajectory(sample, names[agent], steps)
    whole = trajectories.pop(root)
    return {**whole, "subagent_trajectories": list(trajectories.values())} if called else whole


def _has_tokens(turn: Turn) -> bool:
    return turn.tokens.get(tokens.ACTION_TOKENS) is not None


def _find_generated(turn: Turn) -> int | None:
    """Return the place of the last generated message among a turn's messages."""
    for place in reversed(range(len(turn.completion))):
        if is_generated(turn.completion[place]):
            return len(turn.prompt) + place
    return None


def _split_agents(sample: Sample) -> dict[str, list[Turn]] | None:
    """Return the turns of each agent; None if a turn does not continue from the one before it."""
    chains: dict[str, list[Turn]] = {}
    for turn in sample.turns:
        chain = chains.setdefault(turn.agent_id, [])
        if chain and turn.parent != (turn.agent_id, chain[-1].step):
            return None
        chain.append(turn)
    root = sample.turns[0].agent_id
    is_called = all(turns[0].caller is not None for a, turns in chains.items() if a != root)
    return chains if is_called else None


def _make_steps(
    path: Sequence[Turn],
    num_copied: int,
    called: Mapping[tuple[str, int], Sequence[str]],
) -> list[dict[str, Any]]:
    """Return the steps of turns, of which the first `num_copied` are those of another agent.

    called: names of the trajectories that were called at a step, by agent and step.
    """
    steps: list[dict[str, Any]] = []
    context: list[int] | None = []
    for number, turn in enumerate(path):
        is_copied = number < num_copied
        metrics = None
        if context is not None and _has_tokens(turn):
            context += turn.tokens[tokens.OBSERVATION_TOKENS]
            metrics = _make_metrics(turn, context)
            context += turn.tokens[tokens.ACTION_TOKENS]
        else:
            context = None
        generated = _find_generated(turn)
        for place, message in enumerate(turn.messages):
            if message["role"] in _TOOLS and steps and steps[-1]["source"] == "agent":
                results = steps[-1].setdefault("observation", {"results": []})["results"]
                results.append(_make_result(message, steps[-1].get("tool_calls", [])))
                continue
            step: dict[str, Any] = {"step_id": len(steps) + 1, "source": _find_source(message)}
            step["message"] = _make_content(message.get("content"))
            if is_copied:
                step["is_copied_context"] = True
            if is_generated(message):
                step |= _make_agent_fields(message, len(steps) + 1)
            if place == generated and not is_copied:
                step |= {} if metrics is None else {"metrics": metrics, "llm_call_count": 1}
                step |= _make_step_extra(turn)
                if names := called.get((turn.agent_id, turn.step)):
                    references = [{"trajectory_id": name} for name in names]
                    step["observation"] = {"results": [{"subagent_trajectory_ref": references}]}
            steps.append(step)
    return steps


def _make_metrics(turn: Turn, context: Sequence[int]) -> dict[str, Any]:
    action = turn.tokens[tokens.ACTION_TOKENS]
    log_probs = turn.tokens.get(tokens.ACTION_LOG_PROBS)
    return {
        "prompt_tokens": len(context),
        "completion_tokens": len(action),
        "prompt_token_ids": list(context),
        "completion_token_ids": action,
        **({} if log_probs is None else {"logprobs": log_probs}),
    }


def _make_step_extra(turn: Turn) -> dict[str, Any]:
    if not _has_tokens(turn):
        return {}
    facts = {"reward": turn.reward, "policy_version": turn.policy_version}
    return {"extra": {name: value for name, value in facts.items() if value is not None}}


def _make_trajectory(sample: Sample, name: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    values = sample.values
    policies = sample.episodes[0].policies
    model = None if policies is None else policies[0]
    return {
        "schema_version": _ATIF_VERSION,
        "session_id": sample.episode_id,
        "trajectory_id": name,
        "agent": {
            "name": str(values.get("source_framework") or "unknown"),
            "version": str(values.get("agent_version") or "unknown"),
            **({"model_name": str(model)} if model else {}),
            **({"tool_definitions": sample.tools} if sample.tools else {}),
        },
        "steps": steps,
        "final_metrics": {"total_steps": len(steps)},
        "extra": _describe(sample),
    }


def _find_source(message: Message) -> str:
    if is_generated(message):
        return "agent"
    return "system" if message["role"] in ("system", "developer") else "user"


def _make_agent_fields(message: Message, step_id: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    calls = read_calls(message)
    if calls:
        fields["tool_calls"] = [
            {
                "tool_call_id": call_id or f"call_{step_id}_{number}",
                "function_name": name,
                "arguments": _parse_arguments(arguments),
            }
            for number, (call_id, name, arguments) in enumerate(calls)
        ]
    if isinstance(reasoning := message.get("reasoning_content"), str):
        fields["reasoning_content"] = reasoning
    return fields


def _make_result(message: Message, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    own_id = message.get("tool_call_id")
    result: dict[str, Any] = {"content": _make_content(message.get("content"))}
    if own_id in [call["tool_call_id"] for call in calls]:
        return {"source_call_id": own_id, **result}
    return result if own_id is None else {**result, "extra": {"tool_call_id": own_id}}


def _make_content(content: Any) -> str | list[dict[str, Any]]:
    """Return content as text, or as parts where it has an image."""
    if not isinstance(content, list):
        return read_text({"content": content})
    parts: list[dict[str, Any]] = []
    for part in content:
        if path := read_image(part):
            kind = mimetypes.guess_type(path)[0]
            if kind in _IMAGES:
                parts.append({"type": "image", "source": {"media_type": kind, "path": path}})
                continue
        text = read_text({"content": [part]})
        if text:
            parts.append({"type": "text", "text": text})
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _parse_arguments(arguments: str) -> dict[str, Any]:
    """Return arguments as an object; what JSON does not have, such as NaN, stays text."""
    try:
        value = load_json(arguments.encode())
        dump_json(value)  # refuses 1e999, which is read as infinity
    except (ValueError, RecursionError):
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


def make_trace(sample: Sample) -> dict[str, Any] | None:
    """Return a dialogue as a verifiers Trace: a graph of messages, each after its parent.

    A node has the tokens that it adds to those of its parents: the generated ones, preceded by all
    tokens since the generation before. Those of a generation without messages are added to the node
    before. None where that node is not its alone, or is not one of a generation.
    """
    turns = _order_by_parents(sample) if sample.is_tree else sample.turns
    nodes: list[dict[str, Any]] = []
    last_nodes: dict[tuple[str, int], int] = {}
    call_ids: list[str] = []
    num_children = Counter(turn.parent for turn in turns)
    for turn in turns:
        parent = None if turn.parent is None else last_nodes.get(turn.parent)
        if not sample.is_tree and nodes:  # agents of one dialogue answer one another
            parent = len(nodes) - 1
        before, own = parent, []
        for message in turn.messages:
            node: dict[str, Any] = {"message": _make_trace_message(message, call_ids, len(nodes))}
            if parent is not None:
                node["parent"] = parent
            node["sampled"] = is_generated(message)
            if turn.time is not None:
                node["timestamp"] = turn.time
            parent = len(nodes)
            own.append(node)
            nodes.append(node)
        num_own = len(own) - len(turn.final)
        last = len(nodes) - 1 - len(turn.final) if num_own else before
        if last is not None:
            last_nodes[turn.agent_id, turn.step] = last
        if not _has_tokens(turn):
            continue
        if last is None or not (num_own or num_children[turn.parent] == 1):
            return None
        if turn.tokens[tokens.ACTION_TOKENS] and not nodes[last]["sampled"]:
            return None
        if not _add_tokens(turn, nodes[last], own[-1] if own else nodes[last]):
            return None
    first = sample.turns[0]
    prompt = [node["message"] for node in nodes[: len(first.prompt)]]
    reward = {} if sample.reward is None else {"reward": {"score": sample.reward, "weight": 1.0}}
    return {
        "version": _TRACE_VERSION,
        "id": sample.episode_id,
        "task": {"type": "Task", "data": {"idx": 0, "prompt": prompt}, "key": sample.group_id},
        "agent": {"config": {}, "name": first.agent_id or "agent"},
        "tools": _make_trace_tools(sample.tools),
        "nodes": nodes,
        "rewards": reward,
        "info": _describe(sample),
        "is_completed": sample.terminated or sample.truncated,
        "ok": sample.terminated,
        "stop_condition": _find_stop(sample),
    }


def _find_stop(sample: Sample) -> str | None:
    """Return the status as a stop condition; verifiers tells truncation by one of its limits."""
    status = sample.values.get("status")
    if sample.truncated:
        return status if status in LIMITS else _ANY_LIMIT
    return status if isinstance(status, str) and status not in LIMITS else None


def _order_by_parents(sample: Sample) -> list[Turn]:
    """Return the turns of a tree, each after the one from which it continues."""
    ordered: dict[tuple[str, int], Turn] = {}
    for turn in sample.turns:
        for one in sample.find_path(turn.agent_id, turn.step):
            ordered.setdefault((one.agent_id, one.step), one)
    return list(ordered.values())


def _add_tokens(turn: Turn, node: dict[str, Any], last: dict[str, Any]) -> bool:
    """Add a turn's tokens to those of its node, and the tokens after it to its last node.

    Returns False if log-probs are known only for a part of the node's tokens.
    """
    observed, acted = turn.tokens[tokens.OBSERVATION_TOKENS], turn.tokens[tokens.ACTION_TOKENS]
    flags = turn.tokens.get(tokens.ACTION_LOSS_MASK) or [True] * len(acted)
    if turn.tokens.get(tokens.IS_TRAINABLE) is False:
        flags = [False] * len(acted)
    log_probs = turn.tokens.get(tokens.ACTION_LOG_PROBS)
    was_sampled = any(node.get("mask", ()))
    if was_sampled and any(flags) and ("logprobs" in node) != (log_probs is not None):
        return False
    _extend(node, observed, [False] * len(observed))
    _extend(node, acted, flags)
    if log_probs is not None:
        own = [v for v, flag in zip(log_probs, flags, strict=True) if flag]
        node["logprobs"] = [*node.get("logprobs", ()), *own]
    if after := turn.tokens.get(tokens.FINAL_OBSERVATION_TOKENS):
        _extend(last, after, [False] * len(after))
    return True


def _extend(node: dict[str, Any], ids: Sequence[int], flags: Sequence[bool]) -> None:
    node["token_ids"] = [*node.get("token_ids", ()), *ids]
    node["mask"] = [*node.get("mask", ()), *flags]


def _make_trace_message(message: Message, call_ids: list[str], number: int) -> dict[str, Any]:
    """Return a message with the fields that verifiers has for its role.

    call_ids: ids of the calls without a result so far; a result without an id is that of the first.
    """
    role, text = message["role"], read_text(message)
    if is_generated(message):
        calls = [
            {"id": call_id or f"call_{number}_{place}", "name": name, "arguments": arguments}
            for place, (call_id, name, arguments) in enumerate(read_calls(message))
        ]
        call_ids[:] = [call["id"] for call in calls]
        reasoning = message.get("reasoning_content")
        return {
            "role": "assistant",
            "content": text or None,
            **({"tool_calls": calls} if calls else {}),
            **({"reasoning_content": reasoning} if isinstance(reasoning, str) else {}),
        }
    if role in _TOOLS:
        own_id = message.get("tool_call_id")
        if own_id is None:
            own_id = call_ids.pop(0) if call_ids else f"call_{number}"
        return {"role": "tool", "tool_call_id": str(own_id), "content": text}
    return {"role": "system" if role in ("system", "developer") else "user", "content": text}


def _make_trace_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    inner = [tool.get("function", tool) for tool in tools if isinstance(tool, dict)]
    return [tool for tool in inner if isinstance(tool, dict) and isinstance(tool.get("name"), str)]


def _describe(sample: Sample) -> dict[str, Any]:
    status = sample.values.get("status")
    facts = {
        "reward": sample.reward,
        "group_id": sample.group_id,
        "terminated": sample.terminated,
        "truncated": sample.truncated,
        "status": status if isinstance(status, str) else None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def read_calls(message: Mapping[str, Any]) -> list[tuple[str | None, str, str]]:
    """Return id, name and arguments (JSON text) of each tool call of a message."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        calls = [message["function_call"]] if message.get("function_call") else []
    if isinstance(parts := message.get("content"), list):
        calls = [*calls, *(part for part in parts if _is_tool_use(part))]
    return [_read_call(call) for call in calls if isinstance(call, dict)]


def _is_tool_use(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "tool_use"


def _read_call(call: Mapping[str, Any]) -> tuple[str | None, str, str]:
    inner = call.get("function", call)
    inner = inner if isinstance(inner, dict) else {}
    arguments = inner.get("arguments", inner.get("input", {}))
    text = arguments if isinstance(arguments, str) else dump_json(arguments)
    call_id = call.get("id")
    return None if call_id is None else str(call_id), str(inner.get("name") or ""), text


def read_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message, without its calls and images."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return dump_json(content)
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type") == "tool_result":
            texts.append(read_text({"content": part.get("content")}))
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
    return "\n".join(texts)


def read_image(part: Any) -> str | None:
    """Return the path or URL of an image in a message's content; None for any other part."""
    if not isinstance(part, dict):
        return None
    value = part.get("image_url", part.get("image"))
    if isinstance(value, dict):
        value = value.get("url", value.get("path"))
    return value if isinstance(value, str) else None
