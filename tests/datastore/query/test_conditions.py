"""Conditions over episodes: any() and all() of their steps, and columns that the log has."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import EmptyReplayError, QueryError, QueryRefusedError
from replaylake.datastore.interchange.export.export_selection import select_for_export
from replaylake.datastore.lake.holdout import Holdout
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.logged_steps import read_logged_steps
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.query.conditions import quote_quantifiers
from replaylake.datastore.query.expressions import canonical_condition, select_episode_keys
from replaylake.datastore.query.moments import measure_returns


@pytest.fixture
def snapshot(lake: Lake, make_episode: Callable[..., Episode]) -> Snapshot:
    """Step t has reward t + 1; `segment` varies in c, and is unknown in one step of d."""
    users = {"a": ["u1"], "b": ["u2"] * 2, "c": ["u1"] * 3, "d": ["u3"] * 2}
    segments = {"a": [1], "b": [2, 2], "c": [1, 2, 1], "d": [3, None]}
    extras = {
        name: {"user_id": np.array(user, object), "segment": np.array(segments[name], object)}
        for name, user in users.items()
    }
    lake.dataset("d").append(
        [make_episode(name, len(users[name]), extras=columns) for name, columns in extras.items()]
    )
    return lake.snapshot("d")


def select(snapshot: Snapshot, where: str) -> str:
    keys = select_episode_keys(snapshot.table, canonical_condition(where))
    return "".join(sorted(keys["episode_id"].to_pylist()))


@pytest.mark.parametrize(
    ("where", "episodes"),
    [
        ("user_id = 'u1'", "ac"),
        ("USER_ID IN ('u2', 'u3') and num_steps = 2", "bd"),
        ("any(segment = 2)", "bc"),
        ("ALL (segment = 2)", "b"),
        ("all(segment = 3)", ""),  # NULL is not true
        ("not any(segment = 2)", "ad"),
        ("any(reward >= 2 and segment = 2) and user_id = 'u1'", "c"),
        ("any(reward >= 2) and any(segment = 1)", "c"),
        ("any(steps.reward = 3) or episodes.num_steps = 1", "ac"),
        ("any(terminated)", ""),
        ("case when any(segment = 3) then true else user_id = 'u2' end", "bd"),
        ("user_id <> 'any(segment = 2)' and any(user_id = 'u3') -- all(", "d"),
        ("any(list_has_any(list_filter([segment], lambda user_id: user_id > 2), [3]))", "d"),
    ],
)
def test_what_is_selected(snapshot: Snapshot, where: str, episodes: str) -> None:
    assert select(snapshot, where) == episodes
    spelled = canonical_condition(where)
    assert canonical_condition(spelled) == spelled


@pytest.mark.parametrize("where", ["segment = 2", '"return" > 2 and abs(segment) < 3'])
def test_a_column_that_varies_has_to_be_in_any_or_all(snapshot: Snapshot, where: str) -> None:
    with pytest.raises(QueryError, match=r"several values of segment in episode .*Write any\("):
        select(snapshot, where)
    assert select(snapshot, "any(segment = 2) and episode_id = 'b'") == "b"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("any(all(segment = 2))", r"any\(\) or all\(\) within any\(\)"),
        ("any(segment, 2)", r"any\(\) of 2 arguments"),
        ("user_id = any(select 1)", "found a subquery"),
        ("any(random() < 0.5)", "whose value changes"),
    ],
)
def test_what_is_refused(where: str, message: str) -> None:
    with pytest.raises(QueryRefusedError, match=message):
        canonical_condition(where)


def test_sqls_own_any_and_all_stay() -> None:
    text = "x = any(select 1) or y in (select 2 union all (select 3)) or 'ä' = z"
    assert quote_quantifiers(text) == text
    assert quote_quantifiers("'ä' = z and Any (x)") == "'ä' = z and \"any\" (x)"
    assert quote_quantifiers("/* any( */ any/**/(x) -- any(") == '/* any( */ "any"/**/(x) -- any('
    with pytest.raises(QueryError, match="UTF-8"):
        canonical_condition("any(segment = '\udcff')")


@pytest.mark.slow
def test_it_is_the_same_wherever_episodes_are_selected(snapshot: Snapshot) -> None:
    where = "any(segment = 2) and user_id = 'u2'"
    assert snapshot.replay(where).num_steps == 2
    assert read_logged_steps(snapshot, where).episode_ids.to_pylist() == ["b"]
    exported = select_for_export(snapshot, where, None).episodes
    assert exported is not None
    assert exported.to_pylist() == ["b\0"]
    measured = measure_returns(snapshot.table, "reward", where=canonical_condition(where))
    assert (measured.num.tolist(), measured.mean.tolist()) == ([1.0], [3.0])
    split = Holdout(fraction=0.5)
    sides = [split.within(where, held_out) for held_out in (True, False)]
    assert sorted(select(snapshot, side) for side in sides) == ["", "b"]
    with pytest.raises(EmptyReplayError, match="of 1 episodes held out"):
        split.check(snapshot, where)
