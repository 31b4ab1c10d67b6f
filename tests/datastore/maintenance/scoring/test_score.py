"""Scores: each form of function, one commit with its provenance, nothing computed twice."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import replaylake as rl
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import (
    CommitConflictError,
    ConfigInvalidError,
    EmptyReplayError,
    SpaceUnsupportedError,
)
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.labels.annotate import annotate
from replaylake.datastore.maintenance.labels.episode_labels import label_episode
from replaylake.datastore.maintenance.scoring.function_scorer import FunctionScorer
from replaylake.datastore.maintenance.scoring.score import ScoreReceipt, score
from replaylake.datastore.maintenance.scoring.score_cache import ScoreCache
from replaylake.datastore.maintenance.scoring.scorer import Outcome, hash_content
from replaylake.datastore.storage.log.expiry import expire

_SOURCE = Path(__file__).with_name("my_rewards.py")


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of reward functions, as a user's: in a folder of its own, on the path."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "my_rewards.py").write_text(_SOURCE.read_text())
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    return importlib.import_module("my_rewards")


@pytest.fixture
def calls(tmp_path: Path) -> Callable[[], list[str]]:
    path = tmp_path / "calls"
    return lambda: path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def control(lake: Lake, make_episode: Callable[..., Episode]) -> Lake:
    """Episodes a (3 steps) and b (2 steps) of numbers, in two shards."""
    lake.dataset("d").append([make_episode("a", terminated=True)])
    lake.dataset("d").append([make_episode("b", num_steps=2)])
    return lake


@pytest.fixture
def math_lake(lake: Lake) -> Lake:
    """Four answers to one question; the right one is 7."""
    lake.dataset("math").append([_answer(f"m{i}", text) for i, text in enumerate("7877")])
    return lake


def _answer(name: str, text: str, answer: str = "7") -> Episode:
    return Episode(
        name,
        observations=np.array(["3 + 4?"], object),
        actions=np.array([text], object),
        rewards=np.array([0.0]),
        terminated=True,
        extras={"answer": [answer]},
    )


def column(lake: Lake, dataset: str, name: str) -> list[Any]:
    rows = lake.sql(f"select {name} as x from {dataset}.steps order by episode_id, agent_id, step")
    values: list[Any] = rows["x"].to_pylist()
    return values


def counts(receipt: ScoreReceipt) -> tuple[int, ...]:
    return (receipt.episodes, receipt.computed, receipt.cached, receipt.failed, receipt.unscored)


def test_a_number_goes_to_all_steps_of_its_episode(control: Lake, rewards: Any) -> None:
    receipt = score(control, "d", rewards.length, by="ada")
    assert column(control, "d", "length") == [3, 3, 3, 2, 2]
    assert column(control, "d", "length_scorer") == [receipt.scorer_id] * 5
    assert counts(receipt) == (2, 2, 0, 0, 0)
    assert (receipt.version, receipt.steps, receipt.shards) == (3, 5, 2)
    assert (receipt.mean, receipt.min, receipt.max) == (2.5, 2.0, 3.0)
    assert receipt.columns == ("length", "length_scorer")
    selected = control.sql("select count(*) as n from d.steps where length > 2")
    assert selected["n"].to_pylist() == [3]
    assert control.snapshot("d").replay("length = 2").num_steps == 2


def test_the_commit_names_the_scorer_and_its_version(control: Lake, rewards: Any) -> None:
    receipt = score(control, "d", rewards.length, where="num_steps > 2", by="ada")
    assert receipt.version is not None
    info = control.dataset("d").commit_info(receipt.version)
    assert info["operation"] == "SCORE"
    scored = info["scored"]
    assert (scored["name"], scored["by"], scored["scored_version"]) == ("length", "ada", 2)
    assert (scored["episodes"], scored["failed"]) == (1, 0)
    assert scored["levels"] == {"length": "episode"}
    assert "num_steps" in scored["where"]
    scorer = scored["scorer"]
    assert scorer["function"] == "my_rewards:length"
    import hashlib
    import inspect

    source = inspect.getsource(rewards.length).encode()
    assert scorer["source_sha256"] == hashlib.sha256(source).hexdigest()
    file = Path(rewards.__file__).read_bytes()
    assert scorer["module_sha256"] == hashlib.sha256(file).hexdigest()
    assert scored["scorer_id"] == receipt.scorer_id


def test_who_scored_outlives_the_commit(control: Lake, rewards: Any) -> None:
    receipt = score(control, "d", rewards.length)
    dataset = control.dataset("d")
    annotate(control, "d", pa.table({"episode_id": ["a"], "x": [1]}), on="episode_id", add="x")
    expire(dataset.table.log, dataset.snapshot().version)
    ids = [info["scored"]["scorer_id"] for info in dataset.history() if "scored" in info]
    assert ids == [receipt.scorer_id]


def test_a_list_has_a_number_for_each_step(control: Lake, rewards: Any) -> None:
    receipt = score(control, "d", rewards.halves)
    assert column(control, "d", "halves") == [0.5, 1.0, None, 0.5, 1.0]
    assert receipt.version is not None
    info = control.dataset("d").commit_info(receipt.version)
    assert info["scored"]["levels"] == {"halves": "step"}
    assert (receipt.mean, receipt.max) == (0.75, 1.0)


def test_components_are_columns_of_their_own(control: Lake, rewards: Any) -> None:
    receipt = score(control, "d", rewards.parts, name="judged")
    assert column(control, "d", "judged") == [0.5] * 5
    assert column(control, "d", "judged_by_step") == [1, 2, 3, 1, 2]
    assert column(control, "d", "judged_passed") == [1.0] * 5
    assert column(control, "d", "judged_pred") == ["seven\N{REPLACEMENT CHARACTER}"] * 5
    assert receipt.columns == (
        "judged",
        "judged_by_step",
        "judged_passed",
        "judged_pred",
        "judged_scorer",
    )


def test_a_failure_is_null_with_its_reason(
    lake: Lake, make_episode: Callable[..., Episode], rewards: Any
) -> None:
    lake.dataset("d").append([make_episode(name, num_steps=2) for name in "abcdefg"])
    receipt = score(lake, "d", rewards.failing)
    assert counts(receipt) == (7, 2, 0, 5, 1)
    assert column(lake, "d", "failing") == [1, 1] + [None] * 12
    reasons = dict(receipt.failures)
    assert reasons == {
        "b": "score: found nan, expected a finite number",
        "c": "score: found a list of 1 values, expected 2, one for each step",
        "d": "score: found str, expected a number, or a list with one number for each step",
        "e": "found a component named 'error', expected letters, digits and _, and none of "
        "error, scorer, prompt, answer",
        "g": "KeyError: 'answer'",
    }
    stored = lake.sql("select distinct episode_id, failing_error as e from d.steps").to_pylist()
    assert {row["episode_id"]: row["e"] for row in stored if row["e"]} == reasons


def test_verl_functions_get_answers_and_ground_truths(
    math_lake: Lake, rewards: Any, calls: Callable[[], list[str]]
) -> None:
    receipt = score(math_lake, "math", rewards.compute_score)
    assert column(math_lake, "math", "compute_score") == [1, 0, 1, 1]
    assert column(math_lake, "math", "compute_score_acc") == [1, 0, 1, 1]
    # Three samples are equal: what the function sees does not tell them apart.
    assert sorted(calls()) == ["7", "8"]
    assert counts(receipt) == (4, 2, 2, 0, 0)
    assert receipt.scorer["form"] == "verl"
    batched = score(math_lake, "math", FunctionScorer(rewards.compute_scores, batch_size=64))
    assert column(math_lake, "math", "compute_scores") == [1, 0, 1, 1]
    assert calls()[-1] == "2"
    assert batched.scorer["form"] == "verl batch"


def test_verl_takes_the_ground_truth_of_its_own_data_sets(lake: Lake, rewards: Any) -> None:
    given = {"reward_model": ['{"ground_truth": "8", "style": "rule"}'], "data_source": ["math"]}
    for name, extras in (("x", {}), ("y", {"extra_info": ['{"num_turns": 9}']})):
        one = _answer(name, "8")
        lake.dataset("other").append(
            [Episode(**{**vars(one), "extras": {**one.extras, **given, **extras}})]
        )
    receipt = score(lake, "other", rewards.compute_score)
    assert column(lake, "other", "compute_score") == [1, 1]
    assert receipt.failed == 0
    labeled = score(lake, "other", FunctionScorer(rewards.compute_score, label="answer"), name="b")
    assert column(lake, "other", "b") == [0, 0]
    assert labeled.scorer_id != receipt.scorer_id


def test_trl_functions_get_columns_and_isolate_failures(math_lake: Lake, rewards: Any) -> None:
    math_lake.dataset("math").append([_answer("m8", ""), _answer("m9", "boom")])
    receipt = score(math_lake, "math", rewards.exact)
    assert column(math_lake, "math", "exact") == [1, 0, 1, 1, None, None]
    assert receipt.failures == (("m9", "ValueError: boom"),)
    assert counts(receipt) == (6, 3, 2, 1, 1)
    score(math_lake, "math", rewards.awaited)
    assert column(math_lake, "math", "awaited") == [1, 1, 1, 1, 0, 4]
    wrong = score(math_lake, "math", rewards.short, where="episode_id in ('m0', 'm1')")
    assert wrong.computed == 2  # one by one, after the batch was refused


def test_trl_gets_messages_where_the_log_has_them(tmp_path: Path, lake: Lake) -> None:
    source = tmp_path / "chats.jsonl"
    source.write_text(
        '{"messages": [{"role": "user", "content": "3 + 4?"}, '
        '{"role": "assistant", "content": "7"}], "reward": 1.0}\n'
    )
    rl.ingest(lake, [source], "chats", format="transcripts")
    seen = []

    def check(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen.append((prompts, completions))
        return [1.0]

    score(lake, "chats", FunctionScorer(check, revision="1"))
    ((prompts, completions),) = seen
    assert [[one["content"] for one in messages] for messages in prompts] == [["3 + 4?"]]
    assert [[one["role"] for one in messages] for messages in completions] == [["assistant"]]


def test_trl_gets_the_ids_of_completions(lake: Lake) -> None:
    """Ids of two generations with what was read between them; None where some are unknown."""
    known = Episode(
        "known",
        observations=np.array(["3 + 4?", "7"], object),
        actions=np.array(["call", "7"], object),
        rewards=np.zeros(2),
        terminated=True,
        extras={
            "observation_tokens": [[1, 2], [5]],
            "action_tokens": [[3, 4], [6]],
        },
    )
    unknown = _answer("unknown", "7")
    nothing = pa.array([None], pa.list_(pa.int32()))
    ids = {"observation_tokens": nothing, "action_tokens": nothing}
    lake.dataset("talks").append(
        [known, Episode(**{**vars(unknown), "extras": ids})],
    )
    seen: list[Any] = []

    def check(completions: Any, completion_ids: Any) -> list[float]:
        seen.extend(completion_ids)
        return [float(len(ids or ())) for ids in completion_ids]

    score(lake, "talks", FunctionScorer(check, revision="1"))
    assert sorted(map(repr, seen)) == ["None", "[3, 4, 5, 6]"]


def test_missing_right_answers_are_counted_and_those_of_requests_found(lake: Lake) -> None:
    about = '{"usage": null, "metadata": {"ground_truth": "7"}}'
    lake.dataset("talks").append(
        [
            Episode(**{**vars(_answer(name, "7")), "extras": {"metadata": [text]}})
            for name, text in (("asked", about), ("none", "{}"))
        ]
    )

    def agrees(solution_str: str, ground_truth: str | None) -> float:
        return float(solution_str == ground_truth)

    receipt = score(lake, "talks", FunctionScorer(agrees, revision="1"))
    assert (receipt.unlabeled, receipt.failed) == (1, 0)
    assert column(lake, "talks", "agrees") == [1, 0]


def test_a_function_of_texts_refuses_numbers(control: Lake, rewards: Any) -> None:
    with pytest.raises(SpaceUnsupportedError, match=r"episode a has observations .* not text"):
        score(control, "d", rewards.awaited)
    assert control.snapshot("d").version == 2


def test_the_same_again_computes_and_changes_nothing(
    control: Lake, rewards: Any, calls: Callable[[], list[str]]
) -> None:
    first = score(control, "d", rewards.length)
    again = score(control, "d", rewards.length)
    assert (again.version, again.steps, counts(again)) == (None, 0, (2, 0, 2, 0, 0))
    assert len(calls()) == 2
    # Another name is other columns of the same outcomes.
    named = score(control, "d", rewards.length, name="n")
    assert (counts(named), named.scorer_id) == ((2, 0, 2, 0, 0), first.scorer_id)


def test_only_new_and_changed_content_is_computed(
    control: Lake,
    make_episode: Callable[..., Episode],
    rewards: Any,
    calls: Callable[[], list[str]],
) -> None:
    score(control, "d", rewards.length)
    score(control, "d", rewards.halves)  # a column of scores, which no scorer sees
    control.dataset("d").append([make_episode("c", num_steps=1)])
    labels = pa.table({"episode_id": ["a"], "reward": [9.0]})
    annotate(control, "d", labels, on="episode_id", set={"reward": "reward"})
    receipt = score(control, "d", rewards.length)
    assert counts(receipt) == (3, 2, 1, 0, 0)
    assert calls() == ["a", "b", "a", "c"]
    assert receipt.steps == 1  # only c had no score


def test_another_version_scores_anew_and_leaves_nothing_of_the_old(
    control: Lake, rewards: Any, calls: Callable[[], list[str]]
) -> None:
    before = score(control, "d", rewards.parts, name="s")
    path = Path(rewards.__file__)
    path.write_text(path.read_text().replace("float(len(episode))", "[None] * len(episode)"))
    importlib.reload(rewards)
    after = score(control, "d", rewards.length, name="s")
    assert after.scorer_id != before.scorer_id
    assert column(control, "d", "s") == [None] * 5
    assert column(control, "d", "s_pred") == [None] * 5
    assert column(control, "d", "s_scorer") == [after.scorer_id] * 5
    assert before.version is not None
    old = control.snapshot(f"d@{before.version}").sql("select distinct s, s_pred from steps")
    assert len(old) == 1
    assert old["s"].to_pylist() == [0.5]


def test_a_score_that_fails_now_is_no_longer_there(
    lake: Lake, make_episode: Callable[..., Episode], rewards: Any
) -> None:
    lake.dataset("d").append([make_episode("g", num_steps=1)])
    score(lake, "d", rewards.length, name="s")
    score(lake, "d", rewards.failing, name="s")
    assert column(lake, "d", "s") == [None]
    assert column(lake, "d", "s_error") == ["KeyError: 'answer'"]
    score(lake, "d", rewards.length, name="s")
    assert (column(lake, "d", "s"), column(lake, "d", "s_error")) == ([1], [None])


def test_scores_of_a_version_are_of_its_content(
    control: Lake, make_episode: Callable[..., Episode], rewards: Any
) -> None:
    control.dataset("d").append([make_episode("c")])
    receipt = score(control, "d@1", rewards.length)
    assert (receipt.scored_version, receipt.episodes, receipt.version) == (1, 1, 4)
    assert column(control, "d", "length") == [3] * 3 + [None] * 5


def test_columns_of_the_log_are_never_overwritten(
    lake: Lake, make_episode: Callable[..., Episode], rewards: Any
) -> None:
    extras = {"best_scorer": ["Ada", "Bo", "Ada"], "judge_note": ["", "", ""], "length": [1, 2, 3]}
    lake.dataset("d").append([make_episode("a", extras=extras)])
    for name, taken in (("length", "length"), ("best", "best_scorer")):
        with pytest.raises(ConfigInvalidError, match=f"column {taken} the dataset has already"):
            score(lake, "d", rewards.length, name=name)
    with pytest.raises(ConfigInvalidError, match="found 'a b', expected"):
        score(lake, "d", rewards.length, name="a b")
    seen = []

    def look(episode: Episode) -> float:
        seen.extend(episode.extras)
        return 0.0

    score(lake, "d", FunctionScorer(look, revision="1"), name="score")
    assert set(seen) == {*extras}
    with pytest.raises(ConfigInvalidError, match="column judge_note the dataset has already"):
        score(lake, "d", rewards.length, name="judge")


def test_a_component_does_not_write_another_score(control: Lake, rewards: Any) -> None:
    score(control, "d", rewards.length, name="s_passed")
    with pytest.raises(ConfigInvalidError, match="column s_passed the dataset has already"):
        score(control, "d", rewards.parts, name="s")
    assert column(control, "d", "s_passed") == [3, 3, 3, 2, 2]


def test_a_selection_of_nothing_is_refused(control: Lake, rewards: Any) -> None:
    with pytest.raises(EmptyReplayError, match="found no episode that meets the condition"):
        score(control, "d", rewards.length, where="num_steps > 9")


def test_agents_are_scored_alone_and_dialogues_whole(
    lake: Lake, make_episode: Callable[..., Episode], rewards: Any
) -> None:
    lake.dataset("d").append(
        [make_episode("a", agent_id="x"), make_episode("a", num_steps=2, agent_id="y")]
    )
    assert score(lake, "d", rewards.length).episodes == 2
    assert column(lake, "d", "length") == [3, 3, 3, 2, 2]


def test_pieces_of_an_episode_are_scored_alone(
    lake: Lake, make_episode: Callable[..., Episode], rewards: Any
) -> None:
    lake.dataset("d").append([make_episode("a"), make_episode("a", num_steps=2, first_step=5)])
    receipt = score(lake, "d", rewards.length)
    assert column(lake, "d", "length") == [3, 3, 3, 2, 2]
    assert receipt.episodes == 2


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (functools.partial(len), "is no function of a module"),
        (len, "is no function of a module"),
        ([].append, "is no function of a module"),
    ],
)
def test_a_version_that_the_source_does_not_tell_is_asked_for(function: Any, reason: str) -> None:
    with pytest.raises(ConfigInvalidError, match=f"revision: .*{reason}"):
        FunctionScorer(function)
    FunctionScorer(function, revision="1", name="x")


def test_what_a_closure_captures_has_to_be_told() -> None:
    limit = 3

    def short(episode: Episode) -> float:
        return float(len(episode) < limit)

    with pytest.raises(ConfigInvalidError, match="uses limit of the function around it"):
        FunctionScorer(short)
    ids = {str(FunctionScorer(short, revision=text).describe()) for text in ("3", "4", "3")}
    assert len(ids) == 2


def test_a_run_that_is_interrupted_keeps_what_it_computed(
    control: Lake, rewards: Any, calls: Callable[[], list[str]]
) -> None:
    def interrupt(done: int, total: int) -> None:
        assert total == 2
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(control, "d", rewards.length, on_progress=interrupt)
    assert control.snapshot("d").version == 2
    assert "length" not in control.snapshot("d").table.schema.names
    assert counts(score(control, "d", rewards.length)) == (2, 1, 1, 0, 0)
    assert calls() == ["a", "b"]


_RUN = """
import sys
import my_rewards
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.maintenance.scoring import score_cache
from replaylake.datastore.maintenance.scoring.score import score

