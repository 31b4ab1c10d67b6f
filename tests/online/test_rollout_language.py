"""Rollouts of language models: what is recorded of each, once each, and what ends a run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

import replaylake as rl
from replaylake.datastore.errors import (
    ConfigInvalidError,
    GenerationError,
    NotFoundError,
    RolloutError,
    SourceInvalidError,
    SpaceUnsupportedError,
)
from replaylake.datastore.lake.runs.metrics import read_curves
from replaylake.offline.running.training.interruption import RunInterrupted

TASKS = [{"id": f"t{number}", "text": f"{number}+1="} for number in range(3)]


def rollout(lake, model, env, callbacks=None, **config):
    config = {"env": env, "tasks": TASKS, "producer": "run", "seed": 0, **config}
    return rl.rollout_language(
        lake, "talks", model, rl.LanguageRolloutConfig(**config), callbacks=callbacks
    )


def read(lake, columns, order="episode_id, step"):
    return lake.sql(f"select {columns} from talks.steps order by {order}").to_pylist()


async def add(task, chat):
    reply = await chat(task["text"])
    return float(reply["content"] == str(int(task["text"][0]) + 1))


def answer(messages):
    return str(int(messages[-1]["content"][0]) + 1)


def test_each_sample_is_an_episode_of_its_group(lake, scripted):
    model = scripted(answer)
    receipt = rollout(lake, model, add, samples=2, sampling={"temperature": 0.5})
    assert (receipt.num_rollouts, receipt.num_recorded_before, receipt.num_failed) == (6, 0, 0)
    assert (receipt.mean_reward, receipt.pass_rate, receipt.group_pass_rate) == (1.0, 1.0, 1.0)
    assert (receipt.num_prompt_tokens, receipt.num_completion_tokens) == (24, 6)
    rows = read(lake, "*")
    names = [f"run/{task}-{sample}" for task in range(3) for sample in range(2)]
    assert [row["episode_id"] for row in rows] == names
    row = rows[2]
    assert row["group_id"] == "run/t1"
    assert (row["observation"], row["action"]) == ("user: 1+1=", "2")
    assert row["observation_tokens"] == [*b"1+1="]
    assert (row["action_tokens"], row["action_log_probs"]) == ([*b"2"], [-0.5])
    assert (row["reward"], row["terminated"], row["truncated"]) == (1.0, True, False)
    assert (row["policy"], row["policy_version"], row["run_id"]) == ("scripted", 3, receipt.run_id)
    assert json.loads(row["sampling"]) == {"temperature": 0.5}
    assert json.loads(row["metadata"]) == {"task_id": "t1", "sample": 0}
    assert model.is_closed


def test_calls_have_seeds_of_their_own_whatever_runs_beside_them(lake, scripted, tmp_path):
    async def twice(task, chat):
        await chat(task["text"])
        await chat(task["text"])

    def seeds(concurrency, seed):
        model = scripted(answer)
        other = rl.open(tmp_path / f"{concurrency}-{seed}", create=True)
        rollout(other, model, twice, samples=2, concurrency=concurrency, seed=seed)
        return [call["seed"] for call in model.calls]

    one = seeds(1, 5)
    assert len({*one}) == len(one) == 12
    assert sorted(seeds(4, 5)) == sorted(one)
    assert not {*seeds(1, 6)} & {*one}


def test_turns_go_on_from_each_other_and_a_tool_stands_between_them(lake, scripted):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]

    async def play(task, chat):
        messages = [{"role": "user", "content": "a"}]
        messages.append(await chat(messages, tools=tools, max_tokens=9))
        messages.append({"role": "tool", "content": "b", "tool_call_id": "call_0"})
        await chat(messages, tools=tools)
        messages[0] = {"role": "user", "content": "c"}  # another history
        await chat(messages)
        return 0.5

    rollout(lake, scripted(lambda messages: "xy"), play, tasks=TASKS[:1])
    rows = read(lake, "*")
    assert [row["observation"] for row in rows] == [
        "user: a", "tool: b", "user: c\nassistant: xy\ntool: b"
    ]  # fmt: skip
    assert [row["observation_tokens"] for row in rows] == [[*b"a"], [*b"b"], [*b"cxyb"]]
    assert [row["is_continuation"] for row in rows] == [None, None, False]
    assert [row["reward"] for row in rows] == [0.0, 0.0, 0.5]
    assert [row["terminated"] for row in rows] == [False, False, True]
    assert json.loads(rows[0]["tools"]) == tools
    sequences = lake.sql("select token_ids, loss_mask from talks.sequences order by first_step")
    assert sequences.to_pylist()[0] == {
        "token_ids": [*b"axybxy"],
        "loss_mask": [0, 1, 1, 0, 1, 1],
    }


def test_an_agent_of_several_has_its_own_dialogue(lake, scripted):
    async def debate(task, chat):
        first, second = await asyncio.gather(chat("p", agent="pro"), chat("c", agent="con"))
        chat.reward(0.25, agent="con")
        await chat([{"role": "user", "content": "p"}, first, second], agent="pro")
        return {"reward": 1.0, "components": {"style": 0.5}, "metadata": {"topic": "x"}}

    rollout(lake, scripted(lambda messages: "ok"), debate, tasks=TASKS[:1])
    rows = read(lake, "agent_id, step, reward, terminated, is_continuation", "agent_id, step")
    assert [tuple(row.values()) for row in rows] == [
        ("con", 0, 1.25, True, None),
        ("pro", 0, 0.0, False, None),
        ("pro", 1, 1.0, True, None),
    ]


def test_two_calls_of_one_agent_at_a_time_are_refused(lake, scripted):
    async def play(task, chat):
        await asyncio.gather(chat("a"), chat("b"))

    class Slow(scripted):
        async def generate(self, messages, **given):
            await asyncio.sleep(0)
            return await super().generate(messages, **given)

    rollout(lake, Slow(lambda messages: "ok"), play, tasks=TASKS[:1])
    (reason,) = {row["status_reason"] for row in read(lake, "status_reason")}
    assert "agent '': found a call before its last one has returned" in reason


def test_a_plain_function_blocks_a_thread_of_its_own(lake, scripted):
    threads = set()

    def play(task, chat):
        threads.add(threading.current_thread().name)
        reply = chat(task["text"])
        chat.reward(2)
        return {"reward": float(reply["content"]), "truncated": True}

    receipt = rollout(lake, scripted(answer), play)
    assert all(name.startswith("environment") for name in threads)
    rows = read(lake, "reward, terminated, truncated")
    assert [row["reward"] for row in rows] == [3.0, 4.0, 5.0]
    assert {(row["terminated"], row["truncated"]) for row in rows} == {(False, True)}
    assert receipt.num_truncated == 3


def test_failed_and_filtered_rollouts_stay_with_their_reason(lake, scripted):
    async def play(task, chat):
        if task["id"] == "t0":
            raise KeyError("before the first call")
        await chat(task["text"])
        if task["id"] == "t1":
            raise ValueError("after it")
        return {"reward": 1.0, "filtered": "too easy"}

    receipt = rollout(lake, scripted(answer), play)
    assert (receipt.num_failed, receipt.num_filtered, receipt.mean_reward) == (2, 1, None)
    rows = read(lake, "status, status_reason, action, reward, truncated, is_trainable")
    here = os.path.basename(__file__)
    assert rows[0]["status_reason"].startswith(f"KeyError: 'before the first call' ({here}:")
    assert rows[1]["status_reason"].startswith(f"ValueError: after it ({here}:")
    assert [row["status"] for row in rows] == ["failed", "failed", "filtered"]
    assert [row["action"] for row in rows] == ["", "2", "3"]
    assert [row["reward"] for row in rows] == [None, None, 1.0]
    assert [row["truncated"] for row in rows] == [True, True, False]
    assert {row["is_trainable"] for row in rows} == {False}
    assert rows[2]["status_reason"] == "too easy"


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ("good", "returned 'good', expected a reward"),
        (float("nan"), "returned nan, expected a reward"),
        ({"score": 1.0}, "found an object with 'score'"),
        ({"components": [1.0]}, "returned \\[1.0\\] as components"),
    ],
)
def test_an_outcome_of_another_form_fails_the_rollout(lake, scripted, returned, reason):
    async def play(task, chat):
        await chat("1")
        return returned

    rollout(lake, scripted(answer), play, tasks=TASKS[:1])
    (row,) = read(lake, "status, status_reason")
    assert row["status"] == "failed"
    assert reason.replace("\\", "").replace("found an", "returned an") in row["status_reason"]


def test_an_environment_that_always_fails_ends_the_run(lake, scripted):
    async def play(task, chat):
        raise KeyError("answer")

    with pytest.raises(RolloutError, match=r"4 rollouts in a row .*KeyError: 'answer'"):
        rollout(lake, scripted(answer), play, samples=4, max_failures=4, concurrency=1)
    assert len(read(lake, "step")) == 4
    (run,) = lake.registry.runs()
    assert run["status"] == "failed"
    assert "KeyError" in run["error"]


def test_a_refused_call_fails_its_rollout_and_a_lost_model_the_run(lake, scripted):
    refused = scripted(lambda messages: GenerationError("messages: found too many"))
    receipt = rollout(lake, refused, add)
    assert receipt.num_failed == 3

    async def swallow(task, chat):
        try:
            await chat("1")
        except Exception:
            return 0.0

    lost = scripted(lambda messages: RolloutError("http://engine: status 401"))
    with pytest.raises(RolloutError, match="status 401"):
        rollout(lake, lost, swallow, producer="other")
    assert len(read(lake, "step")) == 3


def test_too_many_turns_fail_a_rollout(lake, scripted):
    async def play(task, chat):
        while True:
            await chat("1")

    rollout(lake, scripted(answer), play, tasks=TASKS[:1], max_turns=3)
    rows = read(lake, "status_reason, step")
    assert len(rows) == 3
    assert "max_turns: found call 4" in rows[0]["status_reason"]


def test_the_same_producer_makes_only_what_is_not_recorded(lake, scripted):
    first = rollout(lake, scripted(answer), add, num_tasks=2, samples=1, seed=None)
    model = scripted(answer)
    second = rollout(lake, model, add, samples=2, seed=None)
    assert (second.num_recorded_before, second.num_rollouts, len(model.calls)) == (2, 4, 4)
    assert (second.run_id, second.seed) == (first.run_id, first.seed)
    assert len(read(lake, "step")) == 6
    third = rollout(lake, scripted(answer), add, samples=2, seed=None)
    assert (third.num_rollouts, third.mean_reward, len(read(lake, "step"))) == (0, None, 6)
    (run,) = lake.registry.runs()
    assert (run["status"], run["update"], len(run["resumed"])) == ("done", 6, 2)
    assert run["config"]["samples"] == 2


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"seed": 1}, "seed 1"),
        ({"tasks": TASKS[:2]}, "tasks_sha256"),
        ({"sampling": {"temperature": 0.5}}, "sampling {'temperature': 0.5}"),
        ({"env_args": {"more": 1}}, "env_args {'more': 1}"),
        ({"model": {"sha256": "b"}}, "model"),
    ],
)
def test_a_producer_of_other_rollouts_is_refused(lake, scripted, change, found):
    async def play(task, chat, more=0):
        return await add(task, chat)

    described = change.pop("model", {})
    rollout(lake, scripted(answer), play)
    with pytest.raises(ConfigInvalidError, match="expected the same, or another producer") as error:
        rollout(lake, scripted(answer, **described), play, **change)
    assert error.value.parameter == "producer"
    assert f"found {found}" in str(error.value)
    assert len(read(lake, "step")) == 3


def test_an_interrupted_run_goes_on_where_it_was(lake, scripted):
    reached = asyncio.Event()

    async def play(task, chat):
        await chat(task["text"])
        if task["id"] == "t1":
            reached.set()
            await asyncio.Event().wait()
        return 1.0

    callbacks = rl.Callbacks(should_end=reached.is_set)
    with pytest.raises(RunInterrupted):
        rollout(lake, scripted(answer), play, callbacks, concurrency=1)
    assert lake.registry.runs()[0]["status"] == "interrupted"
    assert [row["episode_id"] for row in read(lake, "episode_id")] == ["run/0-0"]

    async def play_again(task, chat):
        await chat(task["text"])
        return 1.0

    play_again.__qualname__ = play.__qualname__
    receipt = rollout(lake, scripted(answer), play_again)
    assert (receipt.num_recorded_before, receipt.num_rollouts) == (1, 2)
    assert lake.registry.runs()[0]["status"] == "done"


def test_metrics_are_of_the_rollouts_since_the_last_point(lake, scripted):
    async def play(task, chat):
        reply = await chat(task["text"])
        return float(reply["content"]) - 1

    points = {}
    callbacks = rl.Callbacks(on_metrics=lambda update, values: points.update({update: values}))
    receipt = rollout(
        lake, scripted(answer), play, callbacks, samples=2, log_rollouts=4, concurrency=1
    )
    curves = read_curves(lake.storage, receipt.run_id)
    assert curves["reward"].updates.tolist() == [4, 6] == [*points]
    # Rewards 0, 0, 1, 1 of two groups, then 2, 2 of the third; 1 passes.
    assert curves["reward"].values.tolist() == [0.5, 2.0]
    assert curves["pass_rate"].values.tolist() == [0.5, 1.0]
    assert curves["group_pass_rate"].values.tolist() == [0.5, 1.0]
    assert curves["mixed_groups"].values.tolist() == [0.0, 0.0]
    assert curves["completion_tokens"].values.tolist() == [1.0, 1.0]
    assert receipt.group_pass_rate == pytest.approx(2 / 3)


def test_progress_ends_with_all_rollouts(lake, scripted):
    seen = []
    callbacks = rl.Callbacks(on_start=seen.append, on_progress=seen.append)
    receipt = rollout(lake, scripted(answer), add, callbacks)
    assert (seen[0].run_id, seen[0].update, seen[0].resumed) == (receipt.run_id, 0, False)
    last = seen[-1]
    assert (last.num_rollouts, last.rollouts, last.num_failed, last.mean_reward) == (3, 3, 0, 1.0)


def test_it_runs_within_an_event_loop_as_in_a_notebook(lake, scripted):
    async def main():
        return rollout(lake, scripted(answer), add)

    assert asyncio.run(main()).num_rollouts == 3


def test_tasks_come_from_a_file_or_a_module(lake, scripted, tmp_path, monkeypatch):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in TASKS) + "\n")
    assert rollout(lake, scripted(answer), add, tasks=str(path)).num_tasks == 3
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums_of_tests.py").write_text(
        "tasks = [{'text': '3+1='}]\n"
        "def more(): return [{'text': f'{n}+1='} for n in range(4)]\n"
        "async def play(task, chat, bonus=0):\n"
        "    return float((await chat(task['text']))['content']) + bonus\n"
    )
    own = rollout(lake, scripted(answer), "sums_of_tests:play", tasks=None, producer="a")
    assert (own.num_tasks, own.mean_reward, own.env) == (1, 4.0, "sums_of_tests:play")
    more = rollout(
        lake, scripted(answer), "sums_of_tests:play", tasks="sums_of_tests:more", producer="b",
        env_args={"bonus": 10},
    )  # fmt: skip
    assert (more.num_tasks, more.mean_reward) == (4, 12.5)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"tasks": "absent.jsonl"}, NotFoundError, "found no file absent.jsonl"),
        ({"tasks": []}, SourceInvalidError, "found no task"),
        ({"tasks": [1]}, SourceInvalidError, "task 0: found 1"),
        ({"tasks": [{"id": 1}, {"id": "1"}]}, SourceInvalidError, "the id '1' again"),
        ({"tasks": None}, ConfigInvalidError, "tasks: found none for"),
        ({"env_args": {"bonus": 1}}, ConfigInvalidError, "unexpected keyword argument 'bonus'"),
        ({"env": "json:absent"}, NotFoundError, "has no 'absent'"),
        ({"env": "FrozenLake-v1", "tasks": None}, SpaceUnsupportedError, "expected Text for both"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(
    lake, scripted, config, error, message
):
    with pytest.raises(error, match=message.replace("(", "\\(")):
        rollout(lake, scripted(answer), **{"env": add, **config})
    assert lake.registry.runs() == []
    assert lake.datasets() == []


def test_a_line_that_is_no_json_is_named(lake, scripted, tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"text": "1"}\n{"text"\n')
    with pytest.raises(SourceInvalidError, match=r"tasks.jsonl: line 2: "):
        rollout(lake, scripted(answer), add, tasks=str(path))


@pytest.mark.parametrize("field", ["samples", "concurrency", "max_turns", "num_tasks"])
def test_numbers_below_one_are_refused(field):
    with pytest.raises(ConfigInvalidError, match=f"{field}: found 0") as error:
        rl.LanguageRolloutConfig(env=add, **{field: 0})
    assert error.value.parameter == field


GYM = """
import gymnasium
from gymnasium.spaces import Text

