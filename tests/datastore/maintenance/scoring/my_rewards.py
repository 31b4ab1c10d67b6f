"""Reward functions that the tests name as `module:function`, or take as functions of a module."""

import os
import time
from pathlib import Path
from typing import Any


def count_call(text: str) -> None:
    """Append a line to the file that the environment names."""
    if path := os.environ.get("CALLS"):
        with Path(path).open("a") as file:
            file.write(f"{text}\n")


def length(episode: Any) -> float:
    count_call(episode.episode_id)
    return float(len(episode))


def halves(episode: Any) -> list[float | None]:
    return [reward / 2 if reward < 3 else None for reward in episode.rewards]


def parts(episode: Any) -> dict[str, Any]:
    return {"score": 0.5, "by_step": episode.rewards, "passed": True, "pred": "seven\0"}


def slow_length(episode: Any) -> float:
    """The environment may name a number of calls after which the next one does not end."""
    time.sleep(0.02)
    if num := os.environ.get("HOLD_AFTER"):
        path = Path(os.environ["CALLS"])
        while path.exists() and len(path.read_text().splitlines()) >= int(num):
            time.sleep(0.01)
    return length(episode)


def failing(episode: Any) -> Any:
    values = {"a": 1.0, "b": float("nan"), "c": [1.0], "d": "text", "e": {"error": 1.0}, "f": None}
    if episode.episode_id == "g":
        raise KeyError("answer")
    return values[episode.episode_id]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
    count_call(solution_str)
    assert data_source == "math"
    assert extra_info["num_turns"] == 1
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth}


def compute_scores(data_sources: Any, solution_strs: Any, ground_truths: Any) -> list[float]:
    count_call(str(len(solution_strs)))
    return [float(a == b) for a, b in zip(solution_strs, ground_truths, strict=True)]


def exact(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> Any:
    assert all(prompt.endswith("?") for prompt in prompts)
    if any(text == "boom" for text in completions):
        raise ValueError("boom")
    return [None if a == "" else float(a == b) for a, b in zip(completions, answer, strict=True)]


async def awaited(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def short(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0]
