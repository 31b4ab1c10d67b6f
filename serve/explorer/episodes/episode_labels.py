"""Labels of an episode: its panel with the form, what the form does, and the queue of a list.

A queue is a list of episodes and a label. What a reader labels in it leads to the next episode of
the list that does not have the label; the list's condition and order stay as they are.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

from replaylake.datastore.errors import ConfigInvalidError, NotFoundError
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.maintenance.labels.episode_labels import (
    EpisodeLabel,
    LabelValue,
    label_episode,
    list_label_names,
    read_episode_labels,
    undo_label,
)
from replaylake.datastore.names import is_sql_keyword
from replaylake.datastore.query.statements import literal
from replaylake.serve.explorer.datasets.dataset_page import read_at
from replaylake.serve.explorer.episodes.episodes_page import (
    EpisodeKey,
    EpisodeList,
    link_episode,
    read_key,
    read_list,
)
from replaylake.serve.explorer.visits.forms import TOKEN_FIELD, read_version
from replaylake.serve.explorer.visits.page import Page, Panel, Redirect, draw_empty
from replaylake.serve.explorer.visits.visit import Visit
from replaylake.serve.pages.markup import Child, Markup, join, tag
from replaylake.serve.pages.tables import Column, table, time_tag
from replaylake.serve.pages.texts import number_text

FLAG: Final = "flagged"
# Not `label`, nor another name that scorers take for the right answer.
_DEFAULT_LABEL: Final = "verdict"
_MAX_VALUES: Final = 50
# Those with a key of their own: 1 to 9.
_MAX_BUTTONS: Final = 9
# What `_value_text` writes, and people.
_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,20}(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,3})?")
_FORM: Final = "labels"
_SCORER: Final = "_scorer"
_NUMERIC: Final = ("double", "float", "int64", "int32", "bool")


def to_json_labels(labels: Mapping[str, EpisodeLabel]) -> dict[str, dict[str, Any]]:
    """Return labels as JSON has them, by name, without those that were removed."""
    return {
        name: {"value": label.value, "by": label.by, "at": label.at}
        for name, label in labels.items()
        if label.value is not None
    }


def show_episode_labels(
    visit: Visit, snapshot: Snapshot, key: EpisodeKey, labels: Mapping[str, EpisodeLabel]
) -> Panel | None:
    """Show who labeled an episode how, its scores, and the form to label it.

    None where nothing may be written, and there is neither.
    """
    scores = _read_scores(visit, snapshot, key)
    listed = read_list(visit, snapshot)
    body: list[Child] = []
    if visit.form_token is not None and _is_newest(visit, snapshot):
        name = visit.values.get("queue") or _default_label(snapshot)
        values = _count_values(visit, snapshot, name)
        body += [
            _notice(visit, listed),
            _label_form(visit, listed, key, name, [one["value"] for one in values], labels),
            _label_table(labels, scores, can_remove=True),
            _training_table(visit, listed, name, values),
        ]
    elif labels or scores or visit.form_token is not None:
        body.append(_label_table(labels, scores, can_remove=False))
        if visit.form_token is not None:
            row = {"episode_id": key.episode_id, "agent_id": key.agent_id}
            address = link_episode(visit, listed, row)
            link = tag("a", "the newest version", href=address)
            body.append(tag("p", "Labels are set in ", link, ".", class_="note"))
    return Panel("Labels", body) if body else None


def write_label(visit: Visit) -> Redirect:
    """Do what the form of an episode's labels says, and return where to go on.

    Raises: ConfigInvalidError, CommitConflictError, NotFoundError, StorageError.
    """
    values = visit.values
    snapshot = visit.lake.snapshot(visit.path["name"])
    dataset, listed = snapshot.dataset, read_list(visit, snapshot)
    episode = {"episode_id": values.get("id", ""), "agent_id": values.get("agent", "")}
    queue = values.get("queue") or None
    visit.back = link_episode(visit, listed, episode, queue=queue)
    by = visit.describe_writer(values.get("by", ""))
    leads_to = None
    if "undo" in values:
        undone = read_version(values, "undo")
        version = undo_label(visit.lake, dataset, undone, by=by, **episode)
    else:
        name, value = _read_assignment(snapshot, values)
        seen_at = read_version(values, "seen")
        shown = visit.lake.snapshot(f"{dataset}@{seen_at}")
        seen = read_episode_labels(shown, **episode).get(name)
        version = label_episode(visit.lake, dataset, name, value, by=by, seen=seen, **episode)
        # A flag is a remark beside the label that the queue is of.
        if queue is not None and value is not None and (name != FLAG or queue == FLAG):
            leads_to = name
    last = json.dumps([version, *episode.values()])
    if leads_to is None:
        address = link_episode(visit, listed, episode, queue=queue, last=last)
    else:
        address = _link_next(visit, listed, leads_to, values.get("after"), last)
    return Redirect(address, reader=values.get("by", "").strip())


def open_next(visit: Visit) -> Redirect | Page:
    """Return the address of the next episode of a list without a label: of `/datasets/NAME/next`.

    It is the first after the place in `after`, or else of the whole list. Raises: QueryError,
    QueryRefusedError for the list's condition.
    """
    snapshot = visit.lake.snapshot(visit.path["name"])
    listed = read_list(visit, snapshot)
    name = visit.values.get("label") or _default_label(snapshot)
    column = name if name in list_label_names(snapshot.table.schema) else None
    after = read_key(visit.values.get("after"))
    rows = listed.find_unlabeled(visit, column, after)
    if not rows and after is not None:
        rows = listed.find_unlabeled(visit, column, None)
    if rows:
        last = visit.values.get("last")
        return Redirect(link_episode(visit, listed, rows[0], queue=name, last=last))
    address = visit.link("datasets", snapshot.dataset, "episodes", **listed.link_values())
    what = f"Every episode of this list has the label {name}."
    body = [_notice(visit, listed), draw_empty(what, hint=tag("a", "The list", href=address))]
    return Page(
        f"No episode without {name}",
        section="datasets",
        crumbs=[
            ("Lake", visit.link()),
            (snapshot.dataset, visit.link("datasets", snapshot.dataset)),
            ("Episodes", address),
        ],
        panels=[Panel("Labels", body)],
        data={"dataset": snapshot.dataset, "label": name, "next": None},
    )


def _link_next(
    visit: Visit, listed: EpisodeList, name: str, after: str | None, last: str | None = None
) -> str:
    dataset = listed.snapshot.dataset
    values = {**listed.link_values(), "label": name, "after": after, "last": last}
    return visit.link("datasets", dataset, "next", **values)


def _is_newest(visit: Visit, snapshot: Snapshot) -> bool:
    """Whether a page shows the newest version, or did when its request came."""
    is_pinned = read_at(visit) is not None
    return not is_pinned or visit.lake.dataset(snapshot.dataset).snapshot().version == (
        snapshot.version
    )


def _default_label(snapshot: Snapshot) -> str:
    """Return the first label of the dataset that is more than a flag."""
    names = [name for name in list_label_names(snapshot.table.schema) if name != FLAG]
    return names[0] if names else _DEFAULT_LABEL


def _count_values(visit: Visit, snapshot: Snapshot, name: str) -> list[dict[str, Any]]:
    """Return the values of a label and their episodes, those that were first set first.

    So a value keeps its place, and its key, when others are added.
    """
    if name not in list_label_names(snapshot.table.schema):
        return []
    return visit.sql(
        f"""SELECT value, count(*) AS num_episodes FROM (
            SELECT episode_id, agent_id, any_value("{name}") AS value,
                min("{name}_labeled_at") AS labeled_at
            FROM {snapshot.dataset}.steps WHERE "{name}" IS NOT NULL GROUP BY ALL
        ) GROUP BY value ORDER BY min(labeled_at), value LIMIT {_MAX_VALUES}""",
        snapshot,
    )


def _read_assignment(
    snapshot: Snapshot, values: Mapping[str, str]
) -> tuple[str, LabelValue | None]:
    """Return the label that a form sets, and its value; None removes it."""
    if "removed" in values:
        return values["removed"], None
    if "flag" in values:
        return FLAG, True if values["flag"] == "true" else None
    name = values.get("label", "").strip()
    text = (values.get("quick") or values.get("value", "")).strip()
    fields = {field.name: str(field.type) for field in snapshot.table.schema}
    kind = fields[name] if name in list_label_names(snapshot.table.schema) else None
    if kind == "bool" and text.lower() in ("true", "false"):
        return name, text.lower() == "true"
    if kind in (None, "double") and _NUMBER.fullmatch(text):
        number = float(text)
        # A label's first value is a text if a float does not hold it, as the digits of a long id.
        if kind is not None or Decimal(_value_text(number)) == Decimal(text):
            return name, number
    return name, text


def _hidden_fields(visit: Visit, listed: EpisodeList, **fields: object) -> list[Markup]:
    """Return what each form sends besides what its reader chose."""
    known = {
        TOKEN_FIELD: visit.form_token,
        "queue": visit.values.get("queue"),
        **listed.link_values(),
        **fields,
    }
    return [
        tag("input", type="hidden", name=name, value=value)
        for name, value in known.items()
        if value is not None
    ]


def _label_form(
    visit: Visit,
    listed: EpisodeList,
    key: EpisodeKey,
    name: str,
    values: Sequence[LabelValue],
    labels: Mapping[str, EpisodeLabel],
) -> Markup:
    is_flagged = FLAG in labels and labels[FLAG].value is True
    snapshot = listed.snapshot
    names = [one for one in list_label_names(snapshot.table.schema) if one != FLAG]
    shown = values[:_MAX_BUTTONS]
    buttons = [
        _key_button(str(number), _value_text(value), name="quick", value=_value_text(value))
        for number, value in enumerate(shown, start=1)
    ]
    return tag(
        "form",
        _hidden_fields(
            visit,
            listed,
            id=key.episode_id,
            agent=key.agent_id,
            after=key.to_text(),
            seen=snapshot.version,
        ),
        _field("Your name", "by", visit.reader, required=True, autocomplete="name", maxlength=100),
        _field("Label", "label", name, required=True, maxlength=40, list="label-names"),
        _field("Value", "value", "", maxlength=500, list="label-values", data_key="l"),
        tag("datalist", [tag("option", value=one) for one in names], id="label-names"),
        tag(
            "datalist",
            [tag("option", value=_value_text(one)) for one in values],
            id="label-values",
        ),
        tag(
            "div",
            # The first button of the form: Enter in a field presses it.
            tag("button", "Set label", type="submit"),
            buttons,
            _key_button(
                "f",
                "Remove flag" if is_flagged else "Flag",
                name="flag",
                value="false" if is_flagged else "true",
            ),
            tag(
                "a",
                "Next without label",
                _hint("n"),
                href=_link_next(visit, listed, name, key.to_text()),
                class_="button",
                data_key="n",
            ),
            # Shown by the script, without which there are no keys.
            tag(
                "label",
                tag("input", type="checkbox", id="keys", checked=True),
                " Keys: l value, f flag, n next, u undo, j and k through the list",
                class_="keys",
                hidden=True,
            ),
            class_="actions",
        ),
        id=_FORM,
        method="post",
        action=visit.link("datasets", snapshot.dataset, "label"),
        class_="labels",
    )


def _field(title: str, name: str, value: str, **attributes: Any) -> Markup:
    identity = f"label-{name}"
    return tag(
        "div",
        tag("label", title, for_=identity),
        tag(
            "input",
            id=identity,
            name=name,
            value=value,
            **{"autocomplete": "off", "spellcheck": "false", **attributes},
        ),
    )


def _key_button(key: str, text: str, **attributes: Any) -> Markup:
    return tag(
        "button", tag("span", text), _hint(key), type="submit", class_="plain", data_key=key,
        **attributes,
    )  # fmt: skip


def _hint(key: str) -> Markup:
    """Return a key's name, which the script shows while keys are on."""
    return tag("kbd", key, aria_hidden="true", hidden=True)


