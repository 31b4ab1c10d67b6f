"""slime's rollouts: samples become generations, and no pickle is executed."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.token_sequences import join_steps
from replaylake.datastore.episodes.tokens import TOKEN_TYPES
from replaylake.datastore.errors import ExtraMissingError, ReplayLakeError, SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.storage.arrow_values import combine_chunks

torch = pytest.importorskip("torch")

FIXTURE = Path(__file__).parents[3] / "fixtures" / "slime" / "7.pt"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _sample(index: int, **fields: Any) -> dict[str, Any]:
    return {
        "group_index": 0,
        "index": index,
        "prompt": "1+1?",
        "tokens": [1, 2, 11, 12],
        "response": "2",
        "response_length": 2,
        "reward": 1.0,
        "loss_mask": None,
        "rollout_log_probs": [-0.25, -0.5],
        "status": "completed",
        **fields,
    }


def _save(path: Path, *samples: Any, rollout_id: Any = 3) -> Path:
    torch.save({"rollout_id": rollout_id, "samples": list(samples)}, path)
    return path


def test_samples_become_generations(lake: Lake) -> None:
    receipt = ingest(lake, [FIXTURE], "talks")
    assert (receipt.format, receipt.episodes.committed, receipt.steps.committed) == ("slime", 4, 5)
    rows = lake.sql("SELECT * FROM talks.steps ORDER BY source_episode_id, step").to_pylist()
    names = ("source_episode_id", "step", "observation_tokens", "action_tokens")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("rollout7/6", 0, [1, 2], [11, 12]),
        ("rollout7/7", 0, [1, 2], [21, 22, 23]),
        ("rollout7/7", 1, [31], [41, 42]),
        ("rollout7/8", 0, [1, 3], [51, 52]),
        ("rollout7/9", 0, [1, 3], []),
    ]
    assert [row["action_loss_mask"] for row in rows] == [None, [True, False, True], *[None] * 3]
    assert [row["is_trainable"] for row in rows] == [None, True, True, False, False]
    assert rows[1]["action_log_probs"] == [-0.125, -0.25, -0.375]
    assert [row["reward"] for row in rows] == [1.0, None, None, 0.0, None]
    assert rows[2]["reward_components"] == [
        {"name": "correct", "score": 0.5, "weight": None},
        {"name": "format", "score": 1.0, "weight": None},
    ]
    # The oldest version that sampled.
    assert [row["policy_version"] for row in rows] == [5, 5, 5, None, None]
    ends = [(row["terminated"], row["truncated"]) for row in rows]
    assert ends == [(True, False), (False, False), (False, True), (True, False), (False, True)]
    assert (rows[0]["observation"], rows[0]["action"]) == ("user: 1+1?", "It is 2.")
    assert rows[3]["observation"] == "system: Solve.\nuser: 2+2?"
    # Of a response in which a tool spoke too, the text does not say who said what.
    assert (rows[1]["action"], rows[2]["action"]) == ("", "")
    metadata = json.loads(rows[1]["metadata"])
    assert metadata["response"] == "Let me see. Tool: 2. Two."
    pixels = metadata["multimodal_train_inputs"]["pixel_values"]
    assert pixels == {"tensor": "torch.float32", "shape": [2, 3]}
    assert json.loads(rows[0]["metadata"])["metadata"] == {"level": "easy"}
    groups = {(row["group_id"], row["group_id_source"], row["train_step"]) for row in rows}
    assert groups == {("rollout7/3", "given", 7), ("rollout7/4", "given", 7)}


def test_sequences_are_slime_s_own_bytes(lake: Lake) -> None:
    ingest(lake, [FIXTURE], "talks")
    for sample in torch.load(FIXTURE, weights_only=True)["samples"]:
        where = f"source_episode_id = 'rollout7/{sample['index']}'"
        table = lake.sql(f"SELECT * FROM talks.steps WHERE {where} ORDER BY step")
        names = [name for name in TOKEN_TYPES if name in table.column_names]
        columns = {name: combine_chunks(table[name].cast(TOKEN_TYPES[name])) for name in names}
        joined = join_steps(columns)
        start = len(sample["tokens"]) - sample["response_length"]
        assert joined.token_ids.tolist() == sample["tokens"]
        mask = sample["loss_mask"]
        mask = [1] * sample["response_length"] if mask is None else mask
        assert joined.loss_mask[start:].astype(int).tolist() == mask
        if sample["rollout_log_probs"] is not None:
            assert joined.log_probs is not None
            logged = np.asarray(sample["rollout_log_probs"], np.float32)
            assert joined.log_probs[start:].tobytes() == logged.tobytes()


def test_a_reward_and_a_column_by_their_paths(lake: Lake) -> None:
    mapping = {"reward": "reward.correct", "level": "metadata.level"}
    ingest(lake, [FIXTURE], "talks", options=ReadOptions(mapping=mapping))
    rows = lake.sql("SELECT reward, level FROM talks.steps ORDER BY source_episode_id, step")
    assert rows.to_pylist()[:3] == [
        {"reward": None, "level": "easy"},
        {"reward": 0.0, "level": None},
        {"reward": 0.5, "level": None},
    ]


def test_files_of_a_folder_and_of_a_zip(lake: Lake, tmp_path: Path) -> None:
    (tmp_path / "dumps").mkdir()
    _save(tmp_path / "dumps" / "3.pt", _sample(0))
    _save(tmp_path / "dumps" / "4.pt", _sample(1), rollout_id=4)
    with zipfile.ZipFile(tmp_path / "dumps.zip", "w") as archive:
        for name in ("3.pt", "4.pt"):
            archive.write(tmp_path / "dumps" / name, name)
    for number, name in enumerate(("dumps", "dumps.zip")):
        assert ingest(lake, [tmp_path / name], f"talks{number}").episodes.committed == 2


_CYCLE: list[Any] = []
_CYCLE.append({"x": _CYCLE})
_BAD: list[tuple[Any, str]] = [
    (3, "found 3, expected a dict"),
    (_sample(1, tokens=None), "tokens: found None, expected a list of token ids"),
    (_sample(1, tokens=[1, 2, -1, 3]), "tokens: found -1, expected ids of 0 or more"),
    (_sample(1, tokens=["a"] * 4), "tokens: found .*, expected a list of token ids"),
    (_sample(1, response_length=9), "response_length: found 9, expected 0 to 4"),
    (_sample(1, response_length=-1), "response_length: found -1, expected 0 to 4"),
    (_sample(1, response_length="2"), "response_length: found '2', expected"),
    (_sample(1, loss_mask=[1]), r"loss_mask: found \[1\], expected 2 flags"),
    (_sample(1, loss_mask=[1, 2]), r"loss_mask: found \[1, 2\], expected 2 flags"),
    (_sample(1, rollout_log_probs=[-1.0]), "rollout_log_probs: found 1 numbers, expected 2"),
    (_sample(1, rollout_log_probs=[0.5, -1]), "found 0.5 for token 0, expected at most 0"),
    (_sample(1, rollout_log_probs=[float("nan"), -1]), "found nan for token 0"),
    (_sample(1, reward="high"), "reward: found 'high', expected a number or a dict"),
    (_sample(1, reward=torch.tensor([1.0, 2.0])), r"reward: found a tensor of shape \[2\]"),
    (_sample(1, reward=torch.zeros(1, device="meta")), r"reward: found a tensor of shape \[1\]"),
    (_sample(1, tokens=torch.eye(4).to_sparse()[0]), "tokens: found a tensor .*sparse_coo"),
    (_sample(1, tokens=torch.zeros(4, dtype=torch.int64, device="meta")), "tokens: .* on meta"),
    (_sample(1, tokens=torch.ones(2, 2, dtype=torch.int64)), r"tokens: .* of shape \[2, 2\]"),
    (_sample(1, loss_mask=torch.ones(()).expand(2)), r"loss_mask: found a tensor of shape \[2\]"),
    (_sample(1, tokens=[[1], [2]]), "tokens: found lists in it, expected a list of numbers"),
    (_sample(1, status=["completed"]), r"status: found \['completed'\], expected text"),
    (_sample(1, metadata=_CYCLE), "found a list that contains itself"),
    (_sample(1, prompt=[3]), r"prompt: found \[3\], expected text or messages"),
]


def test_bad_samples_are_quarantined(lake: Lake, tmp_path: Path) -> None:
    path = _save(tmp_path / "3.pt", _sample(0), *(bad for bad, _ in _BAD), _sample(99))
    receipt = ingest(lake, [path], "talks")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (2, len(_BAD))
    rows = lake.sql("SELECT unnest(reasons) AS reason FROM talks.quarantine").to_pylist()
    for number, (_, message) in enumerate(_BAD):
        place = "" if "token 0" in message else f"3.pt sample {number + 1}: "
        assert any(re.search(place + message, row["reason"]) for row in rows), (message, rows)


def _repeat(value: Any, times: int) -> Any:
    """Return lists of ten, in which one value is found 10**times times."""
    for _ in range(times):
        value = [value] * 10
    return value


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": _repeat(0, 12)},
        {"metadata": _repeat("x" * 1000, 6)},
        {"tokens": _repeat(1, 12)},
        {"status": _repeat("x", 12)},
        {"prompt": [{"role": "user", "content": _repeat("x", 12)}]},
    ],
)
def test_few_bytes_that_become_many_values(
    lake: Lake, tmp_path: Path, fields: dict[str, Any]
) -> None:
    path = _save(tmp_path / "3.pt", _sample(0), _sample(1, **fields), _repeat(0, 12))
    assert path.stat().st_size < 10_000
    receipt = ingest(lake, [path], "talks")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (1, 2)
    rows = lake.sql("SELECT unnest(reasons) AS reason FROM talks.quarantine").to_pylist()
    reasons = sorted(row["reason"] for row in rows)
    assert "3.pt sample 1: found more than 64 MiB of values" in reasons[0]
    assert "3.pt sample 2: found list, expected a dict" in reasons[1]


def test_a_tensor_that_repeats_one_number(lake: Lake, tmp_path: Path) -> None:
    tokens = torch.zeros((), dtype=torch.int64).expand(10**12)
    path = _save(tmp_path / "3.pt", _sample(0, metadata={"x": tokens}), _sample(1, tokens=tokens))
    receipt = ingest(lake, [path], "talks")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (1, 1)
    (check,) = [one for one in receipt.checks if one.outcome == "rejected"]
    assert "sample 1: tokens: found a tensor of shape [1000000000000]" in check.example


class _Planted:
    """Creates a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_file_is_executed(lake: Lake, tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    path = _save(tmp_path / "3.pt", _sample(0, metadata={"x": _Planted(planted)}))
    with pytest.raises(SourceInvalidError, match=r"weights_only refused it .* None of it was"):
        ingest(lake, [path], "talks")
    assert not planted.exists()
    torch.load(path, weights_only=False)  # which would have
    assert planted.exists()


def test_other_files_of_torch_and_files_that_are_cut_off(lake: Lake, tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "model.pt")
    with pytest.raises(SourceInvalidError, match=r"torch.save with \['weight'\], expected slime's"):
        ingest(lake, [tmp_path / "model.pt"], "talks")
    whole = FIXTURE.read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SourceInvalidError, match=r"cut\.pt: could not be read to its end"):
        ingest(lake, [tmp_path / "cut.pt"], "talks")


