"""What the tests of maintenance share: a dataset that a server logs into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.feedback.decisions import (
    decisions_encoder,
    ensure_feedback_tables,
    rewards_encoder,
)
from replaylake.datastore.feedback.join import join_feedback
from replaylake.datastore.lake.lake import open_lake


class Served:
    """Decisions and rewards, as a server logs them."""

    now_s = 1_800_000_000.0

    def __init__(self, path: Path) -> None:
        self.lake = open_lake(path, create=True)
        self.dataset = self.lake.dataset("d")
        ensure_feedback_tables(self.dataset, Box((2,)), Discrete(3))
        self.signer = DecisionSigner(self.lake.signing_key(), "d", "00" * 6)
        self.sequence = 0

    def decide(self, second: float, client: str | None) -> str:
        timestamp = int((self.now_s + second) * 1e6)
        (key,) = self.signer.issue("bc", 1, timestamp)
        record = {"decision_id": key, "request_id": None, "episode_id": client,
                  "timestamp": timestamp, "policy": "bc", "policy_version": 1,
                  "observation": [second, 0.5], "action": 1, "log_prob": -0.25,
                  "deterministic": False}  # fmt: skip
        self._append(self.dataset.decisions, decisions_encoder(self.dataset), record)
        return key

    def reward(self, key: str, second: float, reward: float = 1.0, ends: bool = False) -> None:
        timestamp = int((self.now_s + second) * 1e6)
        record = {"decision_id": key, "timestamp": timestamp, "reward": reward,
                  "terminated": ends, "truncated": False, "final_observation": None}  # fmt: skip
        self._append(self.dataset.rewards, rewards_encoder(self.dataset), record)

    def run(self, second: float, window_s: float = 3600.0) -> Any:
        return join_feedback(self.lake, "d", now_s=self.now_s + second, window_s=window_s)

    def count(self, view: str) -> int:
        return int(self.lake.sql(f"select count(*) as n from d.{view}")["n"][0].as_py())

    def _append(self, table: Any, encode: Any, record: dict[str, Any]) -> None:
        self.sequence += 1
        table.append(encode([record]), producer="test", sequence=self.sequence)


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path / "served")
