"""Target writer: makes the rows of a target from stored episodes while these are read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.episodes import tokens
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError
from replaylake.datastore.interchange.export.export_selection import ExportSelection
from replaylake.datastore.interchange.export.stored_episodes import find_agents, gather_agents
from replaylake.datastore.interchange.export.trainers.files import GroupNumbers, clean_texts
from replaylake.datastore.interchange.export.trainers.samples import (
    Sample,
    SamplePair,
    make_sample,
    read_branches,
)
from replaylake.datastore.interchange.export.trainers.targets import (
    TARGETS,
    Branch,
    Row,
    RowContext,
    Target,
)
from replaylake.datastore.interchange.formats.format import WriteResult
from replaylake.datastore.interchange.formats.generations.json_values import dump_json
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.query.conditions import episodes_where
from replaylake.datastore.query.expressions import canonical_expression
from replaylake.datastore.query.group_views import groups_sql, preference_pairs_sql
from replaylake.datastore.replay.view_query import explain_sql_errors

_BEST_AGAINST_WORST: Final = "pair = 1"
_NOT_SELECTED: Final = "no sample is in a selected pair"
# Number of tokens of the samples whose branches one query finds.
_BATCH_TOKENS: Final = 1 << 18
_FOLDER_FILES: Final = ("state.json", "trajectory-000000.json")


@dataclass(frozen=True)
class TargetOptions:
    """Options of the rows for a trainer; None stands for the default.

    where_pairs: SQL condition over the columns of `preference_pairs`, by default `pair = 1`: the
    best sample of a prompt against the worst. label: the further column, or the key of the
    source's metadata, that has the right answer; by default the first of `samples.LABELS`.
    threshold: samples with a return above it are desirable; by default 0.
    """

    where_pairs: str | None = None
    label: str | None = None
    threshold: float | None = None

    def check(self, name: str) -> None:
        """Refuse options that the format of this name does not use. Raises: ConfigInvalidError."""
        target = TARGETS.get(name)
        uses = {
            "where_pairs": target is not None and target.unit == "pair",
            "label": target is not None and target.uses_label,
            "threshold": target is not None and target.uses_threshold,
        }
        for option, is_used in uses.items():
            if getattr(self, option) is not None and not is_used:
                raise ConfigInvalidError(
                    f"{option}: cannot be used with {name}. "
                    "docs/FORMATS.md lists the options of each format.",
                    parameter=option,
                )


@dataclass(frozen=True)
class _PairPlan:
    """The pair that contains an episode: the ids of both episodes, and their margin."""

    chosen: str
    rejected: str
    margin: float


class TargetWriter:
    """A writer of one target from one snapshot."""

    def __init__(
        self, target: Target, snapshot: Snapshot, selection: ExportSelection, options: TargetOptions
    ) -> None:
        self._target = target
        self.name, self.is_folder = target.name, target.is_folder
        self._context = RowContext(snapshot.dataset, options.label, options.threshold or 0.0)
        self._agents = find_agents(snapshot, selection)
        self._pairs, self._absence = {}, _NOT_SELECTED
        if target.unit == "pair":
            self._pairs = _plan_pairs(snapshot, selection, options.where_pairs)
            if not self._pairs:
                self._absence = _explain_no_pairs(snapshot, selection)
        self._num_incomplete = 0
        self._num_rows = self._num_episodes = self._num_steps = 0
        self._num_forked = self._num_mismatched = self._num_unsupported = 0
        self._num_without_tokens = self._num_unlabeled = self._num_cleaned = 0

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        """Whether a folder holds an earlier export of such a target."""
        return any(file.base_name in _FOLDER_FILES for file in files)

    def write(self, episodes: Iterator[Episode], spec: DatasetSpec, path: Path) -> WriteResult:
        """Write the rows of episodes, whose ids are the store's. Raises: EmptyReplayError."""
        self._target.write_rows(self._rows(self._samples(episodes)), path)
        if not self._num_rows:
            reasons = "; ".join(self._notes()) or self._absence
            raise EmptyReplayError(
                f"{self._context.dataset}: found no row for {self.name}, expected at least one: "
                f"{reasons}. Nothing was written."
            )
        notes = tuple(self._notes())
        return WriteResult(self._num_episodes, self._num_steps, notes, self._num_rows)

    def _samples(self, episodes: Iterator[Episode]) -> Iterator[Sample]:
        for agents in gather_agents(episodes, self._agents):
            self._num_episodes += len(agents)
            self._num_steps += sum(map(len, agents))
            sample = make_sample(agents, with_tokens=self._target.reads_turns)
            if sample.is_tree and not self._target.takes_trees:
                self._num_forked += 1
            else:
                yield sample

    def _rows(self, samples: Iterator[Sample]) -> Iterator[Row]:
        if self._target.unit == "pair":
            items: Iterator[Any] = self._match_pairs(samples)
        elif self._target.unit == "prompt":
            items = _find_prompts(samples)
        elif self._target.unit == "branch":
            items = self._list_branches(_add_branches(samples))
        else:
            items = _add_branches(samples) if self._target.needs_tokens else samples
        for item in items:
            row = self._target.make(item, self._context)
            if row is None:
                self._num_unsupported += 1
            else:
                self._num_rows += 1
                if self._target.is_parquet:
                    given, row = row, clean_texts(row)
                    self._num_cleaned += row != given
                self._num_unlabeled += self._target.uses_label and not self._has_label(item)
                yield row

    def _has_label(self, item: Any) -> bool:
        sample = item if isinstance(item, Sample) else item.sample
        return sample.find_label(self._context.label) is not None

    def _match_pairs(self, samples: Iterator[Sample]) -> Iterator[SamplePair]:
        """Yield each pair when its second sample is read; the first is retained until then."""
        waiting: dict[str, Sample] = {}
        paired = (s for s in samples if s.episodes[0].episode_id in self._pairs)
        self._num_incomplete = len(self._pairs) // 2
        for sample in _add_branches(paired) if self._target.needs_tokens else paired:
            episode_id = sample.episodes[0].episode_id
            plan = self._pairs[episode_id]
            # Without its episodes, which would keep the rows next to theirs in memory.
            waiting[episode_id] = replace(sample, episodes=())
            if plan.chosen in waiting and plan.rejected in waiting:
                self._num_incomplete -= 1
                chosen, rejected = waiting.pop(plan.chosen), waiting.pop(plan.rejected)
                if list(chosen.prompt) == list(rejected.prompt):
                    yield SamplePair(chosen, rejected, plan.margin)
                else:
                    self._num_mismatched += 1

    def _list_branches(self, samples: Iterator[Sample]) -> Iterator[Branch]:
        groups = GroupNumbers()
        for number, sample in enumerate(samples):
            group = groups.number(sample.group_id)
            self._num_without_tokens += not sample.branches
            for row in sample.branches:
                yield Branch(sample, row, number, group)

    def _notes(self) -> Iterator[str]:
        if self._num_forked:
            yield (
                f"{self._num_forked:,} episodes are left out, because their generations fork or "
                "rewrite their history: they are not one sequence of messages"
            )
        if self._num_incomplete:
            yield (
                f"{self._num_incomplete:,} pairs are left out, because an episode of each is left "
                "out"
            )
        if self._num_mismatched:
            yield f"{self._num_mismatched:,} pairs are left out, because their prompts differ"
        if self._num_without_tokens:
            yield (
                f"{self._num_without_tokens:,} dialogues are left out, because their tokens are "
                "unknown"
            )
        if self._num_cleaned:
            yield (
                f"{self._num_cleaned:,} rows have texts with half of a surrogate pair, which "
                "Parquet cannot store: replaced by U+FFFD"
            )
        if self._num_unlabeled:
            yield (
                f"{self._num_unlabeled:,} rows have no right answer: name the column, or the "
                "key of the metadata, that has it in `label`"
            )
        if self._num_unsupported:
            what = {"pair": "pairs", "prompt": "prompts", "branch": "branches"}
            unit = what.get(self._target.unit, "dialogues")
            yield (
                f"{self._num_unsupported:,} {unit} are left out, because {self.name} cannot store "
                "them (docs/FORMATS.md)"
            )


