"""Hooks for frameworks: short, and refused where they would record nothing.

`make compat-recorders` runs them inside their frameworks.
"""

import ast
import asyncio
from pathlib import Path

import pytest

import replaylake as rl
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.online.recorders.rllm import LakeTraceStore
from replaylake.online.recorders.trl import GrpoHook

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
