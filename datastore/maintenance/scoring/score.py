"""Score: rates episodes with a scorer, and writes its values to their steps in one commit.

What is decided, and why:
    - The scores are columns that begin with the scorer's name. `<name>_scorer` has the id of the
      version that gave them, and the commit says who that is: a score without it is hearsay.
    - A score of an episode goes to each of its steps, as a label of `annotate` does, so that
      conditions over episodes can name it.
    - An episode that cannot be scored has NULL, also where an earlier version had a score, and the
      reason in `<name>_error`.
    - A scorer does not see the scores of others, or of its earlier self. Else each would change
      what the next one looks at, and nothing would be found in the cache again.
    - Outcomes are stored as they come; the commit is made at the end, or not at all.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Text
from replaylake.datastore.errors import CommitConflictError, ConfigInvalidError, EmptyReplayError
from replaylake.datastore.interchange.export.export_selection import (
    ExportSelection,
    select_for_export,
)
from replaylake.datastore.interchange.export.stored_episodes import (
    find_agents,
    gather_agents,
    iter_stored_episodes,
)
from replaylake.datastore.interchange.formats.generations.rows import PROMPT_MESSAGES
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.maintenance.labels.annotate import overwrite_columns
from replaylake.datastore.maintenance.labels.episode_labels import list_origin_columns
from replaylake.datastore.maintenance.scoring.function_scorer import FunctionScorer
from replaylake.datastore.maintenance.scoring.score_cache import ScoreCache
from replaylake.datastore.maintenance.scoring.scorer import (
    RESERVED,
    SCORE,
    NotScorableError,
    Outcome,
    Scorer,
    Task,
    Value,
    format_failure,
    hash_content,
    hash_scorer,
    list_turns,
)
from replaylake.datastore.names import is_column_name
from replaylake.datastore.storage.table.presence import check_shards_present
from replaylake.datastore.storage.table.table_snapshot import TableSnapshot

# Called with (episodes done, episodes).
OnProgress = Callable[[int, int], None]
_INFO: Final = "scored"
_MAX_EXAMPLES: Final = 10
# What a scorer's content calls the right answer.
_LABEL: Final = "ground_truth"
# The column with the id of the version that scored a step marks the others as scores.
_MARK: Final = "_scorer"
_ID: Final = "[0-9a-f]{16}"


class ScoringInterrupted(KeyboardInterrupt):
    """A scoring that was asked to end. What was computed is stored, and the same call resumes it.

    num_scored: episodes with a score, of num_episodes. notes: what was given up.
    """

    def __init__(self, num_scored: int, num_episodes: int, notes: Sequence[str] = ()) -> None:
        super().__init__(
            "; ".join(
                [f"{num_scored:,} of {num_episodes:,} episodes have their scores stored", *notes]
            )
        )
        self.num_scored, self.num_episodes, self.notes = num_scored, num_episodes, tuple(notes)


@dataclass(frozen=True)
class ScoreReceipt:
    """What was scored, and what was written.

    version: the commit; None if no step changed. scored_version: the version whose episodes were
    scored. scorer: as it describes itself; scorer_id: the hash of that. episodes: how many were
    scored, as the scorer counts them: a dialogue is one for all its agents. They were computed,
    cached (by this run or an earlier one) or failed. unscored: those that the scorer returned None
    for. unlabeled: those without the right answer that the function takes as ground_truth. steps:
    rows whose values changed. unmatched: labels whose steps were deleted meanwhile. mean, min, max:
    of the score over its values; None without any. failures: episode and reason of the first.
    """

    dataset: str
    version: int | None
    scored_version: int
    name: str
    scorer: Mapping[str, Any]
    scorer_id: str
    episodes: int
    computed: int
    cached: int
    failed: int
    unscored: int
    unlabeled: int
    columns: tuple[str, ...]
    steps: int
    shards: int
    unmatched: int
    mean: float | None
    min: float | None
    max: float | None
    failures: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def score(
    lake: Lake,
    dataset: str,
    scorer: Scorer | Callable[..., Any],
    *,
    name: str | None = None,
    where: str | None = None,
    by: str | None = None,
    on_progress: OnProgress | None = None,
) -> ScoreReceipt:
    """Score the episodes of a dataset, and write the scores to their steps in one commit.

    Args:
        lake: the lake.
        dataset: `NAME`, `NAME@VERSION` or `NAME@TAG`: what is scored. The scores are written to the
            newest version.
        scorer: a Scorer, or a function, which is taken as `FunctionScorer` does.
        name: of the columns that are written; by default the scorer's. `<name>` has the score,
            `<name>_<component>` each further component, `<name>_error` why an episode has none,
            `<name>_scorer` the scorer's id, and `<name>_prompt` and `<name>_answer`, at the last
            step, what a judge was asked and what it said.
        where: SQL condition over the columns of `episodes`; selects whole episodes.
        by: who scores, for the record.
        on_progress: called with (episodes done, episodes).

    What the same version of a scorer computed of the same content before is not computed again. A
    run that was interrupted or killed is resumed by the same call. After an interrupt, the answers
    of a judge that come within five seconds are stored, too. Failures are counted, and tried again
    by the next call.

    Raises: NotFoundError; ConfigInvalidError for a name whose columns no scorer wrote;
    QueryRefusedError or QueryError for a condition; EmptyReplayError if it selects nothing;
    SpaceUnsupportedError if the scorer needs texts that the dataset does not have; what a judge
    raises if it cannot be reached; ScoringInterrupted. Cost: the episodes are read once; memory for
    their scores.
    """
    ready = scorer if isinstance(scorer, Scorer) else FunctionScorer(scorer)
    purges = lake.purges.list()  # before the episodes are read
    snapshot = lake.snapshot(dataset)
    check_shards_present(snapshot.table)
    columns = _ScoreColumns(name or ready.name, lake.dataset(snapshot.dataset))
    selection = select_for_export(snapshot, where, None)
    description = ready.describe()
    scorer_id = hash_scorer(description)
    before = [one for one in purges if one.dataset == snapshot.dataset]
    cache = ScoreCache(
        lake.storage,
        snapshot.dataset,
        scorer_id,
        is_purged=lambda: lake.purges.list(snapshot.dataset) != before,
    )
    job = _Scoring(snapshot, selection, ready, cache, columns, on_progress)
    job.run()
    job.check_not_refused()
    has_grown = lake.dataset(snapshot.dataset).snapshot().version != snapshot.version
    labels = _Labels(columns, scorer_id, job, is_by_step=has_grown)
    receipt = _count(job, snapshot, columns.name, description, scorer_id)
    info = {
        "name": columns.name,
        "scorer": description,
        "scorer_id": scorer_id,
        "by": by,
        "scored_version": snapshot.version,
        "where": selection.where,
        "levels": labels.levels,
        **{key: getattr(receipt, key) for key in ("episodes", "failed", "unscored")},
    }
    if models := job.list_models():
        info["answered_by"] = models
    written = overwrite_columns(
        lake,
        snapshot.dataset,
        labels.table,
        on=labels.key,
        add=labels.names,
        operation="SCORE",
        info={_INFO: info},
        check=columns.check_unchanged,
    )
    return replace(
        receipt,
        version=written.version,
        columns=written.columns,
        steps=written.steps,
        shards=written.shards,
        unmatched=written.unmatched,
    )


def find_scores(dataset: Dataset) -> dict[str, list[str]]:
    """Return which of a dataset's columns are whose scores: by name, without `<name>_scorer`.

    A column of several names is the longest one's: `exact_match_error` is of `exact_match`, not of
    `exact`.
    """
    snapshot = dataset.snapshot()
    names = snapshot.table.schema.names
    marks = [
        one.name
        for one in snapshot.table.schema
        if len(one.name) > len(_MARK) and one.name.endswith(_MARK) and one.type == pa.string()
    ]
    if marks:
        # A log may have a column of such a name, too.
        tests = ", ".join(
            f"""bool_and(regexp_full_match("{one}", '{_ID}')) AS "{one}\"""" for one in marks
        )
        (are_ids,) = snapshot.sql(f"SELECT {tests} FROM steps").to_pylist()
        if None in are_ids.values():
            # All steps with a value were deleted since, or no scorer wrote one.
            scored = {one["scored"]["name"] for one in dataset.history() if _INFO in one}
            are_ids |= {
                one: one.removesuffix(_MARK) in scored for one in marks if are_ids[one] is None
            }
        marks = [one.removesuffix(_MARK) for one in marks if are_ids[one]]
    scores: dict[str, list[str]] = {name: [] for name in marks}
    for column in names:
        owners = [one for one in marks if column == one or column.startswith(f"{one}_")]
        if owners and column != (owner := max(owners, key=len)) + _MARK:
            scores[owner].append(column)
    return scores