class Guess(gymnasium.Env):
    observation_space = Text(64, charset="0123456789 higher")
    action_space = Text(16)
    def __init__(self, limit=9):
        self.limit = limit
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(1, self.limit))
        return "0", {}
    def step(self, action):
        guess = int(action)
        hit = guess == self.number
        return "higher" if not hit else "hi", float(hit), hit, guess >= self.limit, {}
"""


def test_a_gymnasium_environment_of_texts_is_played(lake, scripted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "guess_of_tests.py").write_text(GYM)

    def count_up(messages):
        return str(sum(one["role"] == "assistant" for one in messages) + 1)

    receipt = rollout(
        lake, scripted(count_up), "guess_of_tests:Guess", tasks=None, num_tasks=4, seed=7,
        env_args={"limit": 5},
    )  # fmt: skip
    assert (receipt.num_rollouts, receipt.mean_reward) == (4, 1.0)
    rows = read(lake, "episode_id, step, observation, action, reward, terminated, metadata")
    first = [row for row in rows if row["episode_id"] == "run/0-0"]
    assert [row["action"] for row in first] == [str(n + 1) for n in range(len(first))]
    assert [row["observation"] for row in first[1:]] == ["user: higher"] * (len(first) - 1)
    assert [row["reward"] for row in first] == [*[0.0] * (len(first) - 1), 1.0]
    assert json.loads(first[0]["metadata"])["task_id"] == "7"
    with pytest.raises(ConfigInvalidError, match="num_tasks: found none for guess_of_tests:Guess"):
        rollout(lake, scripted(count_up), "guess_of_tests:Guess", tasks=None, producer="x")


KILLED = """
import sys
sys.path[:0] = sys.argv[2:]
import replaylake as rl
from replaylake_scripted import Scripted

async def play(task, chat):
    await chat(task["text"])
    print(task["id"], flush=True)
    return 1.0

config = rl.LanguageRolloutConfig(
    env=play, tasks=[{"id": str(n), "text": "1+1="} for n in range(400)], producer="run", seed=0
)
rl.rollout_language(rl.open(sys.argv[1]), "talks", Scripted(lambda messages: "2"), config)
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_and_records_each_rollout_once(lake, tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    folder = os.path.join(os.path.dirname(__file__), "environments")
    command = [sys.executable, str(script), lake.url, folder]
    for num_lines in (20, 100):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for _ in range(num_lines):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = read(lake, "episode_id, terminated")
    assert len(rows) == 400 == len({row["episode_id"] for row in rows})
    assert all(row["terminated"] for row in rows)
    (run,) = lake.registry.runs()
    assert (run["status"], run["update"]) == ("done", 400)
