"""Make the logs of examples/data/dsjson: a simulated news site whose policy is Vowpal Wabbit.

    python examples/make_events.py OUTPUT

`articles.dsjson` has one article a visit (contextual bandit, ADF), `pages.dsjson` two slots that
share their candidates (CCB), `banners.dsjson` two slots with candidates of their own and one reward
(slates). VW (the wheel vowpalwabbit) gives the probabilities, and learns from each event.
"""

from __future__ import annotations

import json
import random
import sys
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import vowpalwabbit

TOPICS = ("politics", "sports", "music", "food", "travel", "science")
TASTES = {"Anna": ("science", "travel"), "Tom": ("sports",), "Mia": ("music", "food")}
EXPLORE = "--epsilon 0.2 --dsjson --quiet --random_seed 7"


def main(folder: Path) -> None:
    """Write the three logs into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in (
        ("articles", make_article_events),
        ("pages", make_page_events),
        ("banners", make_banner_events),
    ):
        lines = [json.dumps(event, separators=(",", ":")) + "\n" for event in make()]
        (folder / f"{name}.dsjson").write_text("".join(lines))


def make_article_events(num: int = 200) -> list[dict[str, Any]]:
    """Return events of one decision among three to six articles; every 40th is not shown."""
    draw = random.Random(1)
    vw = vowpalwabbit.Workspace(f"--cb_explore_adf --cb_type mtr -q UT {EXPLORE}")
    events = []
    for i in range(num):
        user = make_user(draw)
        topics = draw.sample(TOPICS, draw.randint(3, 6))
        context = {**user, "_multi": [make_article(draw, topic) for topic in topics]}
        probs = predict(vw, {"c": context, "a": [1], "p": [1.0]})
        chosen = draw.choices(range(len(probs)), probs)[0]
        ranked = [chosen, *(one for one in range(len(probs)) if one != chosen)]
        is_read = draw.random() < (0.6 if topics[chosen] in TASTES[user["User"]["name"]] else 0.1)
        is_skipped = i % 40 == 39
        cost = -float(is_read and not is_skipped)
        head = make_head(draw, i)
        event = {
            "_label_cost": cost,
            "_label_probability": probs[chosen],
            "_label_Action": chosen + 1,
            "_labelIndex": chosen,
            **({"_skipLearn": True} if is_skipped else {}),
            "o": [{"v": 1.0, "EventId": head["EventId"], "ActionTaken": False}] if cost else [],
            **head,
            "a": [one + 1 for one in ranked],
            "c": context,
            "p": [probs[one] for one in ranked],
            "VWState": {"m": "N/A"},
            "_original_label_cost": cost,
        }
        learn(vw, event)
        events.append(event)
    return events


def make_page_events(num: int = 60) -> list[dict[str, Any]]:
    """Return events whose two slots choose among the same articles, each with a cost."""
    draw = random.Random(2)
    vw = vowpalwabbit.Workspace(f"--ccb_explore_adf {EXPLORE}")
    slots = [{"_id": "top", "Slot": {"size": "large"}}, {"_id": "side", "Slot": {"size": "small"}}]
    events = []
    for i in range(num):
        user = make_user(draw)
        topics = draw.sample(TOPICS, draw.randint(3, 5))
        articles = [make_article(draw, topic) for topic in topics]
        context = {**user, "_multi": articles, "_slots": slots}
        outcomes = []
        for slot, ranking in zip(slots, predict(vw, make_unlabeled(context)), strict=True):
            chosen = ranking[0][0]  # VW drew it; later slots have the others
            is_read = draw.random() < (
                0.5 if topics[chosen] in TASTES[user["User"]["name"]] else 0.1
            )
            outcomes.append(
                {
                    "_label_cost": -float(is_read),
                    "_id": slot["_id"],
                    "_a": [action for action, _ in ranking],
                    "_p": [prob for _, prob in ranking],
                    "_o": [-float(is_read)],
                }
            )
        event = {**make_head(draw, i), "c": context, "_outcomes": outcomes, "VWState": {"m": "N/A"}}
        learn(vw, event)
        events.append(event)
    return events


def make_banner_events(num: int = 60) -> list[dict[str, Any]]:
    """Return events whose two slots have candidates of their own, and one cost for both."""
    draw = random.Random(3)
    vw = vowpalwabbit.Workspace(f"--slates {EXPLORE}")
    texts, colors = ("buy now", "learn more", "subscribe"), ("red", "blue")
    events = []
    for i in range(num):
        user = make_user(draw)
        candidates = [
            *({"_slot_id": 0, "Text": {"text": text}} for text in texts),
            *({"_slot_id": 1, "Color": {"color": color}} for color in colors),
        ]
        context = {**user, "_multi": candidates, "_slots": [{"_id": "text"}, {"_id": "color"}]}
        outcomes, chosen = [], []
        for ranking in predict(vw, {**make_unlabeled(context), "_label_cost": 0.0}):
            chosen.append(ranking[0][0])
            outcomes.append({"_a": [one for one, _ in ranking], "_p": [p for _, p in ranking]})
        chance = 0.1 + 0.4 * (chosen == [1, 1])
        event = {
            "_label_cost": -float(draw.random() < chance),
            **make_head(draw, i),
            "c": context,
            "_outcomes": outcomes,
            "VWState": {"m": "N/A"},
        }
        learn(vw, event)
        events.append(event)
    return events


def make_user(draw: random.Random) -> dict[str, Any]:
    """Return the shared features of a visit."""
    when = draw.choice(("morning", "evening"))
    return {"User": {"name": draw.choice([*TASTES]), "time": when, "visits": draw.randint(1, 9)}}


def make_article(draw: random.Random, topic: str) -> dict[str, Any]:
    """Return a candidate."""
    article = {"topic": topic, "age_h": round(draw.uniform(0, 48), 2)}
    return {"_tag": f"{topic}-{draw.randint(1, 99)}", "Topic": article}


def make_head(draw: random.Random, number: int) -> dict[str, Any]:
    """Return id and time of an event, with .NET's seven digits of a second."""
    time = datetime(2026, 3, 2, 8, tzinfo=UTC) + timedelta(seconds=97 * number)
    ticks = draw.randrange(10**7)
    return {
        "Timestamp": f"{time:%Y-%m-%dT%H:%M:%S}.{ticks:07}Z",
        "Version": "1",
        "EventId": uuid.UUID(int=draw.getrandbits(128), version=4).hex,
    }


def make_unlabeled(context: dict[str, Any]) -> dict[str, Any]:
    """Return an event to predict, with an outcome that does not matter."""
    num = len(context["_slots"])
    return {"c": context, "_outcomes": [{"_label_cost": 0.0, "_a": [0], "_p": [1.0]}] * num}


def predict(vw: Any, event: dict[str, Any]) -> Any:
    """Return VW's probabilities of the candidates, or of each slot's."""
    examples = vw.parse(json.dumps(event))
    prediction = vw.predict(examples)
    vw.finish_example(examples)
    return prediction


def learn(vw: Any, event: dict[str, Any]) -> None:
    """Let VW learn from an event, unless it says that it is not to."""
    if not event.get("_skipLearn"):
        examples = vw.parse(json.dumps(event))
        vw.learn(examples)
        vw.finish_example(examples)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