score_cache._PAUSE = 0.0  # as many files as calls, however long the last one took
receipt = score(open_lake(sys.argv[1]), "d", my_rewards.slow_length)
print(receipt.computed, receipt.cached)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_is_resumed(
    tmp_path: Path, make_episode: Callable[..., Episode], rewards: Any,
    calls: Callable[[], list[str]],
) -> None:  # fmt: skip
    lake = open_lake(tmp_path / "lake", create=True)
    num = 120
    lake.dataset("d").append([make_episode(f"e{i}") for i in range(num)])
    environment = {**os.environ, "PYTHONPATH": str(Path(rewards.__file__).parent)}
    command = [sys.executable, "-c", _RUN, str(tmp_path / "lake")]
    for at in (20, 60):
        # Long before its end it waits to be killed.
        process = subprocess.Popen(command, env={**environment, "HOLD_AFTER": str(at + 10)})
        until = time.monotonic() + 60
        while len(calls()) < at:
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        # Nothing of a run that was not finished is seen.
        assert lake.snapshot("d").version == 1
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    computed, cached = map(int, done.stdout.split())
    assert computed + cached == num
    # What was being stored when a kill came was computed again.
    again = len(calls()) - num
    assert 0 <= again <= 2
    assert cached >= 58
    assert column(lake, "d", "slow_length") == [3.0] * 3 * num


