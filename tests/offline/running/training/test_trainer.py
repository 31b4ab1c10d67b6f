import dataclasses

import numpy as np
import pytest
from torch import nn

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ConfigInvalidError, TrainingError
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.learning.learner import Update
from replaylake.offline.networks.graph import PolicyGraph
from replaylake.offline.running.training.config import TrainConfig
from replaylake.offline.running.training.policy_selection import PolicySelection
from replaylake.offline.running.training.trainer import GPU_CHECK_UPDATES, Trainer


class Lazy:
    """A number that counts how often it is read, as one on a GPU would be waited for."""

    reads = 0

    def __init__(self, value):
        self._value = value

    def __add__(self, other):
        return Lazy(self._value + (other._value if isinstance(other, Lazy) else other))

    __radd__ = __add__

    def __float__(self):
        Lazy.reads += 1
        return float(self._value)


class Counting:
    """A learner whose loss is the number of the update, and not finite where it is told."""

    def __init__(self, bad=None, value=float("nan"), priorities=None):
        self._bad, self._value, self.num, self._priorities = bad, value, 0, priorities

    def update(self, batch):
        self.num += 1
        loss = self._value if self.num == self._bad else self.num
        return Update({"loss": Lazy(loss)}, self._priorities)

    def policy(self):
        spec = PolicySpec(Box((1,), "float32"), Discrete(2), "q_values")
        return PolicyGraph(nn.Linear(1, 2), spec)


class Sampler:
    """Gives the same batch, and counts."""

    def __init__(self, batch):
        self._batch, self.num, self.given = batch, 0, []

    def sample(self):
        self.num += 1
        return self._batch

    def update_priorities(self, indices, priorities):
        self.given.append((indices, priorities))

    def state_dict(self):
        return {"num": self.num}

    def load_state_dict(self, state):
        self.num = state["num"]


class Told:
    """An observer that keeps what it is told."""

    last_saved = None

    def __init__(self):
        self.points, self.saved = [], {}

    def record_metrics(self, update, values):
        self.points.append((update, dict(values)))

    def save(self, update, state, *, best):
        self.saved[update] = (state, best)
        self.last_saved = update


@pytest.fixture
def sampler(batch):
    return Sampler(batch(size=4))


def trainer(learner, sampler, told=None, **changes):
    keys = {"measure", "selection", "on_progress", "should_end"}
    given = {key: changes.pop(key) for key in keys & changes.keys()}
    config = TrainConfig(**{"updates": 100, **changes})
    return Trainer(learner, sampler, config, observer=told or Told(), **given)


def on_a_gpu(sampler, learner, told=None, **changes):
    made = trainer(learner, sampler, told, **changes)
    # The loop of a GPU, without one: metrics are read when they are checked.
    made._check_updates = GPU_CHECK_UPDATES
    return made


def test_the_chosen_metrics_are_the_mean_of_the_last_tenth(sampler):
    for make in (trainer(Counting(), sampler), on_a_gpu(sampler, Counting())):
        assert make.run()
        # Updates 91 to 100.
        assert make.selection.chosen.metrics == {"loss": 95.5}
        assert make.selection.chosen.update == 100
        assert make.updates_per_s > 0


def test_a_metric_of_every_second_update_is_averaged_over_those(sampler):
    class Delayed(Counting):
        def update(self, batch):
            loss = super().update(batch).metrics["loss"]
            return Update({"loss": loss, **({"actor_loss": loss} if self.num % 2 == 0 else {})})

    made = trainer(Delayed(), sampler)
    made.run()
    # Updates 92, 94, ... 100.
    assert made.selection.chosen.metrics == {"loss": 95.5, "actor_loss": 96.0}


def test_lazy_metrics_are_read_only_when_something_is_due(sampler):
    Lazy.reads = 0
    on_a_gpu(sampler, Counting(), updates=120, log_updates=1000, evaluate_updates=1000).run()
    # Checked at updates 50, 100 and 120, and at the last one the mean of all twice, which the
    # checkpoint has as numbers.
    assert Lazy.reads == 5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_message_names_the_update_or_those_since_the_last_check(sampler, value):
    few = {"updates": 120, "log_updates": 1000, "evaluate_updates": 1000}
    with pytest.raises(TrainingError, match=r"loss is (nan|inf) at update 60, expected"):
        trainer(Counting(60, value), sampler, **few).run()
    with pytest.raises(TrainingError, match=r"at one of the updates 51 to 100, expected"):
        on_a_gpu(sampler, Counting(60, value), **few).run()
    with pytest.raises(TrainingError, match=r"at one of the updates 101 to 120, expected"):
        on_a_gpu(sampler, Counting(120, value), **few).run()


def test_what_is_not_finite_names_the_rows_and_the_last_good_checkpoint(sampler):
    told = Told()
    with pytest.raises(TrainingError, match=r"last good checkpoint is that of update 50") as found:
        trainer(Counting(60), sampler, told, updates=100).run()
    details = found.value.details
    assert (details["update"], details["metric"], details["checkpoint"]) == (60, "loss", 50)
    keys = [bytes(key).hex() for key in sampler.sample().keys]
    assert list(details["row_keys"]) == keys
    with pytest.raises(TrainingError, match="no checkpoint was saved before"):
        trainer(Counting(5), sampler, Told(), updates=100).run()


