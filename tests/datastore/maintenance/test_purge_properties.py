"""Deleting and purging against a dictionary, on a folder and on an object store, beside writers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.lake.commit import Commit
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.delete import delete
from replaylake.datastore.maintenance.labels.annotate import annotate
from replaylake.datastore.maintenance.purge import purge as purge_module
from replaylake.datastore.maintenance.purge.purge import PurgeReceipt, purge
from replaylake.datastore.storage.storage import LocalStorage

NAMES = ["episode-aa", "episode-bb", "episode-cc", "episode-dd"]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["append", "readmit", "delete", "purge", "annotate", "compact", "tag"]),
        st.sampled_from(NAMES),
    ),
    min_size=2,
    max_size=10,
)


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purge_module, "_PAUSE_S", 0.0)


def live(lake: Lake) -> dict[str, int]:
    rows = lake.dataset("d").snapshot().table.read(["episode_id"])["episode_id"].to_pylist()
    return {name: rows.count(name) for name in set(rows)}


@pytest.mark.slow
@settings(
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
@given(actions=ACTIONS)
def test_any_history(
    tmp_path_factory: pytest.TempPathFactory, make_episode: Any, actions: list[tuple[str, str]]
) -> None:
    lake = open_lake(tmp_path_factory.mktemp("any") / "lake", create=True)
    dataset = lake.dataset("d")
    dataset.create(Box((2,)), Discrete(2))
    known: dict[str, int] = {}
    stored: set[str] = set()  # in some version, the newest or an older one
    purged: set[str] = set()  # refused from then on
    for number, (kind, name) in enumerate(actions):
        where = f"episode_id = '{name}'"
        if kind in ("append", "readmit") and name not in known:
            episodes = [make_episode(name), make_episode(f"other-{number:03}", 1)]
            commit = dataset.append(episodes, readmit=kind == "readmit")
            if kind == "readmit":
                purged.discard(name)
            known[f"other-{number:03}"] = 1
            if name not in purged:
                known[name] = 3
                stored.add(name)
            assert commit.num_episodes == 1 + (name not in purged)
        elif kind == "delete":
            done = delete(lake, "d", where)
            assert done.num_steps == known.pop(name, 0)
        elif kind == "purge":
            gone = purge(lake, "d", where)
            assert gone.is_proven
            assert gone.num_steps == known.pop(name, 0)
            assert (gone.id is not None) == (name in stored)
            if name in stored:
                stored.discard(name)
                purged.add(name)
        elif kind == "annotate":
            labels = pa.table({"episode_id": [name], "x": [number]})
            annotate(lake, "d", labels, on=["episode_id"], add=["x"])
        elif kind == "compact":
            compact(lake, "d", open_s=0)
        else:
            lake.tags.set("d", f"t{number}", dataset.snapshot().version)
        assert live(lake) == known
    # Each tag reads what it read, or says that it cannot.
    for tag in lake.tags.list("d"):
        try:
            rows = lake.snapshot(f"d@{tag.name}").sql("select distinct episode_id as e from steps")
            assert not purged & set(rows["e"].to_pylist())
            assert tag.reproducible
        except NotFoundError:
            assert not tag.reproducible
    oracle = DeltaTable(str(dataset.path)).to_pyarrow_table(columns=["episode_id"])
    assert oracle.num_rows == sum(known.values())


def test_on_an_object_store(make_episode: Any, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    lake = open_lake(f"memory://purge-{tmp_path.name}", create=True)
    dataset = lake.dataset("d")
    dataset.append([make_episode("episode-aa"), make_episode("episode-bb")])
    labels = pa.table({"episode_id": NAMES[:2], "x": [1, 2]})
    assert annotate(lake, "d", labels, on=["episode_id"], add=["x"]).steps == 6
    old = dataset.snapshot(1)
    assert old.table.read().num_rows == 6  # and a copy is in the cache of this machine
    (copy,) = old.table.paths()
    done = purge(lake, "d", "episode_id = 'episode-aa'")
    assert done.is_proven
    assert (done.num_steps, done.num_files) == (3, 2)
    assert not copy.exists()
    assert live(lake) == {"episode-bb": 3}
    with pytest.raises(NotFoundError, match="purged"):
        dataset.snapshot(1).sql("select * from steps")


@pytest.mark.slow
def test_beside_writers(tmp_path: Path, make_episode: Any) -> None:
    lake = open_lake(tmp_path / "lake", create=True)
    dataset = lake.dataset("d")
    for number in range(6):
        dataset.append([make_episode(f"episode-{number:04}"), make_episode(f"secret-{number:04}")])
    stop, failures, written = threading.Event(), [], []

    def write(name: str) -> None:
        try:
            other = open_lake(tmp_path / "lake").dataset("d")
            while not stop.is_set() and len(written) < 200:
                number = len(written)
                other.append([make_episode(f"{name}-{number:06}")])
                written.append(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(f"writer-{n}",)) for n in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(3):
            done = purge(lake, "d", f"episode_id = 'secret-{number:04}'")
            # A writer's file that is not committed yet holds none of it.
            assert done.is_proven
        delete(lake, "d", "episode_id like 'secret-%'")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
    names = live(lake)
    assert not [name for name in names if name.startswith("secret")]
    assert len([name for name in names if name.startswith("episode")]) == 6
    assert sum(num for name, num in names.items() if name.startswith("writer")) == 3 * len(written)


def _purge_beside(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, write: Callable[[], object]
) -> PurgeReceipt:
    """Purge episode-aa while something writes each time that files have been deleted."""
    delete_files = LocalStorage.delete

    def delete_and_write(self: LocalStorage, paths: Iterable[str]) -> None:
        delete_files(self, paths)
        write()

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "delete", delete_and_write)
        return purge(lake, "d", "episode_id = 'episode-aa'")


def test_a_purge_refuses_the_steps_that_a_writer_goes_on_sending(
    lake: Lake, make_episode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("episode-aa"), make_episode("episode-bb")])
    steps = iter(range(3, 300, 3))
    commits: list[Commit] = []
    other = open_lake(lake.url).dataset("d")

    def append_more() -> None:
        commits.append(other.append([make_episode("episode-aa", first_step=next(steps))]))

    done = _purge_beside(lake, monkeypatch, append_more)
    assert done.is_proven
    assert commits
    assert {commit.num_episodes for commit in commits} == {0}
    assert live(lake) == {"episode-bb": 3}


@pytest.mark.slow
def test_rows_of_a_writer_that_knows_of_no_deletions_are_named_and_purged_again(
    lake: Lake, make_episode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("episode-aa"), make_episode("episode-bb")])
    rows = dataset.table.snapshot().read().filter(pc.field("episode_id") == "episode-aa")
    numbers = count()

    def commit_rows() -> None:
        # As an older ReplayLake, or another program that writes Delta tables, would.
        dataset.table.commit([dataset.table.write(rows)], producer="other", sequence=next(numbers))

    done = _purge_beside(lake, monkeypatch, commit_rows)
    assert {trace.kind for trace in done.left} == {"live"}
    again = purge(lake, "d", "episode_id = 'episode-aa'")
    assert again.is_proven
    assert again.resumed == (done.id,)
    assert live(lake) == {"episode-bb": 3}


class Killed(BaseException):
    """As the process would end here."""


def _kill_at(patch: pytest.MonkeyPatch, number: int) -> None:
    """Let the process end just before, or just after, the k-th file that it writes."""
    count = 0
    for method in ("put", "put_if_absent"):
        original = getattr(LocalStorage, method)

        def changed(self: Any, *args: Any, _original: Any = original, **more: Any) -> Any:
            nonlocal count
            count += 1
            if count == number and number % 2:
                raise Killed
            done = _original(self, *args, **more)
            if count == number:
                raise Killed
            return done

        patch.setattr(LocalStorage, method, changed)


@pytest.mark.slow
def test_an_annotation_that_is_killed_is_whole_or_not_there(
    tmp_path: Path, make_episode: Any
) -> None:
    labels = pa.table({"episode_id": NAMES[:3], "x": [1, 2, 3]})
    for kill_at in range(1, 9):
        lake = open_lake(tmp_path / str(kill_at), create=True)
        for name in NAMES[:3]:
            lake.dataset("d").append([make_episode(name)])
        with pytest.MonkeyPatch.context() as patch, suppress(Killed):
            _kill_at(patch, kill_at)
            annotate(lake, "d", labels, on=["episode_id"], add=["x"])
        lake = open_lake(tmp_path / str(kill_at))
        snapshot = lake.dataset("d").snapshot()
        assert snapshot.version in (3, 4)
        assert ("x" in snapshot.spec.extras) == (snapshot.version == 4)
        receipt = annotate(lake, "d", labels, on=["episode_id"], add=["x"])
        assert receipt.already_present == (snapshot.version == 4)
        assert receipt.steps == 9
        found = lake.dataset("d").snapshot().table.read()["x"].to_pylist()
        assert sorted(found) == [1] * 3 + [2] * 3 + [3] * 3