class _ScoreColumns:
    """The columns of a score in a dataset. hidden: those that no scorer sees.

    These are the columns of all scores, and those that say who labeled an episode when: a scorer
    may use what people found, but not who they are.
    """

    def __init__(self, name: str, dataset: Dataset) -> None:
        """Raises: ConfigInvalidError where the columns would be those of others."""
        if not is_column_name(name):
            raise ConfigInvalidError(
                f"name: found {name!r}, expected [A-Za-z_][A-Za-z0-9_]*, the name of a column.",
                parameter="name",
            )
        scores = find_scores(dataset)
        self.name = name
        self.own = scores.get(name, [])
        of_scores = {
            column for owner, columns in scores.items() for column in (*columns, f"{owner}{_MARK}")
        }
        labels = list_origin_columns(dataset.snapshot().table.schema)
        self.hidden = frozenset((*of_scores, *labels))
        self.types = {one.name: one.type for one in dataset.snapshot().table.schema}
        self._others = {*self.types} - {*self.own}
        if name in scores:
            self._others.remove(f"{name}{_MARK}")
            self.check([name, *(f"{name}_{one}" for one in RESERVED)])
        else:
            # Later, its own columns are those that begin with its name.
            begin = (name.lower(), f"{name}_".lower())
            of_log = self._others - of_scores
            self.check(
                [
                    one
                    for one in of_log
                    if one.lower() == begin[0] or one.lower().startswith(begin[1])
                ]
            )
            self.check([name])

    def check(self, names: Sequence[str]) -> None:
        """Refuse to write columns that are no scores, or another's. Raises: ConfigInvalidError."""
        known = {column.lower() for column in self._others}
        if taken := [column for column in names if column.lower() in known]:
            raise ConfigInvalidError(
                f"name: found {self.name}, whose column {taken[0]} the dataset has already, not "
                "written by this scorer, expected a name whose columns are free. State another "
                "`name`.",
                parameter="name",
            )

    def check_unchanged(self, table: TableSnapshot) -> None:
        """Refuse a version with columns of these scores that others wrote meanwhile.

        Raises: CommitConflictError.
        """
        begin = f"{self.name}_".lower()
        for column in table.schema.names:
            is_own = column.lower() == self.name.lower() or column.lower().startswith(begin)
            if is_own and column not in self.types:
                raise CommitConflictError(
                    f"name: found the column {column}, which was added while {self.name} was "
                    "computed, expected the columns of the beginning. Nothing was written. What "
                    "was computed is stored: make the same call again."
                )

    def fit(self, outcome: Outcome) -> Outcome:
        """Return an outcome whose values have the types of the dataset's columns, or a failure.

        Raises: ConfigInvalidError as `check`, and before more is computed that cannot be written.
        """
        values = dict(outcome.values)
        self.check([*map(self.column, values)])
        for name, value in outcome.values.items():
            kind = self.types.get(self.column(name))
            if kind is None or value is None:
                continue
            if kind == pa.string():
                values[name] = value if isinstance(value, str) else json.dumps(value)
            elif isinstance(value, str):
                try:
                    values[name] = float(value)
                except ValueError:
                    reason = (
                        f"{name}: found {value[:80]!r}, expected a number, as the column "
                        f"{self.column(name)} has; another name for the scores has other columns"
                    )
                    return replace(outcome, values={}, error=reason)
        return replace(outcome, values=values)

    def column(self, component: str) -> str:
        """Return the column of a component."""
        return self.name if component == SCORE else f"{self.name}_{component}"


