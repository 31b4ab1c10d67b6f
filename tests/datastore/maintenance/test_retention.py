from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import deltalake
import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import ConfigInvalidError, NotFoundError
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.retention import Retention, read_retention, set_retention
from replaylake.datastore.storage.log.commit_file import Intent
from replaylake.datastore.storage.log.state import LogState

Make = Callable[..., Episode]


@pytest.fixture
def one(lake: Lake, make_episode: Make) -> Lake:
    lake.dataset("d").append([make_episode("e", terminated=True)])
    return lake


def stored(lake: Lake) -> Retention:
    return read_retention(open_lake(lake.path).dataset("d").table.snapshot())


def test_nothing_set_is_the_default(one: Lake) -> None:
    assert stored(one) == Retention()
    assert Retention().keep_versions_s == 7 * 86_400


def test_fields_are_set_kept_and_unset(one: Lake) -> None:
    set_retention(one, "d", {"max_steps": 100, "max_age_s": 3600.0})
    assert stored(one) == Retention(max_steps=100, max_age_s=3600.0)
    now = set_retention(one, "d", {"max_age_s": None, "keep_versions_s": 7200.0})
    assert now == stored(one) == Retention(max_steps=100, keep_versions_s=7200.0)
    assert [info["operation"] for info in one.dataset("d").history()[2:]] == ["SET RETENTION"] * 2


def test_the_same_again_commits_nothing(one: Lake) -> None:
    set_retention(one, "d", {"max_steps": 100})
    set_retention(one, "d", {"max_steps": 100})
    assert one.dataset("d").snapshot().version == 2


def test_it_survives_a_new_column_a_checkpoint_and_is_versioned(
    one: Lake, make_episode: Make
) -> None:
    set_retention(one, "d", {"max_steps": 100})
    extras = {"score": np.arange(3.0)}
    one.dataset("d").append([make_episode("f", terminated=True, extras=extras)])
    one.dataset("d").table.log.checkpoint(3)
    assert stored(one) == Retention(max_steps=100)
    assert read_retention(one.dataset("d").table.snapshot(1)) == Retention()
    assert one.dataset("d").spec.extras.keys() == {"score"}
    assert (
        deltalake.DeltaTable(str(one.path / "d")).to_pyarrow_table(columns=["step"]).num_rows == 6
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_stepps": 1}, "retention of d: found max_stepps, expected only max_steps"),
        ({"max_steps": 0}, "max_steps: found 0, expected more than 0"),
        ({"max_age_s": -1.0}, "max_age_s: found -1.0"),
        ({"keep_versions_s": 60.0}, "keep_versions_s: found 60, expected at least 3600"),
        ({"keep_versions_s": float("nan")}, "keep_versions_s: found nan"),
        ({"target_shard_bytes": 1000}, "target_bytes: found 1,000"),
        ({"cache_max_bytes": -5}, "cache_max_bytes: found -5"),
        ({"max_steps": "100"}, "max_steps: found '100', expected int"),
        ({"max_steps": 1.5}, "max_steps: found 1.5, expected int"),
        ({"max_steps": True}, "max_steps: found True, expected int"),
        ({"max_age_s": "7d"}, "max_age_s: found '7d', expected int or float"),
        ({"max_age_s": float("inf")}, "max_age_s: found inf, expected a number, or none"),
    ],
)
def test_what_makes_no_sense_is_refused(one: Lake, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigInvalidError, match=said):
        set_retention(one, "d", changes)
    assert one.dataset("d").snapshot().version == 1


def test_a_field_of_a_newer_version_is_not_passed_over(one: Lake) -> None:
    def build(state: LogState) -> Intent:
        assert state.metadata is not None
        newer = {"replaylake.retention": json.dumps({"keep_forever": True})}
        configuration = {**state.metadata.configuration, **newer}
        metadata = replace(state.metadata, configuration=configuration)
        return Intent("newer", 0, "SET RETENTION", metadata=metadata)

    one.dataset("d").table.log.commit(build)
    with pytest.raises(ConfigInvalidError, match="keep_forever"):
        stored(one)


def test_a_dataset_that_is_not_there(lake: Lake) -> None:
    with pytest.raises(NotFoundError, match="nope"):
        set_retention(lake, "nope", {"max_steps": 1})
