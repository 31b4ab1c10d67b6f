"""Columns: patterns, ids of several columns, order, fills, time zones, units, and encodings."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaylake.datastore.episodes.compatibility import find_spec_mismatch, join_specs
from replaylake.datastore.episodes.encoding import NO_ENCODING, Encoding
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete, Text
from replaylake.datastore.errors import ConfigInvalidError, ReplayLakeError, SourceInvalidError
from replaylake.datastore.interchange.formats.detect import find_format
from replaylake.datastore.interchange.formats.format import ReadOptions, RejectedEpisode
from replaylake.datastore.interchange.formats.generic.csv import CsvTables
from replaylake.datastore.interchange.formats.tabular.reader import TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import CachedTables
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.sources.source import find_source
from replaylake.datastore.lake.lake import Lake, open_lake


def _open(path: Path, **options: Any) -> Any:
    source = find_source([path])
    return find_format("auto", source.files).read(source.files, ReadOptions(**options))


def _episodes(reading: Any) -> list[Episode]:
    found = list(reading)
    assert not [one for one in found if isinstance(one, RejectedEpisode)]
    return found


def _csv(folder: Path, text: str) -> Path:
    path = folder / "log.csv"
    path.write_text(text)
    return path


def _table(folder: Path, **columns: Any) -> Path:
    path = folder / "log.parquet"
    pq.write_table(pa.table(columns), path)
    return path


WIDE = "user_b,user_a,x,who,act,gain,last\n2,1,3,u,0,1,0\n5,4,6,u,1,2,1\n"
MAP = {"episode_id": "who", "action": "act", "reward": "gain", "terminated": "last"}


@pytest.mark.parametrize(
    ("spelled", "rows"),
    [
        ("user_*", [[2, 1], [5, 4]]),
        ("user_a,user_b", [[1, 2], [4, 5]]),
        ("x,user_*", [[3, 2, 1], [6, 5, 4]]),
        ("user_*,user_b", [[1, 2], [4, 5]]),
        ("user_?", [[2, 1], [5, 4]]),
        ("[ux]*", [[2, 1, 3], [5, 4, 6]]),
    ],
)
def test_a_pattern_is_in_the_files_order(tmp_path: Path, spelled: str, rows: Any) -> None:
    reading = _open(_csv(tmp_path, WIDE), mapping={**MAP, "observation": spelled})
    (episode,) = _episodes(reading)
    assert np.asarray(episode.observations).tolist() == rows


def test_a_pattern_leaves_out_what_is_named_elsewhere(tmp_path: Path) -> None:
    mapping = {**MAP, "observation": "user_*", "note": "user_a"}
    reading = _open(_csv(tmp_path, WIDE), mapping=mapping)
    (episode,) = _episodes(reading)
    assert np.asarray(episode.observations).tolist() == [2, 5]


@pytest.mark.parametrize(
    ("spelled", "kind", "said"),
    [
        ("usr_*", SourceInvalidError, "'user_b', 'user_a', 'x'"),
        ("x,y", SourceInvalidError, "'y'"),
        ("x,x", ConfigInvalidError, "'x' twice"),
    ],
)
def test_a_mapping_that_fits_no_column(
    tmp_path: Path, spelled: str, kind: type[ReplayLakeError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        _open(_csv(tmp_path, WIDE), mapping={**MAP, "observation": spelled})


def test_ids_of_several_columns(tmp_path: Path) -> None:
    path = _table(
        tmp_path,
        user=["a", "a", "b", "a/1", "a"],
        session=[1, 2, 1, 1, 1],
        x=[0.5, 1.5, 2.5, 3.5, 4.5],
        action=[0] * 5,
        reward=[1.0] * 5,
    )
    reading = _open(path, mapping={"observation": "x"}, episode_by=("user", "session"))
    episodes = _episodes(reading)
    assert [e.episode_id for e in episodes] == ["a/1", "a/2", "b/1", "a%2F1/1"]
    assert episodes[0].observations.tolist() == [[0.5], [4.5]]
    # They are further columns still.
    assert episodes[0].extras["user"].to_pylist() == ["a", "a"]
    assert reading.extras.keys() == {"user", "session"}


def test_an_id_without_a_part_is_missing(tmp_path: Path) -> None:
    path = _table(tmp_path, u=["a", None], s=[1, 2], x=[0.5, 1.5], action=[0, 1], reward=[1.0, 2.0])
    found = list(_open(path, mapping={"observation": "x"}, episode_by=("u", "s")))
    (rejected,) = [one for one in found if isinstance(one, RejectedEpisode)]
    assert [(f.check, "'u,s'" in f.message) for f in rejected.findings] == [("missing", True)]


def _times(*hours: int) -> pa.Array:
    return pa.array([datetime(2026, 1, 1, h, tzinfo=UTC) for h in hours], pa.timestamp("us", "UTC"))


@pytest.mark.parametrize(
    ("column", "rewards"),
    [
        (pa.array([3, 1, 2, 0]), [3, 1, 2, 0]),
        (pa.array(["c", "a", "b", "A"]), [3, 1, 2, 0]),
        (_times(12, 2, 9, 1), [3, 1, 2, 0]),
        (pa.array(["2026-01-01T02:00:00+01:00", "2026-01-01T01:30:00+00:00"] * 2), [0, 2, 1, 3]),
    ],
)
def test_rows_are_put_in_order(tmp_path: Path, column: pa.Array, rewards: list[int]) -> None:
    expected = sorted(range(4), key=lambda row: rewards[row])
    path = _table(
        tmp_path,
        who=["u"] * 4,
        at=column,
        step=[9, 9, 9, 9],  # of no use, and not taken for one
        x=[0.0, 1.0, 2.0, 3.0],
        action=[0] * 4,
        reward=[0.0, 1.0, 2.0, 3.0],
    )
    reading = _open(path, mapping={"observation": "x", "episode_id": "who"}, order_by=("at",))
    (episode,) = _episodes(reading)
    if rewards == [0, 2, 1, 3]:  # 1:00 and 1:30 of UTC, twice each: the rest stays as it was
        expected = [0, 2, 1, 3]
    assert episode.rewards.tolist() == expected
    assert episode.first_step == 0
    assert "logged_step" in reading.extras


def test_order_by_two_columns_within_each_episode(tmp_path: Path) -> None:
    text = "who,day,id,x,action,reward\nu,2,1,0,0,0\nv,1,1,1,0,1\nu,1,9,2,0,2\nu,1,10,3,0,3\n"
    reading = _open(
        _csv(tmp_path, text),
        mapping={"observation": "x", "episode_id": "who"},
        order_by=("day", "id"),
    )
    first, second = _episodes(reading)
    assert first.rewards.tolist() == [2, 3, 0]
    assert second.rewards.tolist() == [1]


def test_a_mapped_step_keeps_its_numbers(tmp_path: Path) -> None:
    text = "who,n,at,x,action,reward\nu,5,2,0,0,1\nu,4,1,1,0,0\n"
    mapping = {"observation": "x", "episode_id": "who", "step": "n"}
    (episode,) = _episodes(_open(_csv(tmp_path, text), mapping=mapping, order_by=("at",)))
    assert (episode.first_step, episode.rewards.tolist()) == (4, [0, 1])


def test_a_row_without_its_place_in_the_order_is_missing(tmp_path: Path) -> None:
    text = "who,at,x,action,reward\nu,2,0,0,1\nu,,1,0,0\n"
    mapping = {"observation": "x", "episode_id": "who"}
    (found,) = list(_open(_csv(tmp_path, text), mapping=mapping, order_by=("at",)))
    assert isinstance(found, RejectedEpisode)
    assert [finding.check for finding in found.findings] == ["missing"]


def test_order_needs_an_episode_id(tmp_path: Path) -> None:
    text = "at,x,action,reward,done\n1,2,0,1,0\n2,2,0,1,1\n"
    with pytest.raises(ConfigInvalidError, match="episode_by"):
        _open(_csv(tmp_path, text), mapping={"observation": "x"}, order_by=("at",))


GAPS = "who,a,b,device,action,reward\nu,1,,ios,0,1\nu,,0.5,,0,2\nu,3,1.5,web,0,3\n"
GAPS_MAP = {"observation": "a,b,device", "episode_id": "who"}


def test_a_list_that_is_missing_is_filled_as_a_whole(tmp_path: Path) -> None:
    rows = [{"v": [0.5, 0.1]}, {"v": None}, {"v": [0.2, 0.3]}]
    same = {"episode_id": "a", "action": 1, "reward": 1.0}
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({**same, **row}) + "\n" for row in rows))
    reading = _open(path, mapping={"observation": "v"}, fill={"v": "[0, 0.25]"})
    (episode,) = (item for item in reading if isinstance(item, Episode))
    np.testing.assert_array_equal(episode.observations, [[0.5, 0.1], [0, 0.25], [0.2, 0.3]])
    for text in ("0", "[0, x]", "['a']", "{}"):
        with pytest.raises(ConfigInvalidError, match=r"such as \[0, 0\] for a list of two"):
            _open(path, mapping={"observation": "v"}, fill={"v": text})


def test_missing_values_without_a_fill_reject(tmp_path: Path) -> None:
    (found,) = list(_open(_csv(tmp_path, GAPS), mapping=GAPS_MAP))
    assert isinstance(found, RejectedEpisode)
    assert {f.check for f in found.findings} == {"missing"}
    assert all(any(repr(name) in f.message for f in found.findings) for name in ("a", "b"))


def test_fills_stand_where_nothing_is(tmp_path: Path) -> None:
    fill = {"a": "-1", "b": "0.25", "device": "none"}
    reading = _open(_csv(tmp_path, GAPS), mapping=GAPS_MAP, fill=fill)
    (episode,) = _episodes(reading)
    # a, b, then device: other, ios, none, web in the order of their text.
    assert np.asarray(episode.observations).tolist() == [
        [1, 0.25, 0, 1, 0, 0],
        [-1, 0.5, 0, 0, 1, 0],
        [3, 1.5, 0, 0, 0, 1],
    ]
    notes = "\n".join(reading.notes)
    assert "column 'a': 1 empty cells are -1" in notes
    assert "column 'device': 1 empty cells are none" in notes
    # Counted once, however often it is read.
    _episodes(reading)
    assert "column 'a': 1 empty cells are -1" in "\n".join(reading.notes)
    assert [field.fill for field in reading.encoding.fields] == [-1, 0.25, "none"]


@pytest.mark.parametrize(
    ("fill", "kind", "said"),
    [
        ({"c": "1"}, SourceInvalidError, "'c'"),
        ({"a": "much"}, ConfigInvalidError, "'much'.*int64"),
    ],
)
def test_a_fill_that_fits_no_column(
    tmp_path: Path, fill: dict[str, str], kind: type[ReplayLakeError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        _open(_csv(tmp_path, GAPS), mapping=GAPS_MAP, fill=fill)


LOCAL = "who,at,x,action,reward\nu,2026-01-31 13:00:00,1,0,1\nu,2026-07-01 13:00:00,2,0,2\n"


def test_times_without_a_zone_are_given_one(tmp_path: Path) -> None:
    mapping = {"observation": "x", "episode_id": "who", "timestamp": "at"}
    reading = _open(_csv(tmp_path, LOCAL), mapping=mapping, timezone="Europe/Berlin")
    (episode,) = _episodes(reading)
    assert episode.timestamps is not None
    hours = [datetime.fromtimestamp(t / 1e6, UTC).hour for t in episode.timestamps.tolist()]
    assert hours == [12, 11]


@pytest.mark.parametrize(
    ("moment", "said"), [("2026-10-25 02:30:00", "twice"), ("2026-03-29 02:30:00", "not at all")]
)
def test_a_time_that_names_no_one_moment(tmp_path: Path, moment: str, said: str) -> None:
    mapping = {"observation": "x", "episode_id": "who", "timestamp": "at"}
    path = _csv(tmp_path, LOCAL.replace("2026-07-01 13:00:00", moment))
    with pytest.raises(SourceInvalidError, match=rf"log\.csv row 1, column 'at'.*{said}"):
        list(_open(path, mapping=mapping, timezone="Europe/Berlin"))


def test_a_naive_time_in_an_observation_needs_a_zone(tmp_path: Path) -> None:
    mapping = {"observation": "x,at", "episode_id": "who"}
    with pytest.raises(SourceInvalidError, match=r"'at'.*`timezone`"):
        _open(_csv(tmp_path, LOCAL), mapping=mapping)
    reading = _open(_csv(tmp_path, LOCAL), mapping=mapping, timezone="UTC")
    (episode,) = _episodes(reading)
    # 13:00 is 195 degrees.
    angle = np.deg2rad(195)
    assert np.asarray(episode.observations)[0, :3] == pytest.approx(
        [1, np.sin(angle), np.cos(angle)]
    )
    assert reading.extras["at"] == pa.timestamp("us", "UTC")


def test_a_date_is_its_midnight(tmp_path: Path) -> None:
    days = pa.array([date(2026, 1, 31)], pa.date32())
    path = _table(tmp_path, who=["u"], day=days, x=[1.0], action=[0], reward=[1.0])
    mapping = {"observation": "x,day", "episode_id": "who"}
    with pytest.raises(SourceInvalidError, match=r"'day'.*`timezone`"):
        _open(path, mapping=mapping)
    (episode,) = _episodes(_open(path, mapping=mapping, timezone="Europe/Berlin"))
    week = 2 * np.pi * 5 / 7
    assert episode.observations[0] == pytest.approx([1, 0, 1, np.sin(week), np.cos(week)])


def test_a_zone_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalidError, match="Europe/Berln"):
        _open(_csv(tmp_path, LOCAL), mapping={"observation": "x"}, timezone="Europe/Berln")


def _actions(folder: Path, actions: Any, **more: Any) -> Path:
    num = len(actions)
    return _table(
        folder, episode_id=["u"] * num, observation=[0.5] * num, action=actions,
        reward=[1.0] * num, **more,
    )  # fmt: skip


def test_actions_are_scaled_and_their_densities_with_them(tmp_path: Path) -> None:
    pairs = pa.array([[0.5, -1.0], [0.25, 1.0]], pa.list_(pa.float32(), 2))
    path = _actions(tmp_path, pairs, action_logp=[-1.0, -2.0])
    reading = _open(path, action_scale=2.0)
    (episode,) = _episodes(reading)
    assert np.asarray(episode.actions).tolist() == [[1, -2], [0.5, 2]]
    assert np.asarray(episode.actions).dtype == np.float32
    # A density of two numbers, each twice as wide: -2 ln 2.
    expected = np.array([-1, -2]) - 2 * np.log(2)
    assert episode.behavior_log_probs == pytest.approx(expected, rel=1e-6)
    assert any("2 times those logged; their log-prob" in note for note in reading.notes)


def test_actions_are_brought_to_a_range(tmp_path: Path) -> None:
    path = _actions(tmp_path, [-1.0, 0.0, 1.0 + 5e-7], action_logp=[0.0, 0.5, 1.0])
    reading = _open(path, action_range=(0.0, 10.0))
    (episode,) = _episodes(reading)
    assert np.asarray(episode.actions).tolist() == [[0], [5], [10]]
    expected = np.array([0, 0.5, 1]) - np.log(5)
    assert episode.behavior_log_probs == pytest.approx(expected, rel=1e-6)
    assert any("5 + 5 times those logged" in note for note in reading.notes)


def test_actions_outside_of_the_range_are_a_finding(tmp_path: Path) -> None:
    (found,) = list(_open(_actions(tmp_path, [0.5, 1.01]), action_range=(0.0, 10.0)))
    assert isinstance(found, RejectedEpisode)
    assert [finding.check for finding in found.findings] == ["action_range"]


def test_integers_have_no_units(tmp_path: Path) -> None:
    with pytest.raises(SourceInvalidError, match=r"'action'.*int64.*`action_scale`"):
        list(_open(_actions(tmp_path, [0, 1]), action_scale=2.0))


@pytest.mark.parametrize(
    "options",
    [
        {"action_scale": 2.0, "action_range": (0.0, 1.0)},
        {"action_scale": 0.0},
        {"action_range": (1.0, 0.0)},
    ],
)
def test_units_that_make_no_sense(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigInvalidError, match="action_"):
        _open(_actions(tmp_path, [0.5]), **options)


CLICKS = (
    "user,hour,age,member,device,item,click,last\n"
    "u1,2026-01-31T15:00:00Z,31,true,ios,shoes,0,0\n"
    "u1,2026-01-31T15:00:00Z,31,true,web,hat,1,1\n"
    "u2,2026-01-31T15:00:00Z,45,false,ios,shoes,1,1\n"
)
CLICKS_MAP = {
    "episode_id": "user",
    "observation": "age,member,device,hour",
    "action": "item",
    "reward": "click",
    "terminated": "last",
}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _ingest(lake: Lake, folder: Path, text: str, name: str = "log.csv", **options: Any) -> Any:
    path = folder / name
    path.write_text(text)
    on_invalid = options.pop("on_invalid", "reject")
    options = {"mapping": CLICKS_MAP, **options}
    return ingest(lake, [path], "shop", options=ReadOptions(**options), on_invalid=on_invalid)


def _vectors(lake: Lake) -> list[Any]:
    rows = lake.sql("select observation from shop.steps order by episode_id, step")
    return rows.column("observation").to_pylist()


def test_a_wide_table_is_encoded_and_kept(lake: Lake, tmp_path: Path) -> None:
    receipt = _ingest(lake, tmp_path, CLICKS)
    assert receipt.steps.committed == 3
    spec = lake.dataset("shop").spec
    assert spec.observation_space == Box((9,), "float32")
    assert spec.action_space == Discrete(2)
    assert spec.encoding is not None
    assert spec.encoding.action_names == ("hat", "shoes")
    week = 2 * np.pi * 5 / 7
    time = [-np.sqrt(0.5), -np.sqrt(0.5), np.sin(week), np.cos(week)]
    assert np.allclose(
        _vectors(lake),
        [[31, 1, 0, 1, 0, *time], [31, 1, 0, 0, 1, *time], [45, 0, 0, 1, 0, *time]],
    )
    rows = lake.sql("select action, item, device, age from shop.steps order by episode_id, step")
    assert rows.to_pylist() == [
        {"action": 1, "item": "shoes", "device": "ios", "age": 31},
        {"action": 0, "item": "hat", "device": "web", "age": 31},
        {"action": 1, "item": "shoes", "device": "ios", "age": 45},
    ]
    (note,) = [note for note in receipt.notes if note.startswith("observation is 9 float32")]
    assert "device one of 2 categories or other" in note
    assert "hour time of day and weekday in UTC" in note


def test_what_a_second_log_adds_is_other(lake: Lake, tmp_path: Path) -> None:
    _ingest(lake, tmp_path, CLICKS)
    more = CLICKS.replace("u1", "u3").replace("u2", "u4").replace(",web,", ",vr,")
    receipt = _ingest(lake, tmp_path, more, "more.csv")
    assert receipt.steps.committed == 3
    vectors = lake.sql("select observation from shop.steps where device = 'vr'").column(0)
    assert vectors.to_pylist()[0][:5] == [31, 1, 1, 0, 0]
    assert any("'device': 1 rows hold texts that the dataset" in note for note in receipt.notes)
    assert lake.dataset("shop").spec.encoding == lake.snapshot("shop@1").spec.encoding


def test_an_action_of_no_known_name_rejects_its_episode(lake: Lake, tmp_path: Path) -> None:
    _ingest(lake, tmp_path, CLICKS)
    more = CLICKS.replace("u1", "u3").replace("u2", "u4").replace(",hat,", ",scarf,")
    receipt = _ingest(lake, tmp_path, more, "more.csv")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (1, 1)
    assert "unknown_action" in json.dumps(receipt.to_json())


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (",31,", ",old,", "'age'.*number"),
        ("age", "years", "'age'|age"),
    ],
)
def test_a_second_log_of_other_columns_is_refused(
    lake: Lake, tmp_path: Path, old: str, new: str, said: str
) -> None:
    _ingest(lake, tmp_path, CLICKS)
    more = CLICKS.replace("u1", "u3").replace("u2", "u4").replace(old, new)
    mapping = {**CLICKS_MAP, "observation": CLICKS_MAP["observation"].replace(old, new)}
    with pytest.raises(SourceInvalidError, match=said):
        _ingest(lake, tmp_path, more, "more.csv", mapping=mapping)


def test_the_observation_need_not_be_named_again(lake: Lake, tmp_path: Path) -> None:
    _ingest(lake, tmp_path, CLICKS)
    mapping = {ours: theirs for ours, theirs in CLICKS_MAP.items() if ours != "observation"}
    more = CLICKS.replace("u1", "u3").replace("u2", "u4")
    assert _ingest(lake, tmp_path, more, "more.csv", mapping=mapping).steps.committed == 3
    vectors = _vectors(lake)
    assert sorted(map(str, vectors[:3])) == sorted(map(str, vectors[3:]))


def test_names_are_not_given_to_numbered_actions(lake: Lake, tmp_path: Path) -> None:
    numbered = CLICKS.replace("shoes", "1").replace("hat", "0")
    _ingest(lake, tmp_path, numbered)
    more = CLICKS.replace("u1", "u3").replace("u2", "u4")
    with pytest.raises(ReplayLakeError):
        _ingest(lake, tmp_path, more, "more.csv", on_invalid="abort")


def test_too_many_categories(tmp_path: Path) -> None:
    rows = "".join(f"u{i},{i},n{i},0,1\n" for i in range(20))
    path = _csv(tmp_path, f"who,x,name,action,reward\n{rows}")
    mapping = {"observation": "x,name", "episode_id": "who"}
    assert len(_episodes(_open(path, mapping=mapping, max_categories=20))) == 20
    with pytest.raises(SourceInvalidError, match=r"'name'.*more than 19.*`max_categories`"):
        _open(path, mapping=mapping, max_categories=19)


def test_a_transcript_stays_text(tmp_path: Path) -> None:
    rows = [{"episode_id": "a", "observation": "hello", "action": "goodbye", "reward": 1.0}]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reading = _open(path)
    (episode,) = _episodes(reading)
    assert (episode.observations.tolist(), episode.actions.tolist()) == (["hello"], ["goodbye"])
    assert reading.encoding is None


def test_the_next_observation_is_encoded_alike(tmp_path: Path) -> None:
    text = (
        "who,x,device,next_x,next_device,action,reward,last\n"
        "u,1,ios,2,web,0,0,0\nu,2,web,3,vr,0,0,1\n"
    )
    mapping = {
        "observation": "x,device",
        "next_observation": "next_x,next_device",
        "episode_id": "who",
        "terminated": "last",
    }
    (episode,) = _episodes(_open(_csv(tmp_path, text), mapping=mapping))
    # x, then device: other, ios, vr, web.
    assert episode.observations.tolist() == [[1, 0, 1, 0, 0], [2, 0, 0, 0, 1]]
    assert np.asarray(episode.final_observation).tolist() == [3, 0, 0, 1, 0]
    wrong = text.replace("2,web,0,0,0", "2,vr,0,0,0")
    (found,) = list(_open(_csv(tmp_path, wrong), mapping=mapping))
    assert isinstance(found, RejectedEpisode)
    assert [finding.check for finding in found.findings] == ["next_observation"]


def test_numbers_alone_stay_as_they_are(tmp_path: Path) -> None:
    text = "who,x,y,action,reward\nu,0.1,2,0,1\n"
    reading = _open(_csv(tmp_path, text), mapping={"observation": "x,y", "episode_id": "who"})
    (episode,) = _episodes(reading)
    assert episode.observations.dtype == np.float64
    assert episode.observations.tolist() == [[0.1, 2]]
    assert [field.name for field in reading.encoding.fields] == ["x", "y"]
    assert reading.encoding.is_plain


def test_a_dataset_without_an_encoding_gets_none(tmp_path: Path) -> None:
    text = "who,x,y,action,reward\nu,0.1,2,go,1\n"
    mapping = {"observation": "x,y", "episode_id": "who"}
    reading = _open(_csv(tmp_path, text), mapping=mapping, encoding=NO_ENCODING)
    (episode,) = _episodes(reading)
    assert reading.encoding is None
    assert episode.actions.tolist() == ["go"]


def test_blocks_are_encoded_as_the_whole(tmp_path: Path) -> None:
    rows = "".join(f"u{i % 7},{i},{'abc'[i % 3]},{999 - i},{i % 2},1\n" for i in range(1000))
    path = _csv(tmp_path, f"who,x,device,at,action,reward\n{rows}")
    options = ReadOptions(
        mapping={"observation": "x,device"}, episode_by=("who", "device"), order_by=("at",)
    )
    files = find_source([path]).files
    whole = list(TabularReader(CsvTables(files), options))
    small = TabularReader(CachedTables(CsvTables(files), keep_bytes=1), options, block_bytes=1)
    assert len(whole) == 21
    for one, other in zip(whole, small, strict=True):
        assert isinstance(one, Episode)
        assert isinstance(other, Episode)
        assert one.episode_id == other.episode_id
        assert np.array_equal(one.observations, other.observations)
        assert one.observations[:, 0].tolist() == sorted(one.observations[:, 0], reverse=True)


def test_encodings_that_differ_are_not_trained_together(lake: Lake, tmp_path: Path) -> None:
    _ingest(lake, tmp_path, CLICKS)
    one = lake.dataset("shop").spec
    path = tmp_path / "other.csv"
    path.write_text(CLICKS.replace("web", "tv"))
    ingest(lake, [path], "other", options=ReadOptions(mapping=CLICKS_MAP))
    other = lake.dataset("other").spec
    assert "device" in str(find_spec_mismatch(one, other))
    assert find_spec_mismatch(one, one) is None
    assert join_specs(one, one).encoding == one.encoding
    assert isinstance(one.encoding, Encoding)


def test_a_dataset_of_texts_takes_texts(lake: Lake, tmp_path: Path) -> None:
    lake.dataset("shop").create(Box((2,), "float64"), Text())
    text = "who,x,y,action,reward\nu,0.5,2,go,1\n"
    mapping = {"observation": "x,y", "episode_id": "who"}
    assert _ingest(lake, tmp_path, text, mapping=mapping).steps.committed == 1
    assert lake.sql("select action from shop.steps").column(0).to_pylist() == ["go"]
