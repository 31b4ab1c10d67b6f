"""The recorder of language agents: what it stores, once each, and what survives a kill."""

import base64
import contextlib
import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import replaylake as rl
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EpisodeInvalidError,
    NotFoundError,
    SchemaMismatchError,
    StorageError,
)

COLUMNS = (
    "episode_id, agent_id, step, env_step, observation, action, reward, terminated, truncated, "
    "observation_tokens, action_tokens, action_log_probs, attempt"
)


@pytest.fixture
def lake(tmp_path):
    return rl.open(tmp_path / "lake", create=True)


def read(lake, columns=COLUMNS, where="true"):
    text = f"select {columns} from math.steps where {where} order by episode_id, agent_id, step"
    return lake.sql(text).to_pylist()


def sample(number, **changes):
    """Return a rollout of one generation."""
    return {
        "prompt": f"{number} + 1?",
        "completion": str(number + 1),
        "prompt_ids": [number, 1],
        "completion_ids": [number + 1, 2],
        "log_probs": [-0.25, -0.5],
        "reward": 1.0,
        **changes,
    }


def test_a_screenshot_is_stored_beside_the_messages_once(lake):
    screen = bytes(range(256)) * 4
    source = {"type": "base64", "media_type": "image/png"}
    source["data"] = base64.b64encode(screen).decode()
    shown = {"role": "user", "content": [{"type": "image", "source": source}]}
    with rl.record_language(lake, "math", producer="run/0") as recorder:
        recorder.record(
            prompt=[shown],
            completion=[{"role": "assistant", "content": "click"}, shown],
            reward=1.0,
        )
        recorder.flush()
    (row,) = read(lake, "prompt_messages, final_messages, message_media")
    digest = hashlib.sha256(screen).hexdigest()
    entry = {"sha256": digest, "media_type": "image/png", "num_bytes": 1024, "bytes": screen}
    assert row["message_media"] == [entry]
    stored = [
        {**shown, "content": [{"type": "image", "source": {**source, "data": f"sha256:{digest}"}}]}
    ]
    assert json.loads(row["prompt_messages"]) == json.loads(row["final_messages"]) == stored


def test_a_whole_rollout_is_an_episode_once_it_is_flushed(lake):
    with rl.record_language(lake, "math", producer="run/0", policy="tiny", run_id="r") as recorder:
        components = {"exact": (1.0, 0.5), "length": 3, "style": None}
        name = recorder.record(
            **sample(7, reward_components=components, group_id="g"),
            train_step=np.int64(3),
            policy_version=12,
            finish_reason="stop",
            metadata={"seed": 1},
        )
        version = recorder.flush()
        assert name == "run/0/0"
        assert lake.snapshot(f"math@{version}").num_steps == 1
    (row,) = read(lake, "*")
    assert row["observation"] == "user: 7 + 1?"
    assert (row["action"], row["role"]) == ("8", "assistant")
    assert (row["observation_tokens"], row["action_tokens"]) == ([7, 1], [8, 2])
    assert (row["action_log_probs"], row["behavior_log_prob"]) == ([-0.25, -0.5], -0.75)
    assert (row["reward"], row["terminated"], row["truncated"]) == (1.0, True, False)
    assert row["reward_components"] == [
        {"name": "exact", "score": 1.0, "weight": 0.5},
        {"name": "length", "score": 3.0, "weight": None},
        {"name": "style", "score": None, "weight": None},
    ]
    assert (row["policy"], row["policy_version"], row["run_id"]) == ("tiny", 12, "r")
    assert (row["train_step"], row["finish_reason"]) == (3, "stop")
    assert (row["group_id"], row["group_id_source"]) == ("g", "given")
    assert row["metadata"] == '{"seed":1}'


