"""Statistics of shards: equal to those of all steps, counted once, and never needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, MultiDiscrete
from replaylake.datastore.errors import NotFoundError, ShardCorruptError
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.profile import shard_statistics
from replaylake.datastore.lake.profile.profile import Profile, compute_profile
from replaylake.datastore.lake.profile.shard_statistics import (
    ShardStatistics,
    StepNumbers,
    read_statistics,
    refresh_statistics,
)
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.delete import delete
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.maintain import maintain
from replaylake.datastore.maintenance.purge.purge import purge
from replaylake.datastore.maintenance.vacuum import vacuum
from replaylake.datastore.storage.table.column_ranges import column_ranges, merge_ranges

Make = Callable[..., Episode]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test begins with nothing in memory, and a file is written however little it saves."""
    monkeypatch.setattr(shard_statistics, "_WORTH", 0.0)
    shard_statistics._FILE.forget()
    yield
    shard_statistics._FILE.forget()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards that were counted, by path."""
    paths: list[str] = []
    count = shard_statistics._count_shard

    def note(path: Path, entry: Any, *rest: Any) -> pa.Table:
        paths.append(entry.path)
        return count(path, entry, *rest)

    monkeypatch.setattr(shard_statistics, "_count_shard", note)
    return paths


@pytest.fixture
def dataset(lake: Lake, make_episode: Make) -> Dataset:
    """Three commits, of 20, 30 and 40 steps."""
    dataset = lake.dataset("d")
    for name, num in (("a", 20), ("b", 30), ("c", 40)):
        dataset.append([make_episode(name, num, terminated=True)])
    return dataset


def files(dataset: Dataset) -> list[Path]:
    return sorted((dataset.path / shard_statistics.FOLDER).glob("*"))


def profile_of(dataset: Dataset, version: int | None = None) -> dict[str, Any]:
    return compute_profile(dataset.snapshot(version)).to_json()


def make_rich_episodes(num: int) -> list[Episode]:
    """Return episodes of a Dict space, some of whose values are unknown."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(num):
        steps = int(rng.integers(1, 300))
        rewards = 1e8 + rng.standard_normal(steps)
        rewards[rng.random(steps) < 0.1] = np.nan
        made.append(
            Episode(
                f"e{number}",
                observations={
                    "place": rng.standard_normal((steps, 3)).astype(np.float32),
                    "cell": rng.integers(2, 7, steps),
                },
                actions=rng.integers(0, 3, (steps, 2)),
                rewards=rewards,
                truncated=True,
                behavior_log_probs=rng.normal(-1, 0.3, steps).astype(np.float32),
                policies=rng.choice(np.array(["p", "q", None], dtype=object), steps),
                policy_versions=rng.integers(0, 3, steps),
                timestamps=1_700_000_000_000_000 + number * 10**9 + np.arange(steps) * 1_000_000,
                extras={"tags": [["x"] * int(n) for n in rng.integers(0, 3, steps)]},
            )
        )
    return made


@pytest.fixture
def rich(lake: Lake) -> Dataset:
    """Five commits; each has more steps than are counted at once, of which it makes several."""
    dataset = lake.dataset("rich")
    space = Dict({"place": Box((3,), "float32", -1.0, 1.0), "cell": Discrete(5, start=2)})
    dataset.create(space, MultiDiscrete((3, 3)), rewards_optional=True)
    episodes = make_rich_episodes(20)
    for start in range(0, 20, 4):
        dataset.append(episodes[start : start + 4])
    return dataset


# --- equal to what the steps say ------------------------------------------------------------------