@dataclass(frozen=True)
class _Item:
    """What was scored as one: its outcome has the key, or it is a failure without one."""

    episode_id: str
    steps: Sequence[tuple[str, int]]
    key: str
    failure: Outcome | None = None


@dataclass
class _Scoring:
    """Makes the outcomes of the selected episodes, each content's once."""

    snapshot: Snapshot
    selection: ExportSelection
    scorer: Scorer
    cache: ScoreCache
    columns: _ScoreColumns
    on_progress: OnProgress | None
    items: list[_Item] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    num_computed: int = 0
    num_unlabeled: int = 0
    _num_done: int = 0
    # By key, how many items wait for its outcome.
    _num_waiting: dict[str, int] = field(default_factory=dict)

    def run(self) -> None:
        """Score all episodes. What was computed is stored also if this ends early."""
        total = self._count_items()
        if not total:
            raise EmptyReplayError(
                f"{self.snapshot.dataset}@{self.snapshot.version}: found no episode that meets "
                "the condition, expected one or more. Nothing was scored; widen `where`."
            )
        try:
            with tempfile.TemporaryDirectory(prefix="replaylake-score-") as scratch:
                outcomes = self.scorer.run(self._tasks(Path(scratch), total))
                try:
                    for key, outcome in outcomes:
                        self._take(key, outcome, total)
                except KeyboardInterrupt as interrupt:
                    self._take_last(outcomes, interrupt, total)
                    raise
        except KeyboardInterrupt as interrupt:
            known = {key for key, one in self.outcomes.items() if one.error is None}
            num_scored = sum(item.key in known for item in self.items)
            notes = getattr(interrupt, "__notes__", ())
            raise ScoringInterrupted(num_scored, total, notes) from interrupt
        finally:
            self.cache.flush()

    def _take(self, key: str, outcome: Outcome, total: int) -> None:
        self.cache.add(key, outcome)
        self.outcomes[key] = self.columns.fit(outcome)
        self.num_computed += self.outcomes[key].error is None
        self._report(total, self._num_waiting.pop(key, 0))

    def _take_last(
        self, outcomes: Iterator[tuple[str, Outcome]], interrupt: KeyboardInterrupt, total: int
    ) -> None:
        """Let a scorer that was not itself interrupted end as if it had been."""
        if not isinstance(outcomes, Generator):
            return
        with suppress(KeyboardInterrupt, StopIteration):
            key, outcome = outcomes.throw(interrupt)
            self._take(key, outcome, total)
            for key, outcome in outcomes:
                self._take(key, outcome, total)
        outcomes.close()

    def check_not_refused(self) -> None:
        """Raise what a scorer has to say where each content that it was given was refused."""
        refusals = [self.outcomes[item.key].refusal for item in self.items if not item.failure]
        if refusals and refusals[0] is not None and None not in refusals:
            raise refusals[0]

    def list_models(self) -> list[str]:
        """Return the models that the endpoint of a judge says it answered with, sorted."""
        return sorted({one.answered_by for one in self.outcomes.values() if one.answered_by})

    def outcome(self, item: _Item) -> Outcome:
        """Return what an item was scored with."""
        return item.failure or self.outcomes[item.key]

    def _tasks(self, scratch: Path, total: int) -> Iterator[Task]:
        """Yield what is to be computed; what is known already is taken from the cache."""
        for episodes in self._iter_units(scratch):
            steps = list_turns(episodes)
            episode_id = episodes[0].episode_id
            try:
                content = self.scorer.make_content(self.snapshot.dataset, episodes)
            except NotScorableError as error:
                failure = Outcome(error=format_failure(error))
                self.items.append(_Item(episode_id, steps, "", failure))
                self._report(total, 1)
                continue
            is_labeled = not isinstance(content, Mapping) or content.get(_LABEL, "") is not None
            self.num_unlabeled += not is_labeled
            key = hash_content(content, len(steps))
            self.items.append(_Item(episode_id, steps, key))
            if key in self._num_waiting:
                self._num_waiting[key] += 1
            elif key in self.outcomes:
                self._report(total, 1)
            elif (known := self.cache.find(key)) is not None:
                self.outcomes[key] = self.columns.fit(known)
                self._report(total, 1)
            else:
                self._num_waiting[key] = 1
                yield Task(key, content, len(steps))

    def _iter_units(self, scratch: Path) -> Iterator[Sequence[Episode]]:
        episodes = (
            replace(episode, extras=self._without_scores(episode.extras))
            for episode in iter_stored_episodes(self.snapshot, self.selection, scratch)
        )
        if not self._takes_dialogues():
            return ([episode] for episode in episodes)
        agents = find_agents(self.snapshot, self.selection)
        return gather_agents(episodes, agents)

    def _takes_dialogues(self) -> bool:
        """Whether all agents are scored together: where episodes are no dialogues, each is."""
        spec, names = self.snapshot.spec, self.snapshot.table.schema.names
        spaces = (spec.observation_space, spec.action_space)
        has_texts = PROMPT_MESSAGES in names or all(isinstance(space, Text) for space in spaces)
        return self.scorer.unit == "dialogue" and has_texts

    def _without_scores(self, extras: Mapping[str, Any]) -> dict[str, Any]:
        return {name: column for name, column in extras.items() if name not in self.columns.hidden}

    def _count_items(self) -> int:
        ids = f"SELECT DISTINCT {schema.EPISODE_ID}"
        if not self._takes_dialogues():
            ids += f", {schema.AGENT_ID}"
        if self.selection.episodes is not None:
            keys = self.selection.episodes.to_pylist()
            return len({k.partition("\0")[0] for k in keys} if self._takes_dialogues() else keys)
        counted = self.snapshot.sql(f"SELECT count(*) AS n FROM ({ids} FROM steps)")
        return int(counted["n"][0].as_py())

    def _report(self, total: int, num: int) -> None:
        self._num_done += num
        if self.on_progress is not None:
            self.on_progress(min(self._num_done, total), total)


