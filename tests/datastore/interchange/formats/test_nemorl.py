"""NeMo-RL's training data: sequences become generations, padding goes, bad lines are set aside."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from replaylake.datastore.episodes.token_sequences import join_steps
from replaylake.datastore.episodes.tokens import TOKEN_TYPES
from replaylake.datastore.errors import ReplayLakeError
from replaylake.datastore.interchange.formats import nemorl
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.sources.source import find_source
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.storage.arrow_values import combine_chunks


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _sample(number: int, **fields: Any) -> dict[str, Any]:
    """Two generations, of which the first had a token filtered; the batch's longest has 10."""
    return {
        "content": [["What is it?", "Let me see.", "Tool: 4", "It is 4.", "Right."]],
        "rewards": [1.0],
        "input_lengths": [9],
        "token_ids": [[11, 12, 21, 22, 23, 31, 41, 42, 51, 0]],
        "token_loss_mask": [[0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0]],
        "sample_loss_mask": [1.0],
        "advantages": [[0.5] * 10],
        "generation_logprobs": [[0.0, 0.0, -0.1, -0.2, -0.3, 0.0, -0.4, -0.5, 0.0, 0.0]],
        "prev_logprobs": [[-9.0, -9.0, -0.2, -0.3, -0.4, -9.0, -0.5, -0.6, -9.0, 0.0]],
        "agent_ref": [{"name": "math"}],
        "idx": number,
        **fields,
    }


def _write(folder: Path, lines: list[Any], name: str = "train_data_step7.jsonl") -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / name).write_text("".join(f"{text}\n" for text in texts))
    return folder / name


def test_sample_becomes_generations(lake: Lake, tmp_path: Path) -> None:
    receipt = ingest(lake, [_write(tmp_path, [_sample(0), _sample(1)])], "talks")
    assert receipt.format == "nemorl"
    assert receipt.episodes.rejected == 0
    rows = lake.sql("SELECT * FROM talks.steps WHERE source_episode_id = 'step7/1' ORDER BY step")
    first, second = rows.to_pylist()
    assert (first["observation"], first["action"]) == ("What is it?", "Let me see.")
    assert (second["observation"], second["action"]) == ("Tool: 4", "It is 4.")
    assert second["final_observation"] == "Right."
    assert (first["observation_tokens"], first["action_tokens"]) == ([11, 12], [21, 22, 23])
    assert (second["observation_tokens"], second["action_tokens"]) == ([31], [41, 42])
    assert second["final_observation_tokens"] == [51]
    assert first["action_loss_mask"] == [True, False, True]
    assert np.float32(first["action_log_probs"]).tolist() == np.float32([-0.1, -0.2, -0.3]).tolist()
    assert first["behavior_log_prob"] == pytest.approx(-0.6)
    assert second["proximal_log_probs"] == pytest.approx([-0.5, -0.6])
    assert second["action_advantages"] == [0.5, 0.5]
    assert (first["reward"], second["reward"]) == (0.0, 1.0)
    assert (first["terminated"], second["terminated"]) == (False, True)
    assert (first["train_step"], first["source_framework"]) == (7, "nemo-rl")
    assert json.loads(first["metadata"]) == {"agent_ref": [{"name": "math"}]}
    assert second["metadata"] is None
    groups = lake.sql("SELECT num_episodes, mean FROM talks.groups").to_pylist()
    assert groups == [{"num_episodes": 2, "mean": 1.0}]


def test_sequences_are_the_log_s_own_bytes(lake: Lake, tmp_path: Path) -> None:
    sample = _sample(0)
    ingest(lake, [_write(tmp_path, [sample])], "talks")
    table = lake.snapshot("talks").table.read().sort_by("step")
    names = [name for name in TOKEN_TYPES if name in table.column_names]
    joined = join_steps({name: combine_chunks(table[name]) for name in names})
    assert joined.token_ids.tolist() == sample["token_ids"][0][:9]
    assert joined.loss_mask.tolist() == [bool(one) for one in sample["token_loss_mask"][0][:9]]
    assert joined.log_probs is not None
    logged = np.asarray(sample["generation_logprobs"][0][:9], np.float32)
    assert joined.log_probs.tobytes() == logged.tobytes()
    (row,) = lake.sql("SELECT token_ids, loss_mask FROM talks.sequences").to_pylist()
    assert row["token_ids"] == joined.token_ids.tolist()
    assert row["loss_mask"] == joined.loss_mask.astype(int).tolist()