def test_a_damaged_file_of_outcomes_is_computed_again(
    control: Lake, rewards: Any, calls: Callable[[], list[str]]
) -> None:
    receipt = score(control, "d", rewards.length)
    folder = f"d/_derived/scores/{receipt.scorer_id}"
    names = control.storage.names(folder)
    assert names
    for name in names:
        data = control.storage.get(f"{folder}/{name}")
        assert data is not None
        control.storage.put(f"{folder}/{name}", data.replace(b"3.0", b"4.0"))
    assert counts(score(control, "d", rewards.length)) == (2, 2, 0, 0, 0)
    assert column(control, "d", "length") == [3, 3, 3, 2, 2]


def test_the_cache_begins_new_files_and_leaves_out_failures(control: Lake) -> None:
    cache = ScoreCache(control.storage, "d", "0" * 16)
    for i in range(3000):
        cache.add(f"{i:064}", Outcome({"score": i / 2, "by_step": [None, 0.1]}, None, {"a": "é"}))
    cache.add("x", Outcome(error="no"))
    cache.flush()
    cache.flush()
    assert len(control.storage.names(f"d/_derived/scores/{'0' * 16}")) == 2
    again = ScoreCache(control.storage, "d", "0" * 16)
    assert again.find("x") is None
    found = again.find(f"{2999:064}")
    assert found == Outcome({"score": 1499.5, "by_step": [None, 0.1]}, None, {"a": "é"})


