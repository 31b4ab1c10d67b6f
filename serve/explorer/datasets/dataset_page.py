"""A dataset's page: what it holds, its versions, what was refused, and who learned from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

from replaylake.datastore.episodes.spaces import describe
from replaylake.datastore.interchange.ingest.quarantine_rows import list_quarantine
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.profile.profile import Profile
from replaylake.datastore.lake.runs.summary import dataset_texts, summarize
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.lake.versions.diff import ChangeCounts, EpisodeKey, diff
from replaylake.datastore.lake.versions.history import read_history
from replaylake.datastore.query.group_views import GROUP_ID
from replaylake.serve.explorer.datasets.lake_page import describe_writer
from replaylake.serve.explorer.visits.page import Page, Panel, build_panels, draw_empty
from replaylake.serve.explorer.visits.profiles import FoundProfile
from replaylake.serve.explorer.visits.visit import Visit
from replaylake.serve.pages.charts import bar_list
from replaylake.serve.pages.markup import Child, Markup, join, tag
from replaylake.serve.pages.profile_sections import Section, describe_sample, profile_sections
from replaylake.serve.pages.tables import Column, id_link, quiet_number, table, time_tag
from replaylake.serve.pages.texts import count, number_text, size

_MAX_VERSIONS: Final = 50
_MAX_EPISODES: Final = 100
_REFRESH_S: Final = 2
# Sections of the profile that share a row of the page.
_NARROW: Final = ("Rewards", "Coverage", "Propensities", "Missing values")


@dataclass(frozen=True)
class DatasetContents:
    """What the panels share.

    profile: of the version, of an earlier one (`profile_version`) while the version's is computed,
    as far as `progress` says, or None.
    """

    dataset: Dataset
    snapshot: Snapshot
    body: Mapping[str, Any]
    profile: Profile | None
    profile_version: int | None
    progress: tuple[int, int] | None

    @property
    def name(self) -> str:
        return self.snapshot.dataset


def show_dataset(visit: Visit) -> Page:
    """Return the page of `/datasets/NAME`, at the version or tag in `at`."""
    snapshot = find_snapshot(visit)
    dataset = visit.lake.dataset(snapshot.dataset)
    name, version = snapshot.dataset, snapshot.version
    found = FoundProfile(None, None, None)
    if snapshot.num_steps:
        found = visit.profiles.find(visit.lake, snapshot)
    profile = found.profile
    contents = DatasetContents(
        dataset=dataset,
        snapshot=snapshot,
        body=profile.summary
        if profile is not None and found.progress is None
        else _count(visit, snapshot, is_summarized=found.is_summarized),
        profile=profile,
        profile_version=found.version,
        progress=found.progress,
    )
    newest = dataset.snapshot().version
    lead: Child = None
    if version != newest:
        lead = join(
            f"This is version {version}. ",
            tag("a", f"Version {newest}", href=visit.link("datasets", name)),
            " is the newest.",
        )
    body = contents.body
    return Page(
        f"{name}@{version}",
        section="datasets",
        crumbs=[("Lake", visit.link())],
        lead=lead,
        facts=[
            (
                "episodes",
                "being counted" if body["num_episodes"] is None else f"{body['num_episodes']:,}",
            ),
            ("steps", f"{snapshot.num_steps:,}"),
            ("mean return", quiet_number(body["mean_return"], is_short=True)),
            ("mean length", quiet_number(body["mean_num_steps"], is_short=True)),
            ("size", size(sum(entry.size_bytes for entry in snapshot.files))),
            ("shards", f"{len(snapshot.files):,}"),
        ],
        tools=tag("div", draw_dataset_tools(visit, snapshot), class_="tools"),
        panels=build_panels(visit, contents, PANELS),
        data={
            **body,
            "newest_version": newest,
            "profile": None if profile is None else profile.to_json(),
            "profile_version": contents.profile_version,
            "progress": contents.progress,
        },
        refresh_s=None if contents.progress is None else _REFRESH_S,
    )


def find_snapshot(visit: Visit) -> Snapshot:
    """Return the snapshot that a dataset's address names. Raises: NotFoundError."""
    name, at = visit.path["name"], visit.values.get("at")
    return visit.lake.snapshot(name if not at else f"{name}@{at}")


def read_at(visit: Visit) -> str | None:
    """Return the version or tag in an address, which the links on its page keep."""
    return visit.values.get("at") or None


