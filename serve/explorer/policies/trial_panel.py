"""Trial: one observation acted on by a version of a policy, in this process and without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Dict,
    Discrete,
    Space,
    Tuple,
    children,
    describe,
    num_elements,
)
from replaylake.datastore.errors import ReplayLakeError, SpaceUnsupportedError
from replaylake.datastore.lake.policies.manifest import GRAPH, LANGUAGE, read_manifest
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.lake.profile.column_statistics import Histogram
from replaylake.datastore.names import parse_version
from replaylake.serve.api.values import encode_observations, read_values
from replaylake.serve.explorer.visits.page import Panel, draw_empty
from replaylake.serve.explorer.visits.visit import Visit
from replaylake.serve.messages import RequestRefusedError
from replaylake.serve.pages.charts import bar_list, histogram_chart
from replaylake.serve.pages.frame import write_facts
from replaylake.serve.pages.markup import Child, Markup, tag
from replaylake.serve.pages.texts import number_text

if TYPE_CHECKING:
    from replaylake.datastore.lake.policies.package import PackagedPolicy

_MAX_CHARS: Final = 16_000  # an address with more is refused on its way by many proxies
_MAX_GRAPH_BYTES: Final = 256 << 20
_MAX_BARS: Final = 32
_MAX_DIMENSIONS: Final = 8
_NUM_BINS: Final = 24
# So many actions are drawn where they cannot be listed; fewer of a policy that sees pictures.
_NUM_DRAWN: Final = 1000
_NUM_DRAWN_BY_PICTURES: Final = 64
_LARGE: Final = 4096  # elements of an observation


@dataclass(frozen=True)
class Trial:
    """A panel with the form and, where an observation was given, the answer. data: as JSON."""

    panel: Panel
    data: Mapping[str, Any] | None = None
    status: int = 200


@dataclass(frozen=True)
class _Answer:
    """What a policy does with one observation, drawn and as JSON."""

    body: Child
    data: Mapping[str, Any] = field(default_factory=dict)


def build_trial(visit: Visit, entries: Sequence[Mapping[str, Any]]) -> Trial:
    """Return the form of a policy, with an answer where the address has an observation.

    entries: the versions of the policy, the newest first.
    """
    name = visit.path["name"]
    versions = [int(entry["version"]) for entry in entries]
    chosen = parse_version(visit.values.get("try", ""))
    version = chosen if chosen in versions else versions[0]
    entry = entries[versions.index(version)]
    if entry["kind"] == LANGUAGE:
        empty = draw_empty(
            "A language model takes messages, from any client of OpenAI's API:",
            command=f"`replaylake serve {name}:{version} --log-to DATASET`",
        )
        return Trial(Panel("Try it", empty))
    text = visit.values.get("observation", "")
    answer: Child = None
    data: Mapping[str, Any] | None = None
    status = 200
    if text and visit.is_cross_site:
        # Whoever wrote the link chose the observation: the reader decides whether it is acted on.
        answer = draw_empty("A link on another site led here. Press Act to see the action.")
    elif text:
        try:
            found = _act(visit, name, version, text)
            answer, data = found.body, found.data
        except RequestRefusedError as error:
            status = error.status
            data = {"error": {"field": error.field, "message": error.message}}
            answer = tag("p", f"{error.field}: {error.message}.", class_="wrong", role="alert")
        except ReplayLakeError as error:
            status, data = 400, {"error": {"message": str(error)}}
            answer = [
                tag("p", str(error), class_="wrong", role="alert"),
                draw_empty(
                    "A server may act with this policy:",
                    command=f"`replaylake serve {name}:{version}`",
                ),
            ]
    else:
        text = _find_example(visit, entry)
    queries = visit.take_queries()
    note = "One step of an episode that begins here, by the package alone; nothing is logged."
    result = tag("div", answer, id="action") if answer is not None else None
    form = _form(visit, versions, version, text)
    return Trial(Panel("Try it", [form, result], note=note, queries=queries), data, status)


def _form(visit: Visit, versions: Sequence[int], version: int, text: str) -> Markup:
    options = [tag("option", str(one), value=one, selected=one == version) for one in versions]
    temperature = visit.values.get("temperature", "")
    return tag(
        "form",
        tag("label", "Observation", for_="observation", class_="quiet"),
        tag(
            "textarea",
            text,
            id="observation",
            name="observation",
            rows=3,
            maxlength=_MAX_CHARS,
            spellcheck="false",
            autocomplete="off",
            required=True,
        ),
        tag(
            "div",
            tag("label", tag("span", "Version"), tag("select", options, name="try")),
            tag(
                "label",
                tag("span", "Temperature"),
                tag(
                    "input",
                    type="number",
                    name="temperature",
                    value=temperature or "1",
                    min="0.000001",
                    max="1000000",
                    step="any",
                ),
            ),
            class_="fields",
        ),
        tag("div", tag("button", "Act", type="submit"), class_="more"),
        action=f"{visit.link('policies', visit.path['name'])}#action",
        class_="try",
    )


def _find_example(visit: Visit, entry: Mapping[str, Any]) -> str:
    """Return the first observation of the data that a version learned from; empty without any."""
    for used in entry["lineage"].get("datasets") or ():
        name, version = used.get("dataset"), used.get("version")
        try:
            snapshot = visit.lake.snapshot(f"{name}@{version}")
            space = snapshot.spec.observation_space
            if num_elements(space) > _LARGE:
                return ""
            rows = visit.sql(f"SELECT observation FROM {snapshot.dataset}.steps LIMIT 1", snapshot)
        except ReplayLakeError:
            # Expired, dropped or purged since then.
            continue
        if rows:
            return json.dumps(_plain(space, rows[0]["observation"]))
    return ""


def _plain(space: Space, value: Any) -> Any:
    """Return a value of a row as a client writes it: the fields of a Tuple as a list."""
    if isinstance(space, Dict | Tuple):
        parts = {key: _plain(sub, value[key]) for key, sub in children(space).items()}
        return parts if isinstance(space, Dict) else list(parts.values())
    if isinstance(space, Box):
        array = np.reshape(np.asarray(value, space.dtype), space.shape)
        if array.dtype.kind == "f":
            # A float32 as it prints: 0.1, not the double 0.10000000149011612 that it is.
            array = np.array([float(str(one)) for one in array.reshape(-1)]).reshape(space.shape)
        return array.tolist()
    return value


def _act(visit: Visit, name: str, version: int, text: str) -> _Answer:
    """Act. Raises: RequestRefusedError, ReplayLakeError."""
    temperature = _read_temperature(visit)
    raw = _read_json(text)
    policy = _load(visit, name, version)
    spec = policy.spec
    raw = encode_observations(spec.encoding, [raw], "observation", is_batch=False)
    values = read_values(spec.observation_space, raw, "observation", is_batch=False)
    state = policy.initial_state(1)
    best = policy.act(values, state, rng=np.random.default_rng(0))
    action = best.actions[0]
    facts: list[tuple[str, Child]] = [("action, the most likely", _action_text(action))]
    if isinstance(spec.action_space, Discrete) and spec.encoding is not None:
        named = spec.encoding.action_name(int(action))
        if named is not None:
            facts.append(("called", named))
    log_prob = None
    try:
        log_prob = float(
            policy.log_probs(
                values, best.actions, state, deterministic=False, temperature=temperature
            )[0]
        )
    except SpaceUnsupportedError:
        facts.append(("log-prob", "none: the policy has no density"))
    else:
        known = math.isfinite(log_prob)
        facts.append(
            (
                f"log-prob at temperature {temperature:g}",
                number_text(log_prob) if known else "unknown",
            )
        )
    data: dict[str, Any] = {
        "policy": name,
        "version": version,
        "action": action.tolist(),
        "log_prob": log_prob,
        "temperature": temperature,
    }
    if isinstance(spec.action_space, Discrete):
        probs = policy.action_probs(values, state, deterministic=False, temperature=temperature)[0]
        drawn: Child = _draw_probs(spec, probs, best.q_values)
        data["probabilities"] = probs.tolist()
        if best.q_values is not None:
            data["q_values"] = best.q_values[0].tolist()
    else:
        drawn = _draw_samples(policy, spec, values, temperature)
    head = f"{name}:{version}, head {spec.head}, acts in {describe(spec.action_space)}."
    return _Answer([tag("p", head, class_="quiet"), write_facts(facts), drawn], data)


def _read_temperature(visit: Visit) -> float:
    text = visit.values.get("temperature") or "1"
    try:
        temperature = float(text)
    except ValueError:
        temperature = math.nan
    if not 1e-6 <= temperature <= 1e6:
        raise RequestRefusedError(
            422, "temperature", found=text[:40], expected="a number from 1e-6 to 1e6"
        )
    return temperature


def _read_json(text: str) -> Any:
    if len(text) > _MAX_CHARS:
        found = f"{len(text):,} characters"
        expected = f"at most {_MAX_CHARS:,}: a server takes larger observations"
        raise RequestRefusedError(422, "observation", found=found, expected=expected)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestRefusedError(
            422, "observation", f"expected JSON, such as [0, 0.5]: {error}"
        ) from error


def _load(visit: Visit, name: str, version: int) -> PackagedPolicy:
    """Return the policy, remembered for a while where it is small. Raises: ReplayLakeError."""
    # Not on top: with it the explorer would start with onnxruntime, 16 MB that few readers need.
    from replaylake.datastore.lake.policies.package import load_policy

    ref = visit.lake.registry.resolve(f"{name}:{version}")
    key = ("policy", name, version, ref.manifest_sha256)
    known: PackagedPolicy | None = visit.memory.get(key)
    if known is not None:
        return known
    path = ref.path
    size = read_manifest(path, ref.manifest_sha256).body["files"][GRAPH].get("bytes", 0)
    if size > _MAX_GRAPH_BYTES:
        raise SpaceUnsupportedError(
            f"policy {name}:{version}: found a graph of {size:,} bytes, expected at most "
            f"{_MAX_GRAPH_BYTES:,} here."
        )
    policy = load_policy(path, ref.manifest_sha256)
    visit.memory.put(key, policy, 3 * size + 100_000)
    return policy


def _draw_probs(spec: PolicySpec, probs: Array, q_values: Array | None) -> Child:
    """Draw the probability of each action, or of the most likely ones."""
    order = range(len(probs))
    note = None
    if len(probs) > _MAX_BARS:
        order = np.argsort(-probs, kind="stable")[:_MAX_BARS].tolist()
        note = tag("p", f"The {_MAX_BARS} most likely of {len(probs):,} actions.", class_="quiet")
    start = spec.action_space.start if isinstance(spec.action_space, Discrete) else 0
    rows = []
    for place in order:
        named = None if spec.encoding is None else spec.encoding.action_name(place + start)
        label = f"{place + start}" if named is None else f"{place + start}: {named}"
        text = f"{probs[place]:.4g}"
        if q_values is not None:
            text += f", q {q_values[0][place]:.5g}"
        rows.append((label, float(probs[place]), text))
    return [note, bar_list(rows, label="Probability of each action", top=1.0)]


def _draw_samples(
    policy: PackagedPolicy, spec: PolicySpec, values: Any, temperature: float
) -> Child:
    """Draw histograms of actions that are drawn at the temperature, one of each dimension."""
    num = _NUM_DRAWN
    if num_elements(spec.observation_space) > _LARGE:
        num = _NUM_DRAWN_BY_PICTURES
    drawn = policy.act(
        _repeat(values, num),
        policy.initial_state(num),
        rng=np.random.default_rng(0),
        deterministic=False,
        temperature=temperature,
    ).actions
    columns = np.reshape(drawn, (num, -1)).astype(np.float64)
    if (columns == columns[0]).all():
        return tag("p", "This policy has one action for each observation.", class_="quiet")
    charts = []
    for place in range(min(columns.shape[1], _MAX_DIMENSIONS)):
        column = columns[:, place]
        counts, edges = np.histogram(column, bins=_NUM_BINS)
        if column.min() == column.max():
            edges, counts = np.array([column[0], column[0]]), np.array([num])
        histogram = Histogram(tuple(edges.tolist()), tuple(counts.tolist()))
        charts.append(histogram_chart(histogram, f"Action {place}", "draws"))
    note = f"{num:,} draws at temperature {temperature:g}"
    if columns.shape[1] > _MAX_DIMENSIONS:
        note += f"; the first {_MAX_DIMENSIONS} of {columns.shape[1]} dimensions"
    return [tag("p", f"{note}.", class_="quiet"), tag("div", charts, class_="row")]


def _repeat(values: Any, num: int) -> Any:
    if isinstance(values, Mapping):
        return {key: _repeat(one, num) for key, one in values.items()}
    return np.repeat(values, num, axis=0)


def _action_text(action: Array) -> str:
    if action.ndim == 0:
        return number_text(action.item())
    return ", ".join(number_text(one) for one in action.reshape(-1)[:_MAX_BARS].tolist())
