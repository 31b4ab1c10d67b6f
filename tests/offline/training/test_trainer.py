import pytest

from replaylake.datastore.errors import TrainingFailed
from replaylake.offline.learner import Update
from replaylake.offline.trainer import run_updates


class Lazy:
    """A number that counts how often it is read, as one on a GPU would be waited for."""

    reads = 0

    def __init__(self, value):
        self._value = value

    def __add__(self, other):
        return Lazy(self._value + other._value)

    def __float__(self):
        Lazy.reads += 1
        return float(self._value)


class Counting:
    """A learner whose loss is the number of the update, and not finite where it is told."""

    def __init__(self, bad=None, value=float("nan")):
        self._bad, self._value, self._num = bad, value, 0

    def update(self, batch):
        self._num += 1
        return Update({"loss": Lazy(self._value if self._num == self._bad else self._num)})


class Sampler:
    def __init__(self, batch):
        self._batch = batch

    def sample(self):
        return self._batch


@pytest.fixture
def sampler(batch):
    return Sampler(batch(size=4))


def test_the_metrics_are_the_mean_of_the_last_tenth(sampler):
    for check_updates in (1, 50):
        means, rate = run_updates(Counting(), sampler, 100, check_updates=check_updates)
        # Updates 91 to 100.
        assert means == {"loss": 95.5}
        assert rate > 0


def test_a_metric_of_every_second_update_is_averaged_over_those(sampler):
    class Delayed(Counting):
        def update(self, batch):
            loss = super().update(batch).metrics["loss"]
            return Update({"loss": loss, **({"actor_loss": loss} if self._num % 2 == 0 else {})})

    means, _ = run_updates(Delayed(), sampler, 100)
    # Updates 92, 94, ... 100.
    assert means == {"loss": 95.5, "actor_loss": 96.0}


def test_lazy_metrics_are_read_only_when_they_are_checked(sampler):
    Lazy.reads = 0
    run_updates(Counting(), sampler, 120, check_updates=50)
    # At updates 50, 100 and 120, and the mean.
    assert Lazy.reads == 4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_message_names_the_update_or_those_since_the_last_check(sampler, value):
    with pytest.raises(TrainingFailed, match=r"loss is (nan|inf) at update 60, expected"):
        run_updates(Counting(60, value), sampler, 120)
    with pytest.raises(TrainingFailed, match=r"at one of the updates 51 to 100, expected"):
        run_updates(Counting(60, value), sampler, 120, check_updates=50)
    with pytest.raises(TrainingFailed, match=r"at one of the updates 101 to 120, expected"):
        run_updates(Counting(120, value), sampler, 120, check_updates=50)


def test_progress_is_told_after_the_last_update(sampler):
    seen = []
    run_updates(Counting(), sampler, 7, check_updates=50, on_progress=seen.append)
    assert (seen[-1].update, seen[-1].updates, seen[-1].metrics) == (7, 7, {"loss": 7.0})