def draw_dataset_tools(visit: Visit, snapshot: Snapshot) -> list[Markup]:
    """Return the links to what else there is of a version."""
    name, at = snapshot.dataset, read_at(visit)
    steps = f"SELECT * FROM {name}.steps LIMIT 100"
    return [
        tag("a", "Episodes", href=visit.link("datasets", name, "episodes", at=at), class_="button"),
        *(
            [
                tag(
                    "a",
                    "Groups",
                    href=visit.link("datasets", name, "groups", at=at),
                    class_="button",
                )
            ]
            if GROUP_ID in snapshot.table.schema.names
            else []
        ),
        tag(
            "a",
            "SQL",
            href=visit.link("sql", q=steps, at=[f"{name}={snapshot.version}"]),
            class_="button",
        ),
    ]


def _count(visit: Visit, snapshot: Snapshot, *, is_summarized: bool) -> Mapping[str, Any]:
    """Return counts and means of episodes; all None where a query would read all steps."""
    row: Mapping[str, Any] = dict.fromkeys(("num_episodes", "mean_return", "mean_num_steps"))
    if is_summarized:
        (row,) = visit.sql(
            f"""SELECT count(*) AS num_episodes, avg("return") AS mean_return,
                avg(num_steps) AS mean_num_steps FROM {snapshot.dataset}.episodes""",
            snapshot,
        )
    return {
        "dataset": snapshot.dataset,
        "version": snapshot.version,
        "num_steps": snapshot.num_steps,
        **row,
    }


def describe_columns(visit: Visit, contents: DatasetContents) -> Panel:
    """Show the spaces, and each column with its type and range."""
    spec = contents.snapshot.spec
    facts = [
        ("observation space", describe(spec.observation_space)),
        ("action space", describe(spec.action_space)),
    ]
    if spec.score_reference is not None:
        reference = spec.score_reference
        facts.append(
            ("score reference", f"random {reference.random:g}, expert {reference.expert:g}")
        )
    ranges = contents.body.get("ranges", {})
    rows: list[list[Child]] = []
    for field in contents.snapshot.table.schema:
        known = ranges.get(field.name, {})
        missing = known.get("missing")
        rows.append(
            [
                tag("code", field.name),
                shorten_type(str(field.type)),
                _value_text(known.get("min")),
                _value_text(known.get("max")),
                "" if missing is None else f"{missing:.1%}" if missing else "0",
            ]
        )
    columns: list[Column | str] = [
        "Column",
        "Type",
        Column("Least", is_number=True),
        Column("Greatest", is_number=True),
        Column("Missing", is_number=True),
    ]
    body = join(
        tag(
            "dl",
            [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts],
            class_="facts",
        ),
        tag(
            "details",
            tag("summary", count(len(rows), "column")),
            table(columns, rows, label="Columns"),
            class_="more",
        ),
    )
    return Panel("Spaces and columns", body)


def shorten_type(kind: str) -> str:
    """Return an Arrow type as a person would say it: `float[4]` for a fixed-size list of them."""
    kind = re.sub(r"dictionary<values=(\w+),[^>]*>", r"\1", kind)
    kind = re.sub(r"fixed_size_list<\w+: ([\w ]+?)(?: not null)?>\[(\d+)\]", r"\1[\2]", kind)
    return re.sub(r"list<\w+: (\w+)(?: not null)?>", r"\1[]", kind)


def _value_text(value: Any) -> Child:
    if value is None:
        return ""
    if isinstance(value, str):
        text = " ".join(value.split())
        return text if len(text) <= 24 else f"{text[:22]}\N{HORIZONTAL ELLIPSIS}"
    return number_text(value)


def show_progress(visit: Visit, contents: DatasetContents) -> Panel | None:
    """Show how far the profile is, or that there is nothing to profile."""
    if contents.progress is None:
        if contents.profile is not None:
            return None
        command = f"`replaylake ingest LOG --dataset {contents.name}`"
        return Panel("Contents", draw_empty("This version has no steps.", command=command))
    num, total = contents.progress
    bar = bar_list([("counted", num, f"{num:,}"), ("steps", total, f"{total:,}")], label="Progress")
    note = "All steps are counted once. This page shows them when that is done."
    if contents.profile_version is not None:
        note = (
            f"Below are the counts of version {contents.profile_version}; "
            f"version {contents.snapshot.version} is being counted."
        )
    return Panel("Contents", bar, note=note)


