"""Page: a profile as one HTML file that needs nothing else, neither scripts nor a network."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Final

from replaylake.serve.pages.charts import Interval, interval_chart
from replaylake.serve.pages.markup import Child, tag
from replaylake.serve.pages.profile_sections import Section, describe_sample, profile_sections
from replaylake.serve.pages.tables import Column, table
from replaylake.serve.pages.texts import count, number_text, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from replaylake.datastore.lake.profile.episode_report import EpisodePart, EpisodeReport
    from replaylake.datastore.lake.profile.profile import Profile

# 95% of a normal distribution.
_Z: Final = 1.96
_STYLE: Final = """
body { max-width: 66rem; margin: 2rem auto; padding: 0 1rem; background: var(--panel) }
h2 { margin: 2rem 0 .3rem; border-bottom: 1px solid var(--line); padding-bottom: .2rem }
"""


def html(profile: Profile, episodes: EpisodeReport) -> str:
    """Return the page. What comes from data is escaped: a column may be called `<script>`."""
    summary = profile.summary
    title = f"{summary['dataset']}@{summary['version']}"
    style = files("replaylake.serve.pages").joinpath("page.css").read_text("utf-8") + _STYLE
    body = [
        tag("h1", title),
        tag(
            "p",
            f"{count(summary['num_episodes'], 'episode')}, {count(summary['num_steps'], 'step')}, "
            f"{count(summary['num_shards'], 'shard')}, {size(summary['num_bytes'])}",
            class_="note",
        ),
        tag(
            "p",
            f"observation {summary['observation_space']}; action {summary['action_space']}. "
            + describe_sample(profile),
            class_="note",
        ),
        [(tag("h2", one.title), one.body) for one in _order_sections(profile, episodes)],
    ]
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
    ]
    # The style is ours alone; in its element a browser reads no escapes.
    return (
        f'<!doctype html>\n<html lang="en"><head>{"".join(head)}<style>{style}</style></head>\n'
        f"{tag('body', body)}\n</html>\n"
    )


def _order_sections(profile: Profile, episodes: EpisodeReport) -> Iterator[Section]:
    """Yield the sections of the profile, with those of episodes after the first one."""
    first, *others = profile_sections(profile)
    yield first
    yield from _episode_sections(episodes)
    yield from others


def _episode_sections(report: EpisodeReport) -> Iterator[Section]:
    names = ("min", "5%", "25%", "median", "75%", "95%", "max")
    quantiles = [
        [what, *map(number_text, values)]
        for what, values in (
            ("return", report.return_quantiles),
            ("steps per episode", report.length_quantiles),
        )
        if values
    ]
    if quantiles:
        columns: list[Column | str] = ["", *(Column(name, is_number=True) for name in names)]
        yield Section("Quantiles", table(columns, quantiles, label="Quantiles"))
    if report.best:
        body = [
            tag("h3", "Highest returns"),
            _episode_table(report.best, "Highest returns"),
            tag("h3", "Lowest returns"),
            _episode_table(report.worst, "Lowest returns"),
        ]
        yield Section("Best and worst episodes", body)
    for title, what, parts, num in (
        ("Returns by day", "day", report.days, report.num_days),
        ("Returns by source", "source", report.sources, report.num_sources),
    ):
        if num > 1:
            yield Section(title, _draw_parts(parts, what, num))
    for name, parts in report.columns.items():
        yield Section(f"Returns by {name}", _draw_parts(parts, "value", len(parts)))
    if report.action_rewards:
        rows = [
            Interval(
                one.action,
                one.mean,
                None if one.error is None else one.mean - _Z * one.error,
                None if one.error is None else one.mean + _Z * one.error,
                f"{one.mean:,.4g} of {count(one.num_steps, 'step')}",
            )
            for one in report.action_rewards
        ]
        label = "Mean reward by action, with 95% intervals by the normal approximation"
        note = (
            "The logged policies chose the actions, so differences may be due to different states."
        )
        yield Section(
            "Reward by action", [tag("p", note, class_="note"), interval_chart(rows, label=label)]
        )


def _episode_table(rows: Sequence[Mapping[str, Any]], label: str) -> Child:
    has_agents = any(row["agent_id"] for row in rows)
    columns: list[Column | str] = [
        "episode",
        *(["agent"] if has_agents else []),
        Column("return", is_number=True),
        Column("steps", is_number=True),
    ]
    cells: list[list[Child]] = [
        [
            tag("span", row["episode_id"], class_="id"),
            *([row["agent_id"]] if has_agents else []),
            number_text(row["return"]),
            f"{row['num_steps']:,}",
        ]
        for row in rows
    ]
    return table(columns, cells, label=label)


def _draw_parts(parts: Sequence[EpisodePart], what: str, num: int) -> Iterator[Child]:
    """Yield the mean and the quartiles of each day or source."""
    if num > len(parts):
        kind = "newest" if what == "day" else "largest"
        yield tag("p", f"the {kind} {len(parts)} of {count(num, what)}", class_="note")
    rows = [
        Interval(
            one.name,
            one.mean,
            one.low,
            one.high,
            f"{one.mean:,.4g} of {count(one.num_episodes, 'episode')}",
        )
        for one in parts
        if one.mean is not None
    ]
    unknown = len(parts) - len(rows)
    if rows:
        yield interval_chart(rows, label="Mean and quartiles of the returns")
    if unknown:
        yield tag("p", f"without a known return: {count(unknown, what)}", class_="note")