def test_ids_that_were_not_sampled_part_a_rollout_into_steps(lake):
    messages = [
        {"role": "assistant", "content": "look up"},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "it is 7"},
        {"role": "user", "content": "thanks"},
    ]
    with rl.record_language(lake, "math", producer="run") as recorder:
        recorder.record(
            prompt="use the tool",
            completion=messages,
            prompt_ids=np.array([1, 2]),
            completion_ids=[3, 4, 9, 9, 5, 8],
            log_probs=[-0.5, -1, 0, 0, -2, 0],
            loss_mask=[1, 0, 0, 0, 1, 0],
            versions=[3, 4, 0, 0, 4, 0],
            reward=0.5,
            truncated=True,
        )
        # Without a message for each of its generations, a rollout has its texts in `metadata`.
        recorder.record(
            **sample(
                1, completion="x", completion_ids=[3, 9, 4], loss_mask=[1, 0, 1], log_probs=None
            )
        )
    columns = (
        "observation, action, final_observation, reward, terminated, truncated, observation_tokens,"
        "action_tokens, final_observation_tokens, action_log_probs, action_loss_mask,"
        "action_versions, policy_version, metadata"
    )
    first, second, third, fourth = read(lake, columns)
    assert (first["observation"], first["action"]) == ("user: use the tool", "look up")
    assert (second["observation"], second["action"]) == ("tool: 7", "it is 7")
    assert second["final_observation"] == "user: thanks"
    assert (first["reward"], second["reward"]) == (0.0, 0.5)
    assert (first["truncated"], second["terminated"], second["truncated"]) == (False, False, True)
    # The log-prob of 4 says that it was sampled, and the mask that the loss leaves it out.
    assert (first["observation_tokens"], first["action_tokens"]) == ([1, 2], [3, 4])
    assert first["action_loss_mask"] == [True, False]
    assert (second["observation_tokens"], second["action_tokens"]) == ([9, 9], [5])
    assert second["final_observation_tokens"] == [8]
    assert first["action_log_probs"] == [-0.5, -1]
    assert first["action_versions"] == [{"start": 0, "version": 3}, {"start": 1, "version": 4}]
    assert (first["policy_version"], second["policy_version"]) == (3, 4)
    assert (third["observation"], third["action"], fourth["action"]) == ("user: 1 + 1?", "", "")
    assert third["metadata"] == '{"completion":[{"role":"assistant","content":"x"}]}'
    (whole, _) = lake.sql(
        "select token_ids, loss_mask from math.sequences order by episode_id"
    ).to_pylist()
    assert whole["token_ids"] == [1, 2, 3, 4, 9, 9, 5, 8]
    assert whole["loss_mask"] == [0, 0, 1, 0, 0, 0, 1, 0]


def test_a_sequence_counts_once_also_after_a_restart(lake):
    for _ in range(2):
        with rl.record_language(lake, "math", producer="run") as recorder:
            names = [recorder.record(**sample(i), sequence=i, metadata={"t": _}) for i in range(3)]
            assert recorder.record(**sample(5), sequence="a/b#c") == "run/a%2Fb%23c"
            with pytest.raises(EpisodeInvalidError, match=r"rollout run/1: step 0 was recorded"):
                recorder.record(**sample(9), sequence=1)
            assert recorder.record(**sample(9), sequence=1, on_conflict="attempt") == "run/1#1"
            assert recorder.record(**sample(1), sequence=1, on_conflict="attempt") == "run/1"
    assert names == ["run/0", "run/1", "run/2"]
    rows = read(lake)
    assert [row["episode_id"] for row in rows] == [
        "run/0",
        "run/1",
        "run/1#1",
        "run/2",
        "run/a%2Fb%23c",
    ]
    assert [row["attempt"] for row in rows] == [0, 0, 1, 0, 0]
    with rl.record_language(lake, "math", producer="run") as recorder:
        assert recorder.record(**sample(3)) == "run/3"  # numbers go on
    with rl.record_language(lake, "math", producer="run/1") as recorder:
        assert recorder.record(**sample(3)) == "run/1/0"


def blank_others(lake, producer):
    """Overwrite the rows of every shard that has none of a producer, up to its footer."""
    table = lake.dataset("math").table
    snapshot, num_blanked = table.snapshot(), 0
    for entry in snapshot.files:
        path = f"{table.root}/{entry.path}"
        data = table.storage.get(path)
        if producer.encode() not in data:
            footer = 8 + int.from_bytes(data[-8:-4], "little")
            table.storage.put(path, b"PAR1" + bytes(len(data) - 4 - footer) + data[-footer:])
            table.storage.forget([path])
            num_blanked += 1
    return num_blanked


