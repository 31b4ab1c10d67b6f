"""Decoded token sequences are the rows of the view `sequences`; the cache has them again."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EmptyReplayError,
    NotFoundError,
    QueryError,
    ShardCorruptError,
)
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.purge.purge import purge
from replaylake.datastore.replay.cache.view_cache import ViewCache
from replaylake.datastore.replay.tokens import sequence_decoder
from replaylake.datastore.replay.tokens.token_view import TokenSequences

Make = Callable[..., Episode]
_ROWS = """
SELECT q.*, coalesce(len(final_observation_tokens), 0) AS num_final
FROM sequences AS q JOIN steps AS s
  ON s.episode_id = q.episode_id AND s.agent_id = q.agent_id AND s.step = q.last_step
ORDER BY q.episode_id, q.agent_id, last_step
"""


def _values(row: dict[str, Any], name: str) -> np.ndarray:
    return np.array(
        [
            (np.nan if trained else 0) if value is None else value
            for value, trained in zip(row[name], row["loss_mask"], strict=True)
        ],
        np.float32,
    )


def _versions(row: dict[str, Any]) -> list[int]:
    """The version of each token of the actions, from the runs."""
    ends = [*row["turn_starts"][1:], row["num_tokens"] - row["num_final"]]
    versions = [-1] * row["num_tokens"]
    for start, end in zip(row["action_starts"], ends, strict=True):
        for at in range(start, end):
            runs = [run for run in row["versions"] if start <= run["start"] <= at]
            versions[at] = runs[-1]["version"] if runs else -1
    return versions


def check_rows(found: TokenSequences, rows: list[dict[str, Any]]) -> None:
    """Compare each sequence with its row."""
    table = found.table.append_column("index", pa.array(np.arange(len(found))))
    places = table.sort_by([(n, "ascending") for n in ("episode_id", "agent_id", "last_step")])
    assert len(found) == len(rows)
    for about, row in zip(places.to_pylist(), rows, strict=True):
        sequence = found.read(about["index"])
        assert sequence.token_ids.tolist() == row["token_ids"]
        assert sequence.loss_mask.tolist() == [bool(flag) for flag in row["loss_mask"]]
        np.testing.assert_array_equal(sequence.log_probs, _values(row, "log_probs"))
        assert sequence.versions.tolist() == _versions(row), row
        batch = found.gather(np.array([about["index"]]), is_packed=False, versions=False)
        np.testing.assert_array_equal(
            batch.columns["action_entropies"][0], _values(row, "action_entropies")
        )
        names = ("root_agent_id", "first_step", "num_turns", "num_tokens", "group_id")
        assert [about[name] for name in names] == [row[name] for name in names]
        assert about["return"] == pytest.approx(row["return"])
        assert batch.returns[0] == pytest.approx(row["return"])
        assert about["episode_return"] == pytest.approx(row["episode_return"])
        assert batch.episode_returns[0] == pytest.approx(row["episode_return"])
        assert about["num_loss_tokens"] == sum(row["loss_mask"])
        numbers = [run["version"] for run in row["versions"]] or [None]
        ends = [*row["turn_starts"][1:], row["num_tokens"] - row["num_final"]]
        spans = zip(row["action_starts"], ends, strict=True)
        sampled = [at for start, end in spans for at in range(start, end)]
        is_known = all(_versions(row)[at] >= 0 for at in sampled)
        range_of = about["min_policy_version"], about["max_policy_version"]
        assert range_of == (min(numbers) if is_known else None, max(numbers))


@pytest.mark.parametrize(
    ("seed", "chunk_bytes"), [(0, 1 << 20), pytest.param(1, 1, marks=pytest.mark.slow)]
)
def test_sequences_are_the_rows_of_the_view(
    fill_lake: Callable[[int], Lake], seed: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A row at a time, and an episode at a time where SQL finds them.
    monkeypatch.setattr(sequence_decoder, "_CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(sequence_decoder, "_QUERY_BYTES", chunk_bytes)
    snapshot = fill_lake(seed).snapshot("talks")
    rows = snapshot.sql(_ROWS).to_pylist()
    assert len(rows) > 30
    found = snapshot.token_sequences(columns=["action_entropies"])
    check_rows(found, rows)
    assert found.wait_cached() is not None, found.cache_failure
    again = snapshot.token_sequences(columns=["action_entropies"])
    assert again.table.equals(found.table)
    check_rows(again, rows)
    selected = snapshot.token_sequences('"return" > 1', columns=["action_entropies"], cache=False)
    pairs = snapshot.sql('SELECT episode_id, agent_id FROM episodes WHERE "return" > 1').to_pylist()
    chosen = {(pair["episode_id"], pair["agent_id"]) for pair in pairs}
    assert 0 < len(selected) < len(found)
    check_rows(selected, [r for r in rows if (r["episode_id"], r["agent_id"]) in chosen])


def test_steps_without_ids_are_left_out(lake: Lake, make_dialogue: Make) -> None:
    """Also where all of a shard, or of what is selected, has none."""
    dataset = lake.dataset("talks")
    dataset.append([make_dialogue("a")])
    unknown = {name: [None] * 2 for name in ("observation_tokens", "action_tokens")}
    dataset.append([make_dialogue("b", 2, extras=unknown | {"action_log_probs": [None] * 2})])
    snapshot = lake.snapshot("talks")
    assert snapshot.token_sequences().table["episode_id"].to_pylist() == ["a"]
    with pytest.raises(EmptyReplayError, match="found none where"):
        snapshot.token_sequences(where="episode_id = 'b'")


def _piece(make: Make, name: str, start: int, stop: int, versions: int | None = None) -> Episode:
    """Steps `start` to `stop` of a dialogue of three."""
    whole = make(name)
    final = {"final_observation_tokens": [None, None, [7, 8]]}
    extras = {n: values[start:stop] for n, values in (whole.extras | final).items()}
    entropies = {"action_entropies": [[0.5] * len(ids) for ids in extras["action_tokens"]]}
    return make(
        name,
        stop - start,
        first_step=start,
        rewards=whole.rewards[start:stop],
        terminated=stop == 3,
        policy_versions=None if versions is None else [versions] * (stop - start),
        extras=extras | entropies,
    )


def test_pieces_of_an_episode_in_any_place(lake: Lake, make_dialogue: Make) -> None:
    """Pieces that adjoin are one sequence; with rows between them they are, too."""
    dataset = lake.dataset("talks")
    for pieces in ([("a", 0, 1)], [("a", 1, 3), ("b", 0, 2)], [("c", 0, 3)], [("b", 2, 3)]):
        dataset.append([_piece(make_dialogue, *piece) for piece in pieces])
    snapshot = dataset.snapshot()
    found = snapshot.token_sequences(columns=["action_entropies"])
    assert found.table["episode_id"].to_pylist() == ["a", "c", "b"]
    check_rows(found, snapshot.sql(_ROWS).to_pylist())
    # Without its beginning it is left out, as in the view.
    dataset.append([_piece(make_dialogue, "d", 1, 3)])
    assert len(dataset.snapshot().token_sequences()) == 3
    compact(lake, "talks")
    snapshot = dataset.snapshot()
    found = snapshot.token_sequences(columns=["action_entropies"])
    assert sorted(found.table["episode_id"].to_pylist()) == ["a", "b", "c"]
    check_rows(found, snapshot.sql(_ROWS).to_pylist())


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 2
    path.write_bytes(data)


def test_a_flipped_bit_is_found_when_it_is_read(lake: Lake, make_dialogue: Make) -> None:
    lake.dataset("talks").append([_piece(make_dialogue, name, 0, 3, versions=4) for name in "abc"])
    snapshot = lake.snapshot("talks")
    whole = snapshot.token_sequences(columns=["action_entropies"])
    folder = whole.wait_cached()
    assert folder is not None
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 17
    expected = [whole.read(index) for index in range(len(whole))]
    for name in names:
        _flip(folder / name)
        found = [finding.path for finding in fsck(lake).findings if "replay" in finding.check]
        assert found == [f"talks/_derived/replay/{folder.name}"], name
        again = snapshot.token_sequences(columns=["action_entropies"])
        if name not in ("view.json", "checksums", "shards"):
            with pytest.raises(ShardCorruptError, match=rf"{name}: found CRC-32 .* of block 0"):
                _read_all(again)
            again = snapshot.token_sequences(columns=["action_entropies"])
        _read_all(again)
        if name == "shards":  # read by vacuum and fsck alone
            fsck(lake, repair=True)
            again = snapshot.token_sequences(columns=["action_entropies"])
        assert again.wait_cached() == folder
        for index, sequence in enumerate(expected):
            assert again.read(index).token_ids.tolist() == sequence.token_ids.tolist()
    assert fsck(lake).findings == ()


def _read_all(found: TokenSequences) -> None:
    found.gather(np.arange(len(found)), is_packed=True, versions=True)
    assert len(found.table) == len(found)


def test_a_purge_removes_what_is_cached(fill_lake: Callable[[int], Lake]) -> None:
    lake = fill_lake(0)
    found = lake.snapshot("talks").token_sequences()
    folder = found.wait_cached()
    assert folder is not None
    assert purge(lake, "talks", "episode_id = 'e0-0'").is_proven
    assert not folder.exists()
    _read_all(found)
    assert "e0-0" not in lake.snapshot("talks").token_sequences().table["episode_id"].to_pylist()


def test_a_lake_that_cannot_be_written_to(lake: Lake, make_dialogue: Make) -> None:
    lake.dataset("talks").append([make_dialogue(name) for name in "ab"])
    snapshot = lake.snapshot("talks")
    found = snapshot.token_sequences(cache=False)
    home = ViewCache(snapshot.table.storage, snapshot.table.root).home
    assert not home.exists()
    with pytest.raises(ConfigInvalidError, match=r"talks@1: found .* not in the cache"):
        pickle.dumps(found)
    home.parent.mkdir(exist_ok=True)
    home.write_text("no folder")
    again = snapshot.token_sequences()
    assert again.wait_cached() is None
    assert str(home) in again.cache_failure
    assert again.read(1).token_ids.tolist() == found.read(1).token_ids.tolist()


def test_another_process_maps_the_cached_files(lake: Lake, make_dialogue: Make) -> None:
    lake.dataset("talks").append([make_dialogue(name) for name in "ab"])
    found = lake.snapshot("talks").token_sequences()
    data = pickle.dumps(found)
    assert len(data) < 1000
    again = pickle.loads(data)
    assert again.table.equals(found.table)
    folder = found.wait_cached()
    assert folder is not None
    shutil.rmtree(folder)
    assert again.read(0).token_ids.tolist() == found.read(0).token_ids.tolist()
    with pytest.raises(NotFoundError, match="removed from the cache after"):
        pickle.loads(data)


def test_refusals(fill_lake: Callable[[int], Lake], lake: Lake, make_episode: Make) -> None:
    fill_lake(0)
    snapshot = lake.snapshot("talks")
    with pytest.raises(NotFoundError, match=r"talks@3: found no column nothing with .* some of"):
        snapshot.token_sequences(columns=["nothing"])
    with pytest.raises(EmptyReplayError, match=r"talks@3: found none where .*num_steps > 99"):
        snapshot.token_sequences("num_steps > 99")
    with pytest.raises(QueryError, match=r"where '.*nothing. > 1.*': found .* of `episodes`"):
        snapshot.token_sequences("nothing > 1")
    with pytest.raises(ConfigInvalidError, match="found where 1, expected SQL in a string"):
        snapshot.token_sequences(1)  # type: ignore[arg-type]
    lake.dataset("control").append([make_episode("a")])
    with pytest.raises(NotFoundError, match="control@1: found no column action_tokens"):
        lake.snapshot("control").token_sequences()
