import pytest

from replaylake.datastore.errors import StorageError, TransientStorageError
from replaylake.online.recording.storage_retry import StorageRetry


def refusing(times, error=TransientStorageError):
    left = iter(range(times))

    def call():
        for _ in left:
            raise error("shard: No space left on device")
        return "made"

    return call


@pytest.mark.slow
def test_what_is_refused_in_passing_is_tried_again_and_told_once():
    told = []
    refusals = StorageRetry(told.append)
    assert refusals.retry("checkpoint", refusing(2)) == "made"
    assert told == [
        "the run waits, and goes on by itself. shard: No space left on device",
        "the store takes what is written again: the run goes on",
    ]
    assert refusals.blocked_reason is None


def test_several_that_are_refused_are_one_wait():
    told = []
    refusals = StorageRetry(told.append)
    refusals.set_blocked("worker 0", "no room")
    refusals.set_blocked("commit", "no room for this either")
    refusals.set_blocked("worker 0", None)
    assert (len(told), refusals.blocked_reason) == (1, "no room for this either")
    refusals.set_blocked("commit", None)
    refusals.set_blocked("commit", None)
    assert len(told) == 2


def test_a_run_that_is_asked_to_end_waits_for_nothing():
    refusals = StorageRetry(lambda text: None, lambda: True)
    with pytest.raises(TransientStorageError):
        refusals.retry("checkpoint", refusing(10**6))


def test_what_is_refused_for_good_is_raised():
    told = []
    with pytest.raises(StorageError, match="No space"):
        StorageRetry(told.append).retry("checkpoint", refusing(1, StorageError))
    assert told == []