@pytest.mark.parametrize("kind", ["folder", pytest.param("object store", marks=pytest.mark.slow)])
def test_a_recorder_that_opens_reads_no_rows_of_other_producers(request, tmp_path, kind):
    at = tmp_path / "lake" if kind == "folder" else f"s3://{request.getfixturevalue('bucket')}/lake"
    producers = [f"run/rank{rank}" for rank in (*range(5), 33)]
    for producer in producers:
        with rl.record_language(at, "math", producer=producer) as recorder:
            for _ in range(2):
                recorder.record(**sample(3, completion=producer), terminated=False)
                recorder.flush()
    lake = rl.open(at)
    assert blank_others(lake, "run/rank3/") == 10
    with rl.record_language(lake, "math", producer="run/rank3") as recorder:
        recorder.record(**sample(3, completion="run/rank3"), terminated=False, sequence=1)
        assert recorder.record(**sample(4)) == "run/rank3/2"
        rollout = recorder.begin(1, resume=True)
        assert rollout.step(prompt_ids=[3, 1, 4, 2, 9], completion_ids=[5]) == 1
    with pytest.raises(rl.ReplayLakeError):  # the others' rows are gone indeed
        read(lake, where="episode_id like 'run/rank4/%'")


def test_a_producer_whose_name_begins_another_has_its_own_rollouts(lake):
    with rl.record_language(lake, "math", producer="run/rank3") as recorder:
        recorder.record(**sample(3), sequence=7)
    with rl.record_language(lake, "math", producer="run") as recorder:
        assert recorder.record(**sample(3)) == "run/0"
        with pytest.raises(NotFoundError, match="found none of this id from run,"):
            recorder.reward("run/rank3/7", 1)


def test_the_number_of_a_deleted_rollout_is_not_used_again(lake):
    with rl.record_language(lake, "math", producer="run") as recorder:
        assert [recorder.record(**sample(number)) for number in range(2)] == ["run/0", "run/1"]
    rl.delete(lake, "math", "episode_id = 'run/1'")
    with rl.record_language(lake, "math", producer="run") as recorder:
        assert recorder.record(**sample(3)) == "run/2"
    assert [row["episode_id"] for row in read(lake)] == ["run/0", "run/2"]


def test_numbers_go_on_after_those_that_were_given_as_text(lake):
    with rl.record_language(lake, "math", producer="run") as recorder:
        recorder.begin("4").step(prompt="a")
        assert recorder.record(**sample(1)) == "run/5"
        for sequence in ("7", 10**18, "9" * 30):
            recorder.record(**sample(2), sequence=sequence)
        assert recorder.record(**sample(3)) == "run/8"


def test_a_recorder_that_nobody_closed_releases_its_producer(lake):
    recorder = rl.record_language(lake, "math", producer="run")
    recorder.record(**sample(3))
    recorder.reward("run/0", 2)
    del recorder
    gc.collect()
    with rl.record_language(lake, "math", producer="run") as recorder:
        assert recorder.record(**sample(4)) == "run/1"
    assert [row["reward"] for row in read(lake)] == [2, 1]


def test_a_batch_is_one_attempt_with_groups_of_its_own(lake):
    """Also where some of its rollouts are those of an earlier batch, and after a restart."""
    batches = ([7, 8, 7, 9], [7, 5, 7, 6], [7, 8, 7, 6])
    for _ in range(2):
        with rl.record_language(lake, "math", producer="run") as recorder:
            for attempt, values in enumerate(batches):
                rollouts = [
                    sample(value, sequence=place, group_id="g")
                    for place, value in enumerate(values)
                ]
                names = recorder.record_batch(rollouts)
                tail = f"#{attempt}" if attempt else ""
                assert names == [f"run/{place}{tail}" for place in range(4)]
            for wrong, message in (
                (sample(1), "sequence: found None for rollout 1 of a batch"),
                (sample(1, sequence=8, colour=1), "rollout run/8: colour: found a fact"),
                (sample(1, sequence=8, log_probs=[1]), "rollout run/8: log_probs: found 1 values"),
            ):
                with pytest.raises(EpisodeInvalidError, match=message):
                    recorder.record_batch([sample(1, sequence=9), wrong])
    groups: dict[str, list[int]] = {}
    for row in read(lake, "group_id, observation_tokens, episode_id"):
        groups.setdefault(row["group_id"], []).append(row["observation_tokens"][0])
    assert groups == {"g": batches[0], "g#1": batches[1], "g#2": batches[2]}