def test_equal_content_has_one_hash_however_it_is_stored() -> None:
    texts = pa.array(["a", None, "b", "a"])
    assert hash_content({"x": texts}, 1) == hash_content({"x": texts.dictionary_encode()}, 1)
    assert hash_content(pa.array([[1], [2]]).slice(1), 1) == hash_content(pa.array([[2]]), 1)
    values = [
        np.zeros(2, np.float32), np.zeros(2), np.zeros((2, 1)), ["a", "b"], ["ab"], [["a"], "b"],
        {"a": 1}, {"a": "1"}, {"b": 1}, None, math.nan, "\ud800",
    ]  # fmt: skip
    hashes = [hash_content(value, n) for value in values for n in (1, 2)]
    assert len(set(hashes)) == len(hashes)


def test_purge_removes_the_outcomes(control: Lake, rewards: Any) -> None:
    score(control, "d", rewards.length)
    assert list(control.storage.files("d/_derived/scores"))
    rl.purge(control, "d", "episode_id = 'a'")
    assert not list(control.storage.files("d/_derived/scores"))


def test_a_run_that_a_purge_overtakes_stores_nothing_of_it(control: Lake, rewards: Any) -> None:
    def purge(done: int, total: int) -> None:
        if done == 1:
            rl.purge(control, "d", "episode_id = 'a'")

    receipt = score(control, "d", rewards.length, on_progress=purge)
    assert not list(control.storage.files("d/_derived/scores"))
    assert (receipt.episodes, receipt.unmatched) == (2, 3)
    assert column(control, "d", "length") == [2, 2]
    assert rl.purge(control, "d", None).is_proven
    # The next run's outcomes are stored again.
    score(control, "d", rewards.halves)
    assert list(control.storage.files("d/_derived/scores"))


