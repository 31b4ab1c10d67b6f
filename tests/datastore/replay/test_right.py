"""What samplers of random datasets return, against what SQL says of these row by row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import EmptyReplayError
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.replay.items.episodes import Episodes
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.mixture import mixture
from replaylake.datastore.replay.protocols import Item
from replaylake.datastore.replay.view import ReplayView

Key = tuple[str, str, int]
NAMES: Final = list(itertools.product(["a", "b", "c"], ["", "left"]))
WEIGHT: Final = "(reward * steps.step + num_steps) * (agent_id <> 'left' OR steps.step > 1)::INT"
# Commits of pieces: episode and agent, first step, steps, end, final observation, policy version.
COMMITS: Final = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.integers(0, 9),
            st.integers(1, 4),
            st.sampled_from(["open", "open", "terminated", "truncated"]),
            st.sampled_from(["following", "following", "none", "other"]),
            st.sampled_from([None, 0, 3, 2**40]),
        ),
        min_size=1,
        max_size=5,
    ),
    min_size=1,
    max_size=5,
)
WHERE: Final = st.sampled_from([None, None, "agent_id = 'left'", "num_steps > 3", '"return" > 4'])
WHERE_STEPS: Final = st.sampled_from([None, None, "step % 2 = 1", "reward > 2", "step > 0"])


@pytest.fixture
def make_dataset(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Dataset]:
    """Return what writes commits of pieces; a step that is there twice is left out."""

    def make(commits: Any) -> Dataset:
        dataset = open_lake(tmp_path_factory.mktemp("l"), create=True).dataset("d")
        dataset.create(Box((2,)), Discrete(2))
        taken: set[Key] = set()
        for pieces in commits:
            episodes = []
            for name, first, num, end, final, version in pieces:
                steps = {(*name, step) for step in range(first, first + num)}
                if not steps & taken:
                    taken |= steps
                    episodes.append(_piece(name, first, num, end, final, version))
            if episodes:
                dataset.append(episodes)
        return dataset

    return make


def _piece(
    name: tuple[str, str], first: int, num: int, end: str, final: str, version: int | None
) -> Episode:
    code, steps = NAMES.index(name), np.arange(first, first + num)
    finals = {"following": first + num, "other": 99, "none": 0}
    return Episode(
        name[0],
        np.stack([np.full(num, code), steps], axis=1).astype(np.float32),
        steps % 2,
        (5 * code + 7 * steps) % 11 / 3,
        terminated=end == "terminated",
        truncated=end == "truncated",
        final_observation=None if final == "none" else np.array([code, finals[final]], np.float32),
        agent_id=name[1],
        first_step=first,
        policy_versions=None if version is None else np.full(num, version),
    )


@dataclass(frozen=True)
class Told:
    """What SQL says of a snapshot's steps, and what follows from that one row at a time."""

    snapshot: Snapshot

    @cached_property
    def rows(self) -> dict[Key, dict[str, Any]]:
        rows = self.snapshot.sql("SELECT * FROM transitions").to_pylist()
        return {(row["episode_id"], row["agent_id"], row["step"]): row for row in rows}

    def keys(self, where: str | None, where_steps: str | None) -> set[Key]:
        found = self.snapshot.sql(
            "SELECT episode_id, agent_id, step FROM steps JOIN (SELECT episode_id, agent_id FROM "
            f"episodes WHERE {where or 'true'}) USING (episode_id, agent_id) "
            f"WHERE {where_steps or 'true'}"
        )
        return {tuple(row.values()) for row in found.to_pylist()}

    def is_known(self, key: Key) -> bool:
        row = self.rows[key]
        return row["terminated"] or row["next_observation"] is not None

    def following(self, key: Key) -> list[float]:
        row = self.rows[key]
        found: list[float] = row["next_observation"] or row["observation"]
        return found

    def after(self, key: Key) -> Key | None:
        """The step that an episode goes on with, if its observation is what this one led to."""
        row, after = self.rows[key], (*key[:2], key[2] + 1)
        if row["terminated"] or row["truncated"] or after not in self.rows:
            return None
        final = row["final_observation"]
        return after if final is None or final == self.rows[after]["observation"] else None

    def chains(self) -> Iterator[list[Key]]:
        for key in sorted(self.rows):
            before = (*key[:2], key[2] - 1)
            if before not in self.rows or self.after(before) != key:
                chain = [key]
                while (after := self.after(chain[-1])) is not None:
                    chain.append(after)
                yield chain

    @cached_property
    def stacks(self) -> dict[Key, list[list[float]]]:
        """Frames up to each step, three of them, the first one of a chain repeated."""
        found = {}
        for chain in self.chains():
            frames = [self.rows[key]["observation"] for key in chain]
            for at, key in enumerate(chain):
                found[key] = [frames[max(0, at - back)] for back in (2, 1, 0)]
        return found

    def n_steps(self, key: Key, n: int, gamma: float) -> tuple[float, float, Key]:
        """The discounted sum, the discount and the last step of up to n steps."""
        keys = [key]
        while len(keys) < n and (after := self.after(keys[-1])) is not None:
            keys.append(after)
        if len(keys) > 1 and not self.is_known(keys[-1]):
            keys.pop()
        reward = sum(gamma**k * np.float32(self.rows[at]["reward"]) for k, at in enumerate(keys))
        ended = self.rows[keys[-1]]["terminated"]
        return reward, 0.0 if ended else gamma ** len(keys), keys[-1]


