"""verl: a hook that records what the workers of its agent loop return, with ids and rewards.

Read from `AgentLoopWorker` and `AgentLoopManager` in verl 0.9.1,
verl/experimental/agent_loop/agent_loop.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

from replaylake.online.recorders.language_recorder import LanguageRecorder

# Of a rollout's fields, those that have a column or are the prompt itself.
_KNOWN = frozenset(["raw_prompt", "uid", "agent_name", "tools_kwargs", "multi_modal_data"])


def find_finish_reason(
    ids: Sequence[int], mask: Sequence[int], ends: Set[int | None], length: int
) -> str | None:
    """Return `stop` or `length`, or None if the reason cannot be determined.

    ids, mask [T]: the response, and 1 for sampled ids. ends: end-of-text ids. length: largest
    number of ids of a response. An agent loop's output does not have its engine's reason, and
    vLLM's is `completed` for both. A response without an end-of-text id was truncated if it has
    `length` ids, or if it ends with ids of an environment. After a stop string, neither holds.
    """
    if ids and ids[-1] in ends:
        return "stop"
    return "length" if len(ids) >= length or (mask and not mask[-1]) else None


def record_worker(
    worker: type[Any], open_recorder: Callable[[], LanguageRecorder], *, run_id: str
) -> type[Any]:
    """Return a subclass of an agent loop's worker that records each rollout when it is scored.

    Any agent loop runs in it. Workers are processes: `open_recorder` is called in each, and has to
    give each recorder a producer of its own, or none. A rollout is recorded before the trainer gets
    it; one that cannot be recorded fails.
    """

    class RecordingWorker(worker):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._recorder = open_recorder()
            stops = getattr(self.model_config.generation_config, "eos_token_id", None)
            self._ends = {self.tokenizer.eos_token_id}
            self._ends |= {*stops} if isinstance(stops, list | tuple) else {stops}

        async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
            padded = await super()._agent_loop_postprocess(output, validate, **kwargs)
            length = self.rollout_config.response_length
            ids, mask = output.response_ids, output.response_mask
            reason = find_finish_reason(ids, mask, self._ends, length)
            extra, uid = output.extra_fields, kwargs.get("uid")
            scores = extra.get("reward_extra_info") or {}
            rest = {name: repr(value) for name, value in kwargs.items() if name not in _KNOWN}
            self._recorder.record(
                prompt=list(kwargs["raw_prompt"]),
                completion=self.tokenizer.decode(ids, skip_special_tokens=True),
                prompt_ids=output.prompt_ids,
                completion_ids=ids,
                log_probs=output.response_logprobs,
                loss_mask=mask,
                reward=output.reward_score,
                reward_components={
                    name: score for name, score in scores.items() if isinstance(score, int | float)
                },
                truncated=reason == "length",
                finish_reason=reason,
                run_id=run_id,
                group_id=None if uid is None else f"{run_id}/{uid}",
                policy_version=extra.get("min_global_steps"),
                split="validation" if validate else "train",
                source_framework="verl",
                metadata={"fields": rest, "max_global_steps": extra.get("max_global_steps")},
            )
            return padded

    return RecordingWorker
