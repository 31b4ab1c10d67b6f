"""Hooks for frameworks: short, and refused where they would record nothing.

`make compat-recorders` runs them inside their frameworks.
"""

import ast
import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import replaylake as rl
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.online.recorders.rllm import LakeTraceStore
from replaylake.online.recorders.trl import GrpoHook
from replaylake.online.recorders.verl import find_finish_reason, record_worker

_FOLDER = Path(__file__).parents[3] / "online" / "recorders"


@pytest.mark.parametrize("name", ["rllm", "trl", "verl"])
def test_a_hook_has_at_most_60_lines(name):
    """Lines of code: no imports, docstrings, comments and blank lines."""
    text = (_FOLDER / f"{name}.py").read_text()
    others = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            others |= {*range(node.lineno, node.end_lineno + 1)}
    lines = [
        line
        for number, line in enumerate(text.splitlines(), 1)
        if number not in others and line.strip() and not line.strip().startswith("#")
    ]
    assert 0 < len(lines) <= 60


@pytest.mark.parametrize(
    ("ids", "mask", "reason"),
    [
        ([5, 6, 2], [1, 1, 1], "stop"),
        ([5, 6, 7, 9], [1, 1, 1, 1], "stop"),  # the end came with the last id that it may have
        ([5, 6, 7, 8], [1, 1, 1, 1], "length"),
        ([5, 6, 7], [1, 0, 0], "length"),  # a tool answered, and no more was generated
        ([5, 6, 7], [1, 1, 1], None),  # a text to stop at, which no id tells
        ([], [], None),
    ],
)
def test_a_rollout_of_verl_without_an_end_was_cut(ids, mask, reason):
    assert find_finish_reason(ids, mask, {2, 9, None}, 4) == reason


class Worker:
    """What the hook uses of verl's `AgentLoopWorker`."""

    def __init__(self):
        self.model_config = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[2, 9]))
        self.rollout_config = SimpleNamespace(response_length=3)
        self.tokenizer = SimpleNamespace(eos_token_id=2, decode=lambda ids, **_: str(ids))

    async def _agent_loop_postprocess(self, output, validate, **kwargs):
        return output


def test_a_cut_rollout_of_verl_is_truncated_and_has_no_end(tmp_path):
    lake = rl.open(tmp_path / "lake", create=True)
    worker = record_worker(Worker, lambda: rl.record_language(lake, "math"), run_id="r")()
    for ids in ([5, 6, 7], [5, 6, 9], [5, 2]):
        output = SimpleNamespace(
            prompt_ids=[1], response_ids=ids, response_mask=[1] * len(ids), response_logprobs=None,
            reward_score=1.0, extra_fields={"min_global_steps": 4},
        )  # fmt: skip
        question = [{"role": "user", "content": "?"}]
        asyncio.run(worker._agent_loop_postprocess(output, False, raw_prompt=question, uid="u"))
    worker._recorder.close()
    text = "select action_tokens, terminated, truncated, finish_reason from math.steps"
    found = {(*row.pop("action_tokens"), *row.values()) for row in lake.sql(text).to_pylist()}
    assert found == {
        (5, 6, 7, False, True, "length"), (5, 6, 9, True, False, "stop"),
        (5, 2, True, False, "stop"),
    }  # fmt: skip


def test_a_sample_of_trl_without_an_end_is_truncated(tmp_path):
    trainer = SimpleNamespace(
        state=SimpleNamespace(global_step=1), model=SimpleNamespace(training=True),
        num_generations=2, accelerator=SimpleNamespace(process_index=0, num_processes=1),
        reward_weights=np.ones(1), eos_token_ids=[2, 9],
    )  # fmt: skip
    samples = [[5, 6, 7], [5, 6, 9], [5, 2], []]
    output = {
        "prompt_ids": [[1]] * 4,
        "completion_ids": samples,
        "logprobs": [[-1.0] * len(ids) for ids in samples],
    }
    lake = rl.open(tmp_path / "lake", create=True)
    with rl.record_language(lake, "math", producer="run") as recorder:
        hook = GrpoHook(recorder, [brevity], run_id="r", rollout_func=lambda *_: output)
        hook.rollout_func(["?"] * 4, trainer)
        hook.reward_funcs[0](prompts=["?"] * 4, completions=["a"] * 4)
    text = "select terminated, truncated from math.steps order by episode_id"
    rows = [(*row.values(),) for row in lake.sql(text).to_pylist()]
    assert rows == [(False, True), (True, False), (True, False), (False, True)]


async def scored_elsewhere(**_):
    return []


def brevity(completions, **_):
    return [-len(one) for one in completions]


@pytest.mark.parametrize("funcs", [[scored_elsewhere], [brevity, brevity], [object()]])
def test_reward_functions_whose_scores_would_be_missed_are_refused(tmp_path, funcs):
    with rl.record_language(tmp_path / "lake", "math") as recorder:
        with pytest.raises(ConfigInvalidError, match="expected functions with different names"):
            GrpoHook(recorder, funcs, run_id="r")
        assert GrpoHook(recorder, [brevity], run_id="r").reward_funcs[0].__name__ == "brevity"


def test_traces_that_come_at_once_are_steps_of_one_rollout(tmp_path):
    """Also of a session that a recorder before this one began, which has to be read for it."""

    async def store(first):
        traces = LakeTraceStore(lake, recorder)
        for number in range(first, first + 2):
            data = {
                "messages": [{"role": "user", "content": str(number)}],
                "prompt_token_ids": [number],
                "completion_token_ids": [9],
            }
            stored.append(traces.store_trace(f"t{number}", "s", {**data, "session_id": "s"}))
        await asyncio.gather(*stored)
        return await traces.get_session_traces("s")

    lake = rl.open(tmp_path / "lake", create=True)
    for first in (1, 3):
        stored = []
        with rl.record_language(lake, "traces", producer="gateway") as recorder:
            traces = asyncio.run(store(first))
    assert [trace["prompt_token_ids"] for trace in traces] == [[1], [2], [3], [4]]
    steps = "select step, completion_id from traces.steps order by step"
    assert [(*row.values(),) for row in lake.sql(steps).to_pylist()] == [
        (number, f"t{number + 1}") for number in range(4)
    ]
