"""Received steps: those that clients sent as episodes, moved into the dataset, each once.

What is written, and when:
    - Of a step that was sent more than once, to whichever worker, what came first counts; where the
      others say something else, it is counted as conflicting.
    - What continues an episode's steps in the dataset, or begins at step 0, is written at once, in
      whatever order the pieces came. What comes after a gap waits for the missing steps, at most
      the window after it came; then it is written, and the gap stays one: the row before it keeps
      the observation that its piece ended with, if it had one. Steps that come later still fill it.
    - No step is written after the one that ended the episode, and no end before a later step: these
      count as conflicting, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import (
    ACTION,
    ACTION_MASK,
    AGENT_ID,
    BEHAVIOR_LOG_PROB,
    ENV_STEP,
    EPISODE_ID,
    FINAL_OBSERVATION,
    OBSERVATION,
    POLICY,
    POLICY_VERSION,
    REWARD,
    SOURCE_EPISODE_ID,
    STANDARD_COLUMNS,
    STEP,
    TERMINATED,
    TIMESTAMP,
    TRUNCATED,
    DatasetSpec,
    to_numpy,
)
from replaylake.datastore.episodes.spaces import Array, take
from replaylake.datastore.feedback.received_table import (
    CONTENT_HASH,
    PREFIX,
    RECEIVED_AT,
    recover_received,
)
from replaylake.datastore.feedback.set_aside import (
    STEP_CHECK,
    UNWRITABLE,
    SetAside,
    find_unwritable,
    record_set_aside,
)
from replaylake.datastore.feedback.waits import GAP, Wait, Waits
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.query.table_files import (
    fetch_files,
    from_clause,
    query_arrow,
    query_rows,
    scan_connection,
)
from replaylake.datastore.storage.table.table import TableSnapshot


@dataclass(frozen=True)
class ReceivedResult:
    """What one run made of the steps that were received.

    episodes (pieces count singly) and steps: what it added as `version`, None if nothing. waiting:
    steps whose predecessors may still come; waits: until when. conflicting: steps, of all that were
    ever received, that were sent with different contents, or that contradict an episode's end.
    recovered and damaged: pieces in killed servers' journals, committed first and not readable.
    set_aside: steps that the dataset cannot hold, each of them a gap; quarantined: those that are
    new in its quarantine.
    """

    version: int | None = None
    episodes: int = 0
    steps: int = 0
    waiting: int = 0
    waits: Sequence[Wait] = ()
    conflicting: int = 0
    recovered: int = 0
    damaged: int = 0
    set_aside: int = 0
    quarantined: int = 0


class _Step(NamedTuple):
    """A received step that the dataset lacks, and what the dataset has of its episode.

    file and row: where it is. follows: whether the step before it is in the dataset. last: the last
    step that is. end: the step that ended it, as written.
    """

    file: int
    row: int
    episode: str
    agent: str
    step: int
    received_at: int
    ends: bool
    follows: bool
    last: int | None
    end: int | None


@dataclass
class _MovePlan:
    runs: list[list[_Step]] = field(default_factory=list)
    waits: Waits = field(default_factory=Waits)
    conflicting: int = 0


@dataclass(frozen=True)
class EpisodePosition:
    """The position of an agent in an episode: all steps below next_step are stored, it is not.

    episode_id: the client's. ended: whether a stored step ended the episode.
    """

    episode_id: str
    agent_id: str
    next_step: int
    ended: bool


def find_positions(dataset: Dataset, episode_ids: Sequence[str]) -> list[EpisodePosition]:
    """Return the positions of received episodes, by their clients' ids, in the given order.

    An episode has one position for each of its agents; an unknown one has step 0 of the agent "".
    All committed steps count, whether or not they were moved into the dataset. Cost: a scan of the
    ids of the received steps and of the dataset's. Raises: StorageError, ShardCorruptError.
    """
    names = pa.table({"e": [f"{PREFIX}{name}" for name in dict.fromkeys(episode_ids)]})
    found: dict[str, list[EpisodePosition]] = {}
    for episode, agent, next_step, ended in _read_positions(dataset, names):
        name = episode.removeprefix(PREFIX)
        found.setdefault(name, []).append(EpisodePosition(name, agent, next_step, ended))
    return [
        position
        for name in dict.fromkeys(episode_ids)
        for position in found.get(name, [EpisodePosition(name, "", 0, False)])
    ]


def _read_positions(dataset: Dataset, names: pa.Table) -> list[tuple[str, str, int, bool]]:
    with ExitStack() as stack:
        connection = stack.enter_context(scan_connection({"names": names}))
        sources = []
        for table in (dataset.received, dataset.table):
            if table.exists() and (snapshot := table.snapshot()).files:
                paths = stack.enter_context(fetch_files(snapshot, snapshot.files))
                sources.append(
                    f"SELECT {EPISODE_ID} AS e, CAST({AGENT_ID} AS VARCHAR) AS a, {STEP} AS s, "
                    f"{TERMINATED} OR {TRUNCATED} AS ends FROM {from_clause(snapshot, paths)} "
                    f"SEMI JOIN names ON names.e = {EPISODE_ID}"
                )
        if not sources:
            return []
        return query_rows(
            connection,
            f"WITH steps AS ({' UNION ALL '.join(sources)}), "
            "known AS (SELECT e, a, s, bool_or(ends) AS ends FROM steps GROUP BY ALL), "
            "placed AS (SELECT *, row_number() OVER (PARTITION BY e, a ORDER BY s) - 1 AS place "
            "FROM known) "
            "SELECT e, a, count(*) FILTER (s = place), coalesce(bool_or(ends) FILTER (s = place), "
            "false) FROM placed GROUP BY e, a ORDER BY e, a",
        )


def move_received(dataset: Dataset, *, now_s: float, window_s: float) -> ReceivedResult:
    """Write received steps into the dataset, in one commit; any number of runs write each once.

    Args:
        dataset: the dataset; nothing happens where it never received any.
        now_s: the time (s since 1970, UTC) to judge the window by.
        window_s: how long what comes after a gap waits.

    Raises: ShardCorruptError, StorageError. Cost: one scan of the ids of the received steps and of
    the dataset's.
    """
    if not dataset.received.exists():
        return ReceivedResult()
    producer = f"received:{dataset.name}"
    recovered = recover_received(dataset)
    unwritable: dict[tuple[int, int], SetAside] = {}  # by where the step is
    while True:
        # Two runs at once get the same sequence: the later finds it taken and reads anew.
        sequence = dataset.next_sequence(producer)
        stored, received = dataset.snapshot(), dataset.received.snapshot()
        plan = _make_plan(received, stored.table, int((now_s - window_s) * 1e6))
        runs, aside = _without(plan.runs, unwritable)
        done = ReceivedResult(
            waiting=plan.waits.num,
            waits=plan.waits.to_list(int(window_s * 1e6), None),
            conflicting=plan.conflicting,
            recovered=recovered.num_rows,
            damaged=recovered.num_damaged,
            set_aside=len(aside),
        )
        if runs:
            try:
                episodes = _episodes(received, stored.spec, runs)
                commit = dataset.append(episodes, producer=producer, sequence=sequence)
            except UNWRITABLE:
                errors = _find_unwritable(dataset, received, stored.spec, runs)
                if not errors:
                    raise
                unwritable |= errors
                continue
            if commit.already_present:
                continue
            done = replace(
                done, version=commit.version, episodes=len(episodes), steps=commit.num_steps
            )
        return replace(done, quarantined=record_set_aside(dataset, aside, producer=producer))


def _without(
    runs: Sequence[list[_Step]], unwritable: Mapping[tuple[int, int], SetAside]
) -> tuple[list[list[_Step]], list[SetAside]]:
    """Return runs with gaps where a step cannot be written, and those steps."""
    if not unwritable:
        return list(runs), []
    rest: list[list[_Step]] = []
    aside = []
    for run in runs:
        aside += [unwritable[place] for one in run if (place := (one.file, one.row)) in unwritable]
        rest += _runs([one for one in run if (one.file, one.row) not in unwritable])
    return rest, aside


def _find_unwritable(
    dataset: Dataset, received: TableSnapshot, spec: DatasetSpec, runs: Sequence[list[_Step]]
) -> dict[tuple[int, int], SetAside]:
    """Return the steps that cannot be written: of each run that cannot, at least one."""

    def check(some: Sequence[Sequence[_Step]]) -> None:
        dataset.check(_episodes(received, spec, some))

    errors: list[tuple[_Step, str]] = []
    for run, reason in find_unwritable(runs, check):
        alone = find_unwritable([[one] for one in run], check) or [(run[:1], reason)]
        errors += [(one, text) for (one, *_), text in alone]
    if not errors:
        return {}
    rows = _read_rows(received, [one for one, _ in errors])
    # Who asks that a policy's rows go means these too.
    policies = rows.select([POLICY, POLICY_VERSION]).to_pylist()
    return {
        (one.file, one.row): _aside(one, text, policy)
        for (one, text), policy in zip(errors, policies, strict=True)
    }


def _aside(one: _Step, reason: str, policy: Mapping[str, Any]) -> SetAside:
    about = {EPISODE_ID: one.episode, AGENT_ID: one.agent, STEP: one.step, **policy}
    source = one.episode.removeprefix(PREFIX)
    return SetAside(one.episode, one.agent, source, STEP_CHECK, reason, about)


def _make_plan(received: TableSnapshot, stored: TableSnapshot, closing: int) -> _MovePlan:
    """Decide what is written now; steps received before `closing` (us) no longer wait."""
    plan = _MovePlan()
    if not received.files:
        return plan
    plan.conflicting, steps = _missing(received, stored)
    for _, group in groupby(steps, key=lambda one: (one.episode, one.agent)):
        rest = list(_drop_after_end(group, plan))
        for run in _runs(rest):
            first = run[0]
            is_due = first.step == 0 or first.follows
            if is_due or any(one.received_at < closing for one in run):
                plan.runs.append(run)
            else:
                came = [one.received_at for one in run]
                plan.waits.add(GAP, len(run), min(came), min(came))
    return plan


def _missing(received: TableSnapshot, stored: TableSnapshot) -> tuple[int, list[_Step]]:
    """Return how many steps came with different contents, and those the dataset lacks, in order."""
    columns = (
        f"{EPISODE_ID} AS e, CAST({AGENT_ID} AS VARCHAR) AS a, {STEP} AS s, "
        f"{TERMINATED} OR {TRUNCATED} AS ends"
    )
    with ExitStack() as stack:
        connection = stack.enter_context(scan_connection())
        paths = stack.enter_context(fetch_files(received, received.files))
        connection.execute(
            f"CREATE TEMP TABLE came AS SELECT {columns}, file_index, file_row_number, "
            f"epoch_us({RECEIVED_AT}) AS us, {CONTENT_HASH} AS content "
            f"FROM {from_clause(received, paths)}"
        )
        source = "(SELECT * FROM came LIMIT 0)"
        if stored.files:
            step_paths = stack.enter_context(fetch_files(stored, stored.files))
            source = (
                f"(SELECT {columns} FROM {from_clause(stored, step_paths)} "
                f"WHERE starts_with({EPISODE_ID}, '{PREFIX}'))"
            )
        connection.execute(f"CREATE TEMP TABLE stored AS SELECT e, a, s, ends FROM {source}")
        differing = query_arrow(
            connection,
            "SELECT count(*) AS num FROM (SELECT 1 FROM came GROUP BY e, a, s "
            "HAVING count(DISTINCT content) > 1)",
        )
        rows = query_arrow(
            connection,
            "SELECT file_index, file_row_number, came.e, came.a, came.s, us, came.ends, "
            "before.s IS NOT NULL, reached.last, reached.end_step FROM came "
            "ANTI JOIN stored ON came.e = stored.e AND came.a = stored.a AND came.s = stored.s "
            "LEFT JOIN stored AS before "
            # Not before.s + 1: the highest step has no 32-bit successor.
            "ON came.e = before.e AND came.a = before.a AND came.s - 1 = before.s "
            "LEFT JOIN (SELECT e, a, max(s) AS last, min(s) FILTER (ends) AS end_step "
            "FROM stored GROUP BY e, a) reached ON came.e = reached.e AND came.a = reached.a "
            "QUALIFY row_number() OVER (PARTITION BY came.e, came.a, came.s "
            "ORDER BY us, file_index, file_row_number) = 1 ORDER BY came.e, came.a, came.s",
        )
    cells = [column.to_pylist() for column in rows.columns]
    return differing.column(0)[0].as_py(), list(map(_Step._make, zip(*cells, strict=True)))


def _drop_after_end(steps: Iterator[_Step], plan: _MovePlan) -> Iterator[_Step]:
    """Yield an episode's steps up to the one that ends it; the others are counted."""
    end: int | None = None
    for one in steps:
        end = one.end if end is None else end
        is_after = end is not None and one.step > end
        if is_after or (one.ends and one.last is not None and one.last > one.step):
            plan.conflicting += 1
            continue
        if one.ends:
            end = one.step
        yield one


