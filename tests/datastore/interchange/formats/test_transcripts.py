"""Transcripts: each shape of record, what becomes of it, and the messages again from its rows."""

from __future__ import annotations

import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Text
from replaylake.datastore.errors import SourceInvalidError, SpaceUnsupportedError
from replaylake.datastore.interchange.export.export import export
from replaylake.datastore.interchange.formats.detect import find_format
from replaylake.datastore.interchange.formats.format import (
    ReadOptions,
    RejectedEpisode,
    WritableFormat,
)
from replaylake.datastore.interchange.formats.transcripts.dialogues import is_generated
from replaylake.datastore.interchange.formats.transcripts.transcripts import TranscriptsFormat
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.sources.source import find_source
from replaylake.datastore.lake.lake import Lake, open_lake

FORMAT = TranscriptsFormat()
SYSTEM = {"role": "system", "content": "Help travellers."}
ASK = {"role": "user", "content": "Book a seat."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "seats", "arguments": '{"row":3}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "seats", "content": '["3A"]'}
SAY = {"role": "assistant", "content": "3A is free."}
STOP = {"role": "user", "content": "###STOP###"}


def result(task: int = 4, trial: int = 0, reward: float = 1.0, **given: Any) -> dict[str, Any]:
    """A result as tau-bench's run.py writes it."""
    info = {"task": {"user_id": "u"}, "source": "user", "reward_info": {"reward": reward}}
    messages = [SYSTEM, ASK, CALL, RESULT, SAY, STOP]
    record = {"task_id": task, "reward": reward, "info": info, "traj": messages, "trial": trial}
    return record | given


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(*paths: Path, **options: Any) -> tuple[list[Episode], list[str]]:
    source = find_source([*paths])
    reading = find_format("auto", source.files).read(source.files, ReadOptions(**options))
    episodes = [found for found in reading if isinstance(found, Episode)]
    return episodes, [*reading.notes]


def column(episode: Episode, name: str) -> list[Any]:
    return episode.extras[name].to_pylist()


def messages_of(episodes: list[Episode]) -> dict[str, list[Any]]:
    """Put the increments of each dialogue together, over all its agents."""
    turns = defaultdict(list)
    for episode in episodes:
        names = ("prompt_messages", "completion_messages", "final_messages")
        parts = zip(episode.env_steps.tolist(), *(column(episode, n) for n in names), strict=True)
        turns[episode.episode_id] += parts
    return {
        key: [m for _, *texts in sorted(parts) for text in texts if text for m in json.loads(text)]
        for key, parts in turns.items()
    }


# --- tau-bench ------------------------------------------------------------------------------


def test_results_of_tau_bench(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps([result(), result(trial=1, reward=0.0)], indent=2))
    (first, second), notes = read(path)
    assert (first.episode_id, second.episode_id) == ("4-0", "4-1")
    assert (first.terminated, first.truncated) == (True, False)
    assert first.rewards.tolist() == [0, 1]
    assert second.rewards.tolist() == [0, 0]
    assert column(first, "role") == ["assistant", "assistant"]
    assert column(first, "prompt_messages") == [
        json.dumps([SYSTEM, ASK], separators=(",", ":")),
        json.dumps([RESULT], separators=(",", ":")),
    ]
    assert column(first, "completion_messages")[1] == json.dumps([SAY], separators=(",", ":"))
    assert json.loads(column(first, "final_messages")[1]) == [STOP]
    assert column(first, "tool_name") == ["seats", None]
    assert json.loads(column(first, "tool_calls")[0]) == CALL["tool_calls"]
    assert column(first, "group_id") == ["4", "4"]
    assert column(first, "group_id_source") == ["given", "given"]
    assert column(second, "sample_id") == ["1", "1"]
    assert column(first, "source_framework") == ["tau-bench"] * 2
    assert column(first, "status") == ["completed"] * 2
    assert first.observations.tolist() == [
        "system: Help travellers.\nuser: Book a seat.",
        'tool: ["3A"]',
    ]
    assert first.actions.tolist() == ['seats({"row":3})', "3A is free."]
    assert first.final_observation == "user: ###STOP###"
    kept = json.loads(column(first, "metadata")[0])
    assert kept == {"task_id": 4, "trial": 0, "info": result()["info"]}
    assert column(first, "metadata")[1] is None
    assert notes == []


def test_tasks_that_ran_out_of_steps_or_failed(tmp_path: Path) -> None:
    cut = result(1, info={"reward_info": None})
    failed = result(2, info={"error": "rate limit"}, reward=0.0)
    nothing = result(3, info={"error": "EOF", "traceback": "..."}, reward=0.0, traj=[])
    path = tmp_path / "results.json"
    path.write_text(json.dumps([nothing, cut, failed]))
    (first, second), notes = read(path)
    assert [(e.terminated, e.truncated) for e in (first, second)] == [(False, True)] * 2
    assert (column(first, "status")[0], column(second, "status")[0]) == ("truncated", "error")
    assert notes == [
        "1 transcripts have no turn of an assistant, and so no step: left out (results.json line 1)"
    ]


def test_the_same_task_in_two_files_is_two_episodes(tmp_path: Path) -> None:
    paths = [lines(tmp_path / f"{i}.jsonl", result(reward=float(i))) for i in range(3)]
    episodes, notes = read(*paths)
    assert [e.episode_id for e in episodes] == ["4-0", "4-0#2", "4-0#3"]
    assert notes == [
        "2 transcripts have the id of one before them, such as 4-0: they are 4-0#2 and so on"
    ]


def test_few_shot_lines(shared_data: Path) -> None:
    path = shared_data / "tau_bench" / "MockAirlineDomainEnv-few_shot.jsonl"
    episodes, notes = read(path)
    assert len(episodes) == 19
    assert sum(map(len, episodes)) == 222
    assert not any(e.terminated or e.truncated for e in episodes)
    assert all(np.isnan(e.rewards).all() for e in episodes)
    assert len({column(e, "group_id")[0] for e in episodes}) == 19
    assert {column(e, "group_id_source")[0] for e in episodes} == {"derived"}
    texts = [json.loads(line)["messages_display"] for line in path.read_text().splitlines()]
    again = messages_of(episodes)
    for number, text in enumerate(texts):
        spoken = [f"{m['role']}: {m['content']}" for m in again[str(number)]]
        assert "\n".join(spoken) == text
    assert any("98 turns are calls of tools" in note for note in notes)


def test_few_shot_lines_as_a_dataset(lake: Lake, shared_data: Path) -> None:
    path = shared_data / "tau_bench" / "MockAirlineDomainEnv-few_shot.jsonl"
    receipt = ingest(lake, [path], "fewshot")
    assert (receipt.format, receipt.episodes.committed, receipt.steps.committed) == (
        "transcripts", 19, 222,
    )  # fmt: skip
    assert ingest(lake, [path], "fewshot").episodes.already_present == 19
    row = lake.sql(
        "SELECT count(*) AS n, count(reward) AS known, count(final_messages) AS ends "
        "FROM fewshot.steps"
    ).to_pylist()[0]
    assert row["n"] == 222
    assert row["known"] == 0
    assert lake.sql('SELECT count("return") AS n FROM fewshot.episodes').to_pylist() == [{"n": 0}]
    spec = lake.dataset("fewshot").spec
    assert (spec.observation_space, spec.action_space) == (Text(), Text())
    assert spec.rewards_optional


# --- other shapes ---------------------------------------------------------------------------


def test_messages_of_chat_completions(tmp_path: Path) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "image_url"}]}
    record = {
        "id": "chat-7", "messages": [parts, SAY], "score": 0.25, "model": "m-1", "group_id": 9,
        "finish_reason": "length", "source": "web",
    }  # fmt: skip
    (episode,), _ = read(lines(tmp_path / "c.jsonl", record))
    assert episode.episode_id == "chat-7"
    assert episode.observations.tolist() == ["user: Look\n[image_url]"]
    assert episode.rewards.tolist() == [0.25]
    assert episode.policies.tolist() == ["m-1"]
    assert column(episode, "group_id") == ["9"]
    assert column(episode, "status") == ["length"]
    assert (episode.terminated, episode.truncated) == (False, True)
    assert json.loads(column(episode, "metadata")[0])["source"] == "web"
    assert messages_of([episode]) == {"chat-7": record["messages"]}


