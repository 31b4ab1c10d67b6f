from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import (
    AlreadyExistsError,
    ConfigInvalidError,
    EmptyReplayError,
    NotFoundError,
    QueryRefusedError,
    ShardCorruptError,
    StorageError,
)
from replaylake.datastore.interchange.export.export import export
from replaylake.datastore.interchange.export.export_selection import select_for_export
from replaylake.datastore.interchange.export.stored_episodes import (
    PendingEpisodes,
    iter_stored_episodes,
)
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import Lake, open_lake


def _piece(name: str, first: int, num: int, *, end: bool = False, **fields: Any) -> Episode:
    """Steps first..first+num of an episode; its observations are 100 * the step, + 1 a dim."""
    steps = np.arange(first, first + num)
    observations = (100.0 * steps)[:, None] + np.arange(2)
    final = {"final_observation": 100.0 * (first + num) + np.arange(2)}
    return Episode(
        f"p/{name}",
        observations.astype(np.float32),
        steps % 2,
        steps.astype(float),
        terminated=end,
        first_step=first,
        **{**final, **fields},
    )


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """Episode a in three commits, b in one between them, c with a gap, d in one piece."""
    lake = open_lake(tmp_path / "lake", create=True)
    dataset = lake.dataset("a")
    dataset.append([_piece("a", 0, 5), _piece("b", 0, 4, end=True)])
    dataset.append([_piece("a", 5, 5), _piece("c", 0, 2)])
    dataset.append([_piece("d", 0, 3, end=True)])
    dataset.append([_piece("a", 10, 2, end=True), _piece("c", 4, 2, end=True)])
    return lake


def _episodes(
    lake: Lake, tmp_path: Path, where: str | None = None, where_steps: str | None = None, **k: Any
) -> list[Episode]:
    snapshot = lake.snapshot("a")
    selection = select_for_export(snapshot, where, where_steps)
    return list(iter_stored_episodes(snapshot, selection, tmp_path, **k))


def _shape(episodes: list[Episode]) -> list[tuple[str, int, int, bool]]:
    return [(e.episode_id, e.first_step, len(e), e.terminated) for e in episodes]


# One row at a time, a few, and all of a shard.
@pytest.mark.parametrize("batch_bytes", [1, 1000, 16 << 20])
def test_pieces_become_whole_episodes_in_the_order_of_first_rows(
    lake: Lake, tmp_path: Path, batch_bytes: int
) -> None:
    found = _episodes(lake, tmp_path, batch_bytes=batch_bytes)
    assert _shape(found) == [
        ("p/a", 0, 12, True),
        ("p/b", 0, 4, True),
        ("p/c", 0, 2, False),
        ("p/c", 4, 2, True),
        ("p/d", 0, 3, True),
    ]
    assert found[0].observations[:, 0].tolist() == [100.0 * step for step in range(12)]
    assert found[0].final_observation.tolist() == [1200.0, 1201.0]
    assert found[2].final_observation.tolist() == [200.0, 201.0]


