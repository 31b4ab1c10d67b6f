"""GET / and /docs for browsers: what a server serves, a form that tries it, and the API.

Both are written here, from what /policy and /docs.json answer. A page links to its files and to the
API by relative addresses, so that it works below any path prefix of a proxy.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final

from replaylake.datastore.episodes.spaces import describe
from replaylake.serve.api.about import describe_serving
from replaylake.serve.api.json_schema import Schema, example_of, example_of_fields
from replaylake.serve.api.openapi import document
from replaylake.serve.messages import RequestRefusedError, Response
from replaylake.serve.pages.frame import (
    FRAME_FILES,
    HTML,
    SECURITY_HEADERS,
    Entry,
    read_static,
    write_document,
    write_facts,
    write_heading,
    write_panel,
)
from replaylake.serve.pages.markup import Child, Markup, tag
from replaylake.serve.pages.tables import Column, table, time_tag
from replaylake.serve.pages.texts import duration_text, number_text
from replaylake.serve.serving_state import ServingState

_FILES: Final = (*FRAME_FILES, "server.js")
_FILE_HEADERS: Final = (
    # Their addresses have a digest of them.
    (b"cache-control", b"public, max-age=86400"),
    (b"x-content-type-options", b"nosniff"),
)
_PAGE_HEADERS: Final = (
    (b"cache-control", b"no-store"),
    *((name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()),
)
# A form with a longer example says how to ask instead.
_MAX_EXAMPLE_CHARS: Final = 20_000
_CLIENT: Final = "docs/HTTP.md of ReplayLake has the encodings and a client in Python."


class ServerPages:
    """The pages of a worker, which threads may share. since_s: when it began, since 1970."""

    def __init__(self, serving: Callable[[], ServingState], since_s: float) -> None:
        self._serving = serving
        self._since_s = since_s
        read = read_static("replaylake.serve.pages", _FILES)
        self._files = {one.name: one for one in read}

    def show_server(self) -> Response:
        """Return the page of /: policies, versions, spaces, and the form.

        Raises: RequestRefusedError while nothing is served.
        """
        serving = self._serving()
        about = describe_serving(serving)
        degraded = serving.find_degraded()
        uptime_s = time.time() - self._since_s
        facts: list[tuple[str, Child]] = [
            ("policy", f"{about['policy']}:{about['version']}"),
            ("up for", duration_text(uptime_s)),
            ("logs to", about["log_to"] or "nothing"),
            ("explores", _explore_text(about["explore"])),
            (
                "state",
                tag("span", f"degraded: {', '.join(degraded)}", class_="pill bad")
                if degraded
                else tag("span", "ready", class_="pill good"),
            ),
        ]
        lead = "A policy server: it acts on observations, and takes in what its actions led to."
        content = [
            write_heading(about["reference"], lead=lead, facts=facts),
            tag(
                "div",
                _try_panel(serving),
                _versions_panel(about),
                _following_panel(about),
                _spaces_panel(serving),
                class_="panels",
            ),
        ]
        return self._page(about["reference"], content, about["reference"], "/")

    def show_api(self) -> Response:
        """Return the page of /docs: the operations and schemas of /docs.json.

        Raises: RequestRefusedError while nothing is served.
        """
        api = document(self._serving())
        title = "HTTP API"
        lead = [
            api["info"]["description"],
            " This page as ",
            tag("a", "OpenAPI", href="./docs.json"),
            ".",
        ]
        panels = [
            _operation_panel(method, path, operation)
            for path, operations in api["paths"].items()
            for method, operation in operations.items()
        ]
        panels.append(_schemas_panel(api["components"]["schemas"]))
        content = [write_heading(title, lead=lead), tag("div", panels, class_="panels")]
        return self._page(title, content, api["info"]["title"].partition(": ")[2], "/docs")

    def send_file(self, path: str) -> Response:
        """Return a style, script or picture of the pages. Raises: RequestRefusedError."""
        file = self._files.get(path.removeprefix("/static/"))
        if file is None:
            message = f"unknown path {path[:80]}; pages load {', '.join(self._files)}"
            raise RequestRefusedError(404, "path", message)
        return Response(200, file.content, file.media_type, _FILE_HEADERS)

    def show_error(self, error: RequestRefusedError) -> Response:
        """Return an error as a page; one that lacks a token asks for it."""
        title = HTTPStatus(error.status).phrase
        body: list[Child] = [tag("p", f"{error.message}.", class_="wrong", role="alert")]
        if error.field == "token":
            body.append(_token_form())
        content = [
            write_heading(title),
            tag("div", write_panel("Why", body), class_="panels"),
        ]
        page = self._page(title, content, "", "", status=error.status)
        return Response(page.status, page.body, page.content_type, (*page.headers, *error.headers))

    def _page(
        self, title: str, content: Child, where: str, path: str, *, status: int = 200
    ) -> Response:
        files = self._files.values()
        text = write_document(
            title,
            content,
            assets={one.name: f"./static/{one.name}?{one.digest}" for one in files},
            home="./",
            entries=[
                Entry("Server", "./", is_current=path == "/"),
                Entry("API", "./docs", is_current=path == "/docs"),
            ],
            where=where,
            footer=tag(
                "span",
                "As JSON: ",
                tag("a", "policy", href="./policy"),
                ", ",
                tag("a", "API", href="./docs.json"),
            ),
        )
        return Response(status, text.encode("utf-8", "replace"), HTML, _PAGE_HEADERS)


def _token_form() -> Markup:
    """Return the form of a token, which the script sends as a header: a link cannot."""
    return tag(
        "form",
        tag("label", "Token", for_="token"),
        tag("input", type="password", id="token", required=True, autocomplete="off"),
        tag("button", "Open", type="submit"),
        tag("p", "This tab remembers it until it is closed.", class_="quiet"),
        id="token-form",
        class_="sign-in",
        hidden=True,
    )


def _explore_text(explore: Mapping[str, Any] | None) -> str:
    if explore is None:
        return "no"
    return ", ".join(f"{name} {value:g}" for name, value in explore.items() if value)


def _try_panel(serving: ServingState) -> Markup:
    """Return a form that posts one observation to /act."""
    served = serving.router.one
    spec = served.policy.spec
    fields = () if spec.encoding is None else spec.encoding.fields
    example = example_of_fields(fields) if fields else example_of(spec.observation_space)
    text = json.dumps(example)
    note = "POST /act, as any client sends it."
    if serving.log is not None:
        name = serving.log.dataset.name
        note += f" The decision is logged to {name} as every other, an episode of one step."
    if len(text) > _MAX_EXAMPLE_CHARS:
        body = f"An observation has {len(text):,} characters, more than a form takes. {_CLIENT}"
        return write_panel("Try it", tag("p", body), note=note)
    options = [
        _field(
            "Action",
            tag(
                "select",
                tag("option", "as the server explores", value=""),
                tag("option", "the most likely one", value="true"),
                tag("option", "drawn", value="false"),
                id="deterministic",
                data_option="deterministic",
            ),
        ),
        _field("Temperature", _number_input("temperature")),
        _field("Epsilon", _number_input("epsilon")),
        _field("Seed", _number_input("seed", step="1")),
    ]
    # Where a role has tokens the form needs one of `act`, and the page itself one of `admin`.
    token = None
    if not serving.tokens.is_empty:
        token = _field(
            "Token of role act",
            tag("input", type="password", id="act-token", autocomplete="off"),
        )
    form = tag(
        "form",
        tag("label", "Observation", for_="observation", class_="quiet"),
        tag(
            "textarea",
            text,
            id="observation",
            rows=4,
            spellcheck="false",
            autocomplete="off",
            required=True,
        ),
        tag("div", options if serving.takes_options else None, token, class_="fields"),
        tag(
            "div",
            tag("button", "Act", type="submit"),
            tag("span", "", id="status", class_="quiet", role="status"),
            class_="more",
        ),
        tag("div", tag("dl", id="answer", class_="facts"), tag("pre", tag("code")), hidden=True),
        id="try",
        class_="try",
        data_address="./act",
        hidden=True,
    )
    curl = f"curl ADDRESS/act -H 'content-type: application/json' -d '{{\"observation\": {text}}}'"
    without = tag("noscript", tag("p", "The form needs JavaScript."), tag("pre", tag("code", curl)))
    return write_panel("Try it", form, without, note=note)


def _field(name: str, control: Markup) -> Markup:
    return tag("label", tag("span", name), control)


def _number_input(name: str, step: str = "any") -> Markup:
    return tag("input", type="number", step=step, min=0, id=name, data_option=name)


def _versions_panel(about: Mapping[str, Any]) -> Markup:
    rows: list[list[Child]] = []
    for one in about["versions"]:
        gate = one["ope"]
        rows.append(
            [
                f"{one['policy']}:{one['version']}",
                one["reference"],
                f"{one['weight']:.4g}",
                time_tag(_time(one["since_ms"])) or "unknown",
                one["algorithm"] or "",
                tag("span", one["run_id"], class_="ulid") if one["run_id"] else "",
                [tag("div", _data_text(data)) for data in one["snapshot"]],
                "none" if gate is None else "passed" if gate.get("passed") else "refused",
            ]
        )
    served = {(one["policy"], one["version"]) for one in about["versions"]}
    held = [
        f"{one['policy']}:{one['version']}"
        for one in about["held"]
        if (one["policy"], one["version"]) not in served
    ]
    columns: list[Column | str] = [
        "Policy",
        "Asked for as",
        Column("Share", is_number=True),
        "Since",
        "Algorithm",
        "Run",
        "Learned from",
        "Gate",
    ]
    note = f"Held for episodes that began with them: {', '.join(held)}" if held else None
    return write_panel("Serves", table(columns, rows, label="Versions"), note=note)


def _data_text(data: Mapping[str, Any]) -> str:
    where = f", where {data['where']}" if data.get("where") else ""
    return f"{data.get('dataset')}@{data.get('version')}{where}"


def _following_panel(about: Mapping[str, Any]) -> Markup | None:
    if not about["following"]:
        return None
    rows: list[list[Child]] = []
    for one in about["following"]:
        last, refused = one["last_reload"], one["refused"]
        rows.append(
            [
                f"{one['policy']}@{one['alias']}",
                f"{one['interval_s']:g}",
                ""
                if last is None
                else [
                    f"{last['from_version']} to {last['to_version']}, ",
                    time_tag(_time(last["at_ms"])),
                ],
                ""
                if refused is None
                else tag("span", f"{refused['version']}: {refused['reason']}", class_="wrong"),
                one["unreachable"] or "",
            ]
        )
    columns: list[Column | str] = [
        "Alias",
        Column("Read every, s", is_number=True),
        "Last change",
        "Refused",
        "Not reachable",
    ]
    return write_panel("Follows", table(columns, rows, label="Aliases"))


def _spaces_panel(serving: ServingState) -> Markup:
    spec = serving.router.one.policy.spec
    facts: list[tuple[str, Child]] = [
        ("observation", describe(spec.observation_space)),
        ("action", describe(spec.action_space)),
        ("head", spec.head),
    ]
    if spec.state_size:
        facts.append(("state", f"{spec.state_size:,} numbers"))
    body: list[Child] = [write_facts(facts, is_small=True)]
    if spec.encoding is not None and spec.encoding.fields:
        rows: list[list[Child]] = [
            [one.name, one.kind, "required" if one.fill is None else str(one.fill)]
            for one in spec.encoding.fields
        ]
        columns = ["Field", "Kind", "Where it is absent"]
        body.append(table(columns, rows, label="Fields of an observation"))
    return write_panel("Spaces", body)


def _operation_panel(method: str, path: str, operation: Mapping[str, Any]) -> Markup:
    roles = [role for one in operation.get("security", ()) for role in one]
    note = f"Needs a token of role {' or '.join(roles)}." if roles else None
    body: list[Child] = [tag("p", operation["summary"])]
    request = operation.get("requestBody")
    if request is not None:
        body.append(tag("h3", "Body"))
        body += [_content(kind, one) for kind, one in request["content"].items()]
    if operation.get("parameters"):
        rows: list[list[Child]] = [
            [tag("code", one["name"]), one["in"], _type(one["schema"]), one["description"]]
            for one in operation["parameters"]
        ]
        columns = ["Parameter", "In", "Type", "Meaning"]
        body.append(_folded("Parameters", table(columns, rows, label=f"Parameters of {path}")))
    columns = ["Status", "Meaning", "Body"]
    rows_of: dict[bool, list[list[Child]]] = {False: [], True: []}
    for status, one in operation["responses"].items():
        rows_of[status >= "400"].append([status, one["description"], _body_type(one)])
    body.append(tag("h3", "Answers"))
    body.append(table(columns, rows_of[False], label=f"Answers of {path}"))
    refusals = table(columns, rows_of[True], label=f"Refusals of {path}")
    body.append(_folded("Refusals", refusals))
    return write_panel(
        f"{method.upper()} {path}", body, note=note, identity=operation["operationId"]
    )


def _content(kind: str, one: Mapping[str, Any]) -> Child:
    examples = [
        _folded(f"Example: {name}", tag("pre", tag("code", json.dumps(example["value"], indent=1))))
        for name, example in one.get("examples", {}).items()
        if len(json.dumps(example["value"])) <= _MAX_EXAMPLE_CHARS
    ]
    return [tag("p", tag("code", kind), ": ", _type(one["schema"])), examples]


def _body_type(answer: Mapping[str, Any]) -> Child:
    kinds = answer.get("content", {})
    return [
        tag("div", _type(one["schema"]), ", ", tag("code", kind)) for kind, one in kinds.items()
    ]


def _folded(title: str, *content: Child) -> Markup:
    return tag("details", tag("summary", title), content)


def _schemas_panel(schemas: Mapping[str, Schema]) -> Markup:
    body: list[Child] = []
    for name, schema in schemas.items():
        body.append(tag("h3", name, id=f"schema-{name}"))
        properties = schema.get("properties")
        if not properties:
            body.append(tag("p", _type(schema)))
            continue
        if schema.get("description"):
            body.append(tag("p", schema["description"]))
        required = schema.get("required", ())
        rows: list[list[Child]] = [
            [
                tag("code", key),
                "required" if key in required else "",
                _type(one),
                one.get("description", ""),
            ]
            for key, one in properties.items()
        ]
        body.append(table(["Field", "", "Type", "Meaning"], rows, label=f"Fields of {name}"))
    return write_panel("Schemas", body)


def _type(schema: Schema) -> Child:
    """Return a schema in words: `number from 0 to 1`, `array of 4 x number`, or a link to it."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return tag("a", name, href=f"#schema-{name}")
    for key in ("oneOf", "anyOf"):
        if key in schema and any("required" not in one or "type" in one for one in schema[key]):
            return _alternatives(schema[key])
    if "enum" in schema:
        return _alternatives([{"const": one} for one in schema["enum"]])
    if "const" in schema:
        return json.dumps(schema["const"])
    if "prefixItems" in schema:
        return ["array of ", _alternatives(schema["prefixItems"], ", ")]
    kinds = schema.get("type", "any value")
    names = [kinds] if isinstance(kinds, str) else [one for one in kinds if one != "null"]
    text = " or ".join(names)
    if schema.get("format"):
        text += f" ({schema['format']})"
    if "items" in schema:
        fewest, most = schema.get("minItems"), schema.get("maxItems")
        size = f"{most:,} x " if most is not None and most == fewest else ""
        return [f"{text} of {size}", _type(schema["items"]), _null(kinds)]
    return [text + _limits(schema), _null(kinds)]


def _null(kinds: object) -> str:
    return " or null" if isinstance(kinds, list) and "null" in kinds else ""


def _alternatives(schemas: Sequence[Schema], separator: str = " or ") -> Child:
    return [[separator if place else None, _type(one)] for place, one in enumerate(schemas)]


def _limits(schema: Schema) -> str:
    """Return the bounds of a number; those of its type are left out."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if schema.get("type") == "number" and high is not None and high > 1e30 and high != 1e100:
        return ""
    parts = [
        f" {word} {number_text(bound)}"
        for word, bound in (("from", low), ("to", high))
        if bound is not None
    ]
    return "".join(parts)


def _time(milliseconds: int) -> datetime | None:
    return datetime.fromtimestamp(milliseconds / 1000, UTC) if milliseconds else None
