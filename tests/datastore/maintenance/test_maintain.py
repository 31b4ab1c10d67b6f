from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.versions.tags import tag_snapshot
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.maintain import MaintainReceipt, maintain, maintain_every
from replaylake.datastore.maintenance.retention import set_retention
from replaylake.datastore.maintenance.vacuum import vacuum
from replaylake.datastore.storage.log.commit_log import CommitLog
from replaylake.datastore.storage.log.expiry import expire
from replaylake.datastore.storage.log.folder import LogFolder
from replaylake.datastore.storage.log.state import LogState

Make = Callable[..., Episode]
DAY_MS = 86_400_000


def in_days(days: float) -> int:
    return time.time_ns() // 1_000_000 + int(days * DAY_MS)


@pytest.fixture
def two(lake: Lake, make_episode: Make) -> Lake:
    for name in ("a", "b"):
        for number in range(5):
            lake.dataset(name).append([make_episode(f"e{number}", terminated=True)])
    return lake


def test_each_dataset_has_its_own_retention(two: Lake) -> None:
    set_retention(two, "b", {"max_steps": 6})
    a, b, itself = maintain(two)
    assert (a.dataset, a.trimmed, a.compacted, a.error) == ("a", 0, 4, "")
    assert (b.dataset, b.trimmed, b.compacted, b.error) == ("b", 3, 1, "")
    assert (itself.dataset, itself.error) == ("", "")
    assert a.checkpointed
    assert two.dataset("b").snapshot().num_steps == 6


def test_a_second_round_has_nothing_to_do(two: Lake) -> None:
    maintain(two)
    a, b, _ = maintain(two)
    assert (a, b) == (MaintainReceipt("a", a.version), MaintainReceipt("b", b.version))


def test_after_the_retention_the_log_and_old_shards_go(two: Lake) -> None:
    maintain(two)
    a, _, _ = maintain(two, now_ms=in_days(8))
    assert a.vacuumed == 5
    assert a.vacuumed_bytes > 0
    assert a.dropped > 0
    again = open_lake(two.path)
    assert again.dataset("a").table.log.oldest() == a.version
    assert again.dataset("a").snapshot().table.read().num_rows == 15


def test_what_an_expiry_remembers_ends_with_it(lake: Lake, make_episode: Make) -> None:
    for number in range(5):
        episode = make_episode(f"e{number}", terminated=True)
        lake.dataset("d").append([episode], info={"source": f"{number:064}"})
    rounds = [maintain(lake, ["d"], now_ms=in_days(8 * n))[0] for n in range(5)]
    assert rounds[1].dropped > 0
    assert rounds[3:] == [MaintainReceipt("d", rounds[2].version)] * 2, "no commit a round for good"
    sources = [info["source"] for info in lake.dataset("d").history() if "source" in info]
    assert len(sources) == 5
    assert fsck(lake, all_versions=True).findings == ()


def test_a_tag_keeps_its_version_through_it_all(two: Lake) -> None:
    two.tags.set("a", "paper", 3)
    maintain(two, now_ms=in_days(8))
    maintain(two, now_ms=in_days(16))
    found = open_lake(two.path).snapshot("a@paper")
    assert found.table.read().num_rows == 9


def test_the_failure_of_one_does_not_stop_the_others(two: Lake) -> None:
    path = two.dataset("a").table.snapshot().paths()[0]
    path.write_bytes(b"damaged" * 100)
    a, b, _ = maintain(two)
    assert "Error" in a.error or "Corrupt" in a.error or "Failed" in a.error
    assert (b.compacted, b.error) == (4, "")


def test_only_those_that_are_named(two: Lake) -> None:
    (b,) = maintain(two, ["b"])
    assert b.dataset == "b"
    assert len(two.dataset("a").snapshot().files) == 5
    (missing,) = maintain(two, ["nope"])
    assert missing.error.startswith("NotFoundError: ")