def test_samples_out_of_the_loss_and_texts_that_cannot_be_told_apart(
    lake: Lake, tmp_path: Path
) -> None:
    texts = [["a system prompt", "What is it?", "Let me see.", "Tool: 4", "It is 4.", "Right."]]
    sample = _sample(0, sample_loss_mask=[0.0], content=texts)
    for name in ("rewards", "generation_logprobs", "advantages", "prev_logprobs"):
        del sample[name]
    ingest(lake, [_write(tmp_path, [sample], "log.jsonl")], "talks")
    rows = lake.sql("SELECT * FROM talks.steps ORDER BY step").to_pylist()
    # Without log-probs, the filtered token cannot be told from what was read.
    assert [row["action_tokens"] for row in rows] == [[21], [23], [41, 42]]
    assert {row["is_trainable"] for row in rows} == {False}
    assert {(row["observation"], row["action"]) for row in rows} == {("", "")}
    assert json.loads(rows[0]["metadata"])["content"] == texts
    assert {row["reward"] for row in rows} == {None}
    assert rows[0]["source_episode_id"] == "0/0"
    assert rows[0]["train_step"] is None


def test_rewards_of_filtered_samples(lake: Lake, tmp_path: Path) -> None:
    """With dynamic sampling, `rewards` are of the samples before the filter, in their order."""
    ingest(lake, [_write(tmp_path, [_sample(0, rewards=[-3.0], filtered_rewards=[0.5])])], "talks")
    rows = lake.sql("SELECT reward, metadata FROM talks.steps ORDER BY step").to_pylist()
    assert [row["reward"] for row in rows] == [0.0, 0.5]
    assert json.loads(rows[0]["metadata"])["rewards"] == [-3.0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"token_ids": [[1,', r"Expecting value: line 1 column 19"),
        ("[]", "found list, expected an object"),
        (_sample(1, input_lengths=[11]), "with input_lengths 11, expected"),
        (_sample(1, input_lengths=9), "input_lengths: found 9, expected a list of one value"),
        (_sample(1, input_lengths=["9"]), "input_lengths: found '9', expected a number"),
        (_sample(1, token_ids=[[1.5] * 10]), r"token_ids: found float64 \[10\]"),
        (_sample(1, token_ids=[[-1] * 10]), "token_ids: found -1, expected ids of 0 or more"),
        (_sample(1, token_loss_mask=[[2] * 10]), "token_loss_mask: found 2, expected 0 and 1"),
        (_sample(1, token_loss_mask=[[1] * 10]), "token_loss_mask: found 1 after 9 tokens"),
        (_sample(1, token_loss_mask=[[1] * 9]), r"token_loss_mask: found int64 \[9\]"),
        (_sample(1, prev_logprobs=[[-1.0] * 9]), r"prev_logprobs: found float64 \[9\]"),
        (
            _sample(1, token_loss_mask=[[0] * 10], generation_logprobs=None),
            "loss_mask: found no sampled token among 9",
        ),
        (_sample(1, generation_logprobs=[[0.5] * 10]), "found 0.5 for token 0, expected at most 0"),
        (_sample(1, generation_logprobs=[[float("nan")] * 10]), "found nan for token 0"),
        (_sample(1, generation_logprobs=[[-1e300] * 10]), "found -inf for token 0"),
        (_sample(1, input_lengths=[float("inf")]), "cannot convert float infinity"),
        (_sample(1, idx="\ud83d"), "surrogates not allowed"),
    ],
)
def test_bad_lines_are_quarantined(lake: Lake, tmp_path: Path, line: Any, message: str) -> None:
    path = _write(tmp_path, [_sample(0), line, _sample(2)])
    receipt = ingest(lake, [path], "talks")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (2, 1)
    (check,) = [one for one in receipt.checks if one.outcome == "rejected"]
    assert check.name in ("malformed", "tokens")
    assert "train_data_step7.jsonl line 2: " in check.example or check.place.endswith(" row 2")
    assert re.search(message, check.example)


def test_flipped_bytes(lake: Lake, tmp_path: Path) -> None:
    whole = _write(tmp_path, [_sample(0), _sample(1), _sample(2)]).read_bytes()
    rng = np.random.default_rng(3)
    for number in range(12):
        damaged = bytearray(whole)
        for place in rng.integers(len(whole), size=3):
            damaged[place] ^= 1 << int(rng.integers(8))
        (tmp_path / f"{number}.jsonl").write_bytes(damaged)
        # Recognized by its first line, which may be damaged.
        with suppress(ReplayLakeError):
            ingest(lake, [tmp_path / f"{number}.jsonl"], f"talks{number}", format="nemorl")


def test_a_file_that_is_cut_off(lake: Lake, tmp_path: Path) -> None:
    text = json.dumps(_sample(0)) + "\n" + json.dumps(_sample(1))
    for end in (len(text) - 1, len(text) - 40):
        (tmp_path / f"cut{end}.jsonl").write_text(text[:end])
        receipt = ingest(lake, [tmp_path / f"cut{end}.jsonl"], f"talks{end}")
        assert (receipt.episodes.committed, receipt.episodes.rejected) == (1, 1)


def _tables(path: Path) -> list[tuple[pa.Table, dict[int, str], list[int], int]]:
    file = find_source([path]).files[0]
    reading = nemorl._SampleTables([file])
    return [
        (chunk.table, dict(chunk.damage), list(chunk.lines), chunk.first_row)
        for chunk in reading.chunks()
    ]


def _random_sample(rng: np.random.Generator, number: int) -> dict[str, Any]:
    """A sample of several generations, some of its tokens filtered, some of its fields absent."""
    length, padding = int(rng.integers(1, 120)), int(rng.integers(0, 3)) * 7
    runs = rng.random(length) < np.repeat(rng.random(length), 5)[:length]
    mask = [*runs.astype(float).tolist(), *[0.0] * padding]
    log_probs = np.where(runs | (rng.random(length) < 0.05), -rng.standard_exponential(length), 0)
    values = [*log_probs.tolist(), *[0.0] * padding]
    decimals = [float(round(one, 2)) for one in values]
    ids = rng.integers(0, 150_000, length + padding).tolist()
    num_texts = 2 * int((np.diff(np.append(0, mask)) > 0).sum()) + (not mask[length - 1])
    fields = {
        "content": [[f"text {i} [1, 2]" for i in range(num_texts)]],
        "rewards": [float(rng.standard_normal())],
        "filtered_rewards": [1],
        "token_loss_mask": [[int(one) for one in mask]] if number % 3 else [mask],
        "sample_loss_mask": [float(number % 5 > 0)],
        "generation_logprobs": [values],
        "prev_logprobs": [decimals],
        "advantages": [[0.25] * len(ids)],
        "other_logprobs": [values],
        "idx": number,
    }
    left_out = {name for name in fields if name != "token_loss_mask" and rng.random() < 0.15}
    return {
        "input_lengths": [length],
        "token_ids": [ids],
        **{name: value for name, value in fields.items() if name not in left_out},
    }


_ODD_LINES: tuple[Any, ...] = (
    '{"token_ids": [[1,',
    "",
    "[]",
    "null",
    "NaN",
    *("7", '"text"', "[[[[", json.dumps(list(range(40)))),
)


def _odd_fields(ids: list[int]) -> list[dict[str, Any]]:
    num = len(ids)
    return [
        {"input_lengths": [num + 1]},
        {"input_lengths": [0]},
        {"input_lengths": num},
        {"input_lengths": [float("inf")]},
        {"token_ids": ids},
        {"token_ids": [[-1, *ids[1:]]]},
        {"token_ids": [[2**31, *ids[1:]]]},
        {"token_ids": [[2**63, *ids[1:]]]},
        {"token_ids": [[10**40, *ids[1:]]]},
        {"token_ids": [[*ids[1:], None]]},
        {"token_ids": [[*ids[1:], [3]]]},
        {"token_ids": [[0.5] * num]},
        {"token_loss_mask": [[2] * num]},
        {"token_loss_mask": [[True] * num]},
        {"token_loss_mask": [[0] * num], "generation_logprobs": None},
        {"token_loss_mask": [[1.0] * (num - 1)]},
        {"generation_logprobs": [[float("nan")] * num]},
        {"generation_logprobs": [[-1e300] * num]},
        {"generation_logprobs": [[0, *[-0.5] * (num - 1)]]},
        {"generation_logprobs": [[-0.0] * num]},
        {"rewards": [float("nan")], "filtered_rewards": None},
        {"rewards": ["1"], "filtered_rewards": None},
        {"idx": "\ud83d"},
        {"idx": ids},
        {"idx": "a\x00b"},
        {"other": {"scores": [0.5] * 40, "deep": [[[list(range(30))]]]}},
        {"other": float("inf")},
        {"other": "\ud83d"},
        {"content": [["\ud83d"]]},
        {"content": [list(range(50))]},
        {"content": [[f"see [{', '.join(map(str, range(40)))}]"]]},
    ]


def test_blocks_of_lines_are_read_as_each_line_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of a block have the rows, faults and places that they have when read one by one."""
    monkeypatch.setattr(nemorl, "_CHUNK_TOKENS", 2_000)
    rng = np.random.default_rng(11)
    lines: list[Any] = [_random_sample(rng, number) for number in range(80)]
    ids = rng.integers(0, 150_000, 60).tolist()
    plain = {
        "input_lengths": [60],
        "token_ids": [ids],
        "token_loss_mask": [[0.0] * 20 + [1.0] * 40],
        "generation_logprobs": [[-0.5] * 60],
    }
    odd = [*_ODD_LINES, *({**plain, **fields} for fields in _odd_fields(ids))]
    odd.append(json.dumps(plain)[:-1] + ', "token_ids": [[1, 2, 3]], "input_lengths": [3]}')
    for number, line in enumerate(odd):
        lines.insert(3 * number, line)
    path = _write(tmp_path, lines)
    found = _tables(path)
    monkeypatch.setattr(nemorl, "parse_lines", lambda texts: [None] * len(texts))
    expected = _tables(path)
    assert len(found) == len(expected) > 5
    for (table, *rest), (known, *known_rest) in zip(found, expected, strict=True):
        assert rest == known_rest
        for name in table.column_names:
            # By their bytes: NaN equals nothing, and -0.0 equals 0.0.
            values, others = (combine_chunks(one[name]) for one in (table, known))
            assert _to_bits(values) == _to_bits(others), name
    assert sum(len(damage) for _, damage, _, _ in found) > 20


def _to_bits(array: pa.Array) -> Any:
    if pa.types.is_list(array.type):
        return array.is_valid().to_pylist(), pc.list_value_length(array), _to_bits(array.flatten())
    return repr(array.to_pylist())


def test_most_lines_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a block costs more than its lines one by one."""
    rng = np.random.default_rng(12)
    path = _write(tmp_path, [_random_sample(rng, number) for number in range(40)])
    read_one_by_one: list[int] = []
    read = nemorl._BlockReader._read_sample

    def note(self: Any, line: Any) -> Any:
        read_one_by_one.append(line.number)
        return read(self, line)

    monkeypatch.setattr(nemorl._BlockReader, "_read_sample", note)
    assert sum(table.num_rows for table, *_ in _tables(path)) > 40
    assert len(read_one_by_one) < 15
