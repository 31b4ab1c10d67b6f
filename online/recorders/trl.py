"""TRL: a hook that records the rollouts of `GRPOTrainer`: ids, log-probs, rewards and their parts.

Read from `RolloutFunc`, `_generate` and `_calculate_rewards` in trl/trainer/grpo_trainer.py, TRL
1.16.0.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.interchange.rollout_rows import RolloutFacts
from replaylake.online.recorders.language_recorder import LanguageRecorder
from replaylake.online.recorders.trl_generation import count_samples, generate

RewardFunc = Callable[..., Sequence[float | None]]


class GrpoHook:
    """The `rollout_func` and `reward_funcs` of a GRPO run that is otherwise unchanged.

    Generations come from `rollout_func`, by default from the trainer. Each reward function is
    called as before; when the last one has returned, the batch is recorded. Every process of a run
    needs a recorder with a producer of its own, the same after a restart: a batch that is generated
    again is recorded once if it is equal, else as another attempt, in groups of its own.
    """

    def __init__(
        self,
        recorder: LanguageRecorder,
        reward_funcs: Sequence[RewardFunc],
        *,
        run_id: str,
        rollout_func: Callable[[list[Any], Any], dict[str, Any]] | None = None,
    ) -> None:
        names = {getattr(func, "__name__", None) for func in reward_funcs} - {None}
        if len(names) < len(reward_funcs) or any(map(inspect.iscoroutinefunction, reward_funcs)):
            expected = "expected functions with different names, and no coroutines"
            raise ConfigInvalidError(f"reward_funcs: found {reward_funcs}, {expected}.")
        self._recorder, self._run_id, self._generate = recorder, run_id, rollout_func or generate
        self._scores: dict[str, Sequence[float | None]] = {}
        self._counts: Counter[str] = Counter()
        self.reward_funcs = [self._wrap(func) for func in reward_funcs]

    def rollout_func(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        self._trainer, self._output = trainer, self._generate(prompts, trainer)
        self._scores = {}
        return self._output

    def _wrap(self, func: RewardFunc) -> RewardFunc:
        @functools.wraps(func)
        def score(prompts: Any, completions: Any, **given: Any) -> Sequence[float | None]:
            scores = func(prompts=prompts, completions=completions, **given)
            self._scores[func.__name__] = scores
            if len(self._scores) == len(self.reward_funcs):
                self._record(prompts, completions)
            return scores

        return score

    def _record(self, prompts: Sequence[Any], completions: Sequence[Any]) -> None:
        trainer, output, step = self._trainer, self._output, self._trainer.state.global_step
        split = "train" if trainer.model.training else "eval"
        batch, size = f"{split}-{step}", count_samples(trainer)
        first = self._counts[batch] + trainer.accelerator.process_index * len(prompts)
        self._counts[batch] += trainer.accelerator.num_processes * len(prompts)
        weights = dict(zip(self._scores, trainer.reward_weights.tolist(), strict=True))
        facts: RolloutFacts = {"run_id": self._run_id, "train_step": step, "policy_version": step}
        facts |= {"split": split, "source_framework": "trl"}
        rollouts: list[dict[str, Any]] = []
        for place, ids in enumerate(output["completion_ids"]):
            parts = {name: (self._scores[name][place], weights[name]) for name in weights}
            known = [score * weight for score, weight in parts.values() if score is not None]
            log_probs, number = output["logprobs"][place], first + place
            facts["group_id"] = f"{self._run_id}/{batch}-{number // size}"
            rollout = {
                "prompt": prompts[place],
                "completion": completions[place],
                "prompt_ids": output["prompt_ids"][place],
                "completion_ids": ids,
                "log_probs": None if None in log_probs else log_probs,
                "loss_mask": output.get("env_mask", [None] * len(prompts))[place],
                "reward": sum(known) if known else None,
                "reward_components": parts,
                "truncated": not {*ids[-1:]} & {*trainer.eos_token_ids},
                "sequence": f"{batch}-{number}",
            }
            rollouts.append({**facts, **rollout})
        self._recorder.record_batch(rollouts)