def test_labels_of_a_repeated_rollout_may_differ(lake):
    """A later version of the package must compute the stored hash again, or count it up."""
    rollout = sample(3, sequence=0, reward_components={"exact": (1, 0.5)}, versions=[1, 2])
    for run in ("a", "b"):
        facts = {"run_id": run, "policy": run, "user_id": run, "group_id": run, "split": run}
        with rl.record_language(lake, "math", producer="run", **facts) as recorder:
            recorder.record(
                **rollout,
                tools=[{"name": run}],
                finish_reason=run,
                source_framework=run,
            )
    (row,) = read(lake, "run_id, record_hash")
    assert row == {"run_id": "a", "record_hash": 84950137129632722}
    with rl.record_language(lake, "math", producer="run") as recorder:
        for change in ({"reward": 0.5}, {"log_probs": [-0.25, -1]}, {"prompt": "?"}):
            with pytest.raises(EpisodeInvalidError, match="was recorded under this sequence"):
                recorder.record(**rollout | change)
        assert recorder.record(**rollout) == "run/0"


def test_generations_are_recorded_one_by_one(lake):
    steps = [
        {"prompt": "hi", "completion": "yo", "prompt_ids": [1], "completion_ids": [2]},
        {"prompt": "more", "completion": "ok", "prompt_ids": [1, 2, 5], "completion_ids": [6]},
        {"prompt": "fork", "completion": "b", "prompt_ids": [1, 2, 7], "completion_ids": [6],
         "agent_id": "~1", "parent": ("", 0), "terminated": True},
        {"prompt": "short", "completion": "c", "prompt_ids": [8], "completion_ids": [9],
         "log_probs": [-1], "loss_mask": [1], "versions": [2], "finish_reason": "stop"},
    ]  # fmt: skip
    for _ in range(2):
        with rl.record_language(lake, "math", producer="run") as recorder:
            rollout = recorder.begin("r", group_id="g")
            assert [rollout.step(**one) for one in steps] == [0, 1, 0, 2]
            with pytest.raises(EpisodeInvalidError, match="found step 4 of agent 'x', expected"):
                rollout.step(prompt="?", parent=("x", 4))
            with pytest.raises(EpisodeInvalidError, match="after the one that ended it, 0"):
                rollout.step(prompt="?", agent_id="~1")
    with rl.record_language(lake, "math", producer="run") as recorder:
        rollout = recorder.begin("r", resume=True, group_id="g")
        last = {"prompt": "on", "completion": "d", "completion_ids": [3], "terminated": True}
        assert rollout.step(**last, prompt_ids=[8, 9, 4]) == 3
        assert [recorder.next_attempt(one) for one in ("r", "s")] == [1, 0]
        for _ in range(2):
            again = recorder.begin("r", attempt=1)
            assert again.step(prompt="hi", completion="hey") == 0
            assert again.episode_id == "run/r#1"
        assert recorder.next_attempt("r") == 2
        for wrong in (-1, "1", True):
            with pytest.raises(EpisodeInvalidError, match="attempt: found"):
                recorder.begin("r", attempt=wrong)
    assert [row["attempt"] for row in read(lake, where="episode_id = 'run/r#1'")] == [1]
    columns = f"{COLUMNS}, parent_agent_id, parent_step, is_continuation"
    rows = read(lake, columns, where="episode_id = 'run/r'")
    seen = [
        (row["agent_id"], row["step"], row["env_step"], row["observation_tokens"]) for row in rows
    ]
    assert seen == [
        ("", 0, 0, [1]),
        ("", 1, 1, [5]),
        ("", 2, 3, [8]),  # the history was rewritten
        ("", 3, 4, [4]),
        ("~1", 0, 2, [7]),
    ]
    assert [row["is_continuation"] for row in rows] == [None, None, False, None, None]
    assert (rows[4]["parent_agent_id"], rows[4]["parent_step"]) == ("", 0)
    assert [row["terminated"] for row in rows] == [False, False, False, True, True]
    where = "where token_ids is not null"
    branches = (
        lake.sql(f"select token_ids from math.sequences {where}").column("token_ids").to_pylist()
    )
    assert sorted(branches) == [[1, 2, 5, 6], [1, 2, 7, 6], [8, 9, 4, 3]]


