"""Door checks: each is found, named, counted, and done about it what docs/FORMATS.md says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import EpisodeInvalidError
from replaylake.datastore.interchange.formats.checks import CHECKS, Check, CheckCounts
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.ingest.inspection import Duplicates
from replaylake.datastore.interchange.ingest.receipt import Counts, IngestReceipt
from replaylake.datastore.interchange.ingest.source_validator import SourceValidator
from replaylake.datastore.lake.lake import Lake, open_lake

_DOCS = (Path(__file__).parents[4] / "docs" / "FORMATS.md").read_text()
_HEADER = "episode_id,step,observation,action,reward,terminated\n"
_GOOD = "good,0,0.25,0,1.0,0\ngood,1,0.5,1,1.0,1\n"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _csv(folder: Path, text: str, name: str = "log.csv") -> Path:
    (folder / name).write_text(_HEADER + text)
    return folder / name


def _jsonl(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "log.jsonl"


def _found(receipt: IngestReceipt, outcome: str) -> dict[str, tuple[int, int]]:
    return {
        check.name: (check.num_episodes, check.num_rows)
        for check in receipt.checks
        if check.outcome == outcome
    }


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_every_check_is_documented(name: str) -> None:
    assert f"| `{name}` |" in _DOCS


@pytest.mark.parametrize(
    ("text", "check", "num_rows"),
    [
        ("b,0,0.5,0,nan,0\nb,1,0.5,0,inf,1\n", "not_finite", 2),
        ("b,0,0.5,0,,0\nb,1,0.5,0,1.0,1\n", "missing", 1),
        ("b,0,0.5,0,1.0,0\nb,2,0.5,0,1.0,1\n", "gap", 1),
        ("b,0,0.5,0,1.0,0\nb,0,0.5,0,1.0,0\nb,1,0.5,0,1.0,1\n", "step_twice", 1),
        ("b,-1,0.5,0,1.0,0\nb,0,0.5,0,1.0,1\n", "negative_step", 1),
        ("b,0,0.5,0,1.0,1\nb,1,0.5,0,1.0,1\n", "end_inside", 1),
        # The id again from its first step, after an end: two episodes share it.
        ("b,0,0.5,0,1.0,0\nb,1,0.5,0,1.0,1\nb,0,0.7,0,1.0,0\nb,1,0.7,0,1.0,1\n", "id_reused", 1),
        ("b,0,0.5,0,1.0,0\nb,1,0.5,0,1.0,7\n", "not_a_flag", 1),
        ("b,0.5,0.5,0,1.0,0\nb,1,0.5,0,1.0,1\n", "not_whole", 1),
    ],
)
def test_what_is_rejected(lake: Lake, tmp_path: Path, text: str, check: str, num_rows: int) -> None:
    receipt = ingest(lake, [_csv(tmp_path, _GOOD + text)], "log")
    assert receipt.episodes == Counts(committed=1, rejected=1)
    assert _found(receipt, "rejected") == {check: (1, num_rows)}
    (found,) = [c for c in receipt.checks if c.outcome == "rejected"]
    assert found.example.startswith("episode b: log.csv row ")
    assert found.place.startswith("log.csv row ")


def test_an_id_reused_in_another_file_is_rejected(lake: Lake, tmp_path: Path) -> None:
    # Without an end flag in the first: the file says where it begins again.
    first = _csv(tmp_path, _GOOD + "b,0,0.5,0,1.0,0\nb,1,0.5,0,1.0,0\n", "a.csv")
    second = _csv(tmp_path, "b,0,0.7,0,1.0,0\nb,1,0.7,0,1.0,1\n", "b.csv")
    receipt = ingest(lake, [first, second], "log")
    assert _found(receipt, "rejected") == {"id_reused": (1, 1)}
    assert "b.csv row 0" in receipt.checks[0].example
    assert "`episode_by`" in receipt.checks[0].example


def test_rows_after_an_end_are_another_episode_where_there_is_no_step(
    lake: Lake, tmp_path: Path
) -> None:
    rows = [
        {"episode_id": name, "observation": [0.5], "action": 0, "reward": 1.0, "terminated": end}
        for name, end in (("a", False), ("a", True), ("b", True), ("b", False), ("b", True))
    ]
    receipt = ingest(lake, [_jsonl(tmp_path, rows)], "log")
    assert _found(receipt, "rejected") == {"id_reused": (1, 1)}
    assert "log.jsonl row 3" in receipt.checks[0].example


@pytest.mark.parametrize("probability", [0.0, -0.5, 1.5])
def test_propensities_outside_of_the_unit_interval(
    lake: Lake, tmp_path: Path, probability: float
) -> None:
    rows = [
        {"episode_id": name, "observation": [0.5], "action": 0, "reward": 1.0, "pscore": p}
        for name, p in (("a", 1.0), ("b", probability))
    ]
    receipt = ingest(lake, [_jsonl(tmp_path, rows)], "log")
    assert _found(receipt, "rejected") == {"propensity": (1, 1)}


def test_a_next_observation_that_does_not_follow(lake: Lake, tmp_path: Path) -> None:
    rows = [
        {
            "episode_id": name,
            "step": t,
            "observation": [float(t)],
            "action": 0,
            "reward": 1.0,
            "next_observation": [t + 1.0 + shift],
            "terminated": t == 2,
        }
        for name, shift in (("a", 0.0), ("b", 0.5))
        for t in range(3)
    ]
    receipt = ingest(lake, [_jsonl(tmp_path, rows)], "log")
    assert _found(receipt, "rejected") == {"next_observation": (1, 2)}
    gapped = [row for row in rows if (row["episode_id"], row["step"]) != ("a", 1)]
    other = open_lake(lake.path.parent / "other", create=True)
    receipt = ingest(other, [_jsonl(tmp_path, gapped)], "log", options=ReadOptions(gaps="split"))
    # Across a gap there is nothing to compare with.
    assert _found(receipt, "corrected") == {"gap": (1, 1)}


def test_rows_out_of_order_are_put_in_order_and_told(lake: Lake, tmp_path: Path) -> None:
    text = "b,2,0.3,0,3.0,1\nb,0,0.1,0,1.0,0\nb,1,0.2,0,2.0,0\n"
    receipt = ingest(lake, [_csv(tmp_path, _GOOD + text)], "log")
    assert receipt.episodes == Counts(committed=2)
    assert _found(receipt, "corrected") == {"unordered": (1, 3)}
    rewards = lake.sql(
        "select list(reward order by step) as r from log.steps where source_episode_id = 'b'"
    )
    assert rewards.column("r").to_pylist() == [[1.0, 2.0, 3.0]]


def test_interleaved_episodes_are_in_order(lake: Lake, tmp_path: Path) -> None:
    text = "b,0,0.5,0,1.0,0\nc,0,0.6,0,1.0,0\nb,1,0.7,0,1.0,1\nc,1,0.8,0,1.0,1\n"
    assert "unordered" not in _found(ingest(lake, [_csv(tmp_path, text)], "log"), "corrected")


@pytest.mark.parametrize("open_ends", ["open", "truncated"])
def test_an_episode_without_an_end(lake: Lake, tmp_path: Path, open_ends: str) -> None:
    options = ReadOptions(open_ends=open_ends)
    log = _csv(tmp_path, _GOOD + "b,0,0.5,0,1.0,0\nb,1,0.6,0,1.0,0\n")
    receipt = ingest(lake, [log], "log", options=options)
    outcome = "noted" if open_ends == "open" else "corrected"
    assert _found(receipt, outcome) == {"no_end": (1, 1)}
    (row,) = lake.sql(
        "select terminated, truncated, complete from log.episodes where source_episode_id = 'b'"
    ).to_pylist()
    is_truncated = open_ends == "truncated"
    assert row == {"terminated": False, "truncated": is_truncated, "complete": is_truncated}


def test_a_time_limit_that_the_log_calls_a_termination(lake: Lake, tmp_path: Path) -> None:
    text = "".join(
        f"e{i},{t},0.{i}{t},0,1.0,{int(t == n - 1)}\n"
        for i, n in enumerate((3, 1, 3, 2))
        for t in range(n)
    )
    receipt = ingest(lake, [_csv(tmp_path, text)], "log")
    assert _found(receipt, "noted") == {"time_limit": (2, 2)}
    assert receipt.checks[0].example.startswith("episode e0: log.csv row 2: 2 of 4 terminated")
    assert "`time_limit` 3" in receipt.checks[0].advice
    again = ingest(lake, [_csv(tmp_path, text)], "limited", options=ReadOptions(time_limit=3))
    assert _found(again, "corrected") == {"time_limit": (2, 2)}
    assert _found(again, "noted") == {}


def test_equal_episodes_are_kept_and_told(lake: Lake, tmp_path: Path) -> None:
    copy = _GOOD.replace("good", "copy")
    other = _GOOD.replace("good", "other").replace("0.5", "0.75")
    receipt = ingest(lake, [_csv(tmp_path, _GOOD + copy + other)], "log")
    assert receipt.episodes == Counts(committed=3)
    (check,) = [check for check in receipt.checks if check.name == "duplicate"]
    assert (check.outcome, check.num_episodes, check.num_rows) == ("noted", 1, 2)
    assert check.example == "episode copy: log.csv row 2, the same 2 steps as episode good"
    assert check.place == "log.csv row 2"


def test_decisions_of_one_step_are_no_duplicates() -> None:
    found = Duplicates()
    one = _episode("a", [[0.5]])
    found.add([one, _episode("b", [[0.5]])])
    found.add([_episode("c", [[0.5], [1.0]]), _episode("c", [[0.5], [1.0]])])
    assert found.checks() == (), "an episode is not its own duplicate, as where it was split"


def _episode(name: str, observations: Any, action: int = 0) -> Episode:
    array = np.asarray(observations, np.float32)
    return Episode(name, array, np.full(len(array), action), np.ones(len(array)))


def test_episodes_unlike_the_rest_are_refused_one_by_one() -> None:
    door = SourceValidator(None, None)
    text = Episode("text", np.array(["x"], object), np.array([0]), np.ones(1))
    accepted, refused = door.check(
        [
            _episode("wide", np.zeros((1, 3))),
            _episode("a", np.zeros((3, 2))),
            text,
            _episode("b", np.zeros((2, 2)), 4),
            _episode("negative", np.zeros((2, 2)), -1),
        ]
    )
    assert [episode.episode_id for episode in accepted] == ["a", "b"]
    checks = {episode.episode_id: one.findings[0].check for one, episode in refused}
    assert checks == {"wide": "shape", "text": "shape", "negative": "space"}
    # What came first stands: later ones have to fit it.
    floats = Episode("floats", np.zeros((2, 2), np.float32), np.array([0.5, 1.0]), np.ones(2))
    large = Episode("large", np.full((1, 2), 1e300), np.array([1]), np.ones(1))
    accepted, refused = door.check([floats, large, _episode("c", np.zeros((2, 2)), 9)])
    assert [episode.episode_id for episode in accepted] == ["c"]
    checks = {episode.episode_id: one.findings[0].check for one, episode in refused}
    assert checks == {"floats": "dtype", "large": "dtype"}
    assert door.spec(None).action_space == Discrete(10)
    for one, episode in refused:
        assert door.explain_rejection(episode).findings[0].check == one.findings[0].check


def test_masks_of_two_widths_refuse_the_source() -> None:
    def masked(name: str, width: int) -> Episode:
        return Episode(
            name,
            np.zeros((1, 2), np.float32),
            np.array([0]),
            np.ones(1),
            action_masks=np.ones((1, width), bool),
        )

    with pytest.raises(EpisodeInvalidError, match="action_mask"):
        SourceValidator(None, None).check([masked("a", 2), masked("b", 3)])


def test_which_check_of_the_spaces_fails() -> None:
    spaces = (Box((1,), "float32", 0.0, 1.0), Discrete(2))
    door = SourceValidator(None, spaces)
    bad = {
        "space": _episode("e", [[0.5], [1.5]]),
        "shape": _episode("e", [[0.5, 0.5]]),
        "not_finite": Episode("e", np.array([[0.5]]), np.array([0]), np.array([np.inf])),
        "dtype": Episode("e", np.array([[0.5]]), np.array([0.5]), np.ones(1)),
        "propensity": Episode(
            "e",
            np.array([[0.5]]),
            np.array([0]),
            np.ones(1),
            behavior_log_probs=np.array([0.5], np.float32),
        ),
        "action_mask": Episode(
            "e",
            np.array([[0.5]]),
            np.array([0]),
            np.ones(1),
            action_masks=np.array([[False, True]]),
        ),
    }
    for check, episode in bad.items():
        _, ((one, _),) = door.check([episode])
        assert (one.findings[0].check, one.findings[0].num_rows) == (check, 1)


def test_checks_add_up_by_name_and_outcome() -> None:
    counts = CheckCounts()
    for check in (
        Check("gap", "noted", 1, 1, "first"),
        Check("gap", "rejected", 1, 2, "x"),
        Check("gap", "noted", 2, 5, "second"),
        Check("gap", "corrected", 0, 0, "nothing"),
    ):
        counts.add(check)
    assert counts.checks() == (
        Check("gap", "rejected", 1, 2, "x"),
        Check("gap", "noted", 3, 6, "first"),
    )