def test_lists_of_messages_on_lines_and_alone(tmp_path: Path) -> None:
    by_line = lines(tmp_path / "l.jsonl", [ASK, SAY], [ASK, SAY, ASK, SAY])
    episodes, _ = read(by_line)
    assert [len(episode) for episode in episodes] == [1, 2]
    alone = tmp_path / "one.json"
    alone.write_text(json.dumps([ASK, SAY], indent=2))
    (episode,), _ = read(alone)
    assert len(episode) == 1


def test_conversations_of_sharegpt(tmp_path: Path) -> None:
    record = {
        "id": "s",
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "Hello", "weight": 1},
            {"from": "function_call", "value": '{"name": "f"}'},
            {"from": "observation", "value": "ok"},
        ],
    }
    (episode,), _ = read(lines(tmp_path / "s.jsonl", record))
    assert messages_of([episode])["s"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "weight": 1},
        {"role": "function_call", "content": '{"name": "f"}'},
        {"role": "tool", "content": "ok"},
    ]
    assert column(episode, "prompt_messages")[1] == "[]"
    assert column(episode, "source_framework") == ["sharegpt"] * 2
    assert np.isnan(episode.rewards).all()


def test_prompts_and_completions(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "p.jsonl",
        {"prompt": "2+2?", "completion": "4", "reward": 1},
        {"prompt": [SYSTEM, ASK], "completion": [SAY], "prompt_id": "p9"},
        {"id": "g", "prompt": "3+3?", "completions": ["6", "7"], "rewards": [1.0, None]},
        {"id": "q", "prompt": "hi", "chosen": [{"role": "user", "content": "hi"}, SAY],
         "rejected": "no", "score_chosen": 8, "score_rejected": 2},
    )  # fmt: skip
    episodes, _ = read(path)
    assert [e.episode_id for e in episodes] == ["0", "1", "g/0", "g/1", "q/chosen", "q/rejected"]
    assert [column(e, "sample_id")[0] for e in episodes[2:]] == ["0", "1", "chosen", "rejected"]
    rewards = [float(e.rewards[0]) for e in episodes]
    np.testing.assert_array_equal(rewards, [1, np.nan, 1, np.nan, 8, 2])
    groups = [column(e, "group_id")[0] for e in episodes]
    assert groups[1] == "p9"
    assert groups[2] == groups[3]
    assert groups[4] == groups[5]
    assert len({groups[0], groups[2], groups[4]}) == 3
    assert messages_of(episodes)["q/chosen"] == [{"role": "user", "content": "hi"}, SAY]


