"""Events with features of candidates: importance sampling is Vowpal Wabbit's, to the digit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from replaylake.datastore.errors import QueryRefusedError, SpaceUnsupportedError
from replaylake.datastore.interchange.export.export import export
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.labels.annotate import annotate
from replaylake.offline.evaluation.ope.evaluate_policy import evaluate_policy
from replaylake.offline.evaluation.ope.evaluation_request import EvaluationRequest

vowpalwabbit = pytest.importorskip("vowpalwabbit")

_SAMPLES = Path(__file__).parents[4] / "examples" / "data" / "dsjson"
_GREEDY = "--cb_adf --cb_type ips -q UT"
_EXPLORING = "--cb_explore_adf --cb_type ips --epsilon 0.3 -q UT"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


class _Wabbit:
    """VW on events, with what it reports itself: its loss for the events that it saw."""

    def __init__(self, arguments: str) -> None:
        self._vw = vowpalwabbit.Workspace(f"{arguments} --dsjson --strict_parse --quiet")
        self._is_greedy = "explore" not in arguments

    def predict(self, line: str, *, learns: bool) -> float:
        """Return the probability that its policy gives the action that was taken."""
        examples = self._vw.parse(line)
        scores = self._vw.predict(examples)
        if learns:
            # Predicting counts no loss before the examples are finished.
            self._vw.learn(examples)
        self._vw.finish_example(examples)
        taken = json.loads(line)["_labelIndex"]
        # --cb_adf predicts costs, and takes the lowest; --cb_explore_adf predicts probabilities.
        best = min(range(len(scores)), key=scores.__getitem__)
        return float(best == taken) if self._is_greedy else float(scores[taken])

    def measure(self) -> tuple[float, float]:
        """Return its summed loss, and the weight of the events."""
        return self._vw.get_sum_loss(), self._vw.get_weighted_examples()


def _exported_lines(lake: Lake, folder: Path) -> list[str]:
    ingest(lake, [_SAMPLES / "articles.dsjson"], "log")
    export(lake, "log", folder / "out.dsjson", format="dsjson")
    lines = (folder / "out.dsjson").read_text().splitlines()
    return [line for line in lines if not json.loads(line).get("_skipLearn")]


def _estimate(lake: Lake, lines: Sequence[str], probs: Sequence[float]) -> float:
    """Return our IPS of the policy that gave these events' actions these probabilities."""
    ids = [json.loads(line)["EventId"] for line in lines]
    labels = pa.table({"source_episode_id": ids, "pi": probs})
    annotate(lake, "log", labels, on="source_episode_id", add=["pi"])
    request = EvaluationRequest(
        "log", target_prob="pi", where="pi IS NOT NULL", unseen=True, estimators=("ips",)
    )
    report = evaluate_policy(lake, request)
    assert report.num_episodes == len(lines)
    return report.estimates.estimates[0].value


@pytest.mark.parametrize("arguments", [_GREEDY, _EXPLORING])
def test_ips_of_a_fixed_policy_is_that_of_vw(lake: Lake, tmp_path: Path, arguments: str) -> None:
    """VW learns from the first events; its loss on the others is the IPS of what it learned."""
    lines = _exported_lines(lake, tmp_path)
    vw = _Wabbit(arguments)
    for line in lines[:100]:
        vw.predict(line, learns=True)
    before = vw.measure()
    probs = [vw.predict(line, learns=False) for line in lines[100:]]
    loss, weight = (after - first for after, first in zip(vw.measure(), before, strict=True))
    assert weight == len(probs) == 95
    assert loss < 0
    assert _estimate(lake, lines[100:], probs) == pytest.approx(-loss / weight, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [_GREEDY, _EXPLORING])
def test_ips_of_a_learning_policy_is_the_progressive_loss_of_vw(
    lake: Lake, tmp_path: Path, arguments: str
) -> None:
    """The policy of each event is what VW had learned from those before it."""
    lines = _exported_lines(lake, tmp_path)
    vw = _Wabbit(arguments)
    probs = [vw.predict(line, learns=True) for line in lines]
    loss, weight = vw.measure()
    assert weight == len(lines) == 195
    assert _estimate(lake, lines, probs) == pytest.approx(-loss / weight, rel=1e-6)