def test_a_reward_that_comes_later_is_applied_to_the_last_step(lake):
    with rl.record_language(lake, "math", producer="run") as recorder:
        for number in range(2):
            rollout = recorder.begin(number)
            rollout.step(prompt="a", completion="b")
            rollout.step(prompt="c", completion="d")
        rollout.reward(0.5, terminated=True)
        recorder.reward("run/0", 3, step=0)
        recorder.flush()
        assert [row["reward"] for row in read(lake)] == [3, None, 0, 0.5]
        recorder.reward("run/1", 1, mode="sum", feedback_id="f")
        recorder.reward("run/1", 1, mode="sum", feedback_id="f")
        for wrong in (("run/9", 1), ("run/1", float("inf"))):
            with pytest.raises((NotFoundError, EpisodeInvalidError), match=wrong[0]):
                recorder.reward(*wrong)
        with pytest.raises(EpisodeInvalidError, match="after the one that ended it"):
            rollout.step(prompt="e", completion="f")
    assert [row["reward"] for row in read(lake)] == [3, None, 0, 1.5]
    assert [row["terminated"] for row in read(lake)] == [False, False, False, True]


def test_a_flush_without_new_reports_leaves_the_old_ones_unread(lake):
    """A report that another process wrote shows it: it waits for a flush that has news."""
    with (
        rl.record_language(lake, "math", producer="a") as one,
        rl.record_language(lake, "math", producer="b", flush_interval_s=60) as other,
    ):
        one.record(**sample(1, reward=None))
        other.record(**sample(2, reward=None))
        one.reward("a/0", 1)
        one.flush()
        other._journal.flush()
        other.reward("b/0", 2)
        other._reports.flush()
        for news, rewards in ((False, [1, None]), (True, [3, 2])):
            if news:
                one.reward("a/0", 3)
            one.flush()
            assert [row["reward"] for row in read(lake)] == rewards