def test_a_file_that_unpacks_to_more_than_it_may(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from replaylake.datastore.interchange.formats import slime

    monkeypatch.setattr(slime, "_MAX_BYTES", 1000)
    with pytest.raises(
        SourceInvalidError, match=r"7\.pt: found [\d,]+ bytes, expected at most 1,000"
    ):
        ingest(lake, [FIXTURE], "talks")


@pytest.mark.slow
def test_flipped_bytes(lake: Lake, tmp_path: Path) -> None:
    with zipfile.ZipFile(FIXTURE) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    (name,) = [name for name in members if name.endswith("/data.pkl")]
    rng = np.random.default_rng(13)
    for number in range(20):
        damaged = bytearray(members[name])
        for place in rng.integers(len(damaged), size=2):
            damaged[place] ^= 1 << int(rng.integers(8))
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w") as archive:  # whose checksums are right
            for member, content in members.items():
                archive.writestr(member, bytes(damaged) if member == name else content)
        (tmp_path / f"{number}.pt").write_bytes(data.getvalue())
        with suppress(ReplayLakeError):
            ingest(lake, [tmp_path / f"{number}.pt"], f"talks{number}")


def test_without_torch_the_extra_is_named(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ExtraMissingError, match=r"pip install 'replaylake\[learn\]'"):
        ingest(lake, [FIXTURE], "talks")