def test_a_stop_ends_the_round_between_two_commits(two: Lake) -> None:
    stop = threading.Event()
    said = []

    def on_step(dataset: str, what: str) -> None:
        said.append((dataset, what))
        if what.startswith("summarizing"):
            stop.set()

    assert maintain(two, stop=stop, on_step=on_step) == []
    assert said[-1] == ("a", "summarizing episodes")
    assert len(two.dataset("b").snapshot().files) == 5


def test_rounds_until_a_stop_that_wakes_it(two: Lake) -> None:
    stop = threading.Event()
    rounds: list[list[MaintainReceipt]] = []

    def on_round(done: list[MaintainReceipt]) -> None:
        rounds.append(done)
        # From another thread, while it sleeps.
        threading.Timer(0.2, stop.set).start()

    began = time.monotonic()
    maintain_every(two, 3600.0, stop=stop, on_round=on_round)
    assert time.monotonic() - began < 60
    assert len(rounds) == 1


def test_the_next_round_follows(two: Lake, make_episode: Make) -> None:
    stop = threading.Event()
    rounds: list[list[MaintainReceipt]] = []

    def on_round(done: list[MaintainReceipt]) -> None:
        rounds.append(done)
        two.dataset("a").append([make_episode(f"n{len(rounds)}", terminated=True)])
        if len(rounds) == 2:
            stop.set()

    maintain_every(two, 0.01, stop=stop, on_round=on_round)
    assert [done[0].compacted for done in rounds] == [4, 1]


def test_a_tag_that_is_set_while_the_log_expires_keeps_its_version(
    two: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    maintain(two)
    secure = LogFolder.read_pointer

    def tag_meanwhile(folder: LogFolder) -> int | None:
        if folder.path.startswith("a/"):
            open_lake(two.path).tags.set("a", "paper", 2)
        return secure(folder)

    later = in_days(8)
    monkeypatch.setattr(LogFolder, "read_pointer", tag_meanwhile)
    a, _, _ = maintain(two, now_ms=later)
    assert "a@2 (tag paper): named while versions before" in a.error
    monkeypatch.undo()
    assert two.snapshot("a@paper").num_steps == 6
    a, _, _ = maintain(two, now_ms=later)
    assert a.error == ""
    assert two.snapshot("a@paper").num_steps == 6


def test_a_version_that_expired_meanwhile_gets_no_tag(two: Lake) -> None:
    old = two.snapshot("a@2")
    log = two.dataset("a").table.log
    expire(log, log.newest().version)
    with pytest.raises(NotFoundError, match="version 2: not in a/_delta_log"):
        tag_snapshot(two.tags, old, "paper")
    assert two.tags.list("a") == []


def test_it_ends_beside_a_writer_that_is_first_each_time(
    lake: Lake, make_episode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does as much as alone: what comes meanwhile is for the next round."""
    for name in ("alone", "beside"):
        for number in range(5):
            lake.dataset(name).append([make_episode(f"e{number}", terminated=True)])
        set_retention(lake, name, {"max_steps": 9})
    writer = open_lake(lake.path).dataset("beside")
    newest, looks = CommitLog.newest, Counter[str]()

    def look(self: CommitLog) -> LogState:
        dataset = self.folder.path.split("/")[0]
        looks[dataset] += 1
        if dataset == "beside" and self is not writer.table.log:
            assert looks[dataset] < 1000
            number = looks[dataset]
            with monkeypatch.context() as without:
                without.setattr(CommitLog, "newest", newest)
                writer.append([make_episode(f"w{number}", terminated=True)])
        return newest(self)

    monkeypatch.setattr(CommitLog, "newest", look)
    alone, beside = maintain(lake, ["alone", "beside"], now_ms=in_days(8))
    assert (alone.error, beside.error) == ("", "")
    assert beside.trimmed > alone.trimmed == 2
    assert looks["beside"] <= 2 * looks["alone"]
    looks.clear()
    receipts = [vacuum(lake, [name], now_ms=in_days(16)) for name in ("alone", "beside")]
    assert len(receipts[1].garbage) >= len(receipts[0].garbage)
    assert looks["beside"] <= 2 * looks["alone"]
