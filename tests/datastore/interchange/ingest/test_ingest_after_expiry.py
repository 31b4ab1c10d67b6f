"""What was taken in before the log's old commits were dropped is recognised all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.storage.log.expiry import expire


def _csv(path: Path, episode: str) -> Path:
    rows = [f"{episode},{step},{step % 2},1.5,{step / 2}" for step in range(4)]
    path.write_text("\n".join(["episode_id,step,action,reward,obs", *rows]) + "\n")
    return path


def test_the_same_files_add_nothing(lake: Lake, tmp_path: Path) -> None:
    first, second = (_csv(tmp_path / f"{name}.csv", name) for name in ("a", "b"))
    done = ingest(lake, [first, second], "d", commit_steps=4)
    log = lake.dataset("d").table.log
    ingest(lake, [_csv(tmp_path / "c.csv", "c")], "d")
    expire(log, log.newest().version)
    assert log.oldest() > (done.version or 0)
    for sources in ([first, second], [second, first], [first]):
        again = ingest(lake, sources, "d", commit_steps=2)
        assert again.version is None
        assert lake.dataset("d").snapshot().num_steps == 12
    with pytest.raises(SourceInvalidError, match="are in dataset 'd' already"):
        ingest(lake, [first, _csv(tmp_path / "e.csv", "e")], "d")