def test_rewards_are_applied_though_the_clock_steps_back(lake, monkeypatch):
    now_ns = time.time_ns()
    for round_number in range(2):
        with rl.record_language(lake, "math", producer="run") as recorder:
            recorder.record(**sample(3, reward=None), sequence=0)
            for reward in (1 + round_number, 3 + round_number):
                recorder.reward("run/0", reward)
                recorder.flush()
                assert [row["reward"] for row in read(lake)] == [reward]
                # By an hour more each time, and the clock then stands still.
                now_ns -= 3_600 * 10**9
                monkeypatch.setattr(time, "time_ns", lambda at=now_ns: at)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_probs": [-1]}, "log_probs: found 1 values, expected 2, one for each of completion"),
        ({"log_probs": [-1, float("nan")]}, "log_probs: found nan for token 1"),
        ({"log_probs": [-1, 0.5]}, "action_log_probs at step 0: found 0.5 for token 1, expected"),
        ({"log_probs": "no"}, "log_probs: found"),
        ({"completion_ids": [1, 60]}, "found 60 as token 1, expected 0..49, the vocabulary of t"),
        ({"completion_ids": [1, -1]}, "completion_ids: found -1, expected ids"),
        ({"completion_ids": [1, 2**40]}, "completion_ids: found 1099511627776, expected ids"),
        ({"completion_ids": None}, "completion_ids: found None beside other values"),
        ({"prompt_ids": None}, "prompt_ids: found None beside completion_ids"),
        ({"prompt_ids": [[1, 2]]}, "prompt_ids: found"),
        ({"loss_mask": [1, 2]}, "loss_mask: found"),
        ({"loss_mask": [1]}, "loss_mask: found 1 values"),
        ({"versions": [1.5, 2]}, "versions: found"),
        ({"reward": float("nan")}, "reward: found nan"),
        ({"reward": "good"}, "reward: found 'good', expected a number"),
        ({"reward_components": {"a": float("inf")}}, "reward_components['a']: found inf"),
        ({"prompt": [{"content": "x"}]}, "message: found"),
        ({"prompt": [{"role": "user", "content": {1j}}]}, "messages: "),
        ({"prompt": [{"role": "user", "content": float("nan")}]}, "messages: "),
        ({"status": "odd"}, "status: found 'odd', expected completed, failed or filtered"),
        ({"train_step": "3"}, "train_step: found '3', expected a whole number"),
        ({"group_id": 3}, "group_id: found 3, expected text"),
        ({"metadata": {"x": 3j}}, "metadata: "),
        ({"colour": 1}, "colour: found a fact of this name, expected group_id"),
        ({"sequence": -1}, "sequence: found -1, expected a number of 0 or more"),
        ({"sequence": 2**64}, "sequence: found 18446744073709551616, expected a number of 0"),
        ({"sequence": "\ud800"}, "sequence: found '\\ud800', expected a text without NUL"),
        ({"agent_id": 3}, "agent_id: found 3, expected a text without NUL"),
        ({"agent_id": []}, "agent_id: found [], expected a text without NUL"),
        ({"agent_id": "a\0"}, "agent_id: found 'a\\x00', expected a text without NUL"),
        ({"finish_reason": 3}, "finish_reason: found 3, expected text"),
        ({"reward": 10**400}, "reward: found 1000"),
        ({"reward_components": {3: 1.0}}, "reward_components: found 3, expected text"),
        ({"reward_components": [1.0]}, "reward_components: found [1.0], expected scores by name"),
        ({"on_conflict": "x"}, "on_conflict: found 'x', expected refuse or attempt"),
    ],
    ids=repr,
)  # fmt: skip
def test_a_malformed_rollout_is_refused_by_name_and_not_written(shared, changes, message):
    with pytest.raises((EpisodeInvalidError, SchemaMismatchError)) as refused:
        shared.record(**sample(3, **changes))
    assert message in str(refused.value)
    assert "sequence" in changes or str(refused.value).startswith("rollout run/0: ")
    assert shared._journal.num_pending == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"completion_id": 17}, "completion_id: found 17, expected text"),
        ({"finish_reason": 3}, "finish_reason: found 3, expected text"),
        ({"is_trainable": 1}, "is_trainable: found 1, expected true or false"),
        ({"agent_id": 3}, "agent_id: found 3, expected a text"),
        ({"parent": 3}, "parent: found 3, expected an agent and the number of its step"),
        ({"parent": (3, 0)}, "parent: found (3, 0), expected an agent and the number"),
        ({"parent": ("", 0.0)}, "parent: found ('', 0.0), expected an agent and the number"),
    ],
    ids=repr,
)
def test_a_malformed_step_is_refused_by_name_and_not_written(shared, changes, message):
    rollout = shared.begin("open")
    with pytest.raises(EpisodeInvalidError) as refused:
        rollout.step(prompt="a", completion="b", **changes)
    assert str(refused.value).startswith(f"rollout run/open: {message}")
    assert shared._journal.num_pending == 0


def test_texts_of_a_record_can_be_stored_whatever_an_engine_states(lake):
    with rl.record_language(lake, "math", producer="run") as recorder:
        recorder.record(**sample(3), finish_reason="a\ud800")
        rollout = recorder.begin()
        rollout.step(prompt="a", completion_id="b\0", is_trainable=np.bool_(False))
        rollout.reward(1, feedback_id="c\ud800", step=np.int64(0))
        for wrong in ({"feedback_id": 5}, {"step": "0"}, {"step": True}):
            with pytest.raises((EpisodeInvalidError, NotFoundError), match="rollout run/1: "):
                rollout.reward(1, **wrong)
        with pytest.raises(NotFoundError, match="found none of this id"):
            recorder.reward(["run/1"], 1)
    rows = read(lake, "finish_reason, completion_id, is_trainable, reward")
    shown = "\N{REPLACEMENT CHARACTER}"
    assert rows[0]["finish_reason"].startswith(f"a{shown}")
    assert rows[1] == {
        "finish_reason": None,
        "completion_id": f"b{shown}",
        "is_trainable": False,
        "reward": 1.0,
    }


