"""What a run keeps in the lake, when it goes on after a kill."""

import numpy as np
import pytest

from replaylake.datastore.errors import TrainingError
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.runs.lease import RunLease
from replaylake.datastore.lake.runs.metrics import read_metrics
from replaylake.datastore.lake.runs.summary import EVALUATION
from replaylake.offline.running.training.lake_observer import LakeObserver


class Learner:
    """Holds one array."""

    def __init__(self, array):
        self.array = array

    def state_dict(self):
        return {"w": self.array}


@pytest.fixture
def made(tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    with RunLease(lake.storage, "r") as lease:

        def made(array=None, keep=2):
            learner = Learner(np.zeros(2, np.float32) if array is None else array)
            return LakeObserver(lake.storage, lease, "r", learner, keep=keep)

        yield lake, made


def rows(lake):
    return [(r["update"], r["name"], r["value"]) for r in read_metrics(lake.storage).to_pylist()]


def test_what_came_after_the_checkpoint_comes_again(made):
    lake, make = made
    run = make()
    for update in (5, 10, 15):
        run.record_metrics(update, {"loss": float(update)})
        if update < 15:
            run.save(update, {}, best=None)
    run.close()
    assert make().load_latest().update == 10
    assert rows(lake) == [(5, "loss", 5.0), (10, "loss", 10.0)]


def test_the_closing_evaluation_is_there_once(made):
    """It is of the best update, before that of the checkpoint that a resumed run goes on from."""
    lake, make = made
    for _ in range(2):
        run = make()
        if (checkpoint := run.load_latest()) is None:
            run.record_metrics(10, {"loss": 1.0})
            run.save(10, {}, best=5)
        assert checkpoint is None or checkpoint.update == 10
        run.record_metrics(5, {EVALUATION: 7.0})
        run.close()
    assert rows(lake) == [(10, "loss", 1.0), (5, EVALUATION, 7.0)]


def test_the_best_one_stays_beside_the_newest(made):
    _, make = made
    run = make()
    for update in (1, 2, 3, 4, 5):
        run.save(update, {}, best=2 if update > 1 else None)
    assert run.checkpoints.updates() == [2, 4, 5]


def test_what_is_not_a_number_is_never_the_newest(made):
    _, make = made
    make().save(1, {}, best=None)
    run = make(np.array([1.0, np.nan], np.float32))
    assert run.load_latest().update == 1
    with pytest.raises(TrainingError, match=r"w is not a number after update 2.*of update 1\)"):
        run.save(2, {}, best=None)
    assert run.checkpoints.updates() == [1]
