"""Bounds: which bare operation stands beside which link, and with messages of which size."""

from __future__ import annotations

from pathlib import Path

import pytest

from replaylake.datastore.lake.runs.bounds import BOUND_KINDS, measure_bounds
from replaylake.datastore.lake.runs.run_profile import LinkUse
from replaylake.datastore.storage.storage import LocalStorage


def test_the_mean_message_is_measured_once(tmp_path: Path) -> None:
    sizes: list[int] = []

    def measure_ray(num_bytes: int) -> float:
        sizes.append(num_bytes)
        return 50e6

    links = [
        LinkUse("transfer", "workers", 2.0, 0.5, 4, 20_000_000, 4),
        LinkUse("broadcast", "trainer", 1.0, 0.25, 2, 10_000_000, 2),
        LinkUse("update", "trainer", 1.0, 0.25, 2),
    ]
    found = measure_bounds(links, LocalStorage(tmp_path), measure_ray)
    assert sizes == [5_000_000]
    assert [one.bound_mb_per_s for one in found] == [50.0, 50.0, None]
    # 20 MB in 2 s, where 50 MB/s were possible.
    assert found[0].bound_ratio == pytest.approx(5.0)


def test_messages_are_measured_up_to_32_mib(tmp_path: Path) -> None:
    sizes: list[int] = []
    links = [LinkUse("transfer", "workers", 2.0, 0.5, 1, 1 << 30, 1)]
    measure_bounds(links, LocalStorage(tmp_path), lambda size: sizes.append(size) or 1.0)
    assert sizes == [32 << 20]


@pytest.mark.parametrize(
    "link", ["encode", "tail", "shard_write", "journal", "receive", "broadcast"]
)
def test_each_kind_without_ray(tmp_path: Path, link: str) -> None:
    use = LinkUse(link, "trainer", 1.0, 1.0, 8, 8_000, 8)
    (found,) = measure_bounds([use], LocalStorage(tmp_path))
    assert found.bound_mb_per_s is not None
    assert found.bound_mb_per_s > 0.008
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_moves_no_bytes_has_none() -> None:
    assert not {"update", "env_step", "commit", "learner_wait"} & BOUND_KINDS.keys()
