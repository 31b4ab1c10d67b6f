import pytest

from replaylake.datastore.errors import StorageError, TransientStorageError
from replaylake.online.recording.refusals import StorageRetry


def refusing(times, error=TransientStorageError):
    left = iter(range(times))

    def call():
        for _ in left:
            raise error("shard: No space left on device")
        return "made"

    return call


def test_what_is_refused_in_passing_is_tried_again_and_told_once():
    told = []
    refusals = StorageRetry(told.append)
    assert refusals.until_taken("checkpoint", refusing(2)) == "made"
    assert told == [
        "the run waits, and goes on by itself. shard: No space left on device",
        "the store takes what is written again: the run goes on",
    ]
    assert refusals.trouble is None


def test_several_that_are_refused_are_one_wait():
    told = []
    refusals = StorageRetry(told.append)
    refusals.note("worker 0", "no room")
    refusals.note("commit", "no room for this either")
    refusals.note("worker 0", None)
    assert (len(told), refusals.trouble) == (1, "no room for this either")
    refusals.note("commit", None)
    refusals.note("commit", None)
    assert len(told) == 2


def test_a_run_that_is_asked_to_end_waits_for_nothing():
    refusals = StorageRetry(lambda text: None, lambda: True)
    with pytest.raises(TransientStorageError):
        refusals.until_taken("checkpoint", refusing(10**6))


def test_what_is_refused_for_good_is_raised():
    told = []
    with pytest.raises(StorageError, match="No space"):
        StorageRetry(told.append).until_taken("checkpoint", refusing(1, StorageError))
    assert told == []