def test_a_flush_that_had_to_set_a_record_aside_says_so(lake):
    recorder = rl.record_language(lake, "math", producer="run")
    recorder.record(**sample(3))
    recorder._journal.append([b'{"episode_id":3}'])  # no column holds it; a recorder refuses it
    for commit in (recorder.flush, recorder.flush, recorder.close):
        with pytest.raises(StorageError, match="found 1 records of run that their table cannot"):
            commit()
    assert len(read(lake)) == 1
    rl.record_language(lake, "math", producer="run").close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    path = tmp_path_factory.mktemp("shared") / "lake"
    tokenizer = rl.Tokenizer("t", vocabulary_size=50)
    with rl.record_language(path, "math", producer="run", tokenizer=tokenizer) as recorder:
        yield recorder


def test_rollouts_that_failed_are_kept_with_their_reason(lake):
    with rl.record_language(lake, "math", producer="run") as recorder:
        recorder.record(**sample(1, reward=None), status="failed", status_reason="timed out")
        recorder.record(**sample(2), status="filtered", status_reason="same reward in its group")
        recorder.record(**sample(3, completion_ids=[], log_probs=[]), truncated=True)
    rows = read(lake, "status, status_reason, is_trainable, reward, action_tokens, truncated")
    assert [row["status"] for row in rows] == ["failed", "filtered", None]
    assert rows[0]["status_reason"] == "timed out"
    assert [row["is_trainable"] for row in rows] == [False, False, False]
    assert (rows[2]["action_tokens"], rows[2]["truncated"]) == ([], True)


