"""Language training in two processes of Ray Train that exchange gradients by gloo."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from replaylake.datastore.lake.lake import open_lake
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.running.local_ray import open_ray
from replaylake.offline.running.train_language import (
    KIND,
    LanguageConfig,
    resume_language,
    train_language,
)
from replaylake.offline.running.training.interruption import RunInterrupted
from replaylake.offline.running.training.run_record import find_run

pytestmark = [
    pytest.mark.slow,
    # Ray 2.60 reads settings of its own that it has deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
]


def test_two_processes_train_the_model_that_one_trains(recorded, model_folder, tmp_path):
    lake_path = tmp_path / "two"
    shutil.copytree(recorded.path, lake_path)
    lake = open_lake(lake_path)
    config = LanguageConfig(
        model=str(model_folder), output=str(tmp_path / "model"), method="grpo", updates=100_000,
        batch_size=3, learners=2, log_updates=1, checkpoint_updates=1000,
        options={"learning_rate": 1e-4, "kl_coef": 0.1, "epochs": 2},
    )  # fmt: skip
    seen: list[int] = []
    ends = Callbacks(
        on_metrics=lambda update, _: seen.append(update), should_end=lambda: bool(seen)
    )
    with open_ray("tests", 2):
        with pytest.raises(RunInterrupted) as interrupted:
            train_language(lake, "agents", config, callbacks=ends)
        at, run_id = interrupted.value.update, interrupted.value.run_id
        assert 0 < at < 100_000
        assert not (tmp_path / "model").exists()
        # The same checkpoint, from which one process continues beside the two.
        shutil.copytree(lake_path, tmp_path / "one")
        results = []
        for name, learners in (("two", 2), ("one", 1)):
            own = open_lake(tmp_path / name)
            record = dict(find_run(own.registry, run_id, kind=KIND))
            record["request"] |= {
                "updates": at + 4, "learners": learners, "output": str(tmp_path / f"model-{name}"),
            }  # fmt: skip
            own.registry.record_run(run_id, {k: v for k, v in record.items() if k != "run_id"})
            results.append(resume_language(own, run_id))
    two, one = results
    assert two.metrics == pytest.approx(one.metrics, rel=1e-3, abs=1e-5)
    start = load_file(model_folder / "model.safetensors")
    found, expected = (load_file(one.output / "model.safetensors") for one in results)
    for name, array in expected.items():
        assert np.allclose(found[name], array, atol=1e-6), name
    assert any(np.abs(array - start[name]).max() > 1e-4 for name, array in expected.items())