def all_rows(view: ReplayView, item: Item) -> dict[str, Any]:
    """Every item of a view once, each field of all batches put together."""
    try:
        sampler = view.in_order(7, item)
    except EmptyReplayError:
        return {}
    batches = []
    while True:
        try:
            batches.append(sampler.sample())
        except EmptyReplayError:
            break
    return {
        name: np.concatenate([getattr(batch, name) for batch in batches])
        for name, value in vars(batches[0]).items()
        if isinstance(value, np.ndarray)
    }


def key_of(observation: Any) -> Key:
    """Which step an observation is of."""
    return (*NAMES[int(observation[0])], int(observation[1]))


def opened(snapshot: Snapshot, **options: Any) -> ReplayView | None:
    try:
        return snapshot.replay(cache=False, **options)
    except EmptyReplayError:
        return None


def fast(test: Callable[..., None]) -> Callable[..., None]:
    return settings(
        max_examples=15,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )(test)


Make = Callable[[Any], Dataset]


def check_transitions(told: Told, where: Any, where_steps: Any, item: Transitions, k: int) -> None:
    view = opened(told.snapshot, where=where, where_steps=where_steps, frame_stack=k)
    expected = told.keys(where, where_steps)
    if item.only_bootstrappable:
        expected = {key for key in expected if told.is_known(key)}
    rows = {} if view is None else all_rows(view, item)
    observations = rows.get("observations", np.zeros((0, k, 2))).reshape(-1, k, 2)
    keys = [key_of(frames[-1]) for frames in observations]
    assert len(keys) == len(expected)
    assert set(keys) == expected
    assert len({key.tobytes() for key in rows.get("keys", [])}) == len(keys)
    for i, key in enumerate(keys):
        reward, discount, last = told.n_steps(key, item.n_step, item.discount)
        assert rows["rewards"][i] == pytest.approx(reward, rel=1e-6, abs=1e-6)
        assert rows["discounts"][i] == np.float32(discount)
        assert rows["actions"][i] == told.rows[key]["action"]
        assert rows["bootstrappable"][i] == told.is_known(key)
        assert observations[i].tolist() == told.stacks[key][3 - k :]
        if told.is_known(last):
            stack = [*told.stacks[last][4 - k :], told.following(last)]
            assert rows["next_observations"][i].reshape(k, 2).tolist() == stack[-k:]


TRANSITIONS: Final = st.builds(
    Transitions,
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.sampled_from([1, 1, 2, 3, 5, 1023]),
    st.booleans(),
)


@fast
@given(COMMITS, WHERE, WHERE_STEPS, TRANSITIONS, st.sampled_from([1, 3]))
def test_transitions_are_those_of_sql(
    make_dataset: Make, commits: Any, where: Any, where_steps: Any, item: Any, k: int
) -> None:
    check_transitions(Told(make_dataset(commits).snapshot()), where, where_steps, item, k)