def _label_table(
    labels: Mapping[str, EpisodeLabel], scores: Sequence[Mapping[str, Any]], *, can_remove: bool
) -> Markup:
    if not labels and not scores:
        return tag("p", "This episode has no label.", class_="quiet")
    rows: list[list[Child]] = []
    for name, label in labels.items():
        is_set = label.value is not None
        button = tag(
            "button",
            "Remove",
            type="submit",
            form=_FORM,
            name="removed",
            value=name,
            class_="plain",
            aria_label=f"Remove {name}",
        )
        rows.append(
            [
                name,
                _value_text(label.value) if label.value is not None else "",
                label.by if is_set else f"removed by {label.by}",
                join(time_tag(label.at)),
                button if is_set else None,
            ]
        )
    rows += [
        [one["name"], one["value"], one["scorer"], join(time_tag(one["at"])), None]
        for one in scores
    ]
    columns: list[Column | str] = ["Label", "Value", "By", "When", ""]
    if not can_remove:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return table(columns, rows, label="Labels of this episode")


def _read_scores(visit: Visit, snapshot: Snapshot, key: EpisodeKey) -> list[dict[str, Any]]:
    """Return the scores of an episode with their scorer, and when it was last used.

    A column is a score where `<name>_scorer` has the id of a scorer that a commit describes.
    """
    kinds = {field.name: str(field.type) for field in snapshot.table.schema}
    names = [
        name
        for name, kind in kinds.items()
        if kinds.get(f"{name}{_SCORER}") == "string" and kind in _NUMERIC
    ]
    if not names:
        return []
    columns = ", ".join(
        f'''arg_max("{name}{_SCORER}", step) AS "{name}{_SCORER}",
        avg("{name}"::DOUBLE) AS "{name} mean", min("{name}"::DOUBLE) AS "{name} min",
        max("{name}"::DOUBLE) AS "{name} max"'''
        for name in names
    )
    (row,) = visit.sql(
        f"""SELECT {columns} FROM {snapshot.dataset}.steps
        WHERE episode_id = $id AND agent_id = $agent""",
        snapshot,
        id=key.episode_id,
        agent=key.agent_id,
    )
    scorers = _read_scorers(visit, snapshot)
    found = []
    for name in names:
        scorer = scorers.get((name, row[f"{name}{_SCORER}"]))
        if scorer is None:
            continue
        mean, low, high = (row[f"{name} {part}"] for part in ("mean", "min", "max"))
        value = "failed" if mean is None else number_text(mean)
        if low != high:
            value = f"mean {value}, {number_text(low)} to {number_text(high)}"
        found.append({"name": name, "value": value, **scorer})
    return found