def test_several_agents(tmp_path: Path) -> None:
    talk = [
        ASK,
        {"role": "assistant", "name": "ann", "content": "a"},
        {"role": "assistant", "name": "bob", "content": "b"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "name": "ann", "content": "c"},
    ]
    path = lines(tmp_path / "m.jsonl", {"id": "m", "messages": talk, "reward": 2, "status": "done"})
    episodes, _ = read(path)
    assert [(e.agent_id, len(e), e.terminated) for e in episodes] == [
        ("ann", 2, True), ("bob", 1, True),
    ]  # fmt: skip
    assert episodes[0].env_steps.tolist() == [0, 2]
    assert sum(e.rewards.sum() for e in episodes) == 2
    assert messages_of(episodes) == {"m": talk}


def test_groups_without_a_prompt(tmp_path: Path) -> None:
    (episode,), _ = read(lines(tmp_path / "a.jsonl", {"messages": [SAY, ASK, SAY]}))
    assert column(episode, "group_id") == [None, None]
    assert column(episode, "group_id_source") == ["none"] * 2


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (False, False)),
        ({"status": "completed"}, (True, False)),
        ({"finish_reason": "stop"}, (True, False)),
        ({"stop_reason": "max_tokens"}, (False, True)),
        ({"status": "error"}, (False, True)),
        ({"status": "in review"}, (False, False)),
        ({"terminated": False, "truncated": True, "status": "completed"}, (False, True)),
    ],
)
def test_ends_only_where_the_record_says_so(
    given: dict[str, Any], expected: tuple[bool, bool], tmp_path: Path
) -> None:
    (episode,), _ = read(lines(tmp_path / "e.jsonl", {"messages": [ASK, SAY], **given}))
    assert (episode.terminated, episode.truncated) == expected


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [ASK, SAY]},
        {"history": [ASK, CALL, RESULT, SAY]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"prompt": "2+2?", "completion": "4"},
        {"messages_display": "user: Hi\nassistant: Hello"},
    ],
)
@pytest.mark.parametrize(
    ("given", "terminated"),
    [
        ({"reward": 1}, True),
        ({"score": 0.0}, True),
        ({"reward": None}, False),
        ({"reward": 1, "status": "in review"}, False),
        ({"reward": 1, "terminated": False}, False),
        ({"reward": 1, "finish_reason": "length"}, False),
    ],
)
def test_a_transcript_with_its_outcome_is_terminated(
    record: dict[str, Any], given: dict[str, Any], terminated: bool, tmp_path: Path
) -> None:
    (episode,), _ = read(lines(tmp_path / "e.jsonl", record | given))
    assert episode.terminated == terminated


def test_the_outcome_of_each_answer_and_turn(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "e.jsonl",
        {"prompt": "3+3?", "completions": ["6", "7"], "rewards": [1.0, None]},
        {"prompt": "hi", "chosen": "yes", "rejected": "no", "score_chosen": 8},
        {"messages": [ASK, SAY, ASK, SAY], "rewards": [None, 1]},
        {"messages": [ASK, SAY, ASK, SAY], "rewards": [1, None]},
    )
    episodes, _ = read(path)
    assert [e.terminated for e in episodes] == [True, False, True, False, True, False]
    assert not any(e.truncated for e in episodes)