def _runs(steps: Sequence[_Step]) -> Iterator[list[_Step]]:
    """Part steps in order into runs without a gap."""
    if not steps:
        return
    run = [steps[0]]
    for before, one in pairwise(steps):
        if one.step != before.step + 1:
            yield run
            run = []
        run.append(one)
    yield run


def _episodes(
    received: TableSnapshot, spec: DatasetSpec, runs: Sequence[Sequence[_Step]]
) -> list[Episode]:
    """Read the rows of runs and make a piece of an episode of each."""
    rows = _read_rows(received, [one for run in runs for one in run])
    steps = _DecodedSteps(rows, spec)
    episodes, begin = [], 0
    for run in runs:
        for start, end in steps.parts(begin, begin + len(run)):
            episodes.append(steps.episode(run[start - begin], start, end))
        begin += len(run)
    return episodes


def _read_rows(received: TableSnapshot, steps: Sequence[_Step]) -> pa.Table:
    """Return the rows of steps, in their order."""
    by_file: dict[int, list[tuple[int, int]]] = {}
    for place, one in enumerate(steps):
        by_file.setdefault(one.file, []).append((one.row, place))
    numbers = sorted(by_file)
    some = replace(received, files=tuple(received.files[number] for number in numbers))
    parts = [
        batch.take(pa.array([row for row, _ in by_file[number]], pa.int64()))
        for number, batch in zip(numbers, some.batches(), strict=True)
    ]
    places = np.asarray([place for number in numbers for _, place in by_file[number]])
    return pa.concat_tables(parts).take(pa.array(np.argsort(places))).combine_chunks()