def test_progress_is_told_after_the_last_update(sampler):
    seen = []
    on_a_gpu(sampler, Counting(), updates=7, on_progress=seen.append).run()
    assert (seen[-1].update, seen[-1].updates, seen[-1].metrics) == (7, 7, {"loss": 4.0})
    assert seen[-1].remaining_s == 0


def test_points_are_means_since_the_one_before(sampler):
    told, seen = Told(), []
    trainer(Counting(), sampler, told, updates=25, log_updates=10, on_progress=seen.append).run()
    assert told.points == [(10, {"loss": 5.5}), (20, {"loss": 15.5}), (25, {"loss": 23.0})]
    # What is told last is the last point, which `runs show` and the explorer have.
    assert (seen[-1].update, seen[-1].metrics) == told.points[-1]


def test_checkpoints_are_saved_when_they_are_due_and_at_the_end(sampler):
    told = Told()
    trainer(Counting(), sampler, told, updates=25, checkpoint_updates=10).run()
    assert list(told.saved) == [10, 20, 25]
    assert [best for _, best in told.saved.values()] == [None, None, None]


def test_the_best_policy_is_saved_when_it_is_found(sampler):
    told, values = Told(), iter([1.0, 5.0, 2.0, 3.0])
    made = trainer(
        Counting(), sampler, told, updates=40, evaluate_updates=10, checkpoint_updates=40,
        measure=lambda policy: next(values), selection=PolicySelection("fqe"),
    )  # fmt: skip
    made.run()
    assert {update: best for update, (_, best) in told.saved.items()} == {10: 10, 20: 20, 40: 20}
    assert (made.selection.chosen.update, made.selection.chosen.value) == (20, 5.0)
    assert made.selection.chosen.metrics == {"loss": 15.5}
    assert [point for point in told.points if "selection/fqe" in point[1]][1] == (
        20,
        {"selection/fqe": 5.0},
    )


def test_it_stops_when_nothing_got_better_for_long_enough(sampler):
    told, values = Told(), iter([1.0, 2.0, 2.0, 1.0, 9.0])
    made = trainer(
        Counting(), sampler, told, updates=50, evaluate_updates=10,
        measure=lambda policy: next(values), selection=PolicySelection("fqe", patience=2),
    )  # fmt: skip
    assert made.run()
    assert (made.update, made.selection.chosen.update) == (40, 20)
    assert made.selection.to_json()["stopped_early"]
    assert list(told.saved)[-1] == 40
    # Gone on with from there, it does nothing more.
    again = trainer(Counting(), sampler, updates=50, selection=PolicySelection("fqe", patience=2))
    again.load_state_dict(40, told.saved[40][0])
    assert again.run()
    assert again.update == 40


def test_asked_to_end_it_saves_and_says_that_it_is_not_complete(sampler):
    told, learner = Told(), Counting()
    made = trainer(learner, sampler, told, should_end=lambda: learner.num >= 13)
    assert not made.run()
    assert (made.update, list(told.saved)) == (13, [10, 13])


@pytest.mark.parametrize("at", [1, 9, 10, 33, 50, 99])
def test_what_goes_on_says_what_an_uninterrupted_run_says(sampler, at):
    options = {"log_updates": 7, "evaluate_updates": 20, "checkpoint_updates": 25}
    values = {20 * i: float(i % 3) for i in range(1, 6)}
    whole, told, learner = Told(), Told(), Counting()

    def made(told, learner, **given):
        return trainer(
            learner, sampler, told, **options, **given,
            measure=lambda policy: values[learner.num], selection=PolicySelection("fqe"),
        )  # fmt: skip

    first = made(whole, Counting())
    first_learner = first._learner
    first._measure = lambda policy: values[first_learner.num]
    first.run()
    sampler.num = 0
    assert not made(told, learner, should_end=lambda: learner.num >= at).run()
    state, _ = told.saved[at]
    learner = Counting()
    learner.num = at
    second = made(told, learner)
    second.load_state_dict(at, state)
    assert second.run()
    assert told.points == whole.points
    # With the metrics of the best policy and of the last.
    assert second.selection.state_dict() == first.selection.state_dict()
    assert sampler.num == 100


def test_priorities_go_back_to_the_sampler(sampler, batch):
    sampler._batch = dataclasses.replace(batch(size=4), indices=np.arange(4))
    given = np.ones(4, np.float32)
    trainer(Counting(priorities=given), sampler, updates=3, prioritized=True).run()
    assert [(list(i), p is given) for i, p in sampler.given] == [([0, 1, 2, 3], True)] * 3
    trainer(Counting(priorities=given), sampler, updates=3).run()
    assert len(sampler.given) == 3


def test_prioritized_sampling_is_refused_to_what_gives_no_priorities(sampler):
    with pytest.raises(
        ConfigInvalidError, match="algorithm bc: found that it returns no priorities"
    ):
        trainer(Counting(), sampler, prioritized=True).run()