@pytest.mark.chaos
@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(COMMITS, WHERE, WHERE_STEPS, TRANSITIONS, st.sampled_from([1, 2, 3]))
def test_transitions_of_many_datasets(
    make_dataset: Make, commits: Any, where: Any, where_steps: Any, item: Any, k: int
) -> None:
    check_transitions(Told(make_dataset(commits).snapshot()), where, where_steps, item, k)


def sequences_of(told: Told, item: Sequences) -> dict[Key, tuple[list[Key], list[bool]]]:
    """By the first step: the steps of each sequence, and which of them are learned from.

    One that has nothing to learn from but what those before it have is none.
    """
    found = {}
    for chain in told.chains():
        covered: set[Key] = set()
        for start in range(0, len(chain), item.length - item.overlap):
            steps = chain[start : start + item.burn_in + item.length]
            is_first = start == 0 and chain[0][2] == 0
            mask = [is_first or at >= item.burn_in for at in range(len(steps))]
            learned = {key for key, is_learned in zip(steps, mask, strict=True) if is_learned}
            if learned - covered:
                found[chain[start]] = steps, mask
            covered |= learned
    return found


def check_steps(told: Told, rows: Mapping[str, Any], i: int, steps: list[Key], num: int) -> None:
    """One row [T], of steps and then nothing."""
    observations, following = rows["observations"][i], rows["next_observations"][i]
    for t, key in enumerate(steps):
        row = told.rows[key]
        assert observations[t].tolist() == row["observation"]
        assert rows["actions"][i, t] == row["action"]
        assert rows["rewards"][i, t] == np.float32(row["reward"])
        assert rows["discounts"][i, t] == (0 if row["terminated"] else np.float32(0.9))
        assert rows["bootstrappable"][i, t] == told.is_known(key)
        if told.is_known(key):
            assert following[t].tolist() == told.following(key)
    for name in ("rewards", "discounts", "bootstrappable", "keys", "actions", "mask"):
        assert not rows[name][i, len(steps) : num].any()
    assert not observations[len(steps) + 1 : num].any()


SEQUENCES: Final = st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(0, 3)).map(
    lambda sizes: Sequences(sizes[0], min(sizes[1], sizes[0] - 1), sizes[2], 0.9)
)


@pytest.mark.slow
@fast
@given(COMMITS, WHERE, WHERE_STEPS, SEQUENCES)
def test_sequences_and_masks_are_exact(
    make_dataset: Make, commits: Any, where: Any, where_steps: Any, item: Sequences
) -> None:
    told = Told(make_dataset(commits).snapshot())
    allowed = told.keys(where, where_steps)
    expected = {key: row for key, row in sequences_of(told, item).items() if key in allowed}
    view = opened(told.snapshot, where=where, where_steps=where_steps)
    rows = {} if view is None else all_rows(view, item)
    keys = [key_of(row[0]) for row in rows.get("observations", [])]
    assert sorted(keys) == sorted(expected)
    for i, key in enumerate(keys):
        steps, mask = expected[key]
        check_steps(told, rows, i, steps, item.num_steps)
        assert rows["mask"][i, : len(steps)].tolist() == mask


@pytest.mark.slow
@fast
@given(COMMITS, WHERE, st.booleans())
def test_episodes_are_whole(make_dataset: Make, commits: Any, where: Any, complete: bool) -> None:
    told = Told(make_dataset(commits).snapshot())
    allowed = told.keys(where, None)
    expected = {}
    for chain in told.chains():
        last = told.rows[chain[-1]]
        is_complete = chain[0][2] == 0 and (last["terminated"] or last["truncated"])
        if chain[0] in allowed and (is_complete or not complete):
            expected[chain[0]] = chain
    view = opened(told.snapshot, where=where)
    found = []
    with_episodes = view is not None and bool(expected)
    item = Episodes(only_complete=complete, discount=0.9)
    for batch in _one_by_one(view, item) if with_episodes and view is not None else ():
        observations: Any = batch.observations
        key = key_of(observations[0, 0])
        found.append(key)
        assert batch.mask is not None
        assert batch.mask.all()
        assert batch.mask.shape == (1, len(expected[key]))
        check_steps(told, vars(batch), 0, expected[key], len(expected[key]))
    assert sorted(found) == sorted(expected)


