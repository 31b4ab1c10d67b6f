"""Labels after the fact: matched by key, written once, counted, and nothing else touched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylake.datastore.errors import (
    ConfigInvalidError,
    NotFoundError,
    QueryError,
    QueryRefusedError,
    SchemaMismatchError,
    SourceInvalidError,
)
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.labels.annotate import AnnotationReceipt, annotate
from replaylake.datastore.maintenance.labels.labels import parse_key, read_labels
from replaylake.datastore.storage.log.expiry import expire


@pytest.fixture
def filled(lake: Lake, make_episode: Callable[..., Any]) -> Lake:
    """Episodes a (terminated) and b (open) of three steps each, rewards 1, 2, 3, in two shards."""
    dataset = lake.dataset("d")
    ids = {"decision_id": ["a0", "a1", "a2"]}
    dataset.append([make_episode("a", terminated=True, extras=ids, source_episode_id="client")])
    dataset.append([make_episode("b", extras={"decision_id": ["b0", "b1", "b2"]})])
    return lake


def steps(lake: Lake, columns: str) -> list[tuple[Any, ...]]:
    rows = lake.sql(f"select {columns} from d.steps order by episode_id, agent_id, step")
    return [tuple(row.values()) for row in rows.to_pylist()]


def column(lake: Lake, name: str) -> list[Any]:
    return [row[0] for row in steps(lake, name)]


def counts(receipt: AnnotationReceipt) -> tuple[int, ...]:
    return (receipt.matched, receipt.unmatched, receipt.ambiguous, receipt.repeated, receipt.steps)


def test_a_label_a_step(filled: Lake) -> None:
    labels = pa.table({"decision_id": ["a1", "b2", "nobody"], "converted": [True, False, True]})
    before = filled.dataset("d").snapshot()
    receipt = annotate(filled, "d", labels, on=["decision_id"], add=["converted"])
    assert column(filled, "converted") == [None, True, None, None, None, False]
    assert counts(receipt) == (2, 1, 0, 0, 2)
    assert receipt.labels == 3
    assert (receipt.version, receipt.columns, receipt.shards) == (3, ("converted",), 2)
    assert receipt.unmatched_keys == (("nobody",),)
    assert "converted" not in before.table.read().column_names
    assert before.table.read().num_rows == 6


def test_one_name_needs_no_list(filled: Lake) -> None:
    labels = pa.table({"decision_id": ["a1"], "converted": [True]})
    assert counts(annotate(filled, "d", labels, on="decision_id", add="converted")) == (
        1,
        0,
        0,
        0,
        1,
    )


def test_new_columns_of_which_each_shard_has_values_of_another(filled: Lake) -> None:
    labels = pa.table({"decision_id": ["a1", "b2"], "x": [1, None], "y": [None, 2]})
    receipt = annotate(filled, "d", labels, on=["decision_id"], add=["x", "y"])
    assert (receipt.version, receipt.steps) == (3, 2)
    assert column(filled, "x") == [None, 1, None, None, None, None]
    assert column(filled, "y") == [None, None, None, None, None, 2]


@pytest.mark.slow
def test_a_reward_by_expression_over_label_and_step(filled: Lake) -> None:
    labels = pa.table({"decision_id": ["a0", "a2"], "reward": [10.0, 20.0], "score": [1.0, 2.0]})
    annotate(filled, "d", labels, on=["decision_id"], set={"reward": "reward"})
    assert column(filled, "reward") == [10, 2, 20, 1, 2, 3]
    annotate(
        filled, "d", labels, on=["decision_id"], set={"reward": "steps.reward + 0.5 * score + step"}
    )
    assert column(filled, "reward") == [10.5, 2, 23, 1, 2, 3]
    annotate(filled, "d", labels, on=["decision_id"], set={"reward": "-1"})
    assert column(filled, "reward") == [-1, 2, -1, 1, 2, 3]


@pytest.mark.slow
def test_the_same_call_again_changes_nothing(filled: Lake) -> None:
    labels = pa.table({"decision_id": ["a0", "a1", "gone"], "bonus": [1.0, 2.0, 3.0]})

    def call(given: pa.Table, **more: Any) -> AnnotationReceipt:
        assigned = {"reward": "steps.reward + bonus"}
        return annotate(filled, "d", given, on=["decision_id"], set=assigned, **more)

    first = call(labels)
    assert column(filled, "reward")[:3] == [2, 4, 3]
    again = call(labels.take([2, 1, 0]).append_column("comment", pa.array(["x", "y", "z"])))
    assert again.already_present
    assert (again.version, *counts(again)) == (first.version, *counts(first))
    assert column(filled, "reward")[:3] == [2, 4, 3]
    # Another value, another key or another expression is another call.
    other = call(labels.set_column(1, "bonus", pa.array([0.5, 0.0, 0.0])))
    assert not other.already_present
    assert column(filled, "reward")[:3] == [2.5, 4, 3]
    with pytest.raises(ConfigInvalidError, match="reward twice"):
        call(labels, again=True)


def test_the_same_call_after_its_commit_was_dropped(filled: Lake, make_episode: Any) -> None:
    labels = pa.table({"decision_id": ["a0"], "bonus": [5.0]})

    def call() -> AnnotationReceipt:
        given = {"reward": "steps.reward + bonus"}
        return annotate(filled, "d", labels, on=["decision_id"], set=given)

    first = call()
    expire(filled.dataset("d").table.log, filled.dataset("d").append([make_episode("c")]).version)
    again = call()
    assert (again.already_present, again.version, again.labels) == (True, first.version, 1)
    assert column(filled, "reward")[0] == 6


def test_again_reaches_the_steps_that_came_since(filled: Lake, make_episode: Any) -> None:
    labels = pa.table({"episode_id": ["a", "c"], "grade": [1, 2]})
    assert annotate(filled, "d", labels, on=["episode_id"], add=["grade"]).unmatched == 1
    filled.dataset("d").append([make_episode("c", num_steps=1)])
    assert annotate(filled, "d", labels, on=["episode_id"], add=["grade"]).already_present
    receipt = annotate(filled, "d", labels, on=["episode_id"], add=["grade"], again=True)
    assert (receipt.steps, receipt.unchanged, receipt.shards) == (1, 3, 1)
    assert column(filled, "grade") == [1, 1, 1, None, None, None, 2]


def test_null_leaves_a_value_as_it_is(filled: Lake) -> None:
    on = ["decision_id"]
    labels = pa.table({"decision_id": ["a0", "a1"], "x": [1, 2]})
    annotate(filled, "d", labels, on=on, add=["x"])
    labels = pa.table({"decision_id": ["a0", "a1"], "x": [None, 5], "r": [7.0, None]})
    annotate(filled, "d", labels, on=on, add=["x"], set={"reward": "r"})
    assert steps(filled, "x, reward")[:2] == [(1, 7.0), (5, 2.0)]


def test_a_label_of_an_episode_is_for_all_its_steps_and_its_reward_for_the_last(
    filled: Lake,
) -> None:
    labels = pa.table({"episode_id": ["a", "b"], "score": [0.25, 0.75]})
    receipt = annotate(
        filled, "d", labels, on=["episode_id"], set={"reward": "score"}, add=["score"]
    )
    assert column(filled, "score") == [0.25] * 3 + [0.75] * 3
    assert column(filled, "reward") == [1, 2, 0.25, 1, 2, 0.75]
    assert (receipt.open_episodes, receipt.steps) == (1, 6)


def test_each_step_of_an_episode(filled: Lake) -> None:
    labels = pa.table({"id": ["client"], "weight": [2.0]})
    receipt = annotate(
        filled, "d", labels, on={"source_episode_id": "id"},
        set={"reward": "steps.reward * weight"}, to="each",
    )  # fmt: skip
    assert column(filled, "reward") == [2, 4, 6, 1, 2, 3]
    assert (receipt.steps, receipt.open_episodes) == (3, 0)


def test_a_step_of_an_episode(filled: Lake) -> None:
    labels = pa.table({"episode_id": ["a", "b", "b"], "step": [0.0, 2.0, 9.0], "ok": [1, 2, 3]})
    receipt = annotate(filled, "d", labels, on=["episode_id", "step"], add=["ok"])
    assert column(filled, "ok") == [1, None, None, None, None, 2]
    assert counts(receipt) == (2, 1, 0, 0, 2)


def test_ambiguous_and_repeated_keys_are_counted_and_left_alone(
    filled: Lake, make_episode: Any
) -> None:
    dataset = filled.dataset("d")
    dataset.append([make_episode("c", source_episode_id="client"), make_episode("e", num_steps=1)])
    keys = ["b", "b", "c", "c", "e", None]
    labels = pa.table({"episode_id": keys, "x": [1, 1, 2, 3, 4, 5]})
    receipt = annotate(filled, "d", labels, on=["episode_id"], add=["x"])
    # b is said twice, c has two values, e is plain, and one row has no key.
    assert counts(receipt) == (2, 1, 2, 1, 4)
    assert receipt.labels == 6
    assert receipt.ambiguous_keys == (("c",),)
    assert column(filled, "x") == [None] * 3 + [1] * 3 + [None] * 3 + [4]
    # Two episodes have one client id.
    labels = pa.table({"source_episode_id": ["client"], "x": [9]})
    receipt = annotate(filled, "d", labels, on=["source_episode_id"], add=["x"])
    assert (counts(receipt), receipt.version) == ((0, 0, 1, 0, 0), None)


@pytest.mark.slow
def test_several_agents(lake: Lake, make_episode: Any) -> None:
    lake.dataset("d").append([make_episode("g", agent_id=name) for name in ("p", "q")])
    labels = pa.table({"episode_id": ["g"], "x": [1.0]})
    receipt = annotate(lake, "d", labels, on=["episode_id"], set={"reward": "x"})
    assert counts(receipt) == (0, 0, 1, 0, 0)
    assert annotate(lake, "d", labels, on=["episode_id"], add=["x"]).steps == 6
    labels = pa.table({"episode_id": ["g"], "agent_id": ["q"], "x": [5.0]})
    annotate(lake, "d", labels, on=["episode_id", "agent_id"], set={"reward": "x"})
    assert column(lake, "reward") == [1, 2, 3, 1, 2, 5]
    labels = pa.table({"episode_id": ["g"], "agent_id": ["p"], "step": [0], "x": [6.0]})
    annotate(lake, "d", labels, on=["episode_id", "agent_id", "step"], set={"reward": "x"})
    assert column(lake, "reward") == [6, 2, 3, 1, 2, 5]


def test_strict_writes_nothing(filled: Lake) -> None:
    labels = pa.table({"decision_id": ["a0", "nobody"], "x": [1, 2]})
    receipt = annotate(filled, "d", labels, on=["decision_id"], add=["x"], strict=True)
    assert (receipt.refused, receipt.version, receipt.unmatched) == (True, None, 1)
    assert filled.dataset("d").snapshot().version == 2
    labels = labels.slice(0, 1)
    assert annotate(filled, "d", labels, on=["decision_id"], add=["x"], strict=True).version == 3


def test_only_shards_that_change_are_written_again(filled: Lake) -> None:
    before = filled.dataset("d").snapshot().files
    labels = pa.table({"decision_id": ["a0", "b0"], "r": [5.0, 1.0]})  # b0 has it already
    receipt = annotate(filled, "d", labels, on=["decision_id"], set={"reward": "r"})
    after = filled.dataset("d").snapshot().files
    assert (receipt.steps, receipt.unchanged, receipt.shards) == (1, 1, 1)
    assert after[1] == before[1]
    assert after[0] != before[0]
    assert [entry.since for entry in after] == [1, 2]


TYPES = [
    ("number", pa.array([1, 2], pa.uint16()), pa.int32()),
    ("text", pa.array(["good", "bad"]), pa.string()),
    ("word", pa.array(["good", "bad"]).dictionary_encode(), pa.dictionary(pa.int32(), pa.string())),
    ("list", pa.array([[1.5], [2.0, 3.0]]), pa.list_(pa.field("element", pa.float64()))),
    ("half", pa.array(np.array([1, 2], np.float16)), pa.float32()),
    ("struct", pa.array([{"a": 1}, {"a": 2}]), pa.struct([pa.field("a", pa.int64())])),
    ("when", pa.array([1, 2], pa.timestamp("ns", "Europe/Berlin")).cast(pa.timestamp("us", "UTC"),
        safe=False), pa.timestamp("us", "UTC")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "values", "kept"), TYPES, ids=[case[0] for case in TYPES])
def test_types_go_through_the_door(filled: Lake, name: str, values: pa.Array, kept: Any) -> None:
    labels = pa.table({"decision_id": ["a0", "b1"], name: values})
    annotate(filled, "d", labels, on=["decision_id"], add=[name])
    table = filled.dataset("d").snapshot().table
    assert table.schema.field(name).type == kept
    found = table.read().column(name).drop_null().to_pylist()
    assert found == values.cast(kept).to_pylist()
    # Changed once more, in the column that is there now.
    labels = pa.table({"decision_id": ["a0", "b1"], name: values.take(pa.array([1, 0]))})
    annotate(filled, "d", labels, on=["decision_id"], add=[name])
    found = filled.dataset("d").snapshot().table.read().column(name).drop_null().to_pylist()
    assert found == values.cast(kept).to_pylist()[::-1]
    oracle = DeltaTable(str(filled.dataset("d").path)).to_pyarrow_table()
    assert oracle.num_rows == 6
    assert oracle.column(name).null_count == 4


def test_whole_numbers_fit_a_column_of_numbers(filled: Lake) -> None:
    for score in (pa.array([0.5]), pa.array([2])):
        labels = pa.table({"decision_id": ["a0"], "score": score})
        annotate(filled, "d", labels, on=["decision_id"], add=["score"])
    assert column(filled, "score")[0] == 2.0


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"on": ["decision_id"]}, ConfigInvalidError, "nothing to write"),
        ({"on": [], "add": ["x"]}, ConfigInvalidError, "found nothing, expected decision_id"),
        ({"on": ["step"], "add": ["x"]}, ConfigInvalidError, "found step"),
        ({"on": ["decision_id", "step"], "add": ["x"]}, ConfigInvalidError, "on: found"),
        (
            {"on": ["request_id"], "add": ["x"]},
            NotFoundError,
            "request_id, which is not a column of the dataset",
        ),
        ({"on": ["decision_id"], "add": ["y"]}, NotFoundError, "no column 'y'"),
        ({"on": {"decision_id": "id"}, "add": ["x"]}, NotFoundError, "no column 'id'"),
        ({"on": ["decision_id"], "add": ["step"]}, ConfigInvalidError, "found step"),
        ({"on": ["decision_id"], "add": {"reward": "x"}}, ConfigInvalidError, "a reward is `set`"),
        ({"on": ["decision_id"], "add": {"decision_id": "x"}}, ConfigInvalidError, "decision_id"),
        ({"on": ["decision_id"], "add": {"a b": "x"}}, SchemaMismatchError, "'a b'"),
        (
            {"on": ["decision_id"], "add": {"next_observation": "x"}},
            SchemaMismatchError,
            "next_obs",
        ),
        ({"on": ["decision_id"], "set": {"terminated": "true"}}, ConfigInvalidError, "terminated"),
        ({"on": ["decision_id"], "set": {"reward": "nothing"}}, QueryError, "nothing"),
        ({"on": ["decision_id"], "set": {"reward": "random()"}}, QueryRefusedError, "random"),
        ({"on": ["decision_id"], "set": {"reward": "sum(x)"}}, QueryError, "GROUP BY"),
        ({"on": ["decision_id"], "set": {"reward": "x / 0.0"}}, SchemaMismatchError, "infinity"),
        ({"on": ["decision_id"], "set": {"reward": "t"}}, QueryError, "hot"),
        (
            {"on": ["decision_id"], "set": {"reward": "x"}, "to": "each"},
            ConfigInvalidError,
            "to each: expected",
        ),
        ({"on": ["decision_id"], "set": {"reward": "x"}, "to": "all"}, ConfigInvalidError, "'all'"),
    ],
)
def test_what_is_refused_changes_nothing(
    filled: Lake, more: dict[str, Any], error: type[Exception], said: str
) -> None:
    labels = pa.table({"decision_id": ["a0"], "x": [1.0], "t": ["hot"], "step": [0]})
    with pytest.raises(error, match=said):
        annotate(filled, "d", labels, **more)
    assert filled.dataset("d").snapshot().version == 2


def test_a_column_of_another_type_is_refused_by_name(filled: Lake) -> None:
    labels = pa.table({"decision_id": ["a0"], "x": [1]})
    annotate(filled, "d", labels, on=["decision_id"], add=["x"])
    labels = pa.table({"decision_id": ["a0"], "x": ["one"]})
    with pytest.raises(SchemaMismatchError, match="column 'x': found string, expected int64"):
        annotate(filled, "d", labels, on=["decision_id"], add=["x"])
    naive = pa.table({"decision_id": ["a0"], "at": pa.array([1], pa.timestamp("us"))})
    with pytest.raises(SchemaMismatchError, match="time zone"):
        annotate(filled, "d", naive, on=["decision_id"], add=["at"])


def test_the_log_keeps_no_key_and_no_expression(filled: Lake) -> None:
    labels = pa.table({"decision_id": ["a0", "someone-private"], "x": [1.0, 2.0]})
    assigned = {"reward": "case when decision_id = 'a-private-id' then 1 else x end"}
    annotate(filled, "d", labels, on=["decision_id"], set=assigned)
    logs = list((filled.dataset("d").path / "_delta_log").glob("*.json"))
    assert logs
    assert not any(b"private" in path.read_bytes() for path in logs)


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl", "json"])
def test_files(filled: Lake, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"labels[1].{suffix}"
    if suffix == "parquet":
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"key": ["007", "a1"], "x": [1.5, None]}), path)
    else:
        path.write_text(
            {
                "csv": "key,x\n007,1.5\na1,\n",
                "jsonl": '{"key": "007", "x": 1.5}\n{"key": "a1"}\n',
                "json": '[{"key": "007", "x": 1.5}, {"key": "a1"}]',
            }[suffix]
        )
    labels = read_labels(filled, str(path), parse_key({"decision_id": "key"}))
    assert labels.to_pylist() == [{"key": "007", "x": 1.5}, {"key": "a1", "x": None}]


def test_a_select_is_no_file(filled: Lake) -> None:
    query = "select episode_id, num_steps * 10 as size from d.episodes"
    labels = read_labels(filled, query, parse_key(["episode_id"]))
    annotate(filled, "d", labels, on=["episode_id"], add=["size"])
    assert set(column(filled, "size")) == {30}
    with pytest.raises(NotFoundError, match=r"selected\.csv"):
        read_labels(filled, "selected.csv", parse_key(["episode_id"]))


@pytest.mark.slow
def test_beside_a_compactor_and_writers(tmp_path: Path, make_episode: Any) -> None:
    lake = open_lake(tmp_path / "lake", create=True)
    dataset = lake.dataset("d")
    for number in range(12):
        dataset.append([make_episode(f"e{number:02}", terminated=True)])
    stop = threading.Event()
    failures: list[BaseException] = []

    def write(name: str) -> None:
        other = open_lake(tmp_path / "lake").dataset("d")
        number = 0
        while not stop.is_set() and number < 60:
            other.append([make_episode(f"{name}{number}", terminated=True)])
            number += 1

    def squeeze() -> None:
        while not stop.is_set():
            compact(open_lake(tmp_path / "lake"), "d")

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    works: list[Callable[[], None]] = [lambda: write("w"), lambda: write("v"), squeeze]
    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for round_ in range(4):
        labels = pa.table(
            {"episode_id": [f"e{n:02}" for n in range(12)], f"x{round_}": list(range(12))}
        )
        receipt = annotate(
            lake, "d", labels, on=["episode_id"], add=[f"x{round_}"], set={"reward": f"x{round_}"}
        )
        assert (receipt.matched, receipt.steps) == (12, 36)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    rows = lake.sql(
        "select episode_id, step, reward, x0, x3 from d.steps where episode_id like 'e%' "
        "order by episode_id, step"
    ).to_pylist()
    assert [row["x3"] for row in rows] == [n for n in range(12) for _ in range(3)]
    assert [row["x0"] for row in rows] == [n for n in range(12) for _ in range(3)]
    assert [row["reward"] for row in rows] == [r for n in range(12) for r in (1, 2, n)]
    oracle = DeltaTable(str(dataset.path)).to_pyarrow_table(columns=["episode_id"])
    assert oracle.num_rows == dataset.snapshot().num_steps


LABELS = st.lists(
    st.tuples(st.sampled_from(["a0", "a1", "b2", "z", None]), st.sampled_from([None, 1.0, 2.0])),
    max_size=8,
)


@pytest.mark.slow
@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
@given(rounds=st.lists(LABELS, min_size=1, max_size=3))
def test_any_labels_do_what_a_dictionary_does(
    tmp_path_factory: pytest.TempPathFactory, make_episode: Any, rounds: list[Any]
) -> None:
    lake = open_lake(tmp_path_factory.mktemp("any") / "lake", create=True)
    for name in ("a", "b"):
        ids = [f"{name}{n}" for n in range(3)]
        lake.dataset("d").append([make_episode(name, extras={"decision_id": ids})])
    rewards = dict(zip(["a0", "a1", "a2", "b0", "b1", "b2"], [1.0, 2.0, 3.0] * 2, strict=True))
    done: set[tuple[Any, ...]] = set()
    for rows in rounds:
        labels = pa.table({"decision_id": pa.array([key for key, _ in rows], pa.string()),
                           "r": pa.array([value for _, value in rows], pa.float64())})  # fmt: skip
        receipt = annotate(lake, "d", labels, on=["decision_id"], set={"reward": "r"})
        said: dict[str, set[float | None]] = {}
        for key, value in rows:
            if key is not None:
                said.setdefault(key, set()).add(value)
        whole = {key: values.copy().pop() for key, values in said.items() if len(values) == 1}
        if receipt.already_present:
            assert tuple(sorted(map(repr, rows))) in done
        else:
            rewards |= {k: v for k, v in whole.items() if v is not None and k in rewards}
            if receipt.version is not None:
                done.add(tuple(sorted(map(repr, rows))))
        total = receipt.matched + receipt.unmatched + receipt.ambiguous + receipt.repeated
        assert total == receipt.labels == len(rows)
        found = lake.sql("select decision_id, reward from d.steps").to_pylist()
        assert {row["decision_id"]: row["reward"] for row in found} == rewards


def test_a_label_of_another_type_is_refused_by_its_line(filled: Lake, tmp_path: Path) -> None:
    key = parse_key(["decision_id"])
    lines = '{"decision_id": "a0", "score": 1}\n' * 3 + '{"decision_id": "a1", "score": "n/a"}\n'
    (tmp_path / "labels.jsonl").write_text(lines)
    with pytest.raises(SourceInvalidError, match=r"labels\.jsonl line 4, column 'score'.*'n/a'"):
        read_labels(filled, tmp_path / "labels.jsonl", key)
    # Of a CSV, where each cell is text, the column is text.
    cells = "decision_id,score\n" + "a0,1\n" * 30 + "a1,n/a\n"
    (tmp_path / "labels.csv").write_text(cells)
    found = read_labels(filled, tmp_path / "labels.csv", key)
    assert found.column("score").to_pylist() == ["1"] * 30 + ["n/a"]