def test_threads_share_a_recorder(lake):
    with rl.record_language(lake, "math", flush_interval_s=0.05) as recorder:

        def work(first):
            for number in range(first, first + 25):
                recorder.record(**sample(number))

        threads = [threading.Thread(target=work, args=(25 * number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    rows = read(lake)
    assert len({row["episode_id"] for row in rows}) == 100
    assert {row["observation"] for row in rows} == {f"user: {i} + 1?" for i in range(100)}


def test_a_producer_has_one_recorder_at_a_time(lake):
    with rl.record_language(lake, "math", producer="run"):
        with pytest.raises(ConfigInvalidError, match="which another recorder of dataset math uses"):
            rl.record_language(lake, "math", producer="run")
        rl.record_language(lake, "math", producer="run2").close()
    for wrong in ({"producer": "a b"}, {"flush_interval_s": 0}):
        with pytest.raises(ConfigInvalidError, match=next(iter(wrong))):
            rl.record_language(lake, "math", **wrong)
    rl.record_language(lake, "math", producer="run").close()
    lake.dataset("numbers").create(rl.Box((2,)), rl.Discrete(2))
    with pytest.raises(SchemaMismatchError, match=r"expected texts\. Record into another"):
        rl.record_language(lake, "numbers")


WORKER = """
import os, sys, time
import replaylake as rl
from tests_sample import sample
path, producer, forks = sys.argv[1:]
recorder = rl.record_language(path, "math", producer=producer, flush_interval_s=0.3)
if forks == "1" and os.fork() == 0:
    try:
        recorder.record(prompt="in a child")
    except rl.ReplayLakeError as error:
        print("refused", "a fork of process" in str(error), flush=True)
    recorder.close()
    time.sleep(60)
    os._exit(0)
for number in range(100_000):
    name = recorder.record(**sample(number), sequence=number)
    print(name, flush=True)
"""


@pytest.mark.slow
def test_a_kill_loses_no_rollout_that_was_acknowledged(lake, tmp_path):
    (tmp_path / "tests_sample.py").write_text(
        "def sample(number):\n"
        "    return dict(prompt=str(number), completion='x', prompt_ids=[number % 9],\n"
        "                completion_ids=[1, 2], log_probs=[-0.5, -0.25], reward=number % 2)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    acknowledged: dict[str, set[str]] = {"a": set(), "b": set()}
    children = []
    for round_number in range(3):
        workers = {}
        for producer in ("a", "b"):
            command = [sys.executable, "-c", WORKER, str(lake.path), producer]
            command.append("1" if (producer, round_number) == ("a", 1) else "0")
            workers[producer] = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, text=True, process_group=0
            )
        for producer, worker in workers.items():
            lines = [worker.stdout.readline() for _ in range(40 + 150 * round_number)]
            # A forked child may say that it is refused after its parent has recorded all these.
            if (producer, round_number) == ("a", 1):
                while "refused True\n" not in lines and lines[-1]:
                    lines.append(worker.stdout.readline())
            acknowledged[producer] |= {line.strip() for line in lines}
        for producer, worker in workers.items():
            os.kill(worker.pid, signal.SIGKILL)
            worker.wait()
            children.append(worker.pid)
            # A forked child still has the end of the pipe, and holds no lock of its parent.
            if (producer, round_number) != ("a", 1):
                acknowledged[producer] |= {*worker.stdout.read().splitlines()}
            worker.stdout.close()
    for producer in ("a", "b"):
        rl.record_language(lake, "math", producer=producer).close()
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    assert "refused True" in acknowledged["a"]
    stored = [row["episode_id"] for row in read(lake)]
    assert len(stored) == len({*stored})
    assert (acknowledged["a"] | acknowledged["b"]) - {*stored} - {"refused True"} == set()
    rows = read(lake)
    assert all(row["action_log_probs"] == [-0.5, -0.25] and row["terminated"] for row in rows)


@pytest.mark.slow
def test_a_lake_on_an_object_store(bucket):
    url = f"s3://{bucket}/recorded"
    for _ in range(2):
        with rl.record_language(url, "math", producer="run") as recorder:
            for number in range(3):
                recorder.record(**sample(number), sequence=number)
    assert len(read(rl.open(url))) == 3


def test_a_rollout_of_several_generations_is_recorded_at_once(lake):
    turns = [
        {"prompt": "a", "completion": "b", "prompt_ids": [1], "completion_ids": [2]},
        {"prompt": "c", "completion": "d", "prompt_ids": [1, 2, 3], "completion_ids": [4]},
    ]
    turns[1] |= {"reward": 1.0, "terminated": True}
    with rl.record_language(lake, "math", producer="run/0") as recorder:
        assert recorder.record_steps(turns, sequence="x", group_id="g") == "run/0/x"
        assert recorder.record_steps(turns, sequence="x", group_id="g") == "run/0/x"
        with pytest.raises(EpisodeInvalidError, match=r"run/0/y: found step 1 .*, 0"):
            recorder.record_steps([turns[1], turns[0]], sequence="y")
        with pytest.raises(EpisodeInvalidError, match="log_probs"):
            recorder.record_steps([turns[0], {**turns[1], "log_probs": []}], sequence="z")
        assert [recorder.is_recorded(name) for name in "xyz"] == [True, False, False]
    rows = read(lake)
    assert [row["episode_id"] for row in rows] == ["run/0/x"] * 2
    assert [row["observation_tokens"] for row in rows] == [[1], [3]]
    assert [row["env_step"] for row in rows] == [0, 1]


def test_a_rollout_counts_as_recorded_once_an_attempt_has_ended(lake):
    with rl.record_language(lake, "math", producer="run/0") as recorder:
        recorder.begin("x").step(prompt="a", completion="b")
        assert not recorder.is_recorded("x")
    with rl.record_language(lake, "math", producer="run/0") as recorder:
        assert not recorder.is_recorded("x")
        again = recorder.begin("x", attempt=recorder.next_attempt("x"))
        again.step(prompt="a", completion="c", truncated=True)
        assert recorder.is_recorded("x")
    with rl.record_language(lake, "math", producer="run/0") as recorder:
        assert recorder.is_recorded("x")