def _read_scorers(visit: Visit, snapshot: Snapshot) -> Mapping[tuple[str, str], Mapping[str, Any]]:
    """Return who scored, and when last, by the score's name and the scorer's id.

    No commit is read a second time.
    """
    key = ("scorers", snapshot.dataset)
    version, scorers = visit.memory.get(key) or (-1, {})
    if version > snapshot.version:
        # Later ones are remembered where an earlier version is shown.
        return dict(scorers)
    scorers = dict(scorers)
    for commit in visit.lake.dataset(snapshot.dataset).history(version + 1):
        version = max(version, commit["version"])
        scored = commit.get("scored")
        if scored is not None:
            about = scored["scorer"]
            what = about.get("function") or about.get("model") or scored["scorer_id"]
            by = f", {scored['by']}" if scored.get("by") else ""
            at = commit.get("timestamp")
            scorers[scored["name"], scored["scorer_id"]] = {
                "scorer": f"{what}{by}",
                "at": None if at is None else datetime.fromtimestamp(at / 1000, UTC),
            }
    visit.memory.put(key, (version, scorers), 2000 + 500 * len(scorers))
    return scorers


def _notice(visit: Visit, listed: EpisodeList) -> Markup | None:
    """Say what the last form did, with the button that undoes it."""
    found = _read_last(visit, listed.snapshot)
    if found is None:
        return None
    version, episode_id, agent_id, name = found
    label = read_episode_labels(listed.snapshot, episode_id, agent_id).get(name)
    value = None if label is None else label.value
    whose = episode_id + (f", agent {agent_id}," if agent_id else "")
    state = "was removed" if value is None else f"is {_value_text(value)}"
    undo = tag(
        "form",
        _hidden_fields(visit, listed, id=episode_id, agent=agent_id, by=visit.reader),
        tag("button", tag("span", "Undo"), _hint("u"), name="undo", value=version, type="submit",
            class_="plain", data_key="u"),
        method="post",
        action=visit.link("datasets", listed.snapshot.dataset, "label"),
    )  # fmt: skip
    return tag(
        "div", tag("p", f"Saved in version {version}: {name} of {whose} {state}."), undo,
        class_="saved", role="status",
    )  # fmt: skip


