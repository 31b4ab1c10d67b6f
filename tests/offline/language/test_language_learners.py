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
    shutil.copytree(recorded.path, tmp_path / "two")
    config = LanguageConfig(
        model=str(model_folder), output=str(tmp_path / "model"), method="grpo", updates=8,
        batch_size=3, log_updates=2, options={"learning_rate": 1e-4, "kl_coef": 0.1, "epochs": 2},
    )  # fmt: skip
    ends = Callbacks(should_end=lambda: True)
    with pytest.raises(RunInterrupted) as interrupted:
        train_language(open_lake(tmp_path / "two"), "agents", config, callbacks=ends)
    run_id = interrupted.value.run_id
    # The same checkpoint, from which one process continues beside the two.
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    results, seen = [], []
    with open_ray("tests", 2):
        for name, learners in (("two", 2), ("one", 1)):
            lake = open_lake(tmp_path / name)
            record = find_run(lake.registry, run_id, kind=KIND)
            changes = {"learners": learners, "output": str(tmp_path / f"model-{name}")}
            body = {**record, "request": record["request"] | changes}
            del body["run_id"]
            lake.registry.record_run(run_id, body)
            callbacks = Callbacks(
                on_start=lambda start: seen.append(start.update),
                on_metrics=lambda update, _: seen.append(update),
            )
            results.append(resume_language(lake, run_id, callbacks=callbacks))
    assert seen == [1, 2, 4, 6, 8] * 2
    two, one = results
    assert two.metrics == pytest.approx(one.metrics, rel=1e-3, abs=1e-5)
    start = load_file(model_folder / "model.safetensors")
    found, expected = (load_file(one.output / "model.safetensors") for one in results)
    for name, array in expected.items():
        assert np.allclose(found[name], array, atol=1e-6), name
    assert any(np.abs(array - start[name]).max() > 1e-4 for name, array in expected.items())
