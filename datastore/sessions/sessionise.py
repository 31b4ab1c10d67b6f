"""Sessions: decisions and the rewards that followed, joined into episodes of the dataset.

What is written, and when:
    - Decisions of one client episode_id are its steps, in order of time; the decision whose reward
      said terminated or truncated is the last, and a later one under the same id begins another
      episode. A decision without an episode_id is an episode of one step.
    - An episode is written once it has ended and every decision has its reward. Until then it
      waits, at most the reward window after its last decision.
    - After that, what is known is written and nothing is invented: no end that nobody reported, no
      reward of 0. Steps without a reward stay out, the steps around them keep their numbers, and
      the row before the gap keeps the observation that followed as its final_observation.
    - A decision is written at most once, whenever and however often this runs. A reward that comes
      after its step was written, and differs, changes the step, which then says `reward_late`
      (late.py has the rules). Of several rewards of one decision the last by time counts, whichever
      order they arrive in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from replaylake.datastore.errors import NotFound
from replaylake.datastore.lake import Lake
from replaylake.datastore.schema import EPISODE_ID, TIMESTAMP
from replaylake.datastore.sessions.decision_id import read_unverified
from replaylake.datastore.sessions.decisions import (
    DECISION_ID,
    DEFAULT_WINDOW_S,
    REQUEST_ID,
    recover_feedback,
)
from replaylake.datastore.sessions.late import Late, apply_late
from replaylake.datastore.sessions.segments import NOTHING, Recovered
from replaylake.datastore.sessions.served import (
    Logged,
    Piece,
    build_episodes,
    read_logged,
)


@dataclass(frozen=True)
class SessionReceipt:
    """What one run found and wrote.

    decisions and rewards: rows of the two tables. joined: decisions that have a reward. episodes
    (pieces count singly) and steps: what this run added as `version`. waiting: decisions that may
    still be completed. unrewarded: decisions whose window passed without a reward. repeated:
    unrewarded decisions whose request was sent again and then rewarded. late: steps that got
    another reward, or an end, after they were written. ends_refused: those of them of which the
    reward says that the episode ends there, though steps follow, or does not, though it did.
    orphaned: rewarded decisions that are not there. recovered: rows of killed servers committed
    first. damaged: their records that cannot be; the files are kept in the journals' folders.
    """

    dataset: str
    version: int
    decisions: int
    rewards: int
    joined: int
    episodes: int
    steps: int
    waiting: int
    unrewarded: int
    repeated: int
    late: int
    ends_refused: int
    orphaned: int
    recovered: int
    damaged: int

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)


@dataclass
class _Counts:
    waiting: int = 0
    unrewarded: int = 0
    repeated: int = 0


def sessionise(
    lake: Lake,
    dataset: str,
    *,
    window_s: float = DEFAULT_WINDOW_S,
    now_s: float | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> SessionReceipt:
    """Join what was served into `dataset` with its rewards and append the episodes, in one commit.

    Args:
        lake: the lake.
        dataset: its name.
        window_s: how long a decision waits for its reward.
        now_s: the time (s since 1970, UTC) to judge the window by; the clock's by default. What was
            decided later waits.
        on_progress: called with (episodes built, episodes).

    Raises: NotFound if nothing was ever served into the dataset. Cost: one scan of the two tables'
    ids and of the dataset's decision_id column.
    """
    handle = lake.dataset(dataset)
    if not (handle.exists() and handle.decisions.exists() and handle.rewards.exists()):
        raise NotFound(
            f"sessionise {dataset}: found no decisions, expected some from a served policy. "
            f"`replaylake serve POLICY --log-to {dataset}` logs them."
        )
    now = time.time_ns() // 1000 if now_s is None else int(now_s * 1e6)
    producer = f"sessionise:{dataset}"
    recovered = NOTHING
    while True:
        recovered += recover_feedback(handle)
        # Two runs at once get the same sequence: the later finds it taken and reads anew.
        sequence = handle.next_sequence(producer)
        snapshot = handle.snapshot()
        logged = read_logged(handle, snapshot, now)
        counts = _Counts()
        pieces = list(_plan(logged, now - int(window_s * 1e6), counts))
        version = snapshot.version
        if pieces:
            episodes = build_episodes(handle.decisions, logged, snapshot.spec, pieces, on_progress)
            commit = handle.append(episodes, producer=producer, sequence=sequence)
            if commit.already_present:
                continue
            version = commit.version
        late = apply_late(handle, logged)
        version = version if late.version is None else late.version
        return _receipt(dataset, version, logged, pieces, counts, recovered, late)


def _plan(logged: Logged, closing: int, counts: _Counts) -> Iterator[Piece]:
    """Yield what is to be written now; decisions before `closing` (us) no longer wait."""
    columns = (
        logged.decisions.column(DECISION_ID).to_pylist(),
        logged.decisions.column(EPISODE_ID).to_pylist(),
        logged.decisions.column(REQUEST_ID).to_pylist(),
        logged.decisions.column(TIMESTAMP).cast(pa.int64()).to_pylist(),
    )
    groups: dict[tuple[bool, str], list[tuple[str, str | None, int]]] = {}
    for decision_id, episode_id, request_id, timestamp in zip(*columns, strict=True):
        key = (True, decision_id) if episode_id is None else (False, episode_id)
        groups.setdefault(key, []).append((decision_id, request_id, timestamp))
    for (is_single, source), rows in groups.items():
        for episode in _split_at_ends(rows, logged):
            yield from _pieces(episode, None if is_single else source, logged, closing, counts)


def _split_at_ends(
    rows: list[tuple[str, str | None, int]], logged: Logged
) -> Iterator[list[tuple[str, str | None, int]]]:
    begin = 0
    for i, (decision_id, _, _) in enumerate(rows, 1):
        if i == len(rows) or logged.ends(decision_id):
            yield rows[begin:i]
            begin = i


def _pieces(
    rows: list[tuple[str, str | None, int]],
    source: str | None,
    logged: Logged,
    closing: int,
    counts: _Counts,
) -> Iterator[Piece]:
    rewards, written = logged.rewards, logged.written
    answered = {request for key, request, _ in rows if request is not None and key in rewards}
    # A client that got no answer (the server was killed) asks again under the same request_id.
    kept = [row for row in rows if row[0] in rewards or row[1] not in answered]
    steps = {row[0]: step for step, row in enumerate(kept)}
    if any(steps.get(row[0]) != logged.steps.get(row[0], steps.get(row[0])) for row in rows):
        # An earlier run counted a decision that was asked again since: its place stays a gap, for
        # steps that are written keep their numbers.
        kept = rows
    counts.repeated += len(rows) - len(kept)
    ids = [row[0] for row in kept]
    open_ids = [key for key in ids if key not in written]
    if not open_ids:
        return
    is_whole = all(key in rewards for key in ids) and (source is None or logged.ends(ids[-1]))
    if kept[-1][2] >= logged.horizon or not (is_whole or kept[-1][2] < closing):
        counts.waiting += len(open_ids)
        return
    counts.unrewarded += sum(key not in rewards for key in ids)
    begin = 0
    for i in range(len(ids) + 1):
        if i < len(ids) and ids[i] in rewards and ids[i] not in written:
            continue
        if i > begin:
            next_id = ids[i] if i < len(ids) else None
            yield Piece(f"served/{rows[0][0]}", source, begin, ids[begin:i], next_id)
        begin = i + 1


def _receipt(
    dataset: str,
    version: int,
    logged: Logged,
    pieces: Sequence[Piece],
    counts: _Counts,
    recovered: Recovered,
    late: Late,
) -> SessionReceipt:
    known = set(logged.decisions.column(DECISION_ID).to_pylist())
    orphaned = sum(
        key not in known
        and (said := read_unverified(key)) is not None
        and said.timestamp < logged.horizon
        for key in logged.rewards
    )
    return SessionReceipt(
        dataset=dataset,
        version=version,
        decisions=logged.decisions.num_rows,
        rewards=logged.num_rewards,
        joined=len(known & logged.rewards.keys()),
        episodes=len(pieces),
        steps=sum(len(piece.decision_ids) for piece in pieces),
        waiting=counts.waiting,
        unrewarded=counts.unrewarded,
        repeated=counts.repeated,
        late=late.num_steps,
        ends_refused=late.num_ends_refused,
        orphaned=orphaned,
        recovered=recovered.num_rows,
        damaged=recovered.num_damaged,
    )