def test_options_hold_here_too(tmp_path: Path) -> None:
    path = lines(tmp_path / "e.jsonl", {"messages": [ASK, SAY]})
    (episode,), _ = read(path, mapping={"observation": "prompt_messages"})
    assert episode.observations.tolist() == [json.dumps([ASK], separators=(",", ":"))]
    assert column(episode, "prompt_text") == ["user: Book a seat."]
    (episode,), _ = read(path, open_ends="truncated")
    assert episode.truncated


def test_nothing_else_of_a_record_is_lost(tmp_path: Path) -> None:
    more = {"prompt": "x", "chosen": ["?"], "status": {"code": 1}, "model": 7, "terminated": "no"}
    (episode,), _ = read(lines(tmp_path / "n.jsonl", {"messages": [ASK, SAY], **more}))
    assert json.loads(column(episode, "metadata")[0]) == more


# --- whole again ----------------------------------------------------------------------------

TEXTS = st.text(st.characters(codec=None), max_size=8)
CONTENTS = TEXTS | st.none() | st.lists(st.dictionaries(TEXTS, TEXTS | st.integers()), max_size=2)
MESSAGES = st.builds(
    lambda role, content, more: {**more, "role": role, "content": content},
    st.sampled_from(["system", "user", "assistant", "tool"]),
    CONTENTS,
    st.dictionaries(st.sampled_from(["tool_calls", "name", "weight"]), CONTENTS, max_size=2),
)
DIALOGUES = st.lists(
    st.lists(MESSAGES, max_size=6).filter(lambda talk: any(map(is_generated, talk))),
    min_size=1,
    max_size=4,
)
SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(dialogues=DIALOGUES)
def test_increments_put_together_are_the_dialogue(dialogues: list[Any], tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", *({"messages": talk} for talk in dialogues))
    episodes, _ = read(path)
    assert messages_of(episodes) == {str(i): talk for i, talk in enumerate(dialogues)}


def comparable(episodes: list[Episode]) -> list[Any]:
    """Return all that episodes have, as values that can be compared."""
    return [
        (
            e.episode_id, e.agent_id, e.terminated, e.truncated, e.final_observation,
            e.observations.tolist(), e.actions.tolist(), repr(e.rewards.tolist()),
            e.env_steps.tolist(), None if e.policies is None else e.policies.tolist(),
            {name: column(e, name) for name in e.extras},
        )
        for e in episodes
    ]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(
    records=st.lists(
        st.fixed_dictionaries(
            {"messages": DIALOGUES.map(lambda several: several[0])},
            optional={
                "reward": st.none() | st.floats(-1, 1),
                "status": st.sampled_from(["completed", "length", "?"]),
                "model": st.just("m"),
                "task_id": st.integers(),
                "source": TEXTS,
                "score": st.just(0.5),
                "prompt": TEXTS,
                "id": st.integers(),
            },
        ),
        min_size=1,
        max_size=4,
    )
)
def test_what_is_written_reads_the_same(records: list[Any], tmp_path: Path) -> None:
    episodes, _ = read(lines(tmp_path / "in.jsonl", *records))
    out = tmp_path / "out.jsonl"
    out.unlink(missing_ok=True)
    spec = DatasetSpec(Text(), Text(), rewards_optional=True)
    written = FORMAT.write(iter(episodes), spec, out)
    again, _ = read(out)
    assert (written.num_episodes, written.num_steps) == (len(episodes), sum(map(len, episodes)))
    assert comparable(again) == comparable(episodes)


def test_writing_is_of_transcripts_alone(tmp_path: Path) -> None:
    assert isinstance(FORMAT, WritableFormat)
    other = Episode("e", np.array(["a"], object), np.array(["b"], object), np.zeros(1))
    with pytest.raises(
        SpaceUnsupportedError, match="found no column prompt_messages, completion_messages"
    ):
        FORMAT.write(iter([other]), DatasetSpec(Text(), Text()), tmp_path / "o.jsonl")


def test_a_part_of_a_dialogue_is_written_as_such(tmp_path: Path) -> None:
    path = lines(tmp_path / "in.jsonl", {"messages": [ASK, SAY, STOP, SAY]})
    (whole,), _ = read(path)
    extras = {name: whole.extras[name].slice(1) for name in whole.extras if name != "metadata"}
    part = replace(
        whole, first_step=1, observations=whole.observations[1:], actions=whole.actions[1:],
        rewards=whole.rewards[1:], env_steps=whole.env_steps[1:], extras=extras,
    )  # fmt: skip
    written = FORMAT.write(iter([part]), DatasetSpec(Text(), Text()), tmp_path / "out.jsonl")
    assert "1 begin within a dialogue" in written.notes[0]
    assert json.loads((tmp_path / "out.jsonl").read_text())["messages"] == [STOP, SAY]


def test_an_exported_dataset_ingested_again_has_equal_rows(
    lake: Lake, shared_data: Path, tmp_path: Path
) -> None:
    results = tmp_path / "results.json"
    results.write_text(json.dumps([result(), result(4, 1, 0.0, info={"reward_info": None})]))
    few_shot = shared_data / "tau_bench" / "MockAirlineDomainEnv-few_shot.jsonl"
    for number, path in enumerate((results, few_shot)):
        first, again = f"first{number}", f"again{number}"
        ingest(lake, [path], first)
        export(lake, first, tmp_path / f"{first}.jsonl", format="transcripts")
        assert ingest(lake, [tmp_path / f"{first}.jsonl"], again).format == "transcripts"
        before, after = (
            lake.sql(
                f"SELECT * EXCLUDE (episode_id) FROM {name}.steps ORDER BY source_episode_id, step"
            ).to_pylist()
            for name in (first, again)
        )
        assert before == after
        assert len(before) > 2


def test_rewards_of_each_turn_survive(tmp_path: Path) -> None:
    record = {"messages": [ASK, SAY, ASK, SAY], "rewards": [0.5, None]}
    episodes, _ = read(lines(tmp_path / "in.jsonl", record))
    np.testing.assert_array_equal(episodes[0].rewards, [0.5, np.nan])
    FORMAT.write(iter(episodes), DatasetSpec(Text(), Text()), tmp_path / "out.jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text())["rewards"] == [0.5, None]


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": 3}, "messages: found 3, expected a list of messages"),
        ({"messages": [ASK, {"content": "x"}]}, "as message 1, expected an object with a role"),
        ({"messages": [ASK, {"type": ["ai"], "content": "x"}]}, "as message 1, expected an object"),
        ({"messages": [ASK, SAY], "reward": "good"}, "reward: found 'good', expected a number"),
        ({"messages": [ASK, SAY], "rewards": [1, 2]}, "expected a list of 1, one for each"),
        ({"messages": [ASK, SAY], "id": [1]}, "id: found [1], expected text or a whole number"),
        ({"messages_display": "no role here"}, "expected it to begin with `user: `"),
        ({"prompt": "x", "completions": ["a"], "rewards": 1}, "expected a list of 1"),
        ({"reward": 1}, "expected a transcript: an object with messages"),
        ("text", "expected a transcript"),
    ],
)
def test_a_record_that_is_no_transcript(record: Any, message: str, tmp_path: Path) -> None:
    good = {"messages": [ASK, SAY]}
    source = find_source([lines(tmp_path / "bad.jsonl", good, record, good)])
    first, refused, last = FORMAT.read(source.files, ReadOptions())
    assert isinstance(refused, RejectedEpisode)
    (finding,) = refused.findings
    assert finding.check == "malformed"
    assert finding.message.startswith("bad.jsonl record 1 (line 2): ")
    assert message in finding.message
    assert isinstance(first, Episode)
    assert isinstance(last, Episode)
    assert (first.episode_id, last.episode_id) == ("0", "2")