def _section_panel(title: str) -> Callable[[Visit, DatasetContents], Panel | None]:
    """Return the function of the panel with a section of the profile."""

    def draw(visit: Visit, contents: DatasetContents) -> Panel | None:
        if contents.profile is None:
            return None
        at = read_at(visit)
        if contents.progress is not None:
            at = str(contents.profile_version)

        def link(column: str, low: float, high: float, is_last: bool) -> str:
            name = '"return"' if column == "return" else column
            where = f"{name} >= {low!r} AND {name} {'<=' if is_last else '<'} {high!r}"
            return visit.link("datasets", contents.name, "episodes", where=where, at=at)

        sections = {one.title: one for one in profile_sections(contents.profile, link)}
        section: Section = sections[title]
        note = None
        if title == "Episodes":
            note = "A bar leads to its episodes. " + describe_sample(contents.profile)
            visit.note_query(
                f"""SELECT count(*) AS num_episodes, avg("return") AS mean_return,
                    avg(num_steps) AS mean_num_steps FROM {contents.name}.episodes""",
                contents.snapshot,
            )
        return Panel(title, section.body, note=note, is_wide=title not in _NARROW)

    return draw


def list_versions(visit: Visit, contents: DatasetContents) -> Panel:
    """Show the newest versions with their tags, each with what it changed."""
    history = read_history(contents.dataset, visit.lake.tags, limit=_MAX_VERSIONS)
    rows: list[list[Child]] = []
    for one in history.versions:
        at = (
            None
            if one.committed_ms is None
            else datetime.fromtimestamp(one.committed_ms / 1e3, UTC)
        )
        number = str(one.version)
        before = str(one.version - 1)
        rows.append(
            [
                tag("a", number, href=visit.link("datasets", contents.name, at=number)),
                [tag("span", name, class_="pill good") for name in one.tags],
                join(time_tag(at)),
                (one.operation or "").lower(),
                tag("span", describe_writer(one.producer), title=one.producer),
                "" if one.num_episodes is None else f"{one.num_episodes:,}",
                "" if one.num_steps is None else f"{one.num_steps:,}",
                _shards_text(one.shards_added, one.shards_removed),
                tag(
                    "a",
                    "diff",
                    href=visit.link("datasets", contents.name, "diff", a=before, b=number),
                    aria_label=f"diff of versions {before} and {number}",
                )
                if one.version
                else None,
            ]
        )
    columns: list[Column | str] = [
        "Version",
        "Tags",
        "Committed",
        "Operation",
        "By",
        Column("Episodes", is_number=True),
        Column("Steps", is_number=True),
        Column("Shards", is_number=True),
        "",
    ]
    visit.note_query(
        f"""SELECT version, committed_at, operation, producer, num_episodes, num_steps
        FROM commits WHERE dataset = '{contents.name}' ORDER BY version DESC"""
    )
    note = f"and {count(history.num_older, 'older version')}" if history.num_older else None
    return Panel("Versions", table(columns, rows, label="Versions"), note=note)


def _shards_text(added: int, removed: int) -> str:
    parts = [f"+{added:,}"] if added else []
    if removed:
        parts.append(f"\N{MINUS SIGN}{removed:,}")
    return " ".join(parts)


def list_refused(visit: Visit, contents: DatasetContents) -> Panel:
    """Show why episodes are in quarantine."""
    found = list_quarantine(contents.dataset)
    if not found.reasons:
        return Panel("Quarantine", draw_empty("No episode is in quarantine."), is_wide=False)
    columns: list[Column | str] = [
        "Reason",
        Column("Episodes", is_number=True),
        Column("Rows", is_number=True),
        "First",
    ]
    rows: list[list[Child]] = [
        [one.reason, f"{one.num_episodes:,}", f"{one.num_rows:,}", one.example]
        for one in found.reasons
    ]
    visit.note_query(f"SELECT * FROM {contents.name}.quarantine")
    total = f"{count(found.num_episodes, 'episode')}, {count(found.num_rows, 'row')}"
    return Panel("Quarantine", table(columns, rows, label="Quarantine"), note=total, is_wide=False)