class _Labels:
    """Outcomes as labels: of steps, or of episodes where no value is a single step's.

    names: the columns to write. levels: by component, whether its values are by step or by episode.
    """

    def __init__(
        self, columns: _ScoreColumns, scorer_id: str, job: _Scoring, *, is_by_step: bool
    ) -> None:
        """is_by_step: whether episodes may have further steps by now, which were not scored."""
        self._columns = columns
        outcomes = [job.outcome(item) for item in job.items]
        values = [value for one in outcomes for value in one.values.items()]
        by_step = {name for name, value in values if isinstance(value, Sequence | list)
                   and not isinstance(value, str)}  # fmt: skip
        self.levels = {
            columns.column(name): "step" if name in by_step else "episode"
            for name, _ in sorted(values, key=lambda pair: pair[0])
        }
        self._texts = {name for name, value in values if isinstance(value, str)}
        components = list(dict.fromkeys(name for name, _ in values)) or [SCORE]
        records = list(dict.fromkeys(name for one in outcomes for name in one.record))
        agents = [{agent for agent, _ in item.steps} for item in job.items]
        whole = [(item.episode_id, agent) for item, own in zip(job.items, agents, strict=True)
                 for agent in own]  # fmt: skip
        # A piece of an episode is scored alone, so that its episode does not name it.
        is_by_step |= bool(by_step or records) or len({*whole}) < len(whole)
        self.key = [schema.EPISODE_ID, schema.AGENT_ID]
        self.key += [schema.STEP] if is_by_step else []
        data: dict[str, list[Any]] = {name: [] for name in self.key}
        written = {columns.column(name): name for name in components}
        data |= {name: [] for name in written}
        data |= {f"{columns.name}_{name}": [] for name in (*records, "error", "scorer")}
        for item, own, outcome in zip(job.items, agents, outcomes, strict=True):
            places = item.steps if is_by_step else [(agent, 0) for agent in sorted(own)]
            num = len(places)
            rows: dict[str, Sequence[Any]] = {
                schema.EPISODE_ID: [item.episode_id] * num,
                schema.AGENT_ID: [agent for agent, _ in places],
                schema.STEP: [step for _, step in places],
                f"{columns.name}_error": [outcome.error] * num,
                f"{columns.name}_scorer": [scorer_id] * num,
            }
            for column, name in written.items():
                rows[column] = self._spread(name, outcome.values.get(name), num)
            for name in records:
                rows[f"{columns.name}_{name}"] = [None] * (num - 1) + [outcome.record.get(name)]
            for name, column_values in data.items():
                column_values += rows[name]
        self._add_stale(data)
        self.names = [name for name in data if name not in self.key]
        columns.check(self.names)
        self.table = pa.table({name: self._to_array(name, column, written.get(name))
                               for name, column in data.items()})  # fmt: skip

    def _add_stale(self, data: dict[str, list[Any]]) -> None:
        """Clear the components that only an earlier version of the scorer had."""
        num = len(data[schema.EPISODE_ID])
        for name in self._columns.own:
            data.setdefault(name, [None] * num)

    def _spread(self, name: str, value: Value, num: int) -> Sequence[Any]:
        if name in self._texts and value is not None and not isinstance(value, str):
            value = json.dumps(value)
        if value is None or isinstance(value, str | int | float):
            return [value] * num
        return value

    def _to_array(self, name: str, column: list[Any], component: str | None) -> pa.Array:
        if name == schema.STEP:
            return pa.array(column, pa.int64())
        is_number = component is not None and component not in self._texts
        kind = pa.float64() if is_number else pa.string()
        if column.count(None) == len(column):
            return pa.nulls(len(column), self._columns.types.get(name, kind))
        return pa.array(column, kind)


