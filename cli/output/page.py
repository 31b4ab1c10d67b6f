"""Page: a profile as one HTML file that needs nothing else, neither scripts nor a network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Final

from replaylake.cli.output import plots
from replaylake.cli.output.command_output import count, number_text, size

if TYPE_CHECKING:
    from replaylake.datastore.lake.profile.column_statistics import Dimension
    from replaylake.datastore.lake.profile.profile import Profile
    from replaylake.datastore.lake.profile.vectors import ValueCounts

_STYLE: Final = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1b2733; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; background: #fff }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem;
     border-bottom: 1px solid #e3e6ea; padding-bottom: .2rem }
p { margin: .3rem 0 } .said { color: #5a6672; font-size: .9rem }
.row { display: flex; flex-wrap: wrap; gap: 1rem 2rem; align-items: flex-start }
.half svg { width: 29rem; max-width: 100%; height: auto } .map svg { width: 22rem; max-width: 100% }
.whole svg { width: 100%; height: auto }
table { border-collapse: collapse; font-size: .88rem; margin: .5rem 0 }
th, td { text-align: left; padding: .18rem .9rem .18rem 0; border-bottom: 1px solid #eef0f2;
         vertical-align: top; overflow-wrap: anywhere }
th { color: #5a6672; font-weight: 600 }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.outside { color: #b5482f; font-weight: 600 }
"""
_STATISTICS: Final = ("", "values", "min", "max", "mean", "std", "zeros", "space", "outside")


def html(profile: Profile) -> str:
    """Return the page. What comes from data is escaped: a column may be called `<script>`."""
    summary = profile.summary
    title = f"{summary['dataset']}@{summary['version']}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        *_overview(profile),
        *_episodes(profile),
        *_rewards(profile),
        *_space("Actions", profile.actions, profile.action_counts),
        *_space("Observations", profile.observations, profile.observation_counts),
        *_coverage(profile),
        *_propensities(profile),
        *_policies(profile),
        *_missing(profile),
        *_checks(profile),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _overview(profile: Profile) -> Iterator[str]:
    summary = profile.summary
    yield _paragraph(
        f"{count(summary['num_episodes'], 'episode')}, {count(summary['num_steps'], 'step')}, "
        f"{count(summary['num_shards'], 'shard')}, {size(summary['num_bytes'])}"
    )
    yield _paragraph(
        f"observation {summary['observation_space']}; action {summary['action_space']}. Counts, "
        f"least and greatest values and means are of all steps; histograms of numbers are of "
        f"{profile.num_sampled:,} of them, evenly spread."
    )


def _episodes(profile: Profile) -> Iterator[str]:
    summary = profile.summary
    yield "<h2>Episodes</h2>"
    if summary["mean_return"] is not None:
        yield _paragraph(
            f"return: mean {number_text(summary['mean_return'])}, from "
            f"{number_text(summary['min_return'])} to {number_text(summary['max_return'])}; "
            f"length: mean {number_text(summary['mean_num_steps'])}"
        )
    else:
        yield _paragraph("returns are unknown: some reward of each episode is")
    yield _row(
        plots.distribution(profile.returns, "return"),
        plots.distribution(profile.lengths, "steps an episode"),
        plots.ends(summary["num_terminated"], summary["num_truncated"], summary["num_incomplete"]),
    )


def _rewards(profile: Profile) -> Iterator[str]:
    reward = profile.reward
    yield "<h2>Rewards</h2>"
    if not reward.num:
        yield _paragraph("no step has a reward")
        return
    yield _paragraph(
        f"{reward.share_zero:.1%} of {count(reward.num, 'reward')} are zero; from "
        f"{number_text(reward.minimum)} to {number_text(reward.maximum)}, mean "
        f"{number_text(reward.mean)}"
    )
    yield _row(plots.distribution(reward.histogram, "reward", "steps"))


def _space(title: str, each: Sequence[Dimension], counted: Sequence[ValueCounts]) -> Iterator[str]:
    yield f"<h2>{title}</h2>"
    if not each and not counted:
        yield _paragraph("no numbers to draw")
    yield _row(*map(plots.counts, counted))
    names = {one.name for one in counted}
    picture = plots.dimensions([one for one in each if one.name not in names])
    if picture:
        yield f'<div class="whole">{picture}</div>'
        if any(one.low is not None or one.high is not None for one in each):
            yield _paragraph("dashed: the space's bounds, where they are near the data")
    if each:
        yield _table(_STATISTICS, map(_statistics, each), num_texts=1)


