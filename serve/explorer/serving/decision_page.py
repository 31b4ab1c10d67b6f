"""Page of a decision: its policy version, run and training data, its reward and its episode."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.holdout import describe_selection
from replaylake.datastore.maintenance.lineage.lineage import trace_decision
from replaylake.serve.explorer.runs.runs_page import link_selection
from replaylake.serve.explorer.visits.page import (
    Page,
    Panel,
    build_panels,
    draw_empty,
    plain_value,
)
from replaylake.serve.explorer.visits.visit import Visit
from replaylake.serve.pages.charts import FlowNode, flow_chart
from replaylake.serve.pages.frame import write_facts
from replaylake.serve.pages.markup import Child, tag
from replaylake.serve.pages.tables import Column, quiet_number, table, time_tag
from replaylake.serve.pages.texts import cell_text, count, number_text

_MAX_OBSERVATION: Final = 4000
_MAX_INGESTS: Final = 5


@dataclass(frozen=True)
class DecisionContents:
    """The data of all panels. trace: the result of trace_decision.

    step: the row of `steps` that the decision was joined into, with the return of its episode; None
    if it is not joined yet.
    """

    trace: Mapping[str, Any]
    step: Mapping[str, Any] | None

    @property
    def decision(self) -> Mapping[str, Any]:
        body: Mapping[str, Any] = self.trace["decision"]
        return body


def show_decision(visit: Visit) -> Page:
    """Return the page of `/decision?id=ID`. Raises: ConfigInvalidError, NotFoundError."""
    decision_id = visit.values.get("id", "").strip()
    if not decision_id:
        raise ConfigInvalidError(
            "id: found none, expected the decision_id of a server's answer. Add `?id=`.",
            parameter="id",
        )
    trace = trace_decision(visit.lake, decision_id)
    decision = trace["decision"]
    name = decision["dataset"]
    contents = DecisionContents(trace, _read_step(visit, decision))
    facts: list[tuple[str, Child]] = [
        ("decided", time_tag(datetime.fromisoformat(decision["decided_at"]))),
        ("policy", _policy_link(visit, trace)),
        ("action", _describe_action(decision)),
        ("reward", _describe_reward(contents)),
    ]
    if contents.step is not None:
        facts.append(("return of its episode", quiet_number(contents.step["return"])))
    return Page(
        "Decision",
        section="serving",
        crumbs=[("Serving", visit.link("serving")), (name, visit.link("serving", name))],
        lead=tag("code", decision_id),
        facts=facts,
        panels=build_panels(visit, contents, PANELS),
        data={**trace, "joined": contents.step},
    )


def _read_step(visit: Visit, decision: Mapping[str, Any]) -> dict[str, Any] | None:
    if decision["step"] is None:
        return None
    name = decision["dataset"]
    rows = visit.sql(
        f"""SELECT episode_id, agent_id, step, reward, "return", num_steps
        FROM {name}.steps JOIN {name}.episodes USING (episode_id, agent_id)
        WHERE decision_id = $id AND episode_id = $episode""",
        visit.lake.snapshot(name),
        id=decision["decision_id"],
        episode=decision["step"]["episode_id"],
    )
    return rows[0] if rows else None


def draw_path(visit: Visit, contents: DecisionContents) -> Panel:
    """Draw the lineage of the decision, its reward and its episode."""
    trace, step = contents.trace, contents.step
    decision, policy, run = contents.decision, trace["policy"], trace["run"]
    data = {}
    for place, used in enumerate(trace["datasets"]):
        where = str(used["where"] or "")
        address = _data_address(visit, used)
        detail = where and describe_selection(where)
        data[str(place)] = FlowNode(f"{used['dataset']}@{used['version']}", detail, address)
    run_id = run["run_id"] or ""
    known = any(one["run_id"] == run_id for one in visit.lake.registry.runs())
    address = visit.link("runs", run_id) if known else None
    algorithm = str(run["algorithm"] or "")
    aliases = ", ".join(policy["aliases"])
    version = FlowNode(
        f"{policy['policy']}:{policy['version']}", aliases, _policy_address(visit, trace)
    )
    end = FlowNode("no step yet", "until the feedback join")
    if step is not None:
        detail = f"step {step['step']}, {count(step['num_steps'], 'step')} in all"
        end = FlowNode(step["episode_id"], detail, _episode_address(visit, contents))
    stages = [
        ("Data", data or {"0": FlowNode("not recorded", "")}),
        ("Run", {"": FlowNode(run_id or "not recorded", algorithm, address)}),
        ("Version", {"": version}),
        (
            "Decision",
            {"": FlowNode(f"action {_describe_action(decision)}", _describe_chance(decision))},
        ),
        ("Reward", {"": FlowNode(_describe_reward(contents), "")}),
        ("Episode", {"": end}),
    ]
    links = [(0, key, "") for key in stages[0][1]] + [(place, "", "") for place in range(1, 5)]
    chart = flow_chart(stages, links, label="From data to the reward of this decision")
    return Panel("From data to reward", chart)


def describe_decision(visit: Visit, contents: DecisionContents) -> Panel:
    """Show the request and the answer."""
    decision = contents.decision
    name, decision_id = decision["dataset"], decision["decision_id"]
    visit.note_query(f"SELECT * FROM {name}.decisions WHERE decision_id = $id", id=decision_id)
    if not decision["logged"]:
        body: Child = draw_empty(
            "The decision is not in its log yet.",
            hint="Its server commits decisions in groups. Until then, the id has policy and time.",
        )
        return Panel("Request and answer", body, is_wide=False)
    text = json.dumps(plain_value(decision["observation"]), ensure_ascii=False)
    if len(text) > _MAX_OBSERVATION:
        text = f"{text[:_MAX_OBSERVATION]}\N{HORIZONTAL ELLIPSIS}"
    log_prob = decision["log_prob"]
    facts: list[tuple[str, Child]] = [
        ("action", _describe_action(decision)),
        ("log-prob", quiet_number(log_prob)),
        ("probability", "unknown" if log_prob is None else number_text(math.exp(log_prob))),
        ("chosen", "as the most likely action" if decision["deterministic"] else "by chance"),
    ]
    if decision["request_id"]:
        facts.append(("request", decision["request_id"]))
    if decision["episode_id"]:
        facts.append(("episode, by the client", decision["episode_id"]))
    facts.append(("worker", decision["worker"]))
    content = [write_facts(facts, is_small=True), tag("h3", "Observation")]
    return Panel("Request and answer", [content, tag("pre", tag("code", text))], is_wide=False)


def list_rewards(visit: Visit, contents: DecisionContents) -> Panel:
    """Show the reported rewards of the decision, and the step that they were joined into."""
    decision, step = contents.decision, contents.step
    name = decision["dataset"]
    query = f"SELECT * FROM {name}.rewards WHERE decision_id = $id"
    visit.note_query(query, id=decision["decision_id"])
    rows: list[list[Child]] = [
        [quiet_number(one["reward"]), _yes(one["terminated"]), _yes(one["truncated"])]
        for one in decision["rewards"]
    ]
    columns: list[Column | str] = [Column("Reward", is_number=True), "Terminated", "Truncated"]
    body: Child = table(columns, rows, label="Reported rewards")
    if not rows:
        body = draw_empty("No reward of this decision was reported.")
    after: Child = tag("p", "The decision is not joined into a step yet.", class_="quiet")
    if step is not None:
        episode = tag("a", step["episode_id"], href=_episode_address(visit, contents))
        facts: list[tuple[str, Child]] = [
            ("reward of the step", quiet_number(step["reward"])),
            ("step", f"{step['step']}"),
            ("episode", episode),
            ("its return", quiet_number(step["return"])),
        ]
        after = write_facts(facts, is_small=True)
    note = (
        "Reports in order of arrival; the last one counts, and reports of mode sum are added to it."
    )
    return Panel("Reported rewards", [body, after], note=note, is_wide=False)


def list_data(visit: Visit, contents: DecisionContents) -> Panel:
    """Show the training data of the policy version."""
    trace = contents.trace
    if not trace["datasets"]:
        body: Child = draw_empty("The policy version has no record of its training data.")
        return Panel("Learned from", body)
    rows: list[list[Child]] = []
    for used in trace["datasets"]:
        text = f"{used['dataset']}@{used['version']}"
        address = _data_address(visit, used)
        ingests = [
            tag("div", one["source"] or one["producer"], class_="why")
            for one in used["ingests"][:_MAX_INGESTS]
        ]
        more = len(used["ingests"]) - len(ingests)
        rows.append(
            [
                text if address is None else tag("a", text, href=address),
                "" if address is None else link_selection(visit, used),
                quiet_number(used["num_episodes"]),
                quiet_number(used["num_steps"]),
                "yes" if used["reproducible"] else "no: data was purged",
                [ingests, tag("div", f"and {more:,} more", class_="quiet") if more else None],
            ]
        )
    columns: list[Column | str] = [
        "Data",
        "Selection",
        Column("Episodes", is_number=True),
        Column("Steps", is_number=True),
        "Reproducible",
        "Came from",
    ]
    return Panel("Learned from", table(columns, rows, label="Learned from"))


def _policy_address(visit: Visit, trace: Mapping[str, Any]) -> str | None:
    name = trace["policy"]["policy"]
    known = any(row["policy"] == name for row in visit.lake.registry.list())
    return visit.link("policies", name) if known else None


def _policy_link(visit: Visit, trace: Mapping[str, Any]) -> Child:
    text = f"{trace['policy']['policy']}:{trace['policy']['version']}"
    address = _policy_address(visit, trace)
    return text if address is None else tag("a", text, href=address)


def _data_address(visit: Visit, used: Mapping[str, Any]) -> str | None:
    if used["dataset"] not in visit.lake.datasets():
        return None
    return visit.link("datasets", used["dataset"], at=used["version"])


def _episode_address(visit: Visit, contents: DecisionContents) -> str | None:
    if contents.step is None:
        return None
    name = contents.decision["dataset"]
    return visit.link("datasets", name, "episode", id=contents.step["episode_id"])


def _describe_action(decision: Mapping[str, Any]) -> str:
    return cell_text(plain_value(decision["action"])) if decision["logged"] else "not logged yet"


def _describe_chance(decision: Mapping[str, Any]) -> str:
    log_prob = decision.get("log_prob")
    return "" if log_prob is None else f"probability {math.exp(log_prob):.3g}"


def _describe_reward(contents: DecisionContents) -> str:
    """Return the reward of the step, or else the newest report, which a later one may change."""
    if contents.step is not None:
        return number_text(contents.step["reward"])
    known = [one["reward"] for one in contents.decision["rewards"] if one["reward"] is not None]
    return f"{number_text(known[-1])}, not joined" if known else "none reported"


def _yes(value: object) -> str:
    return "yes" if value else "no"


PANELS: Final = (draw_path, describe_decision, list_rewards, list_data)