@pytest.mark.parametrize("order", ["AABB", "ABAB", "ABBA"])
def test_agents_of_interleaved_dialogues_are_scored_together(lake: Lake, order: str) -> None:
    agents = {"A": iter("xy"), "B": iter("xy")}
    texts = {}
    for number, name in enumerate(order):
        agent = next(agents[name])
        texts[name, agent] = f"{name}{agent}"
        episode = replace(_answer(name, texts[name, agent]), agent_id=agent)
        lake.dataset("d").append([replace(episode, env_steps=np.array([number]))])

    def join(solution_str: str) -> dict[str, Any]:
        return {"score": len(solution_str.split("\n")), "text": solution_str}

    receipt = score(lake, "d", FunctionScorer(join, name="s", revision="1"))
    assert receipt.episodes == 2
    assert column(lake, "d", "s") == [2] * 4
    assert [set(text.split("\n")) for text in column(lake, "d", "s_text")] == [
        {"Ax", "Ay"}, {"Ax", "Ay"}, {"Bx", "By"}, {"Bx", "By"},
    ]  # fmt: skip
    only = score(lake, "d", FunctionScorer(join, name="t", revision="1"), where="agent_id = 'x'")
    assert only.episodes == 2


def test_columns_that_look_like_marks_are_of_the_log(
    lake: Lake, make_episode: Callable[..., Episode], rewards: Any
) -> None:
    extras = {"top_scorer": [1.0, 2.0, 3.0], "best": [1.0, 2.0, 3.0], "best_scorer": [None] * 3}
    texts = [make_episode("b", extras={**extras, "best_scorer": ["Ada", "Bo", "Bo"]})]
    lake.dataset("d").append([make_episode("a", extras=extras), *texts])
    score(lake, "d", rewards.length)
    rl.delete(lake, "d", "episode_id = 'b'")
    for name in ("best", "top"):
        with pytest.raises(ConfigInvalidError, match="the dataset has already"):
            score(lake, "d", rewards.length, name=name)
    assert column(lake, "d", "best") == [1, 2, 3]


