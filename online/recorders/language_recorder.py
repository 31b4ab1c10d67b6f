"""Recorder of language agents: rollouts are written as they are made, each exactly once.

A rollout is an episode with the id `<producer>/<sequence>`. Its steps are records of the dataset's
journal, as the gateway's calls are, and a second or two later rows of `steps`.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Unpack

import numpy as np

from replaylake.datastore.episodes import tokens
from replaylake.datastore.episodes.schema import (
    AGENT_ID,
    ENV_STEP,
    EPISODE_ID,
    STEP,
    TERMINATED,
    TIMESTAMP,
    TRUNCATED,
)
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.episodes.tokenizer import Tokenizer
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EpisodeInvalidError,
    NotFoundError,
    ReplayLakeError,
    SchemaMismatchError,
    StorageError,
)
from replaylake.datastore.feedback.call_outcomes import apply_outcomes, ensure_outcomes_table
from replaylake.datastore.feedback.decisions import (
    LAST,
    REWARDED_AT,
    SUM,
    rewards_encoder,
)
from replaylake.datastore.feedback.journal import Journal, JournalConfig
from replaylake.datastore.feedback.recorded_calls import (
    calls_encoder,
    ensure_calls_dataset,
    make_fits,
    recover_calls,
)
from replaylake.datastore.interchange.formats.generations.messages import shorten
from replaylake.datastore.interchange.rollout_rows import (
    ATTEMPT,
    RECORD_HASH,
    RECORDER_COLUMNS,
    Outcome,
    RolloutFacts,
    Text,
    check_flag,
    check_name,
    check_reward,
    check_text,
    hash_row,
    make_facts,
    make_rollout_rows,
    make_step_row,
    to_ids,
)
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.names import new_ulid
from replaylake.datastore.query.table_files import (
    fetch_files,
    from_clause,
    query_rows,
    scan_connection,
)
from replaylake.datastore.storage.table.column_ranges import select_shards
from replaylake.online.recorders.producer import NUMBER_DIGITS, Producer

REFUSE: Final = "refuse"
AS_ATTEMPT: Final = "attempt"
OnConflict = Literal["refuse", "attempt"]
_PRODUCER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_MAX_SEQUENCE_CHARS: Final = 1000
# Arguments of `record` for the rows of a rollout, and all that are no facts.
_SAMPLED: Final = (
    "prompt",
    "completion",
    "prompt_ids",
    "completion_ids",
    "log_probs",
    "loss_mask",
    "versions",
)
_GIVEN: Final = frozenset(_SAMPLED) | {
    "reward",
    "reward_components",
    "terminated",
    "truncated",
    "finish_reason",
}
_STORED: Final = f"""
SELECT {EPISODE_ID}, CAST({AGENT_ID} AS VARCHAR), {RECORD_HASH}, {TERMINATED} OR {TRUNCATED},
       epoch_us(greatest({TIMESTAMP}, {{rewarded_at}}))
FROM {{steps}} WHERE {EPISODE_ID} >= '{{prefix}}' AND {EPISODE_ID} < '{{below}}'
AND {RECORD_HASH} IS NOT NULL
AND NOT contains(substr({EPISODE_ID}, {{start}}), '/')
ORDER BY {EPISODE_ID}, {AGENT_ID}, {STEP}
"""
_CONTEXT: Final = f"""
SELECT CAST({AGENT_ID} AS VARCHAR), {STEP}, {tokens.OBSERVATION_TOKENS}, {tokens.ACTION_TOKENS},
       {tokens.IS_CONTINUATION}, {tokens.PARENT_STEP} IS NOT NULL