def test_what_is_held_beyond_memory_goes_to_disk_and_comes_back(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _episodes(lake, tmp_path)
    made: list[PendingEpisodes] = []

    def small(spec: Any, folder: Path) -> PendingEpisodes:
        made.append(PendingEpisodes(spec, folder, kept_bytes=100))
        return made[0]

    monkeypatch.setattr(
        "replaylake.datastore.interchange.export.stored_episodes.PendingEpisodes", small
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found = _episodes(lake, scratch)
    assert made[0].num_spilled_bytes > 0
    assert _shape(found) == _shape(expected)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one.observations, other.observations)
    assert [*scratch.iterdir()] == []


def test_where_selects_whole_episodes_and_where_steps_cuts_them(lake: Lake, tmp_path: Path) -> None:
    assert _shape(_episodes(lake, tmp_path, "num_steps = 4")) == [
        ("p/b", 0, 4, True),
        ("p/c", 0, 2, False),
        ("p/c", 4, 2, True),
    ]
    cut = _episodes(lake, tmp_path, "num_steps = 12", "step NOT IN (3, 11)")
    assert _shape(cut) == [("p/a", 0, 3, False), ("p/a", 4, 7, False)]
    # What was seen next is the observation of the step that was left out.
    assert [e.final_observation[0] for e in cut] == [300.0, 1100.0]
    with pytest.raises(QueryRefusedError, match="random"):
        _episodes(lake, tmp_path, "random() < 0.5")


def test_every_field_comes_back(tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake", create=True)
    one = _piece(
        "x",
        3,
        3,
        end=True,
        agent_id="left",
        behavior_log_probs=np.array([-0.5, np.nan, -1.0], np.float32),
        policies=np.array(["a", None, "b"], object),
        policy_versions=np.array([1, 2, 3]),
        action_masks=np.ones((3, 3), bool),
        timestamps=np.array([1, 2, 3]),
        env_steps=np.array([7, 9, 11], np.int32),
        source_episode_id="own",
        extras={"note": ["u", None, "v"]},
    )
    lake.dataset("a").append([one, _piece("y", 0, 2, end=True, agent_id="right")])
    found, bare = _episodes(lake, tmp_path)
    for name in (
        "observations",
        "actions",
        "rewards",
        "behavior_log_probs",
        "policy_versions",
        "action_masks",
        "timestamps",
        "env_steps",
        "final_observation",
    ):
        assert np.array_equal(getattr(found, name), getattr(one, name), equal_nan=True), name
    assert found.policies is not None
    assert found.policies.tolist() == ["a", None, "b"]
    assert found.extras["note"].to_pylist() == ["u", None, "v"]
    assert (found.first_step, found.agent_id, found.source_episode_id) == (3, "left", "own")
    known = (bare.behavior_log_probs, bare.policies, bare.policy_versions, bare.action_masks)
    assert known == (None, None, None, None)
    assert bare.timestamps is None
    assert bare.extras == {}


def test_a_piece_ends_where_versions_begin_to_be_known(tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake", create=True)
    dataset = lake.dataset("a")
    dataset.append([_piece("x", 0, 2)])
    dataset.append([_piece("x", 2, 2, end=True, policy_versions=np.array([4, 5]))])
    first, second = _episodes(lake, tmp_path)
    assert (len(first), first.policy_versions) == (2, None)
    assert second.policy_versions is not None
    assert second.policy_versions.tolist() == [4, 5]


def _ids(path: Path) -> list[str]:
    rows = map(json.loads, path.read_text().splitlines())
    return list(dict.fromkeys(row["episode_id"] for row in rows))


def test_ids_are_the_sources_own_where_they_are_unique(tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("a").append(
        [
            _piece("1/x", 0, 1, end=True, source_episode_id="x"),
            _piece("2/x", 0, 1, end=True, source_episode_id="x"),
            _piece("2/y", 0, 1, end=True, source_episode_id="y"),
            _piece("z", 0, 2, end=True),
        ]
    )
    receipt = export(lake, "a", tmp_path / "o.jsonl", format="jsonl")
    assert _ids(tmp_path / "o.jsonl") == ["p/1/x", "p/2/x", "y", "p/z"]
    assert any("several episodes" in note for note in receipt.notes)
    export(lake, "a", tmp_path / "p.jsonl", format="jsonl", where="episode_id <> 'p/1/x'")
    assert _ids(tmp_path / "p.jsonl") == ["x", "y", "p/z"]


def test_the_receipt_counts(lake: Lake, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    receipt = export(
        lake, "a@2", tmp_path / "o.csv", format="csv", on_progress=lambda *now: seen.append(now)
    )
    lines = (tmp_path / "o.csv").read_text().splitlines()
    # Version 2 is the second append: version 0 made the dataset.
    assert (receipt.version, receipt.num_episodes, receipt.num_steps) == (2, 3, 16)
    assert len(lines) == 17
    assert receipt.num_bytes == (tmp_path / "o.csv").stat().st_size
    assert seen[-1] == (16, 16)
    whole = export(lake, "a", tmp_path / "p.csv", format="csv")
    assert (whole.num_episodes, whole.num_pieces, whole.num_steps) == (4, 5, 23)
    assert any("--gaps split" in note for note in whole.notes)


def _left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith((".o", "o")))


def test_what_is_there_is_kept_unless_it_is_forced(lake: Lake, tmp_path: Path) -> None:
    path = tmp_path / "o.csv"
    path.write_text("mine")
    with pytest.raises(AlreadyExistsError, match="`force`"):
        export(lake, "a", path, format="csv")
    assert path.read_text() == "mine"
    export(lake, "a", path, format="csv", force=True)
    assert path.read_text().startswith("episode_id")
    folder = tmp_path / "o"
    (folder / "thesis").mkdir(parents=True)
    with pytest.raises(AlreadyExistsError, match="folder"):
        export(lake, "a", folder, format="csv", force=True)
    with pytest.raises(AlreadyExistsError, match="folder"):
        export(lake, "a", folder, format="minari", force=True)
    assert (folder / "thesis").is_dir()
    with pytest.raises(NotFoundError, match="no such folder"):
        export(lake, "a", tmp_path / "no" / "o.csv", format="csv")


def test_a_folder_is_replaced_by_its_like(lake: Lake, tmp_path: Path) -> None:
    path = tmp_path / "o"
    export(lake, "a", path, format="minari", where="num_steps = 3")
    before = sorted(path.rglob("*"))
    export(lake, "a", path, format="minari", where="num_steps = 12", force=True)
    assert sorted(path.rglob("*")) == before
    assert _left(tmp_path) == ["o"]


def test_a_failed_export_leaves_nothing(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "o.csv"
    with pytest.raises(EmptyReplayError, match="widen"):
        export(lake, "a", path, format="csv", where="num_steps > 100")
    with pytest.raises(ConfigInvalidError, match="parquet"):
        export(lake, "a", path, format="xls")

    def full(*_: object) -> Iterator[bytes]:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("replaylake.datastore.interchange.formats.generic.csv.csv_lines", full)
        with pytest.raises(StorageError, match="No space left"):
            export(lake, "a", path, format="csv")
    shard = next((lake.dataset("a").path / "shards").iterdir())
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(ShardCorruptError, match="sha256"):
        export(lake, "a", path, format="csv")
    assert _left(tmp_path) == []


@pytest.mark.slow
def test_memory_does_not_grow_with_the_dataset(tmp_path: Path) -> None:
    """120 MB of rows whose first episode goes on to the end: all of it waits for that one."""
    lake = open_lake(tmp_path / "lake", create=True)
    dataset = lake.dataset("a")
    rng = np.random.default_rng(0)
    for i in range(30):
        wide = rng.normal(size=(1000, 500))
        dataset.append(
            [
                Episode("p/long", wide[:1], np.zeros(1, int), np.ones(1), first_step=i),
                Episode(f"p/{i}", wide, np.zeros(1000, int), np.ones(1000), truncated=True),
            ]
        )
    snapshot = lake.snapshot("a")
    held: list[PendingEpisodes] = []
    selection = select_for_export(snapshot, None, None)

    def small(spec: Any, folder: Path) -> PendingEpisodes:
        held.append(PendingEpisodes(spec, folder, kept_bytes=16 << 20))
        return held[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "replaylake.datastore.interchange.export.stored_episodes.PendingEpisodes", small
        )
        before, num = pa.total_allocated_bytes(), 0
        seen: list[int] = []
        for episode in iter_stored_episodes(
            snapshot,
            selection,
            tmp_path,
            lambda _: seen.append(pa.total_allocated_bytes()),
            batch_bytes=1 << 20,
        ):
            num += len(episode)
        most = max(seen) - before
    assert num == 30 * 1001
    assert most < 40 << 20
    assert held[0].num_spilled_bytes > 60 << 20


def test_the_receipt_says_what_a_text_cannot_hold(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("user,age,dev,shown\na,31,ios,x\na,45,web,y\n")
    lake = open_lake(tmp_path / "lake", create=True)
    options = ReadOptions(
        mapping={"observation": "age,dev", "action": "shown"},
        episode_by=("user",),
        reward_unknown=True,
    )
    ingest(lake, [log], "a", options=options)
    notes = export(lake, "a", tmp_path / "o.csv", format="csv").notes
    assert any("no place for the rules" in note for note in notes)
    assert any("--no-reward" in note for note in notes)
    assert not export(lake, "a", tmp_path / "o.parquet", format="parquet").notes
    ingest(lake, [tmp_path / "o.parquet"], "b")
    encoding = lake.snapshot("b").spec.encoding
    assert encoding is not None
    assert encoding == lake.snapshot("a").spec.encoding
