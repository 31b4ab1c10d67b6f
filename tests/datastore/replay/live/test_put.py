"""Pieces that are put into a live view are what a commit of them would have been."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.episode_columns import EpisodeColumns
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, concatenate
from replaylake.datastore.errors import ConfigInvalidError, EpisodeInvalidError, SchemaMismatchError
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.delete import delete
from replaylake.datastore.maintenance.labels.annotate import annotate
from replaylake.datastore.replay.items.episodes import Episodes
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.live.live_view import LiveView
from replaylake.datastore.replay.protocols import Item, SelectedItems

Make = Callable[..., Episode]
ITEMS = (
    Transitions(n_step=3),
    Transitions(only_bootstrappable=False),
    Sequences(5, overlap=2, burn_in=1),
    Episodes(),
)


def drawn(view: LiveView, item: Item) -> Any:
    candidates = view.candidates(item)
    numbers = np.arange(*candidates.bounds())
    positions = candidates.positions(numbers)
    return view.assembler(item).assemble(positions[positions >= 0], SelectedItems(numbers)).batch


def rows(batch: Any) -> list[Any]:
    names = ("keys", "observations", "actions", "rewards", "next_observations", "discounts")
    found = zip(*(leaves(getattr(batch, name), len(batch)) for name in names), strict=True)
    # Padding at the end differs with the longest row of the batch; how a sum is rounded, too.
    return sorted(tuple(tuple(v for v in part if v) for part in row) for row in found)


def leaves(values: Any, num: int) -> Any:
    if isinstance(values, dict):
        values = np.concatenate([leaves(sub, num) for sub in values.values()], 1)
    return np.round(np.asarray(values).reshape(num, -1), 4)


def pieces_of(make_told: Make, lengths: list[int], cuts: list[int]) -> list[Episode]:
    """Whole episodes cut at some steps, in an order in which they might come."""
    pieces = []
    for number, length in enumerate(lengths):
        at = [0, *(cut for cut in cuts if cut < length), length]
        for first, end in pairwise(at):
            pieces.append(
                make_told(
                    number,
                    end - first,
                    first,
                    truncated=end == length and number % 2 == 0,
                    terminated=end == length and number % 2 == 1,
                    behavior_log_probs=np.full(end - first, -0.5, np.float32),
                )
            )
    return pieces


def joined(pieces: list[Episode]) -> EpisodeColumns:
    """The same pieces as a worker hands them over."""
    extras = {name: np.concatenate([p.extras[name] for p in pieces]) for name in pieces[0].extras}
    finals: Any = [piece.final_observation for piece in pieces]
    if isinstance(finals[0], dict):
        finals = {key: np.stack([final[key] for final in finals]) for key in finals[0]}
    steps: dict[str, Any] = {
        name: concatenate([getattr(piece, name) for piece in pieces])
        for name in (
            "observations",
            "actions",
            "rewards",
            "behavior_log_probs",
            "action_masks",
            "policy_versions",
        )
        if getattr(pieces[0], name) is not None
    }
    return EpisodeColumns(
        steps=Episode(episode_id="", extras=extras, **steps),
        episode_ids=[piece.episode_id for piece in pieces],
        lengths=np.array([len(piece) for piece in pieces]),
        first_steps=np.array([piece.first_step for piece in pieces]),
        terminated=np.array([piece.terminated for piece in pieces]),
        truncated=np.array([piece.truncated for piece in pieces]),
        final_observations=finals if isinstance(finals, dict) else np.stack(finals),
    )


@pytest.mark.parametrize("frame_stack", [1, 3])
@pytest.mark.parametrize("order", ["by step", "any"])
def test_as_if_they_had_been_committed(
    dataset: Dataset, make_told: Make, frame_stack: int, order: str
) -> None:
    pieces = pieces_of(make_told, [1, 2, 37, 90, 70], [3, 11, 12, 30])
    rng = np.random.default_rng(0)
    if order == "any":
        pieces = [pieces[i] for i in rng.permutation(len(pieces))]
    with (
        dataset.follow(frame_stack=frame_stack) as view,
        dataset.follow(frame_stack=frame_stack) as other,
    ):
        for item in ITEMS:
            view.candidates(item)
        while pieces:
            num = rng.integers(1, 5)
            some, pieces = pieces[:num], pieces[num:]
            before = view.num_steps
            view.put(joined(some) if rng.random() < 0.5 else some)
            assert view.num_steps == before + sum(map(len, some))
            # One commit a piece: what is in one commit is decoded as one run.
            for piece in some:
                version = dataset.append([piece]).version
        assert view.wait_for(version)
        assert other.wait_for(version)
        for item in ITEMS:
            one, two = drawn(view, item), drawn(other, item)
            if order == "by step" or isinstance(item, Transitions):
                assert rows(one) == rows(two)
        # The commits brought nothing new to the view that had the steps already.
        assert view.num_steps == view.num_transitions == other.num_steps == 200


def test_masks_columns_and_nested_spaces(lake: Lake) -> None:
    dataset = lake.dataset("d")
    space = Dict({"near": Box((2,)), "far": Discrete(4)})
    extras = {
        "state": pa.list_(pa.float32(), 2),
        "worker": pa.int64(),
        "value": pa.float64(),
    }
    dataset.create(space, Discrete(3), mask_size=3, extras=extras)
    rng = np.random.default_rng(0)

    def piece(name: str, first: int, num: int, **fields: Any) -> Episode:
        observations = {"near": rng.normal(size=(num + 1, 2)), "far": rng.integers(4, size=num + 1)}
        masks = np.ones((num, 3), np.bool_)
        masks[:, 2] = False
        return Episode(
            episode_id=name,
            first_step=first,
            observations={key: array[:-1] for key, array in observations.items()},
            final_observation={key: array[-1] for key, array in observations.items()},
            actions=rng.integers(2, size=num),
            rewards=rng.normal(size=num),
            policy_versions=np.arange(num),
            action_masks=masks,
            **fields,
        )

    def extras_of(num: int) -> dict[str, Any]:
        state = rng.normal(size=(num, 2)).astype(np.float32)
        return {"state": list(state), "worker": np.arange(num), "value": rng.normal(size=num)}

    whole = extras_of(6)
    ready = {**whole, "state": np.array(whole["state"])}
    pieces = [
        piece("a", 0, 6, extras=ready, terminated=True),
        # Of other types, which have to be converted, and some missing.
        piece("b", 0, 3, extras={"state": whole["state"][:3], "worker": np.arange(3, dtype="i4")}),
        piece("b", 3, 2, extras={"worker": [5, 6]}),
        piece("c", 0, 2, extras={"worker": [0, 0]}, terminated=True),
    ]
    names = ["state", "worker", "value", "policy_version"]
    with dataset.follow(columns=names) as view, dataset.follow(columns=names) as other:
        view.put(pieces[:1])
        view.put(pieces[1:])
        # Together, with one column that has to be converted, and one that is missing.
        others = [
            replace(one, extras={"worker": np.arange(len(one), dtype="i4")})
            for one in (piece("d", 0, 4), piece("e", 0, 1), piece("f", 2, 3, terminated=True))
        ]
        pieces += others
        view.put(joined(others))
        for number, one in enumerate(pieces):
            version = dataset.append([one], producer="p", sequence=number).version
        assert other.wait_for(version)
        one, two = drawn(view, Transitions()), drawn(other, Transitions())
        order = [np.lexsort(batch.keys.T) for batch in (one, two)]
        assert rows(one) == rows(two)
        for field in ("action_masks", "next_action_masks", "behavior_log_probs"):
            pair = [getattr(b, field)[o] for b, o in zip((one, two), order, strict=True)]
            np.testing.assert_array_equal(*pair)
        for name in names:
            pair = [b.columns[name][o] for b, o in zip((one, two), order, strict=True)]
            np.testing.assert_array_equal(*pair)


def test_images_and_many_at_once(lake: Lake) -> None:
    """Large records are written one by one, and megabytes of them in several blocks."""
    dataset = lake.dataset("d")
    dataset.create(Box((84, 84, 4), "uint8", low=0, high=255), Discrete(2))
    frames = np.random.default_rng(0).integers(0, 256, (130, 84, 84, 4), np.uint8)

    def piece(first: int, end: int) -> Episode:
        return Episode(
            episode_id="e",
            first_step=first,
            observations=frames[first:end],
            actions=np.arange(first, end) % 2,
            rewards=np.arange(first, end, dtype=np.float64),
            final_observation=frames[end],
        )

    cuts = [0, 3, 60, 100, 129]
    with dataset.follow(max_steps=200) as view:
        view.put([piece(*cut) for cut in pairwise(cuts)])
        batch = drawn(view, Transitions())
        np.testing.assert_array_equal(batch.observations, frames[:-1])
        np.testing.assert_array_equal(batch.next_observations, frames[1:])
        assert batch.rewards.tolist() == list(range(129))


@pytest.mark.slow
def test_those_who_put_need_not_read_it_again(
    lake: Lake, dataset: Dataset, make_told: Make
) -> None:
    """What others do to those steps shows all the same."""
    with dataset.follow(without_producers=["run"]) as view:
        pieces = [make_told(number, 5, terminated=True) for number in range(4)]
        view.put(pieces)
        for number, piece in enumerate(pieces):
            dataset.append([piece], producer="run", sequence=number)
        version = dataset.append([make_told(7, 5)], producer="run2", sequence=0).version
        assert view.wait_for(version)
        found = view.timings()
        assert (found.decode.items, found.tail.items) == (5, 5)
        assert found.decode.num_bytes == dataset.snapshot().files[-1].size_bytes
        assert found.tail.seconds > 0 < found.decode.seconds
        assert view.timings().decode == (0.0, 0, 0)
        compact(lake, "d", open_s=0)
        labels = pa.table({"episode_id": ["e1"], "score": [9.0]})
        annotate(lake, "d", labels, on="episode_id", set={"reward": "score"})
        delete(lake, "d", "episode_id = 'e2'")
        assert view.wait_for(dataset.snapshot().version)
        batch = drawn(view, Transitions())
        assert sorted(set(batch.observations[:, 0])) == [0, 1, 3, 7]
        assert view.num_steps == 20
        assert (batch.rewards == 9).sum() == 1
    # From the start, what there is is read, whoever made it.
    with dataset.follow(without_producers=["run"]) as view:
        assert view.num_steps == 20


def test_what_does_not_fit_is_named(lake: Lake, dataset: Dataset, make_told: Make) -> None:
    with dataset.follow() as view:
        wrong = make_told(1, 3, observations=np.zeros((3, 5), np.float32))
        with pytest.raises(
            EpisodeInvalidError, match=r"episode e1: observation: found shape \[5\]"
        ):
            view.put([make_told(0, 3), wrong])
        with pytest.raises(EpisodeInvalidError, match="episode e1: found no steps"):
            view.put([make_told(1, 0)])
        with pytest.raises(EpisodeInvalidError, match="episode_id: found ''"):
            view.put([make_told(1, 2, episode_id="")])
        with pytest.raises(EpisodeInvalidError, match="episode e2: final_observation"):
            view.put([make_told(0, 2), make_told(2, 2, final_observation=np.zeros(3))])
        masks = np.ones((2, 5), np.bool_)
        with pytest.raises(SchemaMismatchError, match="found action masks, expected none"):
            view.put([make_told(1, 2, action_masks=masks)])
        with pytest.raises(EpisodeInvalidError, match=r"episode e1: reward at step 1: found .*nan"):
            view.put(joined([make_told(0, 3), make_told(1, 2, rewards=np.array([0, np.nan]))]))
        view.put([])
        view.put(joined([make_told(0, 3)])[:0])
        assert view.num_steps == 0
    with (
        dataset.follow(where_steps="reward > 0") as view,
        pytest.raises(ConfigInvalidError, match="put: found a view with where_steps"),
    ):
        view.put([make_told(0, 3)])


def test_there_is_room_for_the_newest(dataset: Dataset, make_told: Make) -> None:
    with dataset.follow(max_steps=100) as view:
        sampler = view.uniform(32, seed=0)
        for number in range(50):
            view.put([make_told(number, 7), make_told(number + 1000, 40)])
            assert set(sampler.sample().observations[:, 0] % 1000) <= set(range(number + 1))
        assert view.num_steps == 100
        assert set(drawn(view, Transitions()).observations[:, 0]) == {48, 49, 1047, 1048, 1049}
