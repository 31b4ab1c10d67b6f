"""Sections of a profile: what a dataset holds, drawn for the explorer and for `show --report`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from replaylake.serve.pages.charts import (
    bar_list,
    column_chart,
    density_map,
    histogram_chart,
    stacked_chart,
)
from replaylake.serve.pages.markup import Child, Markup, join, tag
from replaylake.serve.pages.tables import Column, table
from replaylake.serve.pages.texts import count, short_number

if TYPE_CHECKING:
    from replaylake.datastore.lake.profile.column_statistics import Dimension
    from replaylake.datastore.lake.profile.profile import PolicyShare, Profile
    from replaylake.datastore.lake.profile.vectors import ValueCounts

# Values of a discrete space that are bars with names; more of them are columns.
_MAX_BARS: Final = 24
_NOT_RECORDED: Final = "not recorded"
# The address of the episodes whose column is from one value up to another; the last argument says
# whether the upper one belongs to them.
EpisodeLink = Callable[[str, float, float, bool], str]


@dataclass(frozen=True)
class Section:
    """A part of the page with its heading."""

    title: str
    body: Child


def profile_sections(profile: Profile, link: EpisodeLink | None = None) -> list[Section]:
    """Return what a profile has, in order. What comes from data is escaped."""
    return [
        Section("Episodes", _episodes(profile, link)),
        Section("Rewards", _rewards(profile)),
        Section("Actions", _space(profile.actions, profile.action_counts)),
        Section("Observations", _space(profile.observations, profile.observation_counts)),
        Section("Coverage", _coverage(profile)),
        Section("Propensities", _propensities(profile)),
        Section("Policy versions", _policies(profile)),
        Section("Missing values", _missing(profile)),
        Section("Checks at ingest", _checks(profile)),
    ]


def describe_sample(profile: Profile) -> str:
    """Return what the numbers of a profile are of."""
    whole = "Counts, least and greatest values and means are of all steps"
    if profile.num_sampled == profile.summary["num_steps"]:
        return f"{whole}, and so are histograms."
    return (
        f"{whole}; histograms of numbers, the map of observations and the used range of actions "
        f"are of a sample of {profile.num_sampled:,} of them, evenly spread."
    )


def _episodes(profile: Profile, link: EpisodeLink | None) -> Iterator[Child]:
    summary = profile.summary
    if summary["mean_return"] is not None:
        yield _note(
            f"Mean return {short_number(summary['mean_return'])}"
            f"{_range(summary['min_return'], summary['max_return'])}; mean length "
            f"{short_number(summary['mean_num_steps'])} steps."
        )
    else:
        yield _note("Returns are unknown: some reward of each episode is.")
    ends = [
        (name, summary[key], f"{summary[key]:,}")
        for name, key in (
            ("terminated", "num_terminated"),
            ("truncated", "num_truncated"),
            ("open", "num_incomplete"),
        )
    ]

    def of_column(column: str) -> Callable[[float, float, bool], str] | None:
        if link is None:
            return None
        return lambda low, high, is_last: link(column, low, high, is_last)

    yield tag(
        "div",
        histogram_chart(profile.returns, "Return", link=of_column("return")),
        histogram_chart(profile.lengths, "Steps an episode", link=of_column("num_steps")),
        _titled("How episodes end", bar_list(ends, label="How episodes end")),
        class_="row",
    )


def _rewards(profile: Profile) -> Iterator[Child]:
    reward = profile.reward
    if not reward.num:
        yield _note("No step has a reward.")
        return
    zeros = f", {reward.share_zero:.1%} of them zero" if reward.share_zero else ""
    yield _note(
        f"{count(reward.num, 'reward')}{zeros}; mean {short_number(reward.mean)}"
        f"{_range(reward.minimum, reward.maximum)}."
    )
    yield tag("div", histogram_chart(reward.histogram, "Reward", "steps"), class_="row")


def _space(each: Sequence[Dimension], counted: Sequence[ValueCounts]) -> Iterator[Child]:
    if not each and not counted:
        yield _note("There are no numbers to draw.")
    if counted:
        yield tag("div", map(_counts_chart, counted), class_="row")
    names = {one.name for one in counted}
    pictures = [
        histogram_chart(one.histogram, one.name, "steps") for one in each if one.name not in names
    ]
    if any(picture is not None for picture in pictures):
        yield tag("div", pictures, class_="row small")
    if each:
        columns: list[Column | str] = [
            "",
            *(Column(t, is_number=True) for t in ("Values", "Min", "Max", "Mean", "Std", "Zeros")),
            Column("Space", is_number=True),
            Column("Outside", is_number=True),
        ]
        statistics = table(columns, map(_statistics, each), label="Statistics")
        if len(each) > _MAX_BARS:
            word = f"Statistics of {len(each)} numbers"
            yield tag("details", tag("summary", word), statistics, class_="more")
        else:
            yield statistics


def _counts_chart(values: ValueCounts) -> Markup:
    names = list(values.names) or [
        f"{value:,}" for value in range(values.start, values.start + len(values.counts))
    ]
    total = sum(values.counts) or 1
    if len(names) <= _MAX_BARS:
        rows = [
            (name, num, f"{num:,} ({num / total:.1%})")
            for name, num in zip(names, values.counts, strict=True)
        ]
        return _titled(values.name, bar_list(rows, label=values.name))
    titles = [f"{name}: {num:,}" for name, num in zip(names, values.counts, strict=True)]
    return column_chart(values.counts, titles, label=values.name, axis=[names[0], names[-1]])


def _statistics(one: Dimension) -> list[Child]:
    low = "-inf" if one.low is None else short_number(one.low)
    high = "inf" if one.high is None else short_number(one.high)
    numbers = (one.minimum, one.maximum, one.mean, one.std)
    outside = tag("span", f"{one.num_outside:,}", class_="outside") if one.num_outside else "0"
    return [
        one.name,
        f"{one.num:,}",
        *(short_number(number) for number in numbers),
        f"{one.share_zero:.1%}",
        f"[{low}, {high}]",
        outside,
    ]


def _coverage(profile: Profile) -> Iterator[Child]:
    share = profile.coverage
    if (share.action_share, share.state_share, share.map_share) == (None, None, None):
        yield _note("Coverage is of numbers: neither actions nor observations have any.")
    if share.action_share is not None:
        kind = "actions were taken" if share.action_entropy is not None else "action range is used"
        yield _note(f"{share.action_share:.1%} of the {kind}.")
    if share.action_entropy is not None:
        yield _note(
            f"The entropy of the actions is {share.action_entropy:.2f} of the greatest possible."
        )
    if share.state_share is not None:
        yield _note(f"{share.state_share:.1%} of the discrete observations were seen.")
    if share.observation_map is not None and share.map_share is not None:
        yield _note(
            "Where observations lie, on the two axes along which they vary most "
            f"({share.map_share:.0%} of their variance): stronger is more, empty is none."
        )
        yield density_map(share.observation_map, label="Observations on two principal components")


def _propensities(profile: Profile) -> Iterator[Child]:
    values = profile.propensities
    if values is None:
        yield _note("Not recorded: off-policy evaluation by importance weights is not possible.")
        return
    what = "Probability" if values.high == 1 else "Density"
    yield _note(
        f"{what} of the logged action, known for {count(values.num, 'step')}"
        f"{_range(values.minimum, values.maximum)}. Small ones make large importance weights."
    )
    yield tag("div", histogram_chart(values.histogram, what, "steps"), class_="row")


def _policies(profile: Profile) -> Iterator[Child]:
    if [one.policy for one in profile.policies] == [None]:
        yield _note("Not recorded: which policy acted is unknown.")
        return
    total = profile.summary["num_steps"]
    parts = [
        (_policy_name(one), one.by_period, f"{one.num_steps:,} ({one.num_steps / total:.1%})")
        for one in profile.policies
    ]
    axis = ("first", "last") if profile.by_timestamp else ("first committed", "last committed")
    label = "Steps by policy version, over time"
    if not profile.by_timestamp:
        label = "Steps by policy version, in the order they were committed"
        # Of fewer steps than there are columns, some would be empty.
        shown = [i for i in range(len(parts[0][1])) if any(values[i] for _, values, _ in parts)]
        parts = [(name, tuple(values[i] for i in shown), text) for name, values, text in parts]
    yield stacked_chart(parts, label=label, axis=axis, unknown=_NOT_RECORDED)


def _missing(profile: Profile) -> Iterator[Child]:
    lacking = {name: share for name, share in profile.missing.items() if share > 0}
    if not lacking:
        yield _note("Every column has a value in every row.")
        return
    yield _note("Share of rows without a value; other columns have one in every row.")
    ordered = sorted(lacking.items(), key=lambda item: -item[1])
    rows = [(name, share, f"{share:.1%}") for name, share in ordered]
    yield tag("div", bar_list(rows, label="Missing values"), class_="row")


def _checks(profile: Profile) -> Iterator[Child]:
    if not profile.checks:
        yield _note("No ingest of this dataset reported any.")
    else:
        columns: list[Column | str] = [
            "Check",
            "Outcome",
            Column("Episodes", is_number=True),
            Column("Rows", is_number=True),
            "Example",
        ]
        rows = [
            [one.check, one.outcome, f"{one.num_episodes:,}", f"{one.num_rows:,}", one.example]
            for one in profile.checks
        ]
        yield table(columns, rows, label="Checks at ingest")
    if profile.left_out:
        yield _note(f"Not drawn: {', '.join(profile.left_out)}.")


def _policy_name(one: PolicyShare) -> str:
    if one.policy is None:
        return _NOT_RECORDED
    return one.policy if one.version is None else f"{one.policy}:{one.version}"


def _range(low: float | None, high: float | None) -> str:
    """Return between which values others are, as the end of a sentence; nothing for one value."""
    return "" if low == high else f", from {short_number(low)} to {short_number(high)}"


def _titled(title: str, body: Markup) -> Markup:
    return tag("figure", tag("figcaption", title), body, class_="chart")


def _note(text: str) -> Markup:
    return join(tag("p", text, class_="note"))
