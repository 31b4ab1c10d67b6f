"""Runs: the contiguous pieces of an episode with gaps; all of them are committed, or none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.interchange.formats.checks import Finding, Places
from replaylake.datastore.interchange.formats.format import LoggedEpisode, Rejected
from replaylake.datastore.interchange.ingest.door import Refusal
from replaylake.datastore.interchange.ingest.quarantine import rows_of

_Whole = tuple[str, str]


def whole_of(episode: Episode) -> _Whole:
    """Return the id and agent, which the runs of one episode share."""
    return (episode.episode_id, episode.agent_id)


def in_runs(found: Iterable[Episode | Rejected]) -> Iterator[list[Episode] | Rejected]:
    """Put the runs of one episode, which follow one another, together."""
    runs: list[Episode] = []
    for one in found:
        if runs and (isinstance(one, Rejected) or whole_of(one) != whole_of(runs[0])):
            yield runs
            runs = []
        if isinstance(one, Rejected):
            yield one
        else:
            runs.append(one)
    if runs:
        yield runs


def refused_whole(
    accepted: list[Episode], refused: Sequence[Refusal]
) -> tuple[list[Episode], list[tuple[Rejected, list[Episode]]]]:
    """Take the other runs of refused ones out of those accepted; return the refusals, one each.

    An episode that is half in the dataset and half in quarantine would be counted as both.
    """
    said: dict[_Whole, list[Rejected]] = {}
    runs: dict[_Whole, list[Episode]] = {}
    for one, episode in refused:
        said.setdefault(whole_of(episode), []).append(one)
        runs.setdefault(whole_of(episode), []).append(episode)
    for episode in accepted if refused else ():
        if (known := runs.get(whole_of(episode))) is not None:
            known.append(episode)
    for known in runs.values():
        known.sort(key=lambda run: run.first_step)
    kept = [e for e in accepted if whole_of(e) not in said] if refused else accepted
    return kept, [(one_refusal(said[whole], runs[whole]), runs[whole]) for whole in said]


def one_refusal(said: Sequence[Rejected], runs: Sequence[Episode]) -> Rejected:
    """Return the refusal of an episode whose runs these are, from those of its runs."""
    if len(runs) == 1:
        return said[0]
    found: dict[str, Finding] = {}
    for finding in (finding for one in said for finding in one.findings):
        known = found.get(finding.check)
        found[finding.check] = (
            finding if known is None else replace(known, num_rows=known.num_rows + finding.num_rows)
        )
    return replace(
        said[0],
        num_steps=sum(map(len, runs)),
        findings=tuple(found.values()),
        places=_places_of(runs),
    )


def with_rows(refusal: Rejected, runs: Sequence[Episode]) -> Rejected:
    """Return a refusal with the rows of all runs, as `rows_of` has them: under our names."""
    tables = [rows_of(run) for run in runs]
    rows = pa.concat_tables(tables, promote_options="default") if len(tables) > 1 else tables[0]
    return replace(refusal, rows=rows, mapping={name: name for name in rows.column_names})


def _places_of(runs: Sequence[Episode]) -> Places | None:
    places = [run.places for run in runs if isinstance(run, LoggedEpisode)]
    known = [one for one in places if one is not None]
    if len(known) != len(runs):
        return None
    return Places(np.concatenate([one.rows for one in known]), known[0].locate)
