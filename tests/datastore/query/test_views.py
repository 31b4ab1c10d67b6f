"""Views: games over several agents, and that only what a query names is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.query import views
from replaylake.datastore.query.connections import session
from replaylake.datastore.query.statements import find_tables

Make = Callable[..., Episode]


@pytest.fixture
def game(lake: Lake, make_episode: Make) -> Lake:
    """Two agents in `g`: `left` dies at tick 2, `right` is cut off at tick 5. `h` goes on."""
    lake.dataset("m").append(
        [
            make_episode(
                "g",
                2,
                agent_id="left",
                env_steps=np.array([0, 2]),
                rewards=np.array([1.0, -3.0]),
                terminated=True,
                policies=["old"] * 2,
                policy_versions=[4, 5],
                timestamps=[1_000_000, 3_000_000],
                source_episode_id="7",
            ),
            make_episode(
                "g",
                3,
                agent_id="right",
                env_steps=np.array([1, 3, 5]),
                rewards=np.array([0.5, 0.5, 2.0]),
                truncated=True,
                policies=["new"] * 3,
                policy_versions=[9] * 3,
                timestamps=[2_000_000, 4_000_000, 6_000_000],
                source_episode_id="7",
            ),
            make_episode("h", 1, agent_id="left", terminated=True),
            make_episode("h", 1, agent_id="right"),
        ]
    )
    return lake


def test_games(game: Lake) -> None:
    query = (
        'SELECT episode_id, num_agents, num_steps, num_env_steps, "return", agent_returns, '
        "terminated, truncated, complete, policies, min_policy_version, max_policy_version, "
        "epoch(started_at) AS a, epoch(ended_at) AS b, source_episode_id FROM m.games ORDER BY 1"
    )
    found: list[dict[str, Any]] = game.sql(query).to_pylist(maps_as_pydicts="strict")
    first, second = (tuple(row.values()) for row in found)
    returns = {"left": -2.0, "right": 3.0}
    assert first[:6] == ("g", 2, 5, 6, 1.0, returns)
    # One was cut off, so the game did not end by itself; but both have ended.
    assert first[6:9] == (False, True, True)
    assert first[9:] == (["new", "old"], 4, 9, 1.0, 6.0, "7")
    assert second[:4] == ("h", 2, 2, 1)
    assert second[6:10] == (False, False, False, [])


def test_a_game_of_one_agent_is_its_episode(lake: Lake, make_episode: Make) -> None:
    lake.dataset("d").append([make_episode("a", 3, terminated=True), make_episode("b", 2)])
    shared = 'episode_id, num_steps, "return", terminated, truncated, complete'
    episodes = lake.sql(f"SELECT {shared} FROM d.episodes ORDER BY episode_id").to_pylist()
    assert lake.sql(f"SELECT {shared} FROM d.games ORDER BY episode_id").to_pylist() == episodes


@pytest.mark.parametrize(
    ("query", "made"),
    [
        ("SELECT * FROM m.steps", ["m.steps"]),
        ("SELECT * FROM m.games g JOIN m.transitions t USING (episode_id)", ["games", "transit"]),
        ("SELECT * FROM m.episodes, m.episodes e", ["m.episodes"]),
        ("SELECT 1", []),
    ],
)
def test_only_what_is_named_is_made(
    game: Lake, query: str, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_listing(_: Any) -> list[str]:
        raise AssertionError("the lake was listed")

    monkeypatch.setattr(type(game), "datasets", no_listing)
    with session() as connection:
        planned = views.plan_views(find_tables(connection, query), game.catalog())
    created = [text for text in planned.statements if text.startswith("CREATE VIEW")]
    assert len(created) == len(made)
    assert all(any(name in text[:30] for text in created) for name in made)


def test_a_query_may_build_on_the_view_it_is_called_as(game: Lake) -> None:
    game.registry.record_run("r1", {"kind": "offline", "started_ms": 1})
    query = "WITH runs AS (SELECT run_id FROM runs) SELECT run_id FROM runs"
    assert game.sql(query).to_pylist() == [{"run_id": "r1"}]