def test_a_name_whose_scores_were_all_deleted_is_still_its_own(control: Lake, rewards: Any) -> None:
    score(control, "d", rewards.length, where="episode_id = 'a'")
    rl.delete(control, "d", "episode_id = 'a'")
    assert score(control, "d", rewards.length).columns == ("length", "length_scorer")


def test_values_are_of_the_types_that_their_columns_have(control: Lake) -> None:
    def make(revision: str, level: Any) -> FunctionScorer:
        def rate(episode: Episode) -> dict[str, Any]:
            return {"score": 1.0, "level": level, "Note": level}

        return FunctionScorer(rate, name="s", revision=revision)

    score(control, "d", make("1", 0.5))
    assert column(control, "d", "s_note") == [0.5] * 5
    assert score(control, "d", make("2", "0.25")).failed == 0
    assert column(control, "d", "s_level") == [0.25] * 5
    receipt = score(control, "d", make("3", "high"))
    assert counts(receipt) == (2, 0, 0, 2, 0)
    assert receipt.failures[0][1].startswith("level: found 'high', expected a number, as the")
    assert column(control, "d", "s") == [None] * 5


@pytest.mark.parametrize(
    ("names", "reason"),
    [(("A", "a"), "two components named 'a'"), (("x_scorer",), "no end in _scorer")],
)
def test_components_that_are_refused(control: Lake, names: tuple[str, ...], reason: str) -> None:
    def rate(episode: Episode) -> dict[str, float]:
        return dict.fromkeys(names, 1.0)

    receipt = score(control, "d", FunctionScorer(rate, name="s", revision="1"))
    assert reason in receipt.failures[0][1]