def _plan_pairs(
    snapshot: Snapshot, selection: ExportSelection, where: str | None
) -> dict[str, _PairPlan]:
    """Return the pairs of the selected episodes by the id of each of their episodes."""
    names, steps = snapshot.table.schema.names, _select_steps(snapshot, selection)
    pairs = preference_pairs_sql(steps, snapshot.table.schema, names)
    condition = where or _BEST_AGAINST_WORST
    with explain_sql_errors("where_pairs", condition):
        rows = snapshot.sql(
            "SELECT chosen_episode_id AS chosen, rejected_episode_id AS rejected, margin "
            f"FROM ({pairs}) WHERE ({canonical_expression(condition)})"
        ).to_pylist()
    plans = [_PairPlan(**row) for row in rows]
    return {side: plan for plan in plans for side in (plan.chosen, plan.rejected)}


def _select_steps(snapshot: Snapshot, selection: ExportSelection) -> str:
    """Return a FROM item of the steps of the selected episodes."""
    if selection.where is None:
        return "steps"
    selected = episodes_where(selection.where, snapshot.table.schema.names)
    return f"(SELECT steps.* FROM steps SEMI JOIN ({selected}) AS s USING (episode_id))"


def _explain_no_pairs(snapshot: Snapshot, selection: ExportSelection) -> str:
    """Return why the selected episodes form no pair, and what a pair requires."""
    groups = groups_sql(_select_steps(snapshot, selection), snapshot.table.schema.names)
    (found,) = snapshot.sql(
        "SELECT count(*) FILTER (num_episodes > 1) AS num_groups, "
        "coalesce(sum(num_episodes), 0) AS num_episodes, coalesce(sum(n), 0) AS num_known, "
        f"count(*) FILTER (best > worst) AS num_different FROM ({groups})"
    ).to_pylist()
    if found["num_different"]:
        return _NOT_SELECTED
    return (
        "a pair is two episodes of one group whose rewards are known and differ. Found: groups of "
        f"several episodes: {found['num_groups']:,}; episodes in groups with known rewards: "
        f"{found['num_known']:,} of {found['num_episodes']:,}. Give the samples of a "
        'prompt one group_id and report their rewards (docs/GATEWAY.md, "Rewards"), '
        "or export dialogues without pairs (trl-sft)"
    )