def _statistics(one: Dimension) -> list[str]:
    low = "-inf" if one.low is None else number_text(one.low)
    high = "inf" if one.high is None else number_text(one.high)
    numbers = (one.minimum, one.maximum, one.mean, one.std)
    outside = f'<span class="outside">{one.num_outside:,}</span>' if one.num_outside else "0"
    return [
        escape(one.name),
        f"{one.num:,}",
        *(number_text(number) for number in numbers),
        f"{one.share_zero:.1%}",
        f"[{low}, {high}]",
        outside,
    ]


def _coverage(profile: Profile) -> Iterator[str]:
    share = profile.coverage
    yield "<h2>Coverage</h2>"
    if (share.action_share, share.state_share, share.map_share) == (None, None, None):
        yield _paragraph("cannot be told of what has no numbers")
    if share.action_share is not None:
        kind = "actions were taken" if share.action_entropy is not None else "action range is used"
        yield _paragraph(f"{share.action_share:.1%} of the {kind}")
    if share.action_entropy is not None:
        yield _paragraph(
            f"entropy of the actions: {share.action_entropy:.2f} of the greatest possible"
        )
    if share.state_share is not None:
        yield _paragraph(f"{share.state_share:.1%} of the discrete observations were seen")
    if share.observation_map is not None and share.map_share is not None:
        yield _paragraph(
            "where observations lie, on the two axes along which they vary most "
            f"({share.map_share:.0%} of their variance); darker is more, white is never"
        )
        yield f'<div class="map">{plots.observation_map(share.observation_map)}</div>'


def _propensities(profile: Profile) -> Iterator[str]:
    values = profile.propensities
    yield "<h2>Propensities</h2>"
    if values is None:
        yield _paragraph(
            "not recorded: off-policy evaluation by importance weights is not possible"
        )
        return
    what = "probability" if values.high == 1 else "density"
    yield _paragraph(
        f"{what} of the logged action, known for {count(values.num, 'step')}: from "
        f"{number_text(values.minimum)} to {number_text(values.maximum)}. Small ones make large "
        "importance weights."
    )
    yield _row(plots.distribution(values.histogram, what, "steps"))


def _policies(profile: Profile) -> Iterator[str]:
    yield "<h2>Policy versions</h2>"
    total = profile.summary["num_steps"]
    rows = [
        [escape(plots.policy_name(one)), f"{one.num_steps:,}", f"{one.num_steps / total:.1%}"]
        for one in profile.policies
    ]
    if [one.policy for one in profile.policies] == [None]:
        yield _paragraph("not recorded: which policy acted is unknown")
        return
    yield f'<div class="whole">{plots.policies(profile.policies, profile.by_timestamp)}</div>'
    yield _table(("policy", "steps", "share"), rows, num_texts=1)


def _missing(profile: Profile) -> Iterator[str]:
    yield "<h2>Missing values</h2>"
    lacking = {name: share for name, share in profile.missing.items() if share > 0}
    if not lacking:
        yield _paragraph("every column has a value in every row")
        return
    yield _paragraph("share of rows without a value; other columns have one in every row")
    ordered = sorted(lacking.items(), key=lambda item: -item[1])
    yield _table(("column", "missing"), [[escape(n), f"{s:.1%}"] for n, s in ordered], num_texts=1)


def _checks(profile: Profile) -> Iterator[str]:
    yield "<h2>Door checks</h2>"
    if not profile.checks:
        yield _paragraph("no ingest of this dataset reported any")
    else:
        rows = [
            [
                escape(one.check),
                escape(one.outcome),
                f"{one.num_episodes:,}",
                f"{one.num_rows:,}",
                escape(one.example),
            ]
            for one in profile.checks
        ]
        yield _table(("check", "outcome", "episodes", "rows", "example"), rows, num_texts=2)
    if profile.left_out:
        yield _paragraph(f"not drawn: {', '.join(profile.left_out)}")


def _paragraph(text: str) -> str:
    return f'<p class="said">{escape(text)}</p>'


def _row(*pictures: str | None) -> str:
    inside = "".join(f'<div class="half">{one}</div>' for one in pictures if one)
    return f'<div class="row">{inside}</div>' if inside else ""


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, num_texts: int) -> str:
    """Return a table; the first `num_texts` columns, and one called `example`, are texts."""
    kinds = [
        "" if i < num_texts or t == "example" else " class=number" for i, t in enumerate(titles)
    ]
    head = "".join(f"<th{k}>{escape(t)}</th>" for k, t in zip(kinds, titles, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{k}>{c}</td>" for k, c in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