FROM {{steps}} WHERE {EPISODE_ID} = '{{episode}}' ORDER BY {AGENT_ID}, {STEP}
"""


def record_language(
    lake: Lake | str | Path,
    dataset: str,
    *,
    producer: str | None = None,
    tokenizer: Tokenizer | None = None,
    flush_interval_s: float = 1.0,
    sync_every_record: bool = False,
    **facts: Unpack[RolloutFacts],
) -> LanguageRecorder:
    """Open a recorder of a language agent's rollouts into a dataset; both are created if absent.

    When `record`, `step` or `reward` returns, a kill of the process loses nothing of it, and a
    power cut at most the last 5 ms, or nothing with `sync_every_record`. It is visible to SQL after
    `flush_interval_s`, or when `flush` returns. What a killed process left in its journal is
    committed by the next recorder or gateway of the dataset on the machine, or within a second by
    one that is open.

    Args:
        lake: a lake, or its path or URL. The journal of a remote lake is on this machine.
        dataset: of language agents: made by a recorder, a gateway or an ingest of transcripts.
        producer: who records, the same after a restart: one process at a time. With `sequence`, it
            identifies a rollout, which is recorded once however often it is sent. By default a new
            name, under which nothing can be repeated.
        tokenizer: of the ids; stored with the dataset, which refuses others.
        flush_interval_s: how long a record waits before it is committed.
        sync_every_record: fsync before returning, about 0.12 ms a record.
        facts: values for all rollouts, such as run_id and policy.

    Raises: ConfigInvalidError if the producer is malformed, or recording in another process;
    SchemaMismatchError for a dataset of other steps or another tokenizer; StorageError. Cost with
    `producer`: reading the footer of each shard, and the short columns of shards that may have
    rollouts of this producer, or of all shards if rewards were reported.
    """
    if not isinstance(lake, Lake):
        lake = open_lake(lake, create=True)
    if not flush_interval_s > 0:
        raise ConfigInvalidError(
            f"flush_interval_s: found {flush_interval_s}, expected more than 0 seconds.",
            parameter="flush_interval_s",
        )
    if producer is not None and not _PRODUCER.fullmatch(producer):
        raise ConfigInvalidError(
            f"producer: found {producer!r}, expected a letter or digit, then at most 127 letters, "
            "digits or any of . _ : / -",
            parameter="producer",
        )
    config = JournalConfig(flush_interval_s=flush_interval_s, sync_every=sync_every_record)
    return LanguageRecorder(lake.dataset(dataset), producer, tokenizer, config, facts)


@dataclass(slots=True)
class _RecordedRollout:
    """What is known of a recorded rollout: by agent, the hashes of its steps, and which ended."""

    hashes: dict[str, array[int]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    @property
    def num_steps(self) -> int:
        return sum(map(len, self.hashes.values()))


@dataclass(frozen=True, slots=True)
class _MadeRollout:
    """A rollout that was checked: its id without an attempt, its steps, and their hashes."""

    name: str
    agent_id: str
    rows: list[dict[str, Any]]
    hashes: list[int]


@dataclass(frozen=True, slots=True)
class _StepRow:
    """A step of a rollout to be written: its agent, number, columns, and their hash."""

    agent_id: str
    step: int
    row: dict[str, Any]
    content: int


class LanguageRecorder:
    """Records rollouts of one producer in a dataset; threads may share it. See `record_language`.

    Use it as a context manager, or close it: this commits what is left. In a forked child process
    it refuses to record.
    """

    def __init__(
        self,
        dataset: Dataset,
        producer: str | None,
        tokenizer: Tokenizer | None,
        config: JournalConfig,
        facts: Mapping[str, Any],
    ) -> None:
        self.producer = producer or f"recorder/{new_ulid()}"
        self.dataset = dataset
        self._facts = dict(facts)
        make_facts(self._facts)
        ensure_calls_dataset(dataset, RECORDER_COLUMNS)
        if tokenizer is not None:
            dataset.set_tokenizer(tokenizer)
        self._tokenizer = dataset.spec.tokenizer
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._worker, self._config = new_ulid(), config
        self._producer = None if producer is None else Producer(dataset, producer, self._worker)
        self._last_time = 0
        try:
            encoder = calls_encoder(dataset, RECORDER_COLUMNS)
            recover_calls(dataset, encoder)
            number = 0 if self._producer is None else self._producer.recover(encoder)
            apply_outcomes(dataset)  # what a killed process had been told and not applied
            self._recorded: dict[str, _RecordedRollout] = {}
            if producer is not None:
                self._recorded, self._last_time = _read_recorded(dataset, f"{producer}/")
            # One that was deleted is not used again: its rows would be left out as deleted ones.
            self._next_number = max(number, 1 + max(map(_to_number, self._recorded), default=-1))
            self._fits, self._schema = make_fits(encoder), encoder.schema
            self._journal = Journal(dataset.table, encoder, worker=self._worker, config=config)
        except BaseException:
            if self._producer is not None:
                self._producer.release(is_committed=False)
            raise
        self._reports: Journal | None = None
        self._num_reports = self._num_applied = 0
        # At the interpreter's end too: a loop that knows no recorder closes none.
        journals = (self._journal,)
        self._finalizer = weakref.finalize(
            self, _close_all, journals, self._producer, self._process
        )
        _recorders.add(self)

    def __enter__(self) -> LanguageRecorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except ReplayLakeError as failure:
            if error is None:
                raise
            error.add_note(f"The last rollouts recorded are on disk, not committed: {failure}")

    def record(
        self,
        *,
        prompt: Text | None = None,
        completion: Text | None = None,
        prompt_ids: Any = None,
        completion_ids: Any = None,
        log_probs: Any = None,
        loss_mask: Any = None,
        versions: Any = None,
        reward: float | None = None,
        reward_components: Mapping[str, Any] | None = None,
        terminated: bool | None = None,
        truncated: bool = False,
        sequence: int | str | None = None,
        on_conflict: OnConflict = REFUSE,
        finish_reason: str | None = None,
        agent_id: str = "",
        **facts: Unpack[RolloutFacts],
    ) -> str:
        """Record a whole rollout and return its episode id, `<producer>/<sequence>`.

        Each run of sampled ids in completion_ids is a step; what stands between two of them is the
        observation of the second. Messages are assigned to steps where there is one message of the
        assistant for each.

        Args:
            prompt: a text, a message, or messages with role and content.
            completion: likewise.
            prompt_ids: int [P]; lists, arrays or tensors.
            completion_ids: int [N], with the ids that an environment added.
            log_probs: [N], ln of the probability that the acting policy gave each id; 0 for ids
                that it did not sample. None if unknown.
            loss_mask: [N], 1 for ids that the policy sampled and the loss is over; None: for all.
            versions: int [N], the version of the weights that sampled each id; None if there is one
                (`policy_version`) or it is unknown.
            reward: of the whole rollout; None if it is not known yet.
            reward_components: scores by name; a tuple is a score and its weight.
            terminated: whether the episode ended by itself; by default, unless it was truncated.
            truncated: whether a limit of length or turns ended it.
            sequence: the rollout's number or name among the producer's. The same rollout under the
                same sequence is recorded once. By default the next number.
            on_conflict: what happens to another rollout under a sequence that is taken: `refuse`
                raises EpisodeInvalidError, `attempt` records it as `<producer>/<sequence>#1`.
            finish_reason: as the engine states it.
            agent_id: the agent, where the episode has several.
            facts: group_id, train_step, policy_version, status and others of `RolloutFacts`.

        Raises: EpisodeInvalidError or SchemaMismatchError with the rollout's id, where nothing was
        written; StorageError if the disk refuses.
        """
        with self._use():
            if on_conflict not in (REFUSE, AS_ATTEMPT):
                raise EpisodeInvalidError(
                    f"rollout {self._name(sequence)}: on_conflict: found {on_conflict!r}, expected "
                    f"{REFUSE} or {AS_ATTEMPT}."
                )
            made = self._make(
                sequence,
                agent_id,
                facts,
                prompt=prompt,
                completion=completion,
                prompt_ids=prompt_ids,
                completion_ids=completion_ids,
                log_probs=log_probs,
                loss_mask=loss_mask,
                versions=versions,
                reward=reward,
                reward_components=reward_components,
                terminated=terminated,
                truncated=truncated,
                finish_reason=finish_reason,
            )
            return self._write_made(
                made, 0 if on_conflict == REFUSE else self._find_attempt([made])
            )

    def record_batch(self, rollouts: Sequence[Mapping[str, Any]]) -> list[str]:
        """Record rollouts that were generated together, and return their episode ids.

        They are one attempt: where one of them differs from the rollout under its sequence, all are
        recorded as the next attempt, each as `<producer>/<sequence>#1`, and their groups are
        `<group_id>#1`. So a group has the samples of one batch alone, as often as it is generated.

        Args:
            rollouts: the arguments of `record` for each, but on_conflict; sequence is required.

        Raises: as record; where a value is malformed, no rollout was written.
        """
        with self._use():
            made: list[_MadeRollout] = []
            for rollout in rollouts:
                given = {"sequence": None, "agent_id": "", **rollout}
                sequence, agent_id = given.pop("sequence"), given.pop("agent_id")
                if sequence is None:
                    raise EpisodeInvalidError(
                        f"sequence: found None for rollout {len(made)} of a batch, expected a "
                        "number or a text."
                    )
                facts = {name: given.pop(name) for name in {*given} - _GIVEN}
                made.append(self._make(sequence, agent_id, facts, **given))
            attempt = self._find_attempt(made)
            if attempt:
                for row in (row for one in made for row in one.rows):
                    if "group_id" in row:
                        row["group_id"] += f"#{attempt}"
            return [self._write_made(one, attempt) for one in made]

    def record_steps(
        self,
        steps: Sequence[Mapping[str, Any]],
        *,
        sequence: int | str | None = None,
        attempt: int = 0,
        **facts: Unpack[RolloutFacts],
    ) -> str:
        """Record a whole rollout of several generations and return its episode id.

        All of them are written at once: an error leaves none, and a reader sees none without the
        others.

        Args:
            steps: the arguments of `OpenRollout.step` for each generation, at least one.
            sequence: as `record` takes it.
            attempt: as `begin` takes it.
            facts: as `record` takes them.

        Raises: EpisodeInvalidError or SchemaMismatchError with the rollout's id, where nothing was
        written; StorageError if the disk refuses.
        """
        with self._use():
            rows: list[_StepRow] = []
            opened = self.begin(sequence, attempt=attempt, **facts)
            opened.write = lambda name, agent_id, step, row: rows.append(
                _StepRow(agent_id, step, row, hash_row(row))
            )
            for step in steps:
                opened.step(**step)
            with _naming(opened.episode_id):
                self._write_rows(opened.episode_id, rows)
            return opened.episode_id

    def begin(
        self,
        sequence: int | str | None = None,
        *,
        resume: bool = False,
        attempt: int = 0,
        **facts: Unpack[RolloutFacts],
    ) -> OpenRollout:
        """Begin a rollout whose generations are recorded one by one.

        Steps that were recorded under this sequence before are recognized as they come again. With
        `resume`, the first step instead follows the last one that was recorded. `attempt` tells a
        rollout that is generated anew from earlier ones; `next_attempt` has the number of a new
        one. Raises: EpisodeInvalidError.
        """
        with self._use():
            name = self._name(sequence)
            if not _is_whole(attempt) or attempt < 0:
                raise EpisodeInvalidError(
                    f"attempt: found {shorten(attempt)}, expected a number of 0 or more."
                )
            name = _name_attempt(name, attempt)
            with _naming(name):
                made = make_facts(self._facts, facts)
            self._recorded.setdefault(name, _RecordedRollout())
            self._count(name)
            hashes = self._recorded[name].hashes if resume else {}
            counts = {agent: len(steps) for agent, steps in hashes.items()}
        contexts: dict[str, _Context] = {}
        if counts:  # without the lock: others may record while this scans the dataset
            self._journal.flush()
            contexts = _read_contexts(self.dataset, name)
        return OpenRollout(self, name, made, contexts, counts)

    def reward(
        self,
        rollout: str,
        reward: float,
        *,
        step: int | None = None,
        terminated: bool = False,
        truncated: bool = False,
        mode: str = LAST,
        feedback_id: str | None = None,
    ) -> None:
        """Record a reward that became known after the rollout; on return a kill does not lose it.

        It is applied to the steps by `flush`, `close`, or the next recorder of the dataset: the
        reward of a rollout to its last step, and 0 to others whose reward is unknown; with `step`,
        to that step.

        Args:
            rollout: the id that `record` returned.
            reward: a finite number.
            step: a step of the rollout's agent "".
            terminated: whether the rollout ended by itself.
            truncated: whether a limit ended it.
            mode: `last` replaces the reward, `sum` adds to it.
            feedback_id: reports of a rollout under one id count once.

        Raises: NotFoundError if this producer recorded no such rollout; EpisodeInvalidError.
        """
        with self._use():
            known = self._recorded.get(rollout) if isinstance(rollout, str) else None
            if known is None or not known.num_steps:
                raise NotFoundError(
                    f"rollout {rollout!r}: found none of this id from {self.producer}, expected "
                    "the id that `record` returned."
                )
            if mode not in (LAST, SUM):
                raise EpisodeInvalidError(f"mode: found {mode!r}, expected {LAST} or {SUM}.")
            num_steps = len(known.hashes.get("", ()))
            if step is not None and not (_is_whole(step) and 0 <= step < num_steps):
                raise NotFoundError(
                    f"rollout {rollout}: found no step {step!r}, expected one below {num_steps}."
                )
            with _naming(rollout):
                value = check_reward(reward, "reward")
                name = check_text(feedback_id, "feedback_id")
            if self._reports is None:
                ensure_outcomes_table(self.dataset)
                self._reports = Journal(
                    self.dataset.rewards,
                    rewards_encoder(self.dataset),
                    worker=self._worker,
                    config=self._config,
                )
                self._finalizer.detach()
                journals = (self._journal, self._reports)
                self._finalizer = weakref.finalize(
                    self, _close_all, journals, self._producer, self._process
                )
            report = {
                EPISODE_ID: rollout,
                STEP: None if step is None else int(step),
                "feedback_id": name,
                "mode": mode,
                TIMESTAMP: self._now(),
                "reward": value,
                TERMINATED: bool(terminated),
                TRUNCATED: bool(truncated),
            }
            self._reports.append([json.dumps(report).encode()])
            self._num_reports += 1
            if terminated or truncated:
                known.ended |= {*known.hashes}

    def flush(self) -> int:
        """Commit everything that was recorded, and apply rewards; return the dataset's version.

        On return it survives a power cut, and SQL sees it. Raises: StorageError; what was recorded
        remains on disk, and the next flush commits it. A record that its table cannot hold is set
        aside in a file beside the journal, and every flush then raises.
        """
        with self._use():
            reports, num_reports = self._reports, self._num_reports
        self._journal.flush()
        if reports is not None:
            reports.flush()
            # Every report of the dataset is read for it: not where there are no new ones.
            if num_reports > self._num_applied:
                apply_outcomes(self.dataset)
                with self._lock:
                    self._num_applied = max(self._num_applied, num_reports)
        self._check_committed()
        return self.dataset.table.log.newest().version

    def close(self) -> None:
        """Commit everything and release the producer's name. Raises: as flush.

        In a forked child process it does nothing.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            self._finalizer.detach()
            is_committed = False
            try:
                self._journal.close()
                if self._reports is not None:
                    self._reports.close()
                    apply_outcomes(self.dataset)
                self._check_committed()
                is_committed = True
            finally:
                if self._producer is not None:
                    self._producer.release(is_committed=is_committed)

    def episode_id(self, sequence: int | str) -> str:
        """Return the episode id of the rollout under a sequence. Raises: EpisodeInvalidError."""
        return self._name(sequence)

    def next_attempt(self, sequence: int | str) -> int:
        """Return the number of the first attempt under a sequence that nothing is recorded of.

        Raises: EpisodeInvalidError.
        """
        with self._use():
            name = self._name(sequence)
            return next(one for one in count() if not self._has(_name_attempt(name, one)))

    def is_recorded(self, sequence: int | str) -> bool:
        """Return whether a rollout under a sequence, or an attempt of it, is recorded to its end.

        Raises: EpisodeInvalidError.
        """
        with self._use():
            first = self._name(sequence)
            names = takewhile(self._has, (_name_attempt(first, one) for one in count()))
            known = [self._recorded[name] for name in names]
            return any(one.ended >= {*one.hashes} for one in known)

    def write_step(self, name: str, agent_id: str, step: int, row: dict[str, Any]) -> None:
        """Record the row of one step of a rollout, or recognize it. Called by OpenRollout."""
        with self._use():
            self._write_rows(name, [_StepRow(agent_id, step, row, hash_row(row))])

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that the dataset states."""
        return self._tokenizer

    def abandon(self) -> None:
        """Let go of the parent's lock in a forked child process."""
        if self._producer is not None:
            self._producer.abandon()

    def _use(self) -> threading.RLock:
        # The child has no threads of the journal, and its parent writes to the same file.
        if os.getpid() != self._process:
            raise ConfigInvalidError(
                f"recorder {self.producer}: used in process {os.getpid()}, a fork of process "
                f"{self._process} that created it. Open a recorder in each process, with a "
                "producer of its own."
            )
        if self._producer is not None:
            self._producer.check()
        return self._lock

    def _name(self, sequence: int | str | None) -> str:
        if sequence is None:
            sequence = self._next_number
        is_name = isinstance(sequence, str) and 0 < len(sequence) <= _MAX_SEQUENCE_CHARS
        if not (is_name or (_is_whole(sequence) and 0 <= int(sequence) < 2**63)):
            raise EpisodeInvalidError(
                f"sequence: found {sequence!r}, expected a number of 0 or more in 64 bits, or a "
                f"text of at most {_MAX_SEQUENCE_CHARS} characters."
            )
        text = (
            check_name(str(sequence), "sequence")
            .replace("%", "%25")
            .replace("#", "%23")
            .replace("/", "%2F")
        )
        return f"{self.producer}/{text}"

    def _has(self, name: str) -> bool:
        known = self._recorded.get(name)
        return known is not None and known.num_steps > 0

    def _count(self, name: str) -> None:
        """Let the numbers of rollouts without a sequence go on after a rollout's, if it has one."""
        if (number := _to_number(name)) >= self._next_number:
            self._next_number = number + 1
            if self._producer is not None:
                self._producer.note_number(self._next_number)

    def _check_committed(self) -> None:
        """Raises: StorageError where a commit set records of this recorder aside."""
        for journal in (self._journal, self._reports):
            if journal is not None and journal.is_ended:
                raise StorageError(f"{journal.folder}: {journal.failure}.")
            if journal is not None and journal.num_set_aside:
                raise StorageError(
                    f"{journal.folder}: found {journal.num_set_aside} records of "
                    f"{self.producer} that their table cannot hold, expected none. They are in the "
                    f"files {journal.worker}-*.damaged there, and the log says why."
                )

    def _make(
        self,
        sequence: int | str | None,
        agent_id: str,
        facts: Mapping[str, Any],
        *,
        reward: float | None = None,
        reward_components: Mapping[str, Any] | None = None,
        terminated: bool | None = None,
        truncated: bool = False,
        finish_reason: str | None = None,
        **given: Any,
    ) -> _MadeRollout:
        """Check the arguments of `record`. Raises: EpisodeInvalidError, SchemaMismatchError."""
        name = self._name(sequence)
        ends = not truncated if terminated is None else terminated
        with _naming(name):
            check_name(agent_id, "agent_id")
            rows = make_rollout_rows(
                **{argument: given.get(argument) for argument in _SAMPLED},
                outcome=Outcome(reward, reward_components, ends, truncated),
                facts=make_facts(self._facts, facts),
                tokenizer=self._tokenizer,
            )
            if (reason := check_text(finish_reason, "finish_reason")) is not None:
                rows[-1]["finish_reason"] = reason
        return _MadeRollout(name, agent_id, rows, list(map(hash_row, rows)))

    def _write_made(self, made: _MadeRollout, attempt: int) -> str:
        name = _name_attempt(made.name, attempt)
        rows = [
            _StepRow(made.agent_id, step, row, content)
            for step, (row, content) in enumerate(zip(made.rows, made.hashes, strict=True))
        ]
        with _naming(name):
            self._write_rows(name, rows)
        self._count(name)
        return name

    def _find_attempt(self, batch: Sequence[_MadeRollout]) -> int:
        """Return the first attempt of which each rollout is free or has a beginning recorded."""
        return next(
            number for number in count() if all(self._fits_attempt(one, number) for one in batch)
        )

    def _fits_attempt(self, made: _MadeRollout, attempt: int) -> bool:
        known = self._recorded.get(_name_attempt(made.name, attempt))
        if known is None:
            return True
        stored = known.hashes.get(made.agent_id, array("q"))
        is_beginning = list(stored) == made.hashes[: len(stored)]
        return is_beginning and (
            made.agent_id not in known.ended or len(stored) == len(made.hashes)
        )

    def _write_rows(self, name: str, rows: Sequence[_StepRow]) -> None:
        """Write those of some steps that are new, all or none.

        Raises: EpisodeInvalidError for steps other than the recorded ones; StorageError.
        """
        known = self._recorded.get(name, _RecordedRollout())
        fresh, ended = [], {*known.ended}
        for one in rows:
            stored = known.hashes.get(one.agent_id, array("q"))
            if one.step < len(stored):
                if stored[one.step] != one.content:
                    raise EpisodeInvalidError(
                        f"step {one.step} was recorded under this sequence with other values, "
                        "expected the same. Give another rollout another sequence."
                    )
                continue
            if one.agent_id in ended:
                raise EpisodeInvalidError(
                    f"found step {one.step} of agent {one.agent_id!r} after the one that ended it, "
                    f"{one.step - 1}. Give another rollout another sequence."
                )
            if one.row[TERMINATED] or one.row[TRUNCATED]:
                ended.add(one.agent_id)
            fresh.append(one)
        if not fresh:
            return
        attempt, records = _to_attempt(name), []
        for env_step, one in enumerate(fresh, known.num_steps):
            record = {
                **one.row,
                EPISODE_ID: name,
                AGENT_ID: one.agent_id,
                STEP: one.step,
                ENV_STEP: env_step,
                TIMESTAMP: self._now(),
                ATTEMPT: attempt,
                RECORD_HASH: one.content,
            }
            self._check_fits(record)
            records.append(json.dumps(record, separators=(",", ":")).encode())
        self._journal.append(records)
        # Only now: what could not be written is not recorded.
        for one in fresh:
            known.hashes.setdefault(one.agent_id, array("q")).append(one.content)
        known.ended = ended
        self._recorded[name] = known

    def _check_fits(self, record: Mapping[str, Any]) -> None:
        """Refuse a value that its column cannot hold: after its acknowledgment it would be lost.

        Raises: EpisodeInvalidError.
        """
        for name, value in record.items():
            if value is not None and self._fits[name](value) != value:
                kind = self._schema.field(name).type
                raise EpisodeInvalidError(f"{name}: found {shorten(value)}, expected {kind}.")

    def _now(self) -> int:
        """Return the time (us since 1970), later than any before though the clock steps back.

        A report applies to the steps before it, and is news where it is later than the last one.
        """
        self._last_time = max(self._last_time + 1, time.time_ns() // 1000)
        return self._last_time


@dataclass(slots=True)
class _Context:
    """The ids that an agent's steps have read and sampled since the history last changed.

    ends: by step, how many of them there were after it.
    """

    token_ids: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    ends: dict[int, int] = field(default_factory=dict)

    def after(self, step: int) -> Array | None:
        return self.token_ids[: self.ends[step]] if step in self.ends else None

    def add(self, step: int, prompt: Array, sampled: Array) -> None:
        self.token_ids = np.concatenate([prompt, sampled])
        self.ends[step] = len(self.token_ids)


class OpenRollout:
    """A rollout whose generations are recorded one by one. Made by `LanguageRecorder.begin`.

    write: writes the row of a step, given (episode id, agent, step, row). Not safe for threads,
    unlike its recorder.
    """

    def __init__(
        self,
        recorder: LanguageRecorder,
        name: str,
        facts: dict[str, Any],
        contexts: dict[str, _Context],
        counts: dict[str, int],
    ) -> None:
        self.episode_id = name
        self.write: Callable[[str, str, int, dict[str, Any]], None] = recorder.write_step
        self._recorder, self._facts = recorder, facts
        self._contexts, self._counts = contexts, counts

    def step(
        self,
        *,
        prompt: Text | None = None,
        completion: Text | None = None,
        prompt_ids: Any = None,
        completion_ids: Any = None,
        log_probs: Any = None,
        loss_mask: Any = None,
        versions: Any = None,
        reward: float | None = None,
        reward_components: Mapping[str, Any] | None = None,
        terminated: bool = False,
        truncated: bool = False,
        agent_id: str = "",
        parent: tuple[str, int] | None = None,
        is_trainable: bool | None = None,
        finish_reason: str | None = None,
        completion_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> int:
        """Record one generation and return its step.

        Args:
            prompt: what came since the agent's last generation: a text or messages.
            completion: the text or message that was generated.
            prompt_ids: int [P], all ids before the generation. Those that the last step of the
                agent ended with are not stored again; where they do not begin with these (the
                history was rewritten), the step has all of them and `is_continuation` false.
            completion_ids: int [N], the ids that were sampled.
            log_probs: as `LanguageRecorder.record` takes them.
            loss_mask: likewise.
            versions: likewise.
            reward: of this step; None if it is not known yet.
            reward_components: as `LanguageRecorder.record` takes them.
            terminated: whether this step ended the agent's episode.
            truncated: whether a limit ended it with this step.
            agent_id: the agent that generated it.
            parent: agent and step that an agent's first generation goes on from, for a branch.
            is_trainable: false for a generation that was copied or scripted.
            finish_reason: as the engine states it.
            completion_id: likewise.
            metadata: what has no column, as JSON holds it.

        Raises: EpisodeInvalidError or SchemaMismatchError with the rollout's id; StorageError.
        """
        with _naming(self.episode_id):
            step = self._counts.get(check_name(agent_id, "agent_id"), 0)
            if parent is not None:
                self._check_parent(agent_id, step, parent)
            whole = None if prompt_ids is None else to_ids(prompt_ids, "prompt_ids")
            base = self._find_base(agent_id, step, parent)
            begins = base is not None and whole is not None
            begins = begins and np.array_equal(whole[: len(base)], base)  # type: ignore[index, arg-type]
            fresh = whole[len(base) :] if begins else whole  # type: ignore[index, arg-type]
            row = make_step_row(
                prompt=prompt,
                completion=completion,
                prompt_ids=fresh,
                completion_ids=completion_ids,
                log_probs=log_probs,
                loss_mask=loss_mask,
                versions=versions,
                outcome=Outcome(reward, reward_components, terminated, truncated),
                facts={**self._facts, **make_facts({"metadata": metadata})},
                tokenizer=self._recorder.tokenizer,
            )
            follows = step > 0 or parent is not None
            if follows and whole is not None and not begins:
                row[tokens.IS_CONTINUATION] = False
            row |= {
                name: value
                for name, value in (
                    ("finish_reason", check_text(finish_reason, "finish_reason")),
                    ("completion_id", check_text(completion_id, "completion_id")),
                    (tokens.IS_TRAINABLE, check_flag(is_trainable, "is_trainable")),
                )
                if value is not None
            }
            if parent is not None:
                row |= {tokens.PARENT_AGENT_ID: parent[0], tokens.PARENT_STEP: int(parent[1])}
            self.write(self.episode_id, agent_id, step, row)
        self._counts[agent_id] = step + 1
        if whole is None:
            self._contexts[agent_id] = _Context()
        else:
            if agent_id not in self._contexts or not begins:
                self._contexts[agent_id] = _Context()
            sampled = to_ids(completion_ids, "completion_ids")
            self._contexts[agent_id].add(step, whole, sampled)
        return step

    def reward(self, reward: float, **report: Any) -> None:
        """Record a reward of the rollout, as `LanguageRecorder.reward` does."""
        self._recorder.reward(self.episode_id, reward, **report)

    def _find_base(self, agent_id: str, step: int, parent: tuple[str, int] | None) -> Array | None:
        """Return the ids that a generation continues; None where they are not known."""
        agent, before = parent or (agent_id, step - 1)
        if before < 0:
            return np.zeros(0, np.int32)
        context = self._contexts.get(agent)
        return None if context is None else context.after(before)

    def _check_parent(self, agent_id: str, step: int, parent: tuple[str, int]) -> None:
        is_pair = isinstance(parent, tuple) and len(parent) == 2
        if not (is_pair and isinstance(parent[0], str) and _is_whole(parent[1])):
            raise EpisodeInvalidError(
                f"parent: found {shorten(parent)}, expected an agent and the number of its step."
            )
        agent, before = parent
        if not 0 <= before < self._counts.get(agent, 0):
            raise EpisodeInvalidError(
                f"parent of step {step} of agent {agent_id!r}: found step {before} of agent "
                f"{agent!r}, expected one that was recorded before."
            )


def _read_recorded(dataset: Dataset, prefix: str) -> tuple[dict[str, _RecordedRollout], int]:
    """Return what the dataset has of the rollouts `<prefix><sequence>`, and their newest time."""
    recorded: dict[str, _RecordedRollout] = {}
    newest = 0
    # Not those of another producer whose name goes on after this one: `run` and `run/rank3`.
    below = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    text = _STORED.replace("{prefix}", prefix).replace("{start}", str(len(prefix) + 1))
    text = text.replace("{below}", below)
    has_rewards = REWARDED_AT in dataset.table.snapshot().schema.names
    text = text.replace("{rewarded_at}", REWARDED_AT if has_rewards else TIMESTAMP)
    for episode, agent, content, ends, time_us in _query(dataset, text, prefix, below):
        rollout = recorded.setdefault(episode, _RecordedRollout())
        rollout.hashes.setdefault(agent, array("q")).append(content)
        if ends:
            rollout.ended.add(agent)
        newest = max(newest, time_us)
    return recorded, newest


def _read_contexts(dataset: Dataset, name: str) -> dict[str, _Context]:
    """Return the ids up to the last recorded step of each agent of a rollout."""
    contexts: dict[str, _Context] = {}
    text = _CONTEXT.replace("{episode}", name.replace("'", "''"))
    for agent, step, read, sampled, is_continuation, has_parent in _query(
        dataset, text, name, f"{name}\0"
    ):
        context = contexts.setdefault(agent, _Context())
        before = context.after(step - 1) if step else np.zeros(0, np.int32)
        if is_continuation is False:
            before = np.zeros(0, np.int32)
        if has_parent or sampled is None or before is None:
            contexts[agent] = _Context()  # its beginning is another agent's, or unknown
            continue
        if is_continuation is False:
            context = contexts[agent] = _Context()
        prompt = np.concatenate([before, np.array(read, np.int32)])
        context.add(step, prompt, np.array(sampled, np.int32))
    return contexts


def _query(dataset: Dataset, text: str, least: str, below: str) -> list[tuple[Any, ...]]:
    """Query the shards that may have episode ids from `least` to before `below`."""
    snapshot = dataset.table.snapshot()
    entries = list(snapshot.files)
    if snapshot.storage.is_metered:  # else DuckDB reads the footers of all sooner
        entries = select_shards(snapshot, EPISODE_ID, least, below)
    if not entries:
        return []
    with fetch_files(snapshot, entries) as paths, scan_connection() as connection:
        return query_rows(connection, text.replace("{steps}", from_clause(snapshot, paths)))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _name_attempt(name: str, attempt: int) -> str:
    return f"{name}#{attempt}" if attempt else name


def _to_attempt(name: str) -> int:
    _, _, number = name.rpartition("/")[2].partition("#")
    return int(number or 0)


def _to_number(name: str) -> int:
    """Return the number in a rollout's id; -1 for a name, and for numbers that are not counted."""
    text = name.rpartition("/")[2].partition("#")[0]
    is_number = text.isascii() and text.isdecimal() and len(text) <= NUMBER_DIGITS
    return int(text) if is_number else -1


@contextmanager
def _naming(rollout: str) -> Iterator[None]:
    """Put a rollout's id before errors of its values."""
    try:
        yield
    except (EpisodeInvalidError, SchemaMismatchError) as error:
        raise type(error)(f"rollout {rollout}: {error}") from error


def _close_all(journals: Sequence[Journal], producer: Producer | None, process: int) -> None:
    """Commit what is left for a recorder that nobody closed, and release its producer's name.

    What cannot be committed is left to the next recorder.
    """
    if os.getpid() != process:
        return
    is_committed = True
    for journal in journals:
        try:
            journal.close()
        except ReplayLakeError:
            is_committed = False
    if producer is not None:
        producer.release(is_committed=is_committed)


_recorders: Final[weakref.WeakSet[LanguageRecorder]] = weakref.WeakSet()


def _abandon_all() -> None:
    for recorder in list(_recorders):
        recorder.abandon()


os.register_at_fork(after_in_child=_abandon_all)