def _count(
    job: _Scoring, snapshot: Snapshot, name: str, scorer: Mapping[str, Any], scorer_id: str
) -> ScoreReceipt:
    outcomes = [job.outcome(item) for item in job.items]
    failures = [
        (item.episode_id, outcome.error)
        for item, outcome in zip(job.items, outcomes, strict=True)
        if outcome.error is not None
    ]
    scores: list[float] = []
    for outcome in outcomes:
        value = outcome.values.get(SCORE)
        many = value if isinstance(value, list | tuple) else [value]
        scores += [one for one in many if isinstance(one, int | float)]
    unscored = [one for one in outcomes if one.error is None and one.values == {SCORE: None}]
    return ScoreReceipt(
        dataset=snapshot.dataset,
        version=None,
        scored_version=snapshot.version,
        name=name,
        scorer=scorer,
        scorer_id=scorer_id,
        episodes=len(outcomes),
        computed=job.num_computed,
        cached=len(outcomes) - job.num_computed - len(failures),
        failed=len(failures),
        unscored=len(unscored),
        unlabeled=job.num_unlabeled,
        columns=(),
        steps=0,
        shards=0,
        unmatched=0,
        mean=math.fsum(scores) / len(scores) if scores else None,
        min=min(scores, default=None),
        max=max(scores, default=None),
        failures=tuple(failures[:_MAX_EXAMPLES]),
    )