def test_the_merge_is_what_all_steps_say(rich: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_statistics, "_BATCH_ROWS", 100)
    snapshot = rich.snapshot()
    assert len(snapshot.files) == 5
    found = compute_profile(snapshot)
    steps = snapshot.table.read()
    places = np.stack(steps["observation"].combine_chunks().field("place").to_numpy(False))
    cells = steps["observation"].combine_chunks().field("cell").to_numpy()
    rewards = steps["reward"].to_numpy()
    chances = np.exp(steps["behavior_log_prob"].to_numpy().astype(np.float64))
    for one, values in [
        *zip(found.observations, [*places.T.astype(np.float64), cells], strict=True),
        (found.reward, rewards[~np.isnan(rewards)]),
        (found.propensities, chances),
    ]:
        assert one is not None
        assert (one.num, one.minimum, one.maximum) == (len(values), values.min(), values.max())
        assert one.mean == pytest.approx(values.mean(), rel=1e-12)
        centered = values - values.mean()
        assert one.std == pytest.approx(np.sqrt((centered**2).mean()), rel=1e-12, abs=1e-9)
        assert one.share_zero == (values == 0).mean()
        assert one.num_outside == sum(
            (values < (-np.inf if one.low is None else one.low))
            | (values > (np.inf if one.high is None else one.high))
        )
    (counts,) = found.observation_counts
    assert counts.counts == tuple(np.bincount(cells, minlength=7)[2:].tolist())
    ranges = column_ranges(snapshot.table)
    columns = read_statistics(snapshot).read_columns(snapshot.table.schema)
    assert merge_ranges(columns, snapshot.table) == ranges
    assert ranges["timestamp"].least is not None
    assert found.summary == snapshot.describe()
    for name in ("reward", "policy", "tags", "action_mask"):
        if name in steps.column_names:
            expected = steps[name].null_count / steps.num_rows
            assert found.missing[name] == pytest.approx(expected), name
    assert found.missing["tags"] == 0.0, "an empty list is a value"
    assert found.missing["policy"] > 0.2
    assert "final_observation" not in found.missing


def test_policies_are_counted_exactly_and_placed_in_time(rich: Dataset) -> None:
    snapshot = rich.snapshot()
    found = compute_profile(snapshot)
    assert found.by_timestamp
    rows = snapshot.sql(
        """WITH bounds AS (SELECT min(epoch_us(timestamp)) AS first,
            max(epoch_us(timestamp)) AS last FROM steps)
        SELECT policy, policy_version AS version, CAST(least(39,
            floor((epoch_us(timestamp) - first) / (last - first) * 40)) AS INTEGER) AS period,
            count(*) AS num FROM steps, bounds GROUP BY ALL"""
    ).to_pylist()
    exact: dict[Any, list[int]] = {}
    for row in rows:
        exact.setdefault((row["policy"], row["version"]), [0] * 40)[row["period"]] += row["num"]
    assert {(p.policy, p.version) for p in found.policies} == set(exact)
    for share in found.policies:
        by_period = exact[share.policy, share.version]
        assert share.num_steps == sum(by_period)
        # A part of a shard is a fifth of a period, or less, of which there are five: what is not
        # in its own period is beside it.
        moved = np.abs(np.cumsum(by_period) - np.cumsum(share.by_period)).max()
        assert moved <= max(by_period)


def test_a_column_that_came_later_is_missing_before(dataset: Dataset, make_episode: Make) -> None:
    extras = {"mark": np.arange(10)}
    dataset.append([make_episode("z", 10, terminated=True, extras=extras)])
    found = compute_profile(dataset.snapshot())
    assert found.missing["mark"] == 0.9
    assert found.summary["ranges"]["mark"] == {"min": 0, "max": 9, "missing": 0.9}
    assert "mark" not in compute_profile(dataset.snapshot(3)).missing


# --- a sample of it -------------------------------------------------------------------------------


