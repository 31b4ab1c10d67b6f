"""Bandit logs: the Open Bandit Dataset as it is, other one-step logs by a mapping."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ConfigInvalidError, SourceInvalidError
from replaylake.datastore.interchange.formats.detect import find_format
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.sources.source import find_source
from replaylake.datastore.lake.lake import Lake, open_lake


def _read(*paths: Path, format: str = "bandit", **options: Any) -> list[Any]:
    source = find_source(paths)
    return list(find_format(format, source.files).read(source.files, ReadOptions(**options)))


@pytest.fixture(scope="module")
def obd(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Lake:
    """Both logs in one dataset: that of the uniform policy first."""
    lake = open_lake(tmp_path_factory.mktemp("obd") / "lake", create=True)
    for policy in ("random", "bts"):
        log = shared_data / "obd" / policy / "men" / "men.csv"
        receipt = ingest(lake, [log], "obd")
        assert receipt.format == "bandit"
        assert receipt.episodes.committed == receipt.steps.committed == 10_000
    return lake


@pytest.mark.slow
def test_the_open_bandit_dataset(obd: Lake) -> None:
    spec = obd.dataset("obd").spec
    assert spec.action_space == Discrete(34)
    assert spec.encoding is not None
    assert [field.name for field in spec.encoding.fields] == [
        *(f"user_feature_{i}" for i in range(4)),
        "position",
    ]
    assert spec.observation_space == Box((spec.encoding.width,), "float32")
    # All its columns: three are ours under another name, the others are kept.
    kept = set(spec.extras)
    assert {f"user_item_affinity_{i}" for i in range(34)} <= kept
    assert {"position", "user_feature_0", "user_feature_3", "column_0"} <= kept
    rows = obd.sql(
        "select sum(reward), count(distinct episode_id), sum(terminated::int), count(timestamp) "
        "from obd.steps group by left(episode_id, 16) order by 1"
    ).to_pylist()
    assert [list(row.values()) for row in rows] == [
        [clicks, 10_000, 10_000, 10_000] for clicks in (46, 69)
    ]


def test_its_propensities_are_kept(obd: Lake) -> None:
    first = obd.snapshot("obd@1").sql("select distinct behavior_log_prob as p from steps")
    assert first.column("p").to_pylist() == pytest.approx([np.log(1 / 34)])


def test_vectors_are_those_of_their_columns(obd: Lake) -> None:
    encoding = obd.dataset("obd").spec.encoding
    assert encoding is not None
    names = [field.name for field in encoding.fields]
    rows = obd.sql(
        f"select observation, {', '.join(names)} from obd.steps order by episode_id limit 200"
    ).to_pylist()
    for row in rows:
        vector = row.pop("observation")
        assert np.array_equal(encoding.encode_one(row), np.array(vector, np.float32))


def test_a_second_log_is_encoded_as_the_first(obd: Lake) -> None:
    first, second = (obd.snapshot(f"obd@{version}").spec for version in (1, 2))
    assert first.encoding is not None
    assert first == second


@pytest.mark.slow
def test_a_table_of_items_beside_the_log_is_left_out(shared_data: Path) -> None:
    source = find_source([shared_data / "obd" / "random" / "men"])
    form = find_format("auto", source.files)
    assert form.name == "bandit"
    reading = form.read(source.files, ReadOptions())
    assert len(list(reading)) == 10_000
    assert any("item_context.csv: left out" in note for note in reading.notes)


def test_a_table_of_items_alone_is_refused(shared_data: Path) -> None:
    with pytest.raises(SourceInvalidError, match=r"item_context\.csv: found a table of items"):
        _read(shared_data / "obd" / "random" / "men" / "item_context.csv")


_LOG = "age,device,shown,chance,paid\n31,ios,a,0.5,0\n45,web,b,0.25,1.5\n31,ios,b,0.5,0\n"
_MAP = {"observation": "age,device", "action": "shown", "reward": "paid", "behavior_prob": "chance"}


def _log(folder: Path, text: str = _LOG) -> Path:
    path = folder / "log.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_any_wide_table_by_a_mapping(tmp_path: Path, suffix: str) -> None:
    header, *lines = [line.split(",") for line in _LOG.split()]
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    typed = [
        {**r, "age": int(r["age"]), "chance": float(r["chance"]), "paid": float(r["paid"])}
        for r in rows
    ]
    path = tmp_path / f"log{suffix}"
    if suffix == ".csv":
        path.write_text(_LOG)
    elif suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in typed))
    else:
        pq.write_table(pa.Table.from_pylist(typed), path)
    episodes = _read(path, mapping=_MAP)
    assert all(isinstance(episode, Episode) and episode.terminated for episode in episodes)
    # age, then device: other, ios, web.
    assert [e.observations.tolist() for e in episodes] == [
        [[31, 0, 1, 0]],
        [[45, 0, 0, 1]],
        [[31, 0, 1, 0]],
    ]
    assert [e.actions.tolist() for e in episodes] == [[0], [1], [1]]
    assert [e.rewards.tolist() for e in episodes] == [[0], [1.5], [0]]
    assert episodes[1].behavior_log_probs == pytest.approx(np.log([0.25]))


def test_a_lone_text_is_a_category_here(tmp_path: Path) -> None:
    episodes = _read(_log(tmp_path), mapping={**_MAP, "observation": "device"})
    assert [e.observations.tolist() for e in episodes] == [[[0, 1, 0]], [[0, 0, 1]], [[0, 1, 0]]]


def test_a_list_of_actions_is_a_slate(tmp_path: Path) -> None:
    rows = [{"x": 1.0, "y": 2.0, "shown": [3, 4], "paid": 1.0, "chance": 0.5}]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SourceInvalidError, match=r"'shown'.*slates are not supported"):
        _read(path, mapping={**_MAP, "observation": "x,y"})


@pytest.mark.parametrize("column", ["impression_id", "slate_id", "request_id"])
def test_rows_of_one_impression_are_a_slate(tmp_path: Path, column: str) -> None:
    header, *lines = _LOG.split()
    numbered = [f"{line},{n}" for line, n in zip(lines, (7, 7, 8), strict=True)]
    path = _log(tmp_path, "\n".join([f"{header},{column}", *numbered]) + "\n")
    with pytest.raises(SourceInvalidError, match=rf"'{column}'.*7.*slates are not supported"):
        _read(path, mapping=_MAP)
    # Each was decided by itself: the caller says so.
    assert len(_read(path, mapping={**_MAP, "own": column})) == 3


def test_impressions_of_one_row_are_no_slates(tmp_path: Path) -> None:
    header, *lines = _LOG.split()
    numbered = [f"{line},{n}" for n, line in enumerate(lines)]
    path = _log(tmp_path, "\n".join([f"{header},slate_id", *numbered]) + "\n")
    assert len(_read(path, mapping=_MAP)) == 3


@pytest.mark.parametrize("options", [{"episode_by": ("device",)}, {"order_by": ("age",)}])
def test_what_would_change_nothing_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigInvalidError, match="each row of this format is one episode"):
        _read(_log(tmp_path), mapping=_MAP, **options)


@pytest.mark.parametrize("length", [0, 1, 30, 200, 3000])
def test_a_torn_log_is_read_or_refused(tmp_path: Path, shared_data: Path, length: int) -> None:
    whole = (shared_data / "obd" / "random" / "men" / "men.csv").read_bytes()
    path = tmp_path / "men.csv"
    path.write_bytes(whole[:length])
    with suppress(SourceInvalidError):
        _read(path)


def test_common_names_need_no_mapping(tmp_path: Path) -> None:
    log = _log(tmp_path, "context,action,position,propensity,reward\n3,0,1,0.1,0\n4,1,2,0.25,1\n")
    first, second = _read(log)
    assert [first.observations.tolist(), second.observations.tolist()] == [[[3, 1]], [[4, 2]]]
    assert second.behavior_log_probs == pytest.approx(np.log([0.25]))
    assert second.rewards.tolist() == [1]