def _one_by_one(view: ReplayView, item: Item) -> Iterator[Batch]:
    sampler = view.in_order(1, item)
    while True:
        try:
            yield sampler.sample()
        except EmptyReplayError:
            return


SELECTORS: Final[dict[str, Callable[[ReplayView, Item, int], Any]]] = {
    "uniform": lambda view, item, size: view.uniform(size, item, seed=1),
    "shuffled": lambda view, item, size: view.shuffled(size, item, seed=1),
    "prioritized": lambda view, item, size: view.prioritized(size, item, seed=1),
    "recent": lambda view, item, size: view.recent(size, item, max_staleness=3, seed=1),
    "weighted": lambda view, item, size: view.weighted(
        size, item, weight="1 + coalesce(policy_version, 1)", seed=1, correct=True
    ),
    "mixture": lambda view, item, size: mixture(
        [view.uniform(3, item, seed=1)], [1], batch_size=size, seed=1
    ),
}


@pytest.mark.slow
@fast
@given(COMMITS, st.sampled_from([Transitions(0.9, 2), Sequences(3, 1, 1)]), st.integers(1, 40))
def test_every_sampler_draws_rows_of_the_view(
    make_dataset: Make, commits: Any, item: Item, size: int
) -> None:
    """Also where a batch is larger than the data; what `indices` name, the batch holds."""
    view = opened(make_dataset(commits).snapshot(), columns=("policy_version",))
    rows = all_rows(view, item) if view is not None else {}
    for name, make in SELECTORS.items() if view is not None and rows else ():
        try:
            batches = [make(view, item, size).sample() for _ in range(3)]
        except EmptyReplayError:
            assert name == "recent"
            starts = view.candidates(item).positions(rows["indices"])
            versions = view.packed.records.take("column.policy_version", starts)
            assert (versions < 0).all()
            continue
        for batch in batches:
            assert len(batch) == (min(size, len(rows["keys"])) if name == "shuffled" else size)
            for field in set(rows) - {"weights", "indices"}:
                assert np.array_equal(
                    getattr(batch, field), rows[field][batch.indices], equal_nan=True
                ), (name, field)
            assert (batch.weights.dtype, batch.indices.dtype) == (np.float32, np.int64)
            assert batch.weights.max() == 1
            assert batch.weights.min() > 0


@pytest.mark.slow
@fast
@given(COMMITS, WHERE, WHERE_STEPS, st.integers(1, 9))
def test_weights_are_those_of_sql(
    make_dataset: Make, commits: Any, where: Any, where_steps: Any, size: int
) -> None:
    told = Told(make_dataset(commits).snapshot())
    rows = told.snapshot.sql(
        f"SELECT episode_id, agent_id, steps.step, {WEIGHT} AS weight FROM steps JOIN "
        "(SELECT episode_id, agent_id, num_steps FROM episodes) USING (episode_id, agent_id)"
    ).to_pylist()
    weights = {(row["episode_id"], row["agent_id"], row["step"]): row["weight"] for row in rows}
    allowed = {key for key in told.keys(where, where_steps) if told.is_known(key)}
    view = opened(told.snapshot, where=where, where_steps=where_steps)
    if view is None or not any(weights[key] for key in allowed):
        return
    sampler = view.weighted(size, weight=WEIGHT, seed=0, correct=True)
    seen = set()
    for _ in range(60):
        batch = sampler.sample()
        observations: Any = batch.observations
        keys = [key_of(observation) for observation in observations]
        own = np.array([weights[key] for key in keys])
        assert batch.weights == pytest.approx(own.min() / own, rel=1e-6)
        seen |= set(keys)
    assert seen <= {key for key in allowed if weights[key]}


def test_one_step_is_enough_for_everything(lake: Lake) -> None:
    dataset = lake.dataset("one")
    dataset.append([_piece(("a", ""), 0, 1, "terminated", "none", 7)])
    view = dataset.snapshot().replay(columns=("policy_version",), cache=False)
    for item in (Transitions(0.9, 1023), Sequences(4, 3, 2), Episodes()):
        for name, make in SELECTORS.items():
            if name == "mixture" and isinstance(item, Episodes):
                continue
            batch = make(view, item, 9).sample()
            assert set(batch.indices.tolist()) == {0}
            assert (batch.weights == 1).all()
            assert not batch.discounts.any()