def test_messages_nested_too_deeply(tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text(
        '{"messages": [{"role": "assistant", "content": ' + "[" * 9999 + "]" * 9999 + "}]}"
    )
    source = find_source([path])
    with pytest.raises(SourceInvalidError, match="nested too deeply"):
        FORMAT.read(source.files, ReadOptions())


def test_nul_and_lone_surrogates_are_kept_in_the_json(lake: Lake, tmp_path: Path) -> None:
    odd = {"role": "user", "content": "a\0b\ud83dc"}
    ingest(lake, [lines(tmp_path / "o.jsonl", {"messages": [odd, SAY]})], "odd")
    row = lake.sql("SELECT observation, prompt_messages FROM odd.steps").to_pylist()[0]
    assert (
        row["observation"]
        == "user: a\N{REPLACEMENT CHARACTER}b"
        + "\N{REPLACEMENT CHARACTER}" * (row["observation"].count("\N{REPLACEMENT CHARACTER}") - 1)
        + "c"
    )
    assert json.loads(row["prompt_messages"]) == [odd]


def test_tables_of_steps_are_not_taken_for_transcripts(tmp_path: Path) -> None:
    for number, record in enumerate(
        [
            {"obs": [1.0], "action": 0, "reward": 1.0, "messages": []},
            {"observation": "x", "action": 1, "reward": 0, "prompt": "p"},
            {"episode_id": 1, "observation": [0.1], "action": 2, "reward": 3},
        ]
    ):
        files = find_source([lines(tmp_path / f"{number}.jsonl", record)]).files
        assert not FORMAT.recognizes(files)
        assert find_format("auto", files).name == "jsonl"


def damaged(data: bytes) -> Iterator[bytes]:
    rng = random.Random(7)
    for _ in range(40):
        yield data[: rng.randrange(1, len(data))]
    for _ in range(80):
        place = rng.randrange(len(data))
        yield data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]