def test_a_column_that_cannot_be_written_is_told_before_all_is_computed(
    lake: Lake, make_episode: Callable[..., Episode], rewards: Any, calls: Any
) -> None:
    lake.dataset("d").append([make_episode(str(i)) for i in range(9)])
    score(lake, "d", rewards.halves, name="s_passed")
    num_calls = 0

    def rate(episode: Episode) -> dict[str, float]:
        nonlocal num_calls
        num_calls += 1
        return {"score": 1.0, "passed": 1.0}

    with pytest.raises(ConfigInvalidError, match="column s_passed the dataset has already"):
        score(lake, "d", FunctionScorer(rate, name="s", revision="1"))
    assert num_calls == 1


def test_columns_that_appear_meanwhile_are_not_overwritten(control: Lake, rewards: Any) -> None:
    def add_column(done: int, total: int) -> None:
        if done == 1:
            values = pa.table({"episode_id": ["a", "b"], "length": [7.0, 8.0]})
            annotate(control, "d", values, on="episode_id", add="length")

    with pytest.raises(CommitConflictError, match="column length, which was added while"):
        score(control, "d", rewards.length, on_progress=add_column)
    assert column(control, "d", "length") == [7, 7, 7, 8, 8]


def test_components_of_two_scorers_do_not_mix(control: Lake, rewards: Any) -> None:
    other = FunctionScorer(rewards.parts, name="length")

    def add_scores(done: int, total: int) -> None:
        if done == 1:
            score(control, "d", other)

    with pytest.raises(CommitConflictError, match="make the same call again"):
        score(control, "d", rewards.length, on_progress=add_scores)
    receipt = score(control, "d", rewards.length)
    assert (receipt.cached, receipt.computed) == (2, 0)
    assert column(control, "d", "length_passed") == [None] * 5