class _DecodedSteps:
    """Decoded rows, from which pieces are cut."""

    def __init__(self, rows: pa.Table, spec: DatasetSpec) -> None:
        self._rows, self._spec = rows, spec
        self._observations = to_numpy(spec.observation_space, rows.column(OBSERVATION))
        self._actions = to_numpy(spec.action_space, rows.column(ACTION))
        # An unknown reward, which is null, is NaN in an episode, and so is an unknown log-prob.
        self._rewards = rows.column(REWARD).to_numpy()
        self._log_probs = rows.column(BEHAVIOR_LOG_PROB).to_numpy().astype(np.float32)
        self._policies = np.asarray(rows.column(POLICY).to_pylist(), dtype=object)
        own = {*STANDARD_COLUMNS, RECEIVED_AT, CONTENT_HASH}
        self._extras = [name for name in rows.column_names if name not in own]
        known = [rows.column(name).is_valid().to_numpy() for name in (POLICY_VERSION, TIMESTAMP)]
        self._changes = np.logical_or.reduce([one[1:] != one[:-1] for one in known])

    def parts(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Part rows where versions or timestamps begin or cease to be known.

        An episode has them for all of its steps or for none.
        """
        cuts = np.flatnonzero(self._changes[begin : end - 1]) + begin + 1
        yield from pairwise([begin, *cuts.tolist(), end])

    def episode(self, first: _Step, begin: int, end: int) -> Episode:
        """Cut one piece out."""
        rows = self._rows.slice(begin, end - begin)
        last = rows.slice(len(rows) - 1)
        log_probs = self._log_probs[begin:end]
        policies = self._policies[begin:end]
        return Episode(
            episode_id=first.episode,
            source_episode_id=rows.column(SOURCE_EPISODE_ID)[0].as_py(),
            agent_id=first.agent,
            first_step=first.step,
            observations=take(self._observations, slice(begin, end)),
            actions=take(self._actions, slice(begin, end)),
            rewards=self._rewards[begin:end],
            terminated=last.column(TERMINATED)[0].as_py(),
            truncated=last.column(TRUNCATED)[0].as_py(),
            final_observation=self._final(last),
            behavior_log_probs=None if np.isnan(log_probs).all() else log_probs,
            policies=None if all(name is None for name in policies) else policies,
            policy_versions=_to_integers(rows.column(POLICY_VERSION)),
            action_masks=self._masks(rows),
            timestamps=_to_integers(rows.column(TIMESTAMP).cast(pa.int64())),
            env_steps=_to_integers(rows.column(ENV_STEP)),
            extras={
                name: column.combine_chunks()
                for name in self._extras
                if (column := rows.column(name)).null_count < len(column)
            },
        )

    def _final(self, last: pa.Table) -> Any:
        final = last.column(FINAL_OBSERVATION)
        if not final.is_valid()[0].as_py():
            return None
        return take(to_numpy(self._spec.observation_space, final), 0)

    def _masks(self, rows: pa.Table) -> Array | None:
        """Return bool [T, A]; a step without a mask had every action allowed."""
        num = self._spec.mask_size
        if num is None or not (given := rows.column(ACTION_MASK).is_valid().to_numpy()).any():
            return None
        masks = np.ones((len(given), num), dtype=bool)
        column = rows.column(ACTION_MASK).combine_chunks().drop_null()
        masks[given] = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, num)
        return masks


def _to_integers(column: pa.ChunkedArray) -> Array | None:
    """Return integers as numpy, or None where one of them is unknown."""
    if column.null_count:
        return None
    return np.asarray(pc.cast(column, pa.int64()).to_numpy())
