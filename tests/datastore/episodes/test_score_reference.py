"""Scores between a random policy's return and an expert's, and the dataset that keeps both."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.score_reference import ScoreReference
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.interchange.export.export import export
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.merge import merge

REFERENCE = ScoreReference(20.0, 120.0, "a table")


def test_normalize() -> None:
    assert [REFERENCE.normalize(score) for score in (20, 70, 120, -80)] == [0, 50, 100, -100]


@pytest.mark.parametrize(
    ("random", "expert", "source", "message"),
    [
        (1, 1, "x", "above a random policy's"),
        (2, 1, "x", "above a random policy's"),
        (math.nan, 1, "x", "expected a finite number"),
        (0, math.inf, "x", "expected a finite number"),
        (None, 1, "x", "expected a finite number"),
        (0, 1, " ", "where the returns are from"),
    ],
)
def test_what_is_refused(random: Any, expert: Any, source: str, message: str) -> None:
    with pytest.raises(ConfigInvalidError, match=message):
        ScoreReference(random, expert, source)


def test_a_dataset_keeps_it(lake: Lake, make_episode: Callable[..., Episode]) -> None:
    for name in "de":
        lake.dataset(name).create(Box((2,)), Discrete(2))
        lake.dataset(name).append([make_episode(f"{name}1", 3), make_episode(f"{name}2", 4)])
    dataset = lake.dataset("d")
    assert dataset.snapshot().describe()["normalized_return"] is None
    assert dataset.set_score_reference(ScoreReference(3, 13, "x")) == 2
    assert dataset.set_score_reference(ScoreReference(3, 13, "x")) == 2
    described = dataset.snapshot().describe()
    assert described["normalized_return"] == pytest.approx(50)  # returns 6 and 10
    assert described["score_reference"] == {"random": 3, "expert": 13, "source": "x"}
    assert dataset.snapshot(1).spec.score_reference is None
    merge(lake, ["d", "e"], "joined")
    assert lake.dataset("joined").spec.score_reference is None
    lake.dataset("e").set_score_reference(ScoreReference(3, 13, "x"))
    merge(lake, ["d", "e"], "again")
    assert lake.dataset("again").spec.score_reference == ScoreReference(3, 13, "x")
    assert dataset.set_score_reference(None) == 3
    assert dataset.spec.score_reference is None


def test_minari_states_it(lake: Lake, make_episode: Callable[..., Episode], tmp_path: Path) -> None:
    lake.dataset("d").create(Box((2,)), Discrete(2), score_reference=REFERENCE)
    lake.dataset("d").append([make_episode("1", 2, terminated=True)])
    folder = tmp_path / "toy-v0"
    export(lake, "d", folder, format="minari")
    ingest(lake, [folder], "back")
    assert lake.dataset("back").spec.score_reference == REFERENCE
    text = (folder / "data" / "metadata.json").read_text()
    (folder / "data" / "metadata.json").write_text(
        text.replace('"replaylake_score_source": "a table"', '"ref_note": 1').replace(
            "120.0", "121"
        )
    )
    ingest(lake, [folder], "theirs")
    found = lake.dataset("theirs").spec.score_reference
    assert found == ScoreReference(20.0, 121, "Minari toy-v0")
    (folder / "data" / "metadata.json").write_text(text.replace("120.0", '"high"'))
    receipt = ingest(lake, [folder], "neither")
    assert lake.dataset("neither").spec.score_reference is None
    assert any("ref_max_score 'high' are left out" in note for note in receipt.notes)