def test_the_sample_is_even_over_all_steps(
    lake: Lake, make_episode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where shards are counted with other strides, as the dataset grows."""
    monkeypatch.setattr(shard_statistics, "_SAMPLE_ROWS", 200)
    dataset = lake.dataset("d")
    taken = 0
    for number, num in enumerate([50, 400, 3, 900, 1, 2_000]):
        dataset.append([make_episode(f"e{number}", num)])
        snapshot = dataset.snapshot()
        statistics = read_statistics(snapshot)
        steps = statistics.sample(200)[:, 0]
        taken += num
        assert min(taken, 90) <= len(steps) <= 200
        assert len(statistics.table["sample"].combine_chunks().flatten()) <= 2 * 200 * 5
        if taken == 50:
            assert len(steps) == 50, "what is little is all there"
    stride = int(np.diff(steps).max())
    assert stride == 32
    assert np.isin(np.diff(steps)[np.diff(steps) > 0], [stride]).mean() > 0.97
    # The same whether they were counted one by one, or all at once.
    shard_statistics._FILE.delete(dataset.table.storage, "d")
    np.testing.assert_array_equal(read_statistics(snapshot).sample(200)[:, 0], steps)


def test_where_a_sample_starts_is_even_over_shards() -> None:
    entries = [f"shards/{number}.parquet" for number in range(4_096)]
    starts = [-shard_statistics.zlib.crc32(path.encode()) % 64 for path in entries]
    assert np.bincount(starts, minlength=64).min() > 30


# --- counted once ---------------------------------------------------------------------------------


def test_a_shard_is_counted_once(dataset: Dataset, make_episode: Make, counted: list[str]) -> None:
    first, newest = profile_of(dataset, 1), profile_of(dataset)
    assert counted == [entry.path for entry in dataset.snapshot().files]
    shard_statistics._FILE.forget()
    assert (profile_of(dataset, 1), profile_of(dataset)) == (first, newest)
    assert len(counted) == 3, "read back from the file"
    assert len(files(dataset)) == 1
    dataset.append([make_episode("e", 50)])
    assert compute_profile(dataset.snapshot()).reward.num == 140
    assert compute_profile(dataset.snapshot(2)).reward.num == 50
    assert len(counted) == 4, "the new shard alone"


def test_little_is_counted_again_rather_than_kept(
    dataset: Dataset, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_statistics, "_WORTH", 2.0)
    expected = profile_of(dataset)
    assert files(dataset) == []
    assert profile_of(dataset) == expected
    assert len(counted) == 3, "remembered all the same"


def test_what_was_counted_before_an_end_is_kept(dataset: Dataset, counted: list[str]) -> None:
    class StoppedError(Exception):
        pass

    def stop(num: int, total: int) -> None:
        seen.append((num, total))
        if num >= 50:
            raise StoppedError

    seen: list[tuple[int, int]] = []
    with pytest.raises(StoppedError):
        compute_profile(dataset.snapshot(), on_progress=stop)
    assert seen == [(20, 90), (50, 90)]
    shard_statistics._FILE.forget()
    seen.clear()
    assert compute_profile(dataset.snapshot(), on_progress=lambda *at: seen.append(at)).reward.num
    assert seen == [(90, 90)]
    assert len(counted) == 3


def test_a_long_count_is_kept_on_the_way(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_statistics, "_SAVED_STEPS", 40)
    there: list[int] = []
    expected = compute_profile(
        dataset.snapshot(), on_progress=lambda *_: there.append(len(files(dataset)))
    )
    assert there == [0, 1, 1]
    assert expected.to_json() == profile_of(dataset)


def test_other_spaces_are_other_numbers(dataset: Dataset, counted: list[str]) -> None:
    profile_of(dataset)
    snapshot = dataset.snapshot()
    spec = replace(snapshot.spec, action_space=Discrete(9))
    assert StepNumbers(spec).key != StepNumbers(snapshot.spec).key
    other = compute_profile(replace(snapshot, spec=spec))
    assert len(other.action_counts[0].counts) == 9
    assert len(counted) == 6


# --- it may be deleted, damaged, out of reach, or written twice -----------------------------------


def test_it_may_be_deleted_or_damaged(dataset: Dataset, counted: list[str]) -> None:
    expected = profile_of(dataset)
    for harm in ("delete", "truncate", "flip", "rename", "garbage"):
        (file,) = files(dataset)
        content = bytearray(file.read_bytes())
        if harm == "delete":
            file.unlink()
        elif harm == "rename":
            file.rename(file.with_name("01m-other.parquet"))
        elif harm == "garbage":
            (file.parent / "zz.parquet").write_bytes(b"PAR1")
        else:
            content[len(content) // 2] ^= 1
            file.write_bytes(content[:-9] if harm == "truncate" else content)
        shard_statistics._FILE.forget()
        counted.clear()
        assert profile_of(dataset) == expected, harm
        assert len(counted) == (0 if harm == "garbage" else 3), harm
        for other in files(dataset)[:-1] if harm == "garbage" else ():
            assert other == file
        (dataset.path / shard_statistics.FOLDER / "zz.parquet").unlink(missing_ok=True)


def test_a_lake_that_may_only_be_read(
    dataset: Dataset, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(dataset.table.storage), "put", refuse)
    expected = profile_of(dataset)
    assert profile_of(dataset) == expected
    assert len(counted) == 3, "kept in memory"
    assert files(dataset) == []


@pytest.mark.slow
def test_several_at_once(dataset: Dataset) -> None:
    expected = profile_of(dataset)
    shard_statistics._FILE.delete(dataset.table.storage, "d")

    def read(_: int) -> dict[str, Any]:
        shard_statistics._FILE.forget()
        return profile_of(open_lake(dataset.path.parent).dataset("d"))

    with ThreadPoolExecutor(4) as pool:
        assert all(found == expected for found in pool.map(read, range(12)))
    assert 1 <= len(files(dataset)) <= 4


@pytest.mark.slow
def test_an_object_store_keeps_it_for_other_machines(
    bucket: str, make_episode: Make, counted: list[str]
) -> None:
    dataset = open_lake(f"s3://{bucket}/lake", create=True).dataset("d")
    for name in "ab":
        dataset.append([make_episode(name, 20, terminated=True)])
    expected = profile_of(dataset)
    assert len(counted) == 2
    # Another machine: nothing in memory, and no copies of shards.
    shard_statistics._FILE.forget()
    other = open_lake(f"s3://{bucket}/lake")
    assert compute_profile(other.snapshot("d")).to_json() == expected
    assert len(counted) == 2
    purge(other, "d", "episode_id = 'a'")
    assert other.storage.names(f"d/{shard_statistics.FOLDER}") == []
    assert compute_profile(other.snapshot("d")).reward.num == 20


def test_a_shard_that_is_gone_is_reported(dataset: Dataset) -> None:
    profile_of(dataset)
    dataset.snapshot().table.paths()[1].unlink()
    with pytest.raises(ShardCorruptError):
        profile_of(dataset)


def test_damage_is_found_while_a_shard_is_counted(dataset: Dataset) -> None:
    path = dataset.snapshot().table.paths()[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ShardCorruptError):
        profile_of(dataset)


# --- what maintenance does to it ------------------------------------------------------------------


def test_compaction_and_deletion_leave_each_version_right(
    lake: Lake, dataset: Dataset, counted: list[str]
) -> None:
    before = profile_of(dataset)
    compact(lake, "d")
    after = profile_of(dataset)
    assert len(counted) == 4
    assert after["reward"] == {**before["reward"], "mean": after["reward"]["mean"]}
    delete(lake, "d", "episode_id = 'b'")
    assert profile_of(dataset)["reward"]["num"] == 60
    assert profile_of(dataset, 3) == before


def test_vacuum_takes_out_what_tells_of_shards_that_are_gone(
    lake: Lake, dataset: Dataset, counted: list[str]
) -> None:
    profile_of(dataset)
    delete(lake, "d", "episode_id = 'b'")
    expected = profile_of(dataset)
    num_counted = len(counted)
    assert "b" in ids_in_file(dataset)
    vacuum(lake, ["d"], delete=True, now_ms=1 << 43)
    assert "b" not in ids_in_file(dataset)
    shard_statistics._FILE.forget()
    assert profile_of(dataset) == expected
    assert len(counted) == num_counted, "the others need not be counted again"
    with pytest.raises(NotFoundError):
        profile_of(dataset, 3)


def ids_in_file(dataset: Dataset) -> set[str]:
    """Return the least and greatest episode ids that the file has of each shard."""
    (file,) = files(dataset)
    data = shard_statistics._decode(file.read_bytes())
    assert isinstance(data, ShardStatistics)
    fields = dataset.snapshot().table.schema
    shards = data.read_columns(fields)
    return {
        value for one in shards for value in (one["episode_id"].least, one["episode_id"].greatest)
    }


def test_purge_deletes_it(lake: Lake, dataset: Dataset) -> None:
    profile_of(dataset)
    assert files(dataset)
    purge(lake, "d", "episode_id = 'b'")
    assert files(dataset) == []
    assert profile_of(dataset)["reward"]["num"] == 60
    assert "b" not in ids_in_file(dataset)


def test_fsck_deletes_what_was_made_from_damaged_shards(lake: Lake, dataset: Dataset) -> None:
    profile_of(dataset)
    assert fsck(lake).is_clean
    assert files(dataset), "of what is whole it stays"
    path = dataset.snapshot().table.paths()[0]
    path.write_bytes(path.read_bytes()[:-9])
    assert not fsck(lake).is_clean
    assert files(dataset) == []


def test_maintenance_counts_what_a_visitor_would_wait_for(
    lake: Lake, dataset: Dataset, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (one, _) = maintain(lake)
    assert (one.counted, counted, files(dataset)) == (False, [], [])
    monkeypatch.setattr(shard_statistics, "_MIN_REFRESHED_STEPS", 50)
    (one, _) = maintain(lake)
    assert (one.counted, len(counted), len(files(dataset))) == (True, 1, 1)
    (one, _) = maintain(lake)
    assert (one.counted, len(counted)) == (False, 1)
    assert not refresh_statistics(dataset.snapshot())
    assert isinstance(compute_profile(dataset.snapshot()), Profile)
    assert len(counted) == 1
