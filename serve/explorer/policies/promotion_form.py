"""The form that promotes a version of a policy, and the state of the last promotion."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Final

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.holdout import Holdout
from replaylake.datastore.lake.policies.exploration import parse_exploration
from replaylake.datastore.names import check_alias
from replaylake.serve.explorer.visits.forms import TOKEN_FIELD, read_version
from replaylake.serve.explorer.visits.page import Panel, Redirect
from replaylake.serve.explorer.visits.promotions import Promotion, PromotionRequest, Promotions
from replaylake.serve.explorer.visits.visit import Visit
from replaylake.serve.messages import RequestRefusedError
from replaylake.serve.pages.markup import Child, Markup, join, tag
from replaylake.serve.pages.tables import time_tag

_CHAMPION: Final = "champion"
_MAX_TEXT: Final = 1000
# A cookie holds the name, too.
_MAX_PERSON: Final = 100
# By its name in the form: the default of a number, as `promote` has it, its least and its largest.
# Whoever started the explorer relies on the gate: a reader may make it stricter than by default,
# never weaker.
_NUMBERS: Final = {
    "gamma": (1.0, 0.0, 1.0),
    "alpha": (0.025, 0.0, 0.025),
    "margin": (0.0, 0.0, math.inf),
}


def start_promotion(visit: Visit) -> Redirect:
    """Start what the form of a policy's page asks for, and return the page.

    Raises: RequestRefusedError, 403, where nobody may promote; ConfigInvalidError, NotFoundError,
    InvalidNameError; CommitConflictError while another promotion runs.
    """
    name = visit.path["name"]
    visit.back = visit.link("policies", name)
    promotions = _require_promotions(visit)
    request = _read_request(name, visit)
    registry = visit.lake.registry
    registry.resolve(f"{name}:{request.version}")
    visit.lake.snapshot(request.dataset)
    check_alias(request.alias)
    parse_exploration(request.explore)
    if request.holdout is not None:
        Holdout(request.holdout)
    if registry.alias_version(name, request.alias) == request.version:
        raise ConfigInvalidError(
            f"version: found {request.version}, which {name}@{request.alias} is already, expected "
            "another one.",
            parameter="version",
        )
    promotions.start(request)
    return Redirect(f"{visit.back}#promotion", reader=_read_text(visit.values, "by") or "")


def cancel_promotion(visit: Visit) -> Redirect:
    """End the promotion of a policy, and return the page.

    Raises: RequestRefusedError, 403, where nobody may promote; ConfigInvalidError for a wrong name;
    NotFoundError if none of this policy is running.
    """
    name = visit.path["name"]
    visit.back = visit.link("policies", name)
    promotions = _require_promotions(visit)
    by = visit.describe_writer(_read_text(visit.values, "by") or "")
    promotions.cancel(name, by or "a reader")
    return Redirect(f"{visit.back}#promotion")


def _require_promotions(visit: Visit) -> Promotions:
    if visit.promotions is None:
        message = "this explorer moves no aliases: who starts it has to allow that"
        raise RequestRefusedError(403, "promote", message)
    return visit.promotions


def _read_request(name: str, visit: Visit) -> PromotionRequest:
    values = visit.values
    if values.get("where", "").strip():
        raise ConfigInvalidError(
            f"where: found {values['where'][:80]!r}, expected none: a gate that is asked for here "
            "reads all episodes of the dataset. Use the command `promote` to select some by SQL.",
            parameter="where",
        )
    texts = {key: _read_text(values, key) for key in ("note", "explore")}
    by = _read_person(visit)
    has_holdout = bool(values.get("holdout", "").strip())
    numbers = {key: _read_bounded_number(values, key, *bounds) for key, bounds in _NUMBERS.items()}
    return PromotionRequest(
        policy=name,
        version=read_version(values, "version"),
        alias=values.get("alias", "").strip(),
        dataset=values.get("dataset", "").strip(),
        by=by,
        note=texts["note"],
        explore=texts["explore"],
        estimators=tuple(values.get("estimators", "").replace(",", " ").split()),
        holdout=_read_number(values, "holdout", 0.0) if has_holdout else None,
        **numbers,
        ignore_masks=values.get("ignore_masks") == "yes",
        unseen=values.get("unseen") == "yes",
    )


def _read_person(visit: Visit) -> str:
    by = visit.describe_writer(_read_text(visit.values, "by") or "")
    if not by:
        raise ConfigInvalidError("by: found nothing, expected your name.", parameter="by")
    return by


def _read_text(values: Mapping[str, str], name: str) -> str | None:
    """Return a text, None where the field is empty. Raises: ConfigInvalidError."""
    text = values.get(name, "").strip()
    length = _MAX_PERSON if name == "by" else _MAX_TEXT
    if len(text) > length:
        raise ConfigInvalidError(
            f"{name}: found {len(text):,} characters, expected at most {length:,}.",
            parameter=name,
        )
    if any(unicodedata.category(character) == "Cc" for character in text):
        raise ConfigInvalidError(
            f"{name}: found {text[:80]!r}, expected one line without control characters.",
            parameter=name,
        )
    return text or None


def _read_number(values: Mapping[str, str], name: str, default: float) -> float:
    """Return a number, or its default where the field is empty. Raises: ConfigInvalidError."""
    text = values.get(name, "").strip()
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigInvalidError(f"{name}: found {text[:40]!r}, expected a number.", parameter=name)
    return number


def _read_bounded_number(
    values: Mapping[str, str], name: str, default: float, least: float, largest: float
) -> float:
    """Return a number within bounds, or its default. Raises: ConfigInvalidError."""
    number = _read_number(values, name, default)
    if not least <= number <= largest:
        expected = f"at least {least:g}"
        if math.isfinite(largest):
            expected += f" and at most {largest:g}"
        raise ConfigInvalidError(
            f"{name}: found {number:g}, expected {expected}: the gate is not weaker here than it "
            "is by default.",
            parameter=name,
        )
    return number


def show_promotion(
    visit: Visit,
    versions: Sequence[int],
    aliases: Mapping[str, int],
    last: Promotion | None,
    running: Promotion | None,
) -> Panel | None:
    """Show the form that promotes a version, or the stage of the promotion that is running.

    versions: those of the policy, the newest first. last, running: from `Promotions.find`.
    Returns None where readers may not promote.
    """
    if visit.promotions is None or visit.form_token is None:
        return None
    name = visit.path["name"]
    body: list[Child] = [] if last is None else [_describe(visit, last)]
    if running is None:
        body.append(_form(visit, name, versions, aliases))
    elif running is last:
        body.append(_cancel_form(visit, name))
    else:
        other = f"{running.request.policy}:{running.request.version}"
        body.append(tag("p", f"The gate of {other} is being evaluated. One is at a time."))
    note = "The alias moves if off-policy evaluation finds the version better than the champion."
    return Panel("Promotion", tag("div", body, id="promotion"), note=note)


def _describe(visit: Visit, promotion: Promotion) -> Markup:
    request = promotion.request
    what = f"{request.policy}:{request.version} as {request.alias}, on {request.dataset}"
    asked = [f", asked for by {request.by} at ", join(time_tag(promotion.started_at))]
    if promotion.is_running:
        stage = f": {promotion.stage}" if promotion.stage else ""
        state = "running" if promotion.cancelled_by is None else "being cancelled"
        return tag("p", tag("span", state, class_="pill"), f"{what}{stage}", asked)
    if promotion.result is None:
        return tag(
            "div",
            tag("p", tag("span", "failed", class_="pill bad"), what, asked),
            tag("p", promotion.error or "", class_="wrong"),
            tag("p", "The alias was not moved."),
            role="status",
        )
    result = promotion.result
    is_moved = bool(result["promoted"])
    verdict = "promoted" if is_moved else "refused"
    evaluation = result["evaluation_id"]
    report: Child = tag("p", f"The report is not saved: {result.get('unsaved')}", class_="wrong")
    if evaluation is not None:
        address = visit.link("policies", request.policy, evaluation=evaluation)
        report = tag("p", tag("a", "The report of the gate", href=f"{address}#evaluation"))
    return tag(
        "div",
        tag("p", tag("span", verdict, class_=f"pill {'good' if is_moved else 'bad'}"), what, asked),
        tag("ul", [tag("li", str(one)) for one in result["gate"]["reasons"]], class_="reasons"),
        report,
        role="status",
    )


def _form(visit: Visit, name: str, versions: Sequence[int], aliases: Mapping[str, int]) -> Markup:
    datasets = visit.lake.datasets()
    fields = [
        _select("Version", "version", [str(one) for one in versions]),
        _input("Alias", "alias", _CHAMPION, required=True, list="alias-names"),
        tag("datalist", [tag("option", value=one) for one in sorted(aliases)], id="alias-names"),
        _select("Evaluated on", "dataset", datasets),
        _input(
            "Your name",
            "by",
            visit.reader,
            required=True,
            autocomplete="name",
            maxlength=_MAX_PERSON,
        ),
        _input("Note", "note", ""),
    ]
    options = [
        _input("Exploration", "explore", "", placeholder="epsilon=0.05"),
        _input("Estimators", "estimators", "", placeholder="snips dr"),
        _input("Held-out share", "holdout", "", inputmode="decimal"),
        *(
            _input(key.capitalize(), key, f"{default:g}", inputmode="decimal")
            for key, (default, *_) in _NUMBERS.items()
        ),
        _checkbox("Ignore action masks", "ignore_masks"),
        _checkbox("Neither policy was trained on these episodes", "unseen"),
    ]
    return tag(
        "form",
        tag("input", type="hidden", name=TOKEN_FIELD, value=visit.form_token),
        fields,
        tag(
            "details",
            tag("summary", "Options of the gate"),
            tag("div", options, class_="fields"),
            class_="more-options",
        ),
        tag("div", tag("button", "Promote if the gate passes", type="submit"), class_="actions"),
        id="promote",
        method="post",
        action=visit.link("policies", name, "promote"),
        class_="promote",
    )


def _cancel_form(visit: Visit, name: str) -> Markup:
    return tag(
        "form",
        tag("input", type="hidden", name=TOKEN_FIELD, value=visit.form_token),
        tag("input", type="hidden", name="by", value=visit.reader),
        tag("button", "Cancel", type="submit"),
        id="cancel-promotion",
        method="post",
        action=visit.link("policies", name, "cancel"),
    )


def _input(title: str, name: str, value: str, **attributes: Any) -> Markup:
    identity = f"promote-{name}"
    given = {"autocomplete": "off", "spellcheck": "false", "maxlength": _MAX_TEXT, **attributes}
    return tag(
        "div",
        tag("label", title, for_=identity),
        tag("input", id=identity, name=name, value=value, **given),
    )


def _select(title: str, name: str, values: Sequence[str]) -> Markup:
    identity = f"promote-{name}"
    options = [tag("option", value, value=value) for value in values]
    return tag(
        "div",
        tag("label", title, for_=identity),
        tag("select", options, id=identity, name=name, required=True),
    )


def _checkbox(title: str, name: str) -> Markup:
    return tag("label", tag("input", type="checkbox", name=name, value="yes"), f" {title}")