def test_weights_of_slots_are_multiplied(lake: Lake) -> None:
    """By hand: of each event the product of its slots' ratios, and the reward of all slots."""
    ingest(lake, [_SAMPLES / "pages.dsjson"], "log")
    events = [*map(json.loads, (_SAMPLES / "pages.dsjson").read_text().splitlines())]
    total = 0.0
    for event in events:
        num, weight = len(event["c"]["_multi"]), 1.0
        for i, outcome in enumerate(event["_outcomes"]):
            weight *= 1 / (num - i) / outcome["_p"][0]
        total -= weight * sum(outcome["_label_cost"] for outcome in event["_outcomes"])
    request = EvaluationRequest(
        "log",
        target_prob="1.0 / (len(action_features) - step)",
        unseen=True,
        estimators=("is", "pdis"),
    )
    values = [one.value for one in evaluate_policy(lake, request).estimates.estimates]
    # No reward is weighted before all slots are filled.
    assert values == pytest.approx([total / len(events)] * 2, rel=1e-6)


@pytest.mark.parametrize("policy", ["random", "other"])
def test_policies_of_fixed_actions_are_refused_by_name(lake: Lake, policy: str) -> None:
    ingest(lake, [_SAMPLES / "articles.dsjson"], "log")
    with pytest.raises(SpaceUnsupportedError, match=rf"policy {policy}: .*\(action_features\)"):
        evaluate_policy(lake, EvaluationRequest("log", policy=policy))


def _event(number: int, **changes: Any) -> str:
    context = {"_multi": [{"f": 1}, {"f": 2}]}
    label = {"_label_cost": -1.0 * (number % 2), "_label_Action": 1, "_labelIndex": 0}
    probs = {"_label_probability": 0.5, "a": [1, 2], "p": [0.5, 0.5]}
    return json.dumps({**label, **probs, "EventId": str(number), **changes, "c": context})


def test_events_that_were_dropped_unevenly_are_refused(lake: Lake, tmp_path: Path) -> None:
    lines = [_event(i, pdrop=0.5) for i in range(8)] + [_event(i) for i in range(8, 12)]
    (tmp_path / "log").write_text("\n".join(lines))
    ingest(lake, [tmp_path / "log"], "log", format="dsjson")
    request = {"target_prob": "1.0", "unseen": True, "estimators": ("ips",)}
    with pytest.raises(QueryRefusedError, match=r"pdrop: found 0\.0 to 0\.5 among the selected"):
        evaluate_policy(lake, EvaluationRequest("log", **request))
    # Where all have one weight, it makes no difference: half of them cost -1 at probability 0.5.
    report = evaluate_policy(lake, EvaluationRequest("log", where="pdrop = 0.5", **request))
    assert report.estimates.estimates[0].value == pytest.approx(1.0, rel=1e-6)
    vw = vowpalwabbit.Workspace("--cb_adf --dsjson --quiet")
    for line in lines[:8]:
        examples = vw.parse(line)
        vw.predict(examples)
        vw.finish_example(examples)
    assert vw.get_weighted_examples() == 16  # each event stands for two


def test_the_condition_that_a_message_names_selects_events_of_one_drop_rate(
    lake: Lake, tmp_path: Path
) -> None:
    lines = [_event(i, pdrop=1 / 3) for i in range(8)] + [_event(i) for i in range(8, 12)]
    (tmp_path / "log").write_text("\n".join(lines))
    ingest(lake, [tmp_path / "log"], "log", format="dsjson")
    request = {"target_prob": "1.0", "unseen": True, "estimators": ("ips",)}
    with pytest.raises(QueryRefusedError) as caught:
        evaluate_policy(lake, EvaluationRequest("log", **request))
    _, where, _ = str(caught.value).split("'")
    for condition, num in ((where, 8), ("coalesce(pdrop, 0) = 0", 4)):
        report = evaluate_policy(lake, EvaluationRequest("log", where=condition, **request))
        assert report.num_episodes == num