def _read_last(visit: Visit, snapshot: Snapshot) -> tuple[int, str, str, str] | None:
    """Return version, episode, agent and label of the last form; None if the address has none."""
    try:
        version, episode_id, agent_id = json.loads(visit.values.get("last", ""))
        number = read_version({"last": str(version)}, "last")
        info = visit.lake.dataset(snapshot.dataset).commit_info(number)
        return number, str(episode_id), str(agent_id), str(info["labeled"]["label"])
    except (ValueError, TypeError, KeyError, RecursionError, ConfigInvalidError, NotFoundError):
        return None


def _training_table(
    visit: Visit, listed: EpisodeList, name: str, values: Sequence[Mapping[str, Any]]
) -> Markup | None:
    """Show for each value of a label how training selects its episodes."""
    if not values:
        return None
    dataset = listed.snapshot.dataset
    rows: list[list[Child]] = []
    for one in values:
        test = _compare(name, one["value"])
        condition = f"any({test})"
        key = "episode_id, agent_id"
        where = f"({key}) IN (SELECT {key} FROM {dataset}.steps WHERE {test})"
        address = visit.link("datasets", dataset, "episodes", where=where)
        command = (
            f"`replaylake train offline {dataset} --algorithm bc --policy NAME "
            f"--where {_quote(condition)} --lake {shlex.quote(visit.lake.url)}`"
        )
        rows.append(
            [
                _value_text(one["value"]),
                tag("a", f"{one['num_episodes']:,}", href=address),
                tag("code", condition),
                tag("code", command[1:-1]),
            ]
        )
    columns: list[Column | str] = [
        "Value",
        Column("Episodes", is_number=True),
        "SQL condition",
        "Training on these",
    ]
    return tag(
        "details",
        tag("summary", f"Train on the label {name}"),
        table(columns, rows, label=f"Episodes by {name}"),
        class_="train",
    )


def _compare(name: str, value: LabelValue) -> str:
    column = f'"{name}"' if is_sql_keyword(name) else name
    if isinstance(value, bool):
        return column if value else f"NOT {column}"
    return f"{column} = {literal(value) if isinstance(value, str) else _value_text(value)}"


def _quote(text: str) -> str:
    """Return an argument for a shell: in double quotes, which are easier to read, where they do."""
    return shlex.quote(text) if set(text) & set('"$`!\\') else f'"{text}"'


def _value_text(value: LabelValue) -> str:
    """Return a value as a reader types it: `_read_assignment` returns the same value for it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else repr(value).removesuffix(".0")