def test_steps_that_are_added_meanwhile_have_no_score(
    lake: Lake, make_episode: Callable[..., Episode], rewards: Any
) -> None:
    lake.dataset("d").append([make_episode("a", num_steps=2)])

    def append(done: int, total: int) -> None:
        lake.dataset("d").append([make_episode("a", num_steps=2, first_step=2)])

    score(lake, "d", rewards.length, on_progress=append)
    assert column(lake, "d", "length") == [2, 2, None, None]
    assert score(lake, "d", rewards.length).computed == 1
    assert column(lake, "d", "length") == [4] * 4


def test_what_a_function_is_not_called_with_does_not_score_anew(math_lake: Lake) -> None:
    def by_text(solution_str: str, ground_truth: str) -> float:
        return float(solution_str == ground_truth)

    def by_texts(solution_strs: list[str], ground_truths: list[str]) -> list[float]:
        return [float(a == b) for a, b in zip(solution_strs, ground_truths, strict=True)]

    def by_columns(completions: list[str], answer: list[str]) -> list[float]:
        return [float(a == b) for a, b in zip(completions, answer, strict=True)]

    scorers = [FunctionScorer(one, revision="1") for one in (by_text, by_texts, by_columns)]
    for scorer in scorers:
        assert counts(score(math_lake, "math", scorer)) == (4, 2, 2, 0, 0)
        assert column(math_lake, "math", scorer.name) == [1, 0, 1, 1]
    notes = pa.table({"episode_id": ["m0", "m1", "m2", "m3"], "note": ["a", "b", "c", "d"]})
    annotate(math_lake, "math", notes, on="episode_id", add="note")
    for scorer in scorers:
        assert counts(score(math_lake, "math", scorer)) == (4, 0, 4, 0, 0)


def test_an_async_function_may_be_called_under_a_running_loop(
    math_lake: Lake, rewards: Any
) -> None:
    async def run() -> ScoreReceipt:
        return score(math_lake, "math", rewards.awaited)

    assert asyncio.run(run()).failed == 0
    assert column(math_lake, "math", "awaited") == [1] * 4


def test_a_scorer_sees_labels_but_not_who_set_them(control: Lake, rewards: Any) -> None:
    seen = []

    def look(episode: Episode) -> float:
        seen.append(sorted(episode.extras))
        return 1.0

    scorer = FunctionScorer(look, revision="1")
    score(control, "d", scorer)
    label_episode(control, "d", "verdict", "bad", episode_id="a", by="Ada")
    receipt = score(control, "d", scorer)
    # The other episode is as it was, so its score is known.
    assert (receipt.computed, receipt.cached) == (1, 1)
    assert seen[-1] == ["verdict"]