def test_whatever_bytes_come(tmp_path: Path) -> None:
    whole = json.dumps([result(), result(5)], indent=1).encode()
    path = tmp_path / "x.json"
    for data in damaged(whole):
        path.write_bytes(data)
        try:
            source = find_source([path])
            reading = FORMAT.read(source.files, ReadOptions())
            assert all(isinstance(found, Episode | RejectedEpisode) for found in reading)
        except SourceInvalidError as error:
            if "x.json" not in str(error):
                raise


def test_a_large_array_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "replaylake.datastore.interchange.formats.transcripts.transcripts._CHUNK_CHARS", 2000
    )
    path = tmp_path / "results.json"
    path.write_text(json.dumps([result(i) for i in range(40)]))
    source = find_source([path])
    reading = FORMAT.read(source.files, ReadOptions())
    assert len([*reading]) == 40
    chunks = [*FORMAT.read(source.files, ReadOptions())._tables.chunks()]  # type: ignore[attr-defined]
    assert len(chunks) > 10
    assert [c.first_row for c in chunks] == np.cumsum([0, *(c.table.num_rows for c in chunks)])[
        :-1
    ].tolist()


def test_a_lake_of_results(tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake", create=True)
    path = tmp_path / "results.json"
    path.write_text(json.dumps([result(1), result(1, 1, 0.0), result(2)]))
    ingest(lake, [path], "tau")
    found = lake.sql(
        'SELECT s.group_id, count(DISTINCT e.episode_id) AS n, max(e."return") AS best '
        "FROM tau.episodes e JOIN tau.steps s USING (episode_id) GROUP BY 1 ORDER BY 1"
    )
    assert found.to_pylist() == [
        {"group_id": "1", "n": 2, "best": 1.0},
        {"group_id": "2", "n": 1, "best": 1.0},
    ]
    # Token columns may come later, and need no migration.
    handle = lake.dataset("tau")
    late = Episode(
        "new", np.array(["user: x"], object), np.array(["y"], object), np.full(1, np.nan),
        extras={"completion_ids": pa.array([[1, 2, 3]])},
    )  # fmt: skip
    handle.append([late])
    assert handle.spec == replace(handle.spec, extras=handle.spec.extras)
    assert "completion_ids" in handle.spec.extras


# --- as others write them -------------------------------------------------------------------


@pytest.mark.parametrize("messages", [[ASK], [], [{"role": "User", "content": "x"}]])
def test_a_source_without_a_turn_is_refused_by_name(messages: list[Any], tmp_path: Path) -> None:
    source = find_source([lines(tmp_path / "asked.jsonl", {"messages": messages})])
    with pytest.raises(
        SourceInvalidError, match=r"line 1: found no turn of an assistant in any of 1"
    ):
        find_format("auto", source.files).read(source.files, ReadOptions())


@pytest.mark.parametrize(
    ("messages", "asked", "said"),
    [
        ([{"type": "human", "content": "q"}, {"type": "ai", "content": "a"}], "user: q", "a"),
        ([{"role": "user", "text": "q"}, {"role": "ai", "text": "a"}], "user: q", "a"),
        (
            [{"role": "user", "parts": [{"text": "q"}]}, {"role": "model", "parts": ["a"]}],
            "user: q",
            "a",
        ),
        (
            [
                {"role": "user", "content": [{"type": "tool_result", "content": "42"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
            ],
            "user: 42",
            "a",
        ),
    ],
)
def test_messages_of_other_shapes_are_shown_whole(
    messages: list[Any], asked: str, said: str, tmp_path: Path
) -> None:
    source = find_source([lines(tmp_path / "log.jsonl", {"messages": messages})])
    known = find_format("auto", source.files)
    assert known.name == "transcripts"
    (episode,) = known.read(source.files, ReadOptions())
    assert isinstance(episode, Episode)
    assert [*episode.observations] == [asked]
    assert [*episode.actions] == [said]


def test_a_trajectory_beside_its_history(tmp_path: Path) -> None:
    steps = [{"action": "ls", "observation": "a b", "thought": "look"}]
    record = {"trajectory": steps, "history": [SYSTEM, ASK, SAY], "info": {}}
    (episode,), _ = read(lines(tmp_path / "log.traj", record))
    assert [*episode.actions] == ["3A is free."]
    assert column(episode, "source_framework") == ["swe-agent"]
    assert json.loads(column(episode, "metadata")[0])["trajectory"] == steps


def test_a_pair_that_repeats_its_better_side_is_a_pair(tmp_path: Path) -> None:
    record = {
        "prompt": "Book a seat.",
        "chosen": [ASK, SAY],
        "rejected": [ASK, CALL],
        "messages": [ASK, SAY],
        "score_chosen": 9.0,
        "score_rejected": 2.0,
    }
    (better, worse), _ = read(lines(tmp_path / "log.jsonl", record))
    assert (better.rewards.tolist(), worse.rewards.tolist()) == ([9], [2])
    assert column(better, "group_id") == column(worse, "group_id")


def test_steps_that_keep_a_history_are_steps(tmp_path: Path) -> None:
    row = {"observation": [1.0], "action": 0, "reward": 1.0, "history": [ASK, SAY]}
    source = find_source([lines(tmp_path / "log.jsonl", row)])
    assert find_format("auto", source.files).name == "jsonl"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _write_dialogues(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_dialogues_of_parquet_are_those_of_json(lake: Lake, tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talks = [
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "7", "tool_call_id": "c"},
            {"role": "assistant", "content": "It is 7."},
        ],
        [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}],
    ]
    records = [
        {"id": "a", "messages": talks[0], "reward": 1.0, "level": 3},
        {"id": "b", "messages": talks[1], "reward": None, "level": 4},
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, records)))
    columns = {name: [one[name] for one in records] for name in records[0]}
    receipt = ingest(lake, [_write_dialogues(tmp_path / "log.parquet", **columns)], "chats")
    assert (receipt.format, receipt.episodes.committed) == ("transcripts", 2)
    ingest(lake, [tmp_path / "log.jsonl"], "lines")
    query = "SELECT * EXCLUDE (episode_id) FROM {}.steps ORDER BY source_episode_id, step"
    found, expected = (lake.sql(query.format(name)).to_pylist() for name in ("chats", "lines"))
    for row in (*found, *expected):  # Arrow orders fields as its schema does
        for name in ("prompt_messages", "completion_messages"):
            row[name] = json.loads(row[name])
    assert found == expected


@pytest.mark.parametrize(
    ("columns", "actions"),
    [
        ({"prompt": ["p"], "chosen": ["c"], "rejected": ["r"]}, ["c", "r"]),
        (
            {"conversations": [[{"from": "human", "value": "p"}, {"from": "gpt", "value": "c"}]]},
            ["c"],
        ),
        ({"prompt": ["p"], "completions": [["c", "d"]], "rewards": [[1.0, 0.0]]}, ["c", "d"]),
    ],
)
def test_other_forms_of_dialogues_in_parquet(
    lake: Lake, tmp_path: Path, columns: dict[str, Any], actions: list[str]
) -> None:
    receipt = ingest(lake, [_write_dialogues(tmp_path / "log.parquet", **columns)], "chats")
    assert receipt.format == "transcripts"
    found = lake.sql("SELECT action FROM chats.steps ORDER BY action")["action"].to_pylist()
    assert found == actions


def test_bytes_and_faults_in_parquet(lake: Lake, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    columns = {
        "messages": [messages, [], messages],
        "image": [b"x", None, None],
        "reward": ["1", "2", None],
    }
    receipt = ingest(lake, [_write_dialogues(tmp_path / "log.parquet", **columns)], "chats")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (1, 1)
    (check,) = [one for one in receipt.checks if one.outcome == "rejected"]
    assert "log.parquet row 0: reward: found '1', expected a number or null" in check.example
    assert any("log.parquet row 1" in note for note in receipt.notes)
    columns["reward"] = [None, None, "3"]
    ingest(lake, [_write_dialogues(tmp_path / "b.parquet", **columns)], "images")
    metadata = lake.sql("SELECT metadata FROM images.steps")["metadata"].to_pylist()[0]
    digest = hashlib.sha256(b"x").hexdigest()
    assert json.loads(metadata) == {"image": {"sha256": digest, "base64": "eA=="}}


def test_a_table_of_steps_with_messages_is_no_dialogue(lake: Lake, tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": "Hi"}]] * 2
    columns = {"episode_id": ["a", "a"], "step": [0, 1], "observation": [0.5, 1.5]}
    rest = {"action": [0, 1], "reward": [1.0, 1.0], "terminated": [False, True]}
    log = _write_dialogues(tmp_path / "log.parquet", **columns, **rest, trajectory=messages)
    assert ingest(lake, [log], "logged").format == "parquet"


def _simulation(number: int, **changes: Any) -> dict[str, Any]:
    """Return a simulation in the form of tau2-bench's data model."""
    call = {"id": "c", "name": "find", "arguments": {"id": 3}, "requestor": "assistant"}
    own = {"id": "u", "name": "toggle", "arguments": {}, "requestor": "user"}
    result = {"role": "tool", "id": "c", "content": "found", "requestor": "assistant"}
    both = [{**result, "id": "u", "requestor": "user", "content": "on"}]
    return {
        "id": f"s{number}",
        "task_id": "7",
        "trial": number,
        "termination_reason": "user_stop",
        "reward_info": {"reward": 1.0, "db_check": None},
        "messages": [
            {"role": "assistant", "content": "Hi! How can I help?"},
            {"role": "user", "content": "No data."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            result,
            {"role": "assistant", "content": "Toggle it."},
            {"role": "user", "content": None, "tool_calls": [own]},
            {"role": "tool", "tool_messages": both},
            {"role": "assistant", "content": "Done."},
            {"role": "user", "content": "###STOP###"},
        ],
        **changes,
    }


def _run(*simulations: Any) -> dict[str, Any]:
    agent = {"implementation": "llm_agent", "llm": "gpt"}
    info = {"git_commit": "0", "num_trials": 2, "agent_info": agent, "environment_info": {}}
    return {"timestamp": "t", "info": info, "tasks": [{"id": "7"}], "simulations": [*simulations]}


def test_runs_of_tau2_bench(lake: Lake, tmp_path: Path) -> None:
    cut = _simulation(1, termination_reason="max_steps", reward_info=None)
    run = _run(_simulation(0), cut, _simulation(2, messages=None))
    (tmp_path / "results.json").write_text(json.dumps(run, indent=2))
    receipt = ingest(lake, [tmp_path / "results.json"], "talks")
    assert (receipt.format, receipt.episodes.committed) == ("transcripts", 2)
    (check,) = [one for one in receipt.checks if one.outcome == "rejected"]
    assert "results.json record 2 (line 1): messages: found None" in check.example
    rows = lake.sql("SELECT * FROM talks.steps ORDER BY source_episode_id, step").to_pylist()
    first = rows[:4]
    assert [row["action"] for row in first] == [
        "Hi! How can I help?",
        'find({"id":3})',
        "Toggle it.",
        "Done.",
    ]
    assert first[3]["observation"] == "user: toggle({})\ntool: on"
    assert first[3]["final_observation"] == "user: ###STOP###"
    answered = json.loads(first[2]["prompt_messages"])[0]
    assert (answered["tool_call_id"], answered["content"]) == ("c", "found")
    assert [row["reward"] for row in first] == [0.0, 0.0, 0.0, 1.0]
    ends = [(row["terminated"], row["truncated"], row["status"]) for row in (rows[3], rows[7])]
    assert ends == [(True, False, "user_stop"), (False, True, "max_steps")]
    assert {(row["group_id"], row["policy"]) for row in rows} == {("7", "gpt")}
    metadata = json.loads(rows[0]["metadata"])
    assert metadata["task"] == {"id": "7"}
    assert metadata["run"]["info"]["num_trials"] == 2
    assert metadata["reward_info"] == {"reward": 1.0, "db_check": None}


def test_a_folder_of_simulations_of_tau2_bench(lake: Lake, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "simulations").mkdir(parents=True)
    run = {**_run(), "simulation_index": [{"id": "s0"}, {"id": "s1"}]}
    del run["simulations"]
    (folder / "results.json").write_text(json.dumps(run))
    for number in range(2):
        one = json.dumps(_simulation(number))
        (folder / "simulations" / f"s{number}.json").write_text(one)
    receipt = ingest(lake, [folder], "talks")
    assert (receipt.format, receipt.episodes.committed) == ("transcripts", 2)
    frameworks = lake.sql("SELECT DISTINCT source_framework AS f FROM talks.steps")["f"]
    assert frameworks.to_pylist() == ["tau2-bench"]


def test_a_long_run_is_recognized(tmp_path: Path) -> None:
    text = "x" * (9 << 20)
    run = _run(_simulation(0, note=text))
    (tmp_path / "results.json").write_text(json.dumps(run))
    assert find_format("auto", find_source([tmp_path / "results.json"]).files).name == "transcripts"
