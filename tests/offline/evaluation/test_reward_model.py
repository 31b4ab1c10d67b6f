"""Reward models: a tiny classifier, saved and loaded by transformers, scores as it does alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replaylake.cli.main import main
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import NotFoundError, SourceInvalidError, SpaceUnsupportedError
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.scoring.score import score
from replaylake.offline.evaluation.reward_model import RewardModel

# transformers alone takes 5 s to import.
pytestmark = pytest.mark.slow

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
ANSWERS = ("seven", "eight", "seven seven seven", "two plus five is seven", "seven")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of 3 layers with random weights, and a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "user", "assistant", "two", "plus", "five", "is", "seven", "eight"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", chat_template=TEMPLATE
    )
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=24, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("models") / "tiny"
    BertForSequenceClassification(config).save_pretrained(path)
    fast.save_pretrained(path)
    return path


@pytest.fixture
def math_lake(tmp_path: Path) -> Lake:
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("math").append([_answer(f"m{i}", text) for i, text in enumerate(ANSWERS)])
    return lake


def _answer(name: str, text: str) -> Episode:
    return Episode(
        name,
        observations=np.array(["two plus five"], object),
        actions=np.array([text], object),
        rewards=np.array([0.0]),
        terminated=True,
    )


def scores(lake: Lake, name: str) -> list[float]:
    rows = lake.sql(f"select {name} as x from math.steps order by episode_id")
    values: list[float] = rows["x"].to_pylist()
    return values


def compute(folder: Path, text: Any, **options: Any) -> float:
    """Return what transformers itself gives for one text, or a pair."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    texts = [text] if isinstance(text, str) else list(text)
    with torch.inference_mode():
        return float(model(**tokenizer(*texts, return_tensors="pt", **options)).logits[0, 0])


def test_scores_are_those_of_the_model_itself(math_lake: Lake, folder: Path) -> None:
    receipt = score(math_lake, "math", RewardModel(folder, batch_size=3))
    assert (receipt.computed, receipt.cached, receipt.failed) == (4, 1, 0)
    expected = [
        compute(folder, f"user two plus five assistant {text} ", add_special_tokens=False)
        for text in ANSWERS
    ]
    assert scores(math_lake, "reward_model") == pytest.approx(expected, abs=1e-6)
    assert len({round(value, 6) for value in expected}) == 4
    assert receipt.version is not None
    scored = math_lake.dataset("math").commit_info(receipt.version)["scored"]["scorer"]
    assert (scored["kind"], scored["model"]) == ("model", "tiny")
    assert set(scored["files"]) >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert score(math_lake, "math", RewardModel(folder)).cached == 5


def test_without_a_template_prompt_and_completion_are_a_pair(
    math_lake: Lake, folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "plain"
    shutil.copytree(folder, copy)
    (copy / "chat_template.jinja").unlink()
    before = RewardModel(folder).describe()["sha256"]
    model = RewardModel(copy, name="plain")
    assert model.describe()["sha256"] != before
    score(math_lake, "math", model)
    expected = [compute(copy, ("two plus five", text)) for text in ANSWERS]
    assert scores(math_lake, "plain") == pytest.approx(expected, abs=1e-6)


def test_the_command_scores_with_a_model(
    math_lake: Lake, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["score", "math", "--model", str(folder), "--lake", str(tmp_path / "lake")]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    first, second, *_, last = printed.out.splitlines()
    assert first.startswith("math@2: reward_model, reward_model_scorer of 5 steps written")
    assert second == "  5 episodes at version 1: 4 computed, 1 cached, 0 failed"
    assert "BertForSequenceClassification tiny, sha256 " in last
    assert "LOAD REPORT" not in printed.err


def test_what_is_too_long_is_a_failure(math_lake: Lake, folder: Path) -> None:
    math_lake.dataset("math").append([_answer("n", "seven " * 30)])
    receipt = score(math_lake, "math", RewardModel(folder))
    reason = "found 35 tokens, expected at most 24, which the model takes"
    assert receipt.failures == (("n", reason),)
    assert receipt.computed == 4


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"absent has no config.json, expected a folder"):
        RewardModel(tmp_path / "absent")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "x.Y"}}))
    with pytest.raises(SourceInvalidError, match="refers to its own code"):
        RewardModel(copy)
    two = {**config, "id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}
    (copy / "config.json").write_text(json.dumps(two))
    with pytest.raises(SourceInvalidError, match="has 2 outputs, expected 1"):
        RewardModel(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(SourceInvalidError, match="expected a JSON file"):
        RewardModel(copy)
    (copy / "config.json").write_text(json.dumps(config))
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(SourceInvalidError, match="expected a sequence classifier"):
        RewardModel(copy)
    weights.rename(copy / "pytorch_model.bin")
    with pytest.raises(NotFoundError, match="weights in this format: others may contain code"):
        RewardModel(copy)


def test_a_model_of_another_architecture_is_refused(folder: Path, tmp_path: Path) -> None:
    from transformers import BertModel

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    BertModel.from_pretrained(folder).save_pretrained(copy)
    with pytest.raises(SourceInvalidError, match="has no weights classifier"):
        RewardModel(copy)


def test_episodes_of_numbers_are_refused(tmp_path: Path, folder: Path) -> None:
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("d").append(
        [Episode("a", observations=np.zeros((1, 2), np.float32), actions=np.zeros(1, np.int64),
                 rewards=np.zeros(1), terminated=True)]
    )  # fmt: skip
    with pytest.raises(SpaceUnsupportedError, match="not text"):
        score(lake, "d", RewardModel(folder))
