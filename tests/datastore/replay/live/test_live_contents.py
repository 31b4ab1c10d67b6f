"""Whatever comes in whatever pieces and order, a live view holds what SQL says that there is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.replay.items.episodes import Episodes
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.layout import make_layout
from replaylake.datastore.replay.live.live_contents import LiveContents
from replaylake.datastore.replay.live.log_reader import LogReader
from replaylake.datastore.replay.protocols import Item, SelectedItems

ITEMS = (
    Transitions(0.5),
    Transitions(0.5, n_step=3),
    Transitions(0.5, only_bootstrappable=False),
    Sequences(4, overlap=1, burn_in=1),
    Episodes(),
)


@dataclass
class Piece:
    episode: str
    agent: str
    first_step: int
    length: int
    terminated: bool = False
    truncated: bool = False
    has_final: bool = True

    def made(self) -> Episode:
        # Which episode, agent and step it is can be read off each observation.
        base = 1000 * (2 * int(self.episode) + int(self.agent))
        steps = np.arange(self.first_step, self.first_step + self.length)
        end = base + self.first_step + self.length
        return Episode(
            episode_id=self.episode,
            agent_id=self.agent,
            first_step=self.first_step,
            observations=np.stack([base + steps, -steps], 1).astype(np.float32),
            actions=steps % 2,
            rewards=base + steps + 0.5,
            terminated=self.terminated,
            truncated=self.truncated,
            final_observation=(np.array([end, base - end], np.float32) if self.has_final else None),
        )


@st.composite
def layouts(draw: st.DrawFn, *, in_order: bool = False) -> list[list[Piece]]:
    """Commits of pieces; some missing, some without an observation after them."""
    pieces = []
    for episode in range(draw(st.integers(1, 4))):
        for agent in range(draw(st.integers(1, 2))):
            step = draw(st.sampled_from([0, 0, 3]))
            for _ in range(draw(st.integers(1, 5))):
                length = draw(st.integers(1, 6))
                piece = Piece(str(episode), str(agent), step, length, has_final=draw(st.booleans()))
                if not draw(st.sampled_from([False] * 5 + [True])):
                    pieces.append(piece)
                step += length
            end = draw(st.sampled_from(["terminated", "truncated", "open"]))
            if end != "open" and pieces:
                setattr(pieces[-1], end, True)
    if not in_order:
        pieces = draw(st.permutations(pieces))
    commits: list[list[Piece]] = []
    for piece in pieces:
        # Of an episode and agent, a commit has one piece.
        if (
            commits
            and draw(st.booleans())
            and all((p.episode, p.agent) != (piece.episode, piece.agent) for p in commits[-1])
        ):
            commits[-1].append(piece)
        else:
            commits.append([piece])
    return commits


@pytest.fixture(scope="module")
def datasets() -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as folder:
        lake = open_lake(Path(folder) / "lake", create=True)
        yield (lake.dataset(f"d{number}") for number in count())


def followed(dataset: Dataset, max_steps: int = 10_000, frame_stack: int = 1) -> Any:
    dataset.create(Box((2,)), Discrete(2))
    layout = make_layout(dataset.spec, dataset.snapshot().table.schema, frame_stack=frame_stack)
    reader = LogReader(dataset.table, layout, None)
    reader.begin(None)
    return reader, LiveContents(layout, max_steps)


def apply(reader: LogReader, contents: LiveContents) -> None:
    while (change := reader.next()) is not None:
        if change.removed is not None:
            contents.replace(change.added, change.removed)
        else:
            for block in change.added:
                contents.add(block)


def drawn(contents: LiveContents, item: Item) -> Any:
    """All items of a kind that there are, as one batch; each once."""
    candidates = contents.items.candidates(item, lambda *, wait=False: None)
    low, high = candidates.bounds()
    numbers = np.arange(low, high)
    positions = candidates.positions(numbers)
    there = positions >= 0
    assert len(np.unique(positions[there])) == there.sum()
    assembler = item.assembler(contents.ring)
    return assembler.assemble(positions[there], SelectedItems(numbers[there])).batch


def rows_of(batch: Any) -> set[tuple[Any, ...]]:
    """What can be said of each row: flattened arrays without row keys and numbers."""
    if not len(batch):
        return set()
    fields = ("observations", "actions", "rewards", "discounts", "next_observations", "mask")
    arrays = [getattr(batch, name) for name in fields]
    rows = [np.asarray(a).reshape(len(batch), -1).tolist() for a in arrays if a is not None]
    # Padding at the end differs with the longest row of the batch.
    return {tuple(tuple(v for v in part if v) for part in row) for row in zip(*rows, strict=True)}


def sql_transitions(dataset: Dataset, n_step: int = 1) -> set[tuple[float, ...]]:
    table = dataset.snapshot().sql(
        "select episode_id, agent_id, step, observation, reward, terminated, truncated, "
        "next_observation from transitions"
    )
    rows = {(r["episode_id"], r["agent_id"], r["step"]): r for r in table.to_pylist()}
    found = set()
    for key, first in rows.items():
        if first["next_observation"] is None and not first["terminated"]:
            continue
        reward, discount, row = first["reward"], 0.5, first
        for step in range(1, n_step):
            after = rows.get((key[0], key[1], key[2] + step))
            if (
                row["terminated"]
                or row["truncated"]
                or after is None
                or row["next_observation"] != after["observation"]
                or (after["next_observation"] is None and not after["terminated"])
            ):
                break
            reward, discount, row = reward + discount * after["reward"], discount / 2, after
        last = row["next_observation"] or row["observation"]
        ended = 0.0 if row["terminated"] else discount
        found.add((first["observation"][0], round(reward, 3), ended, last[0]))
    return found


def live_transitions(contents: LiveContents, n_step: int = 1) -> set[tuple[float, ...]]:
    batch = drawn(contents, Transitions(0.5, n_step=n_step))
    rows = zip(
        batch.observations[:, 0].tolist(),
        np.round(batch.rewards.astype(np.float64), 3).tolist(),
        batch.discounts.tolist(),
        batch.next_observations[:, 0].tolist(),
        strict=True,
    )
    return set(rows)


def check_sql(
    dataset: Dataset, commits: list[list[Piece]], drops: list[int], *, early: bool
) -> None:
    """Append all commits, take some shards out again, and compare with SQL."""
    reader, contents = followed(dataset)
    if early:
        for item in ITEMS:
            contents.items.candidates(item, lambda *, wait=False: None)
    for number, pieces in enumerate(commits):
        dataset.append([piece.made() for piece in pieces])
        if drops[number] > 6:
            files = dataset.snapshot().files
            path = files[drops[number] % len(files)].path
            dataset.table.commit([], producer=f"drop{number}", sequence=0, removed=[path])
        if drops[number] % 2:
            apply(reader, contents)
    apply(reader, contents)
    assert live_transitions(contents) == sql_transitions(dataset)
    assert live_transitions(contents, 3) == sql_transitions(dataset, 3)
    assert contents.num_transitions == len(sql_transitions(dataset))
    num_rows = dataset.snapshot().num_steps
    assert contents.num_steps == num_rows
    if max(drops[: len(commits)], default=0) <= 6:
        assert len(drawn(contents, Transitions(0.5, only_bootstrappable=False))) == num_rows


def check_snapshot(
    dataset: Dataset, commits: list[list[Piece]], frame_stack: int, items: Any, *, early: bool
) -> None:
    """Append all commits, and compare with a view of the version that they make."""
    reader, contents = followed(dataset, frame_stack=frame_stack)
    for item in items if early else ():
        contents.items.candidates(item, lambda *, wait=False: None)
    for pieces in commits:
        dataset.append([piece.made() for piece in pieces])
        apply(reader, contents)
    if not commits:
        return
    view = dataset.snapshot().replay(frame_stack=frame_stack, cache=False)
    for item in items:
        starts = item.starts(view.packed)
        fixed = item.assembler(view.packed.records).assemble(starts, SelectedItems(starts)).batch
        live = drawn(contents, item)
        assert len(live) == len(fixed)
        assert rows_of(live) == rows_of(fixed)


def check_eviction(dataset: Dataset, commits: list[list[Piece]], max_steps: int) -> None:
    """Append all commits to a view that holds fewer steps."""
    reader, contents = followed(dataset, max_steps)
    for item in ITEMS:
        contents.items.candidates(item, lambda *, wait=False: None)
    num_steps = 0
    for pieces in commits:
        dataset.append([piece.made() for piece in pieces])
        apply(reader, contents)
        num_steps += sum(piece.length for piece in pieces)
        assert contents.num_steps == min(num_steps, max_steps)
        found = live_transitions(contents)
        assert found <= sql_transitions(dataset)
        assert contents.num_transitions == len(found)
        assert len(drawn(contents, ITEMS[2])) == contents.num_steps
        for item in ITEMS:
            drawn(contents, item)


drops = st.lists(st.integers(0, 9), min_size=60, max_size=60)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(layouts(), drops, st.booleans())
def test_what_sql_says(
    datasets: Any, commits: list[list[Piece]], drops: list[int], early: bool
) -> None:
    check_sql(next(datasets), commits, drops, early=early)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(layouts(), st.integers(1, 30))
def test_the_oldest_fall_out(datasets: Any, commits: list[list[Piece]], max_steps: int) -> None:
    check_eviction(next(datasets), commits, max_steps)


@pytest.mark.chaos
@settings(max_examples=40, deadline=None)
@given(layouts(), st.integers(1, 30))
def test_the_oldest_of_many_fall_out(
    datasets: Any, commits: list[list[Piece]], max_steps: int
) -> None:
    check_eviction(next(datasets), commits, max_steps)


@pytest.mark.chaos
@settings(max_examples=60, deadline=None)
@given(layouts(), drops, st.booleans())
def test_what_sql_says_of_many(
    datasets: Any, commits: list[list[Piece]], drops: list[int], early: bool
) -> None:
    check_sql(next(datasets), commits, drops, early=early)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(layouts(), st.booleans())
def test_stacks_in_any_order(datasets: Any, commits: list[list[Piece]], early: bool) -> None:
    items = (Transitions(0.5, n_step=3), Transitions(only_bootstrappable=False))
    check_snapshot(next(datasets), commits, 3, items, early=early)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(layouts(in_order=True), st.sampled_from([1, 3]), st.booleans())
def test_pieces_in_order_make_what_a_snapshot_has(
    datasets: Any, commits: list[list[Piece]], frame_stack: int, early: bool
) -> None:
    check_snapshot(next(datasets), commits, frame_stack, ITEMS, early=early)


@pytest.mark.chaos
@settings(max_examples=40, deadline=None)
@given(layouts(in_order=True), layouts(), st.sampled_from([1, 3]), st.booleans())
def test_many_pieces_make_what_a_snapshot_has(
    datasets: Any,
    commits: list[list[Piece]],
    others: list[list[Piece]],
    frame_stack: int,
    early: bool,
) -> None:
    check_snapshot(next(datasets), commits, frame_stack, ITEMS, early=early)
    items = (Transitions(0.5, n_step=3), Transitions(only_bootstrappable=False))
    check_snapshot(next(datasets), others, frame_stack, items, early=early)