def _find_prompts(samples: Iterator[Sample]) -> Iterator[Sample]:
    """Yield the first sample of each group; without groups, of each distinct prompt."""
    seen = set()
    for sample in samples:
        name = sample.group_id
        text = dump_json(list(sample.prompt)) if name is None else f"\0{name}"
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        if key not in seen and sample.prompt:
            seen.add(key)
            yield sample


def _add_branches(samples: Iterator[Sample]) -> Iterator[Sample]:
    """Yield samples with the branches of their episodes; one query finds those of many samples."""
    batch: list[Sample] = []
    num_tokens = 0
    for sample in samples:
        batch.append(sample)
        num_tokens += sum(map(_count_values, sample.episodes))
        if num_tokens > _BATCH_TOKENS:
            yield from _find_branches(batch)
            batch, num_tokens = [], 0
    yield from _find_branches(batch)


def _count_values(episode: Episode) -> int:
    """Return the approximate number of tokens of an episode."""
    column = episode.extras.get(tokens.ACTION_TOKENS)
    return len(episode) if column is None else len(episode) + int(column.nbytes) // 4


def _find_branches(samples: Sequence[Sample]) -> Iterator[Sample]:
    found = read_branches(samples)
    for sample in samples:
        yield replace(sample, branches=found.get(sample.episodes[0].episode_id, ()))