def list_learners(visit: Visit, contents: DatasetContents) -> Panel:
    """Show the runs that learned from the dataset, at any version."""
    rows: list[list[Child]] = []
    for record in reversed(visit.lake.registry.runs()):
        texts = [t for t in dataset_texts(record) if t.partition("@")[0] == contents.name]
        if not texts:
            continue
        run = summarize(visit.lake.storage, record)
        rows.append(
            [
                tag("a", run.run_id, href=visit.link("runs", run.run_id), class_="ulid"),
                run.algorithm or run.kind or "",
                run.status,
                ", ".join(texts),
                "" if run.best is None else quiet_number(run.best, is_short=True),
                run.policy or "",
            ]
        )
    if not rows:
        body = draw_empty(
            "No run of this lake has learned from it.",
            command=f"`replaylake train offline {contents.name} --algorithm bc --policy NAME`",
        )
        return Panel("Trained on it", body, is_wide=False)
    columns: list[Column | str] = [
        "Run",
        "Algorithm",
        "Status",
        "Version",
        Column("Best", is_number=True),
        "Policy",
    ]
    return Panel("Trained on it", table(columns, rows, label="Trained on it"), is_wide=False)


PANELS: Final = (
    describe_columns,
    show_progress,
    *map(
        _section_panel,
        (
            "Episodes",
            "Policy versions",
            "Actions",
            "Observations",
            "Rewards",
            "Propensities",
            "Coverage",
            "Missing values",
        ),
    ),
    list_versions,
    list_learners,
    list_refused,
    _section_panel("Checks at ingest"),
)


def show_diff(visit: Visit) -> Page:
    """Return the page of `/datasets/NAME/diff`: what changed from version `a` to `b`."""
    name = visit.path["name"]
    newest = visit.lake.dataset(name).snapshot().version
    first = visit.values.get("a") or str(max(0, newest - 1))
    second = visit.values.get("b") or str(newest)
    a, b = visit.lake.snapshot(f"{name}@{first}"), visit.lake.snapshot(f"{name}@{second}")
    found = diff(a, b, limit=_MAX_EPISODES)
    counted = [("episodes", found.episodes), ("steps", found.steps), ("shards", found.shards)]
    columns: list[Column | str] = [
        "",
        *(Column(title, is_number=True) for title in ("Added", "Removed", "Changed")),
    ]
    rows: list[list[Child]] = [[what, *_count_texts(one)] for what, one in counted]
    panels = [Panel("Counts", table(columns, rows, label="Counts"), is_wide=False)]
    changes = [
        ("Added", ", ".join(found.columns_added)),
        ("Removed", ", ".join(found.columns_removed)),
        *((f"Steps with another {key}", f"{num:,}") for key, num in found.columns_changed.items()),
    ]
    body = table(["Change", "Columns"], [row for row in changes if row[1]], label="Columns")
    if not any(text for _, text in changes):
        body = draw_empty("Both versions have the same columns.")
    panels.append(Panel("Columns", body, is_wide=False))
    for title, keys, at in (
        ("Episodes added", found.added, b),
        ("Episodes removed", found.removed, a),
        ("Episodes changed", found.changed, b),
    ):
        if keys:
            note = f"the first {len(keys):,}" if len(keys) == _MAX_EPISODES else None
            panels.append(Panel(title, _episode_list(visit, at, keys), note=note))
    if found.is_empty:
        panels.append(Panel("Steps", draw_empty("Both versions hold the same steps.")))
    return Page(
        f"{name}: version {a.version} to {b.version}",
        section="datasets",
        crumbs=[("Lake", visit.link()), (name, visit.link("datasets", name))],
        tools=_version_form(visit, name, a.version, b.version),
        panels=panels,
        data=asdict(found),
    )


def _count_texts(counts: ChangeCounts) -> list[str]:
    return [f"{counts.added:,}", f"{counts.removed:,}", f"{counts.changed:,}"]


def _version_form(visit: Visit, name: str, first: int, second: int) -> Markup:
    fields = [
        (
            tag("label", text, for_=key),
            tag("input", id=key, name=key, value=value, size=8, inputmode="numeric"),
        )
        for key, text, value in (("a", "From", first), ("b", "to", second))
    ]
    return tag(
        "form",
        fields,
        tag("button", "Compare", type="submit"),
        action=visit.link("datasets", name, "diff"),
        class_="tools",
    )


def _episode_list(visit: Visit, at: Snapshot, keys: Sequence[EpisodeKey]) -> Markup:
    has_agents = any(key.agent_id for key in keys)
    rows: list[list[Child]] = [
        [
            id_link(
                key.episode_id,
                visit.link(
                    "datasets",
                    at.dataset,
                    "episode",
                    id=key.episode_id,
                    agent=key.agent_id or None,
                    at=at.version,
                ),
            ),
            *([key.agent_id] if has_agents else []),
        ]
        for key in keys
    ]
    return table(["Episode", *(["Agent"] if has_agents else [])], rows, label="Episodes")
