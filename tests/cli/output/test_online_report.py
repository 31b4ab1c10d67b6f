import errno
import os

import pytest

from replaylake.cli.commands.train_online import progress_text
from replaylake.online.training.progress import OnlineProgress


def progress(trouble: str | None, mean_return: float | None = 20.125) -> OnlineProgress:
    return OnlineProgress(
        num_steps=100,
        steps=1000,
        update=1234,
        num_episodes=5,
        mean_return=mean_return,
        steps_per_s=1500.4,
        updates_per_s=10.2,
        blocked_reason=trouble,
    )


def test_a_run_at_work_says_how_fast_it_is() -> None:
    said = "update 1,234  return 20.12  1,500 steps/s  10 updates/s"
    assert progress_text(progress(None)) == said
    assert "return" not in progress_text(progress(None, mean_return=None))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_instead(code: int) -> None:
    trouble = f"lake/live/1.parquet: {os.strerror(code)}, expected to read or write it."
    assert progress_text(progress(trouble)) == "waiting for space"


def test_a_store_that_does_not_answer_is_no_full_disk() -> None:
    assert progress_text(progress("s3://lake: no answer in 30 s")) == "waiting for the store"
