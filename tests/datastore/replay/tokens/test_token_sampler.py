"""Batches of token sequences: padded and packed, whole groups, weights, windows, exact resume."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EmptyReplayError,
    QueryError,
    QueryRefusedError,
    SchemaMismatchError,
)
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.replay.prefetch import prefetch
from replaylake.datastore.replay.to_torch import TorchSampler, to_torch
from replaylake.datastore.replay.tokens.token_batch import TokenBatch
from replaylake.datastore.replay.tokens.token_sampler import PackedPlanner, TokenSampler
from replaylake.datastore.replay.tokens.token_view import TokenSequences

Make = Callable[..., Episode]
Samplers = Callable[[TokenSequences], TokenSampler]


@pytest.fixture
def talks(lake: Lake, make_dialogue: Make) -> TokenSequences:
    """40 dialogues in groups of four: dialogue i has 3 + i tokens, return i, and version i // 4."""

    def dialogue(number: int) -> Episode:
        return make_dialogue(
            f"e{number:02}",
            1,
            rewards=[float(number)],
            policy_versions=[number // 4],
            extras={
                "observation_tokens": [[number] * (2 + number)],
                "action_tokens": [[100 + number]],
                "action_log_probs": [[-0.5]],
                "group_id": [f"g{number % 10}"],
            },
        )

    lake.dataset("talks").append([dialogue(number) for number in range(40)])
    return lake.snapshot("talks").token_sequences()


def _ids(batches: list[TokenBatch[Any]]) -> list[int]:
    """The dialogues of some batches, by their returns."""
    return [int(value) for batch in batches for value in batch.returns]


def test_a_padded_batch(talks: TokenSequences) -> None:
    batch = talks.padded(8, seed=0, versions=True).sample()
    longest = int(batch.lengths.max())
    assert batch.token_ids.shape == batch.loss_mask.shape == (8, longest)
    assert batch.log_probs is not None
    assert batch.versions is not None
    for row, number in enumerate(_ids([batch])):
        length = 3 + number
        padding = [0] * (longest - length)
        assert batch.lengths[row] == length
        assert batch.token_ids[row].tolist() == [*[number] * (length - 1), 100 + number, *padding]
        assert batch.loss_mask[row].nonzero()[0].tolist() == [length - 1]
        assert batch.log_probs[row].nonzero()[0].tolist() == [length - 1]
        assert batch.versions[row].tolist()[:length] == [-1] * (length - 1) + [number // 4]
        assert set(batch.versions[row].tolist()[length:]) <= {-1}
        assert batch.oldest_versions[row] == number // 4
        assert talks.table["episode_id"][int(batch.indices[row])].as_py() == f"e{number:02}"
    dtypes = [batch.token_ids, batch.loss_mask, batch.log_probs, batch.versions, batch.returns]
    assert [str(array.dtype) for array in dtypes] == [
        "int32",
        "bool",
        "float32",
        "int64",
        "float32",
    ]
    assert batch.num_tokens == batch.lengths.sum()
    assert len(batch) == 8


def test_a_packed_batch_holds_whole_sequences(talks: TokenSequences) -> None:
    batches = list(talks.packed(100, seed=0, versions=True).rest_of_epoch())
    assert sorted(_ids(batches)) == list(range(40))
    # 900 tokens: nine batches, if each were full.
    assert len(batches) <= 10
    for batch in batches:
        assert batch.cu_seqlens is not None
        assert batch.position_ids is not None
        assert batch.sequence_ids is not None
        assert batch.log_probs is not None
        num = int(batch.cu_seqlens[-1])
        assert num <= 100
        assert batch.token_ids.shape == batch.loss_mask.shape == batch.log_probs.shape == (num,)
        for row, number in enumerate(_ids([batch])):
            own = slice(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1]))
            assert batch.token_ids[own].tolist() == [number] * (2 + number) + [100 + number]
            assert batch.position_ids[own].tolist() == list(range(3 + number))
            assert set(batch.sequence_ids[own].tolist()) == {row}
            assert batch.loss_mask[own].nonzero()[0].tolist() == [2 + number]


def test_tensors_share_the_memory_of_a_batch(talks: TokenSequences) -> None:
    torch = pytest.importorskip("torch")
    for sampler in (talks.padded(8, seed=0, versions=True), talks.packed(99, seed=0)):
        batch = sampler.sample()
        tensors = to_torch(batch)
        assert isinstance(tensors, TokenBatch)
        assert tensors.token_ids.dtype == torch.int32
        assert tensors.loss_mask.dtype == torch.bool
        assert tensors.indices is batch.indices
        for name, value in vars(batch).items():
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(np.asarray(getattr(tensors, name)), value)
        batch.token_ids[...] = 7
        assert (tensors.token_ids == 7).all()
        with pytest.raises(ConfigInvalidError, match="found Tensor, expected a Batch of numpy"):
            to_torch(tensors)  # type: ignore[call-overload]


def test_memory_is_written_again_only_if_asked_for(talks: TokenSequences) -> None:
    expected = [_ids([batch]) for batch in talks.padded(7, seed=3).rest_of_epoch()]
    for reuse, is_own in ((0, True), (1, False), (3, False)):
        sampler = talks.padded(7, seed=3, reuse=reuse)
        batches = [sampler.sample() for _ in range(6)]
        for batch, ids in list(zip(batches, expected, strict=True))[0 if is_own else 5 - reuse :]:
            last = batch.lengths - 1
            assert (batch.token_ids[np.arange(len(batch)), last] - 100).tolist() == ids
        kept = [
            (batch.token_ids[np.arange(len(batch)), batch.lengths - 1] - 100).tolist() == ids
            for batch, ids in zip(batches, expected, strict=True)
        ]
        assert all(kept) == is_own
    with pytest.raises(ConfigInvalidError, match="reuse -1"):
        talks.padded(7, seed=3, reuse=-1)


def test_first_fit_decreasing() -> None:
    # By hand: 6, 5, 4, 3, 2 into tens: 6 + 4, 5 + 3 + 2.
    lengths = np.array([2, 3, 4, 5, 6])
    batches = PackedPlanner(10).cut(np.arange(5), np.ones(5, np.int64), lengths)
    assert [batch.tolist() for batch in batches] == [[4, 2], [3, 1, 0]]
    # Two units of one sequence and one of two, which stay together.
    batches = PackedPlanner(10).cut(np.arange(4), np.array([1, 2, 1]), np.array([6, 4, 4, 2]))
    assert [batch.tolist() for batch in batches] == [[1, 2, 3], [0]]


def test_an_epoch_has_each_sequence_once_in_a_new_order(talks: TokenSequences) -> None:
    sampler = talks.padded(7, seed=1)
    epochs = [_ids(list(sampler.rest_of_epoch())) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(40))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert sampler.epoch == 3
    again = talks.padded(7, seed=1)
    assert _ids(list(again.rest_of_epoch())) == epochs[0]
    assert _ids(list(talks.padded(7, seed=2).rest_of_epoch())) != epochs[0]
    sizes = [len(batch) for batch in talks.padded(7, seed=1).rest_of_epoch()]
    assert sorted(sizes) == [5, *[7] * 5]


def test_length_buckets_need_less_padding(talks: TokenSequences) -> None:
    def count_padding(sampler: TokenSampler) -> int:
        batches = list(sampler.rest_of_epoch())
        assert sorted(_ids(batches)) == list(range(40))
        return sum(batch.token_ids.size - batch.num_tokens for batch in batches)

    plain = count_padding(talks.padded(4, seed=0))
    bucketed = count_padding(talks.padded(4, seed=0, bucket_batches=10))
    # Sorted by length, four rows differ by 1, 2 and 3 tokens.
    assert bucketed == 10 * (1 + 2 + 3)
    assert plain > 3 * bucketed
    orders = [
        _ids(list(talks.padded(4, seed=s, bucket_batches=10).rest_of_epoch())) for s in (0, 1)
    ]
    assert orders[0] != orders[1], "batches lie in a random order"
    batches = list(talks.padded(8, seed=0, bucket_batches=5, max_tokens=120).rest_of_epoch())
    assert sorted(_ids(batches)) == list(range(40))
    assert max(batch.token_ids.size for batch in batches) <= 120


def test_groups_stay_together(talks: TokenSequences) -> None:
    batches = list(talks.padded(3, seed=0, groups=True).rest_of_epoch())
    assert sorted(_ids(batches)) == list(range(40))
    assert sorted(len(batch) for batch in batches) == [4, 12, 12, 12]
    for batch in batches:
        assert set(Counter(batch.groups.tolist()).values()) == {4}
        names = talks.table["group_id"].take(batch.indices).to_pylist()
        assert len(set(zip(names, batch.groups.tolist(), strict=True))) == len(batch) // 4
    for batch in talks.packed(300, seed=0, groups=True).rest_of_epoch():
        assert set(Counter(batch.groups.tolist()).values()) == {4}
    # A group of which one sample is not selected is left out: g0 has 0, 10, 20 and 30.
    sampler = talks.padded(3, seed=0, groups=True, where_sequences="num_tokens > 3")
    assert sorted(_ids(list(sampler.rest_of_epoch()))) == [n for n in range(40) if n % 10]


def test_conditions_and_staleness(talks: TokenSequences) -> None:
    sampler = talks.padded(64, seed=0, where_sequences="\"return\" < 20 and group_id <> 'g3'")
    assert sorted(_ids([sampler.sample()])) == [n for n in range(20) if n % 10 != 3]
    # Versions 0 to 9: of learner 10, those from 8 on are at most 2 behind.
    sampler = talks.padded(64, seed=0, max_staleness=2, policy_version=10)
    assert sorted(_ids([sampler.sample()])) == list(range(32, 40))
    sampler = talks.packed(99, seed=0, max_staleness=0, policy_version=9, where_sequences="true")
    assert sorted(_ids(list(sampler.rest_of_epoch()))) == list(range(36, 40))


def test_staleness_counts_tokens_without_a_version(lake: Lake, make_dialogue: Make) -> None:
    versions = [[{"start": 0, "version": 9}], None]
    lake.dataset("talks").append([make_dialogue("a", 2, extras={"action_versions": versions})])
    found = lake.snapshot("talks").token_sequences()
    assert found.table["min_policy_version"].to_pylist() == [None]
    assert found.table["max_policy_version"].to_pylist() == [9]
    with pytest.raises(SchemaMismatchError, match="1 of 1 sequences without policy versions"):
        found.padded(1, seed=0, max_staleness=0, policy_version=9)


def test_the_return_of_a_tree_selects_all_of_its_branches(lake: Lake, make_dialogue: Make) -> None:
    """The tokens that they share count in the first, whose own steps were not rewarded."""
    forked = {"parent_agent_id": ["x"], "parent_step": [0]}
    lake.dataset("talks").append(
        [
            make_dialogue("a", 2, agent_id="x", rewards=[0.0, 0.0]),
            make_dialogue("a", 1, agent_id="x~1", rewards=[1.0], extras=forked),
        ]
    )
    found = lake.snapshot("talks").token_sequences()
    num_sampled = 1 + 2 + 1  # of steps 0 and 1 of x, and step 0 of x~1
    for condition, num_trained in (("episode_return > 0", num_sampled), ('"return" > 0', 1)):
        batch = found.padded(2, seed=0, where_sequences=condition).sample()
        assert batch.loss_mask.sum() == num_trained
        assert set(batch.episode_returns.tolist()) == {1.0}


def test_prefetch_and_torch_draw_token_batches(talks: TokenSequences) -> None:
    def dump(batch: TokenBatch[Any]) -> list[Any]:
        return [np.asarray(batch.token_ids).tolist(), np.asarray(batch.returns).tolist()]

    reference = talks.padded(4, seed=3)
    expected = [dump(reference.sample()) for _ in range(12)]
    with prefetch(talks.padded(4, seed=3, reuse=4)) as ahead:
        assert [dump(ahead.sample()) for _ in range(5)] == expected[:5]
        state = ahead.state_dict()
    with prefetch(talks.padded(4, seed=3)) as ahead:
        ahead.load_state_dict(state)
        assert [dump(ahead.sample()) for _ in range(7)] == expected[5:]
    with pytest.raises(ConfigInvalidError, match="found a sampler of reuse 1"):
        prefetch(talks.padded(4, seed=3, reuse=1))
    tensors = TorchSampler(talks.padded(4, seed=3))
    found = [tensors.sample() for _ in range(3)]
    assert all(isinstance(batch.loss_mask, torch.Tensor) for batch in found)
    assert [dump(batch) for batch in found] == expected[:3]


def test_weights_draw_in_proportion(talks: TokenSequences) -> None:
    sampler = talks.padded(40, seed=0, weight='case when "return" < 4 then "return" else 0 end')
    counts = Counter(_ids([sampler.sample() for _ in range(150)]))
    assert set(counts) == {1, 2, 3}
    # Of 6,000 draws: 1,000, 2,000 and 3,000, with standard deviations of 29, 37 and 39.
    for number in (1, 2, 3):
        assert abs(counts[number] - 1000 * number) < 200
    groups = talks.padded(10, seed=0, weight="group_id = 'g7'", groups=True)
    assert set(_ids([groups.sample()])) == {7, 17, 27, 37}


@pytest.mark.parametrize(
    "make",
    [
        lambda view: view.padded(3, seed=5),
        lambda view: view.padded(3, seed=5, bucket_batches=4, max_tokens=100),
        lambda view: view.padded(2, seed=5, groups=True, bucket_batches=2),
        lambda view: view.packed(90, seed=5),
        lambda view: view.packed(90, seed=5, weight="num_tokens", where_sequences="num_turns = 1"),
        lambda view: view.packed(99, seed=5, max_staleness=np.int64(3), policy_version=np.int32(9)),
    ],
)
def test_a_saved_position_has_the_same_batches(talks: TokenSequences, make: Samplers) -> None:
    reference = make(talks)
    batches = [_ids([reference.sample()]) for _ in range(45)]
    for taken in (0, 1, 7, 30):
        sampler = make(talks)
        for _ in range(taken):
            sampler.sample()
        state = json.loads(json.dumps(sampler.state_dict()))
        other = make(talks)
        other.sample()
        other.load_state_dict(state)
        assert [_ids([other.sample()]) for _ in range(45 - taken)] == batches[taken:]
        assert other.state_dict() == reference.state_dict()


def test_ranks_share_the_batches(talks: TokenSequences) -> None:
    one = talks.padded(3, seed=5)
    batches = [_ids([one.sample()]) for _ in range(30)]
    ranks = [talks.padded(3, seed=5, rank=rank, num_ranks=3) for rank in range(3)]
    drawn = [[_ids([rank.sample()]) for _ in range(10)] for rank in ranks]
    assert [ids for together in zip(*drawn, strict=True) for ids in together] == batches
    states = [rank.state_dict() for rank in ranks]
    assert states[0] == states[1] == states[2]
    # 14 batches an epoch: five rounds.
    nums = [
        len(list(talks.padded(3, seed=5, rank=rank, num_ranks=3).rest_of_epoch()))
        for rank in range(3)
    ]
    assert nums == [5, 5, 5]
    other = talks.padded(3, seed=5, rank=1, num_ranks=3)
    other.load_state_dict(states[0])
    assert _ids([other.sample()]) == _ids([ranks[1].sample()])
    with pytest.raises(ConfigInvalidError, match="found rank 3 of 3"):
        talks.padded(3, seed=5, rank=3, num_ranks=3)


def test_a_batch_that_cannot_be_read_is_drawn_again(
    talks: TokenSequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = talks.padded(3, seed=5)
    expected = [_ids([sampler.sample()]) for _ in range(3)]
    again = talks.padded(3, seed=5)
    assert _ids([again.sample()]) == expected[0]
    with monkeypatch.context() as patch:
        patch.setattr(TokenSequences, "gather", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            again.sample()
    assert [_ids([again.sample()]) for _ in range(2)] == expected[1:]


def test_states_of_others_are_refused(talks: TokenSequences) -> None:
    sampler = talks.padded(3, seed=0)
    sampler.sample()
    state = sampler.state_dict()
    expected = _ids([sampler.sample()])
    sampler.load_state_dict(state)
    wrong: list[tuple[Any, str]] = [
        (talks.padded(4, seed=0).state_dict(), r"found a state of {'batch_size': 4}, expected of"),
        (talks.packed(99, seed=0).state_dict(), "found a state of {'layout': 'packed', "),
        (talks.padded(3, seed=0, where_sequences="num_turns = 1").state_dict(), "where_sequences"),
        (state | {"num_taken": 99}, "num_taken is 99"),
        (state | {"window": -1}, "window -1 of epoch 0"),
        (state | {"kind": "uniform"}, "one of a uniform sampler"),
        ({}, "the entries none"),
        (3, "a int"),
    ]
    for found, message in wrong:
        with pytest.raises(ConfigInvalidError, match=message):
            sampler.load_state_dict(found)
    assert _ids([sampler.sample()]) == expected


def test_refusals(talks: TokenSequences) -> None:
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ConfigInvalidError, "batch size 0", {"batch_size": 0}),
        (ConfigInvalidError, "seed None", {"seed": None}),
        (
            ConfigInvalidError,
            r"max_tokens 20 and a sequence of 42 tokens, that of episode 'e39', .*num_tokens <= 20",
            {"max_tokens": 20},
        ),
        (
            ConfigInvalidError,
            "max_tokens 150 and group 'g9', of 4 sequences and 168 tokens with padding",
            {"max_tokens": 150, "groups": True},
        ),
        (ConfigInvalidError, "where_sequences 3, expected SQL", {"where_sequences": 3}),
        (QueryError, "where_sequences .*columns of `sequences`", {"where_sequences": "nope > 1"}),
        (QueryRefusedError, "where_sequences: .*random", {"where_sequences": "random() > 0"}),
        (QueryRefusedError, "found 1 values of 40 sequences", {"where_sequences": "max(1) > 0"}),
        (EmptyReplayError, "found 40 sequences, none", {"where_sequences": "num_tokens > 99"}),
        (
            SchemaMismatchError,
            "found -3.0 for the sequence of episode 'e00'",
            {"weight": "-num_tokens"},
        ),
        (SchemaMismatchError, "found NULL for .* the first of 40", {"weight": "null"}),
        (SchemaMismatchError, "found nan for", {"weight": "'nan'::double"}),
        (SchemaMismatchError, "found 0 for all of 40", {"weight": "0"}),
        (ConfigInvalidError, "max_staleness 1 without policy_version", {"max_staleness": 1}),
        (ConfigInvalidError, "policy_version 1 without max_staleness", {"policy_version": 1}),
        (ConfigInvalidError, "bucket_batches 0", {"bucket_batches": 0}),
        (ConfigInvalidError, "groups 'no', expected True or False", {"groups": "no"}),
    ]
    for error, message, options in refused:
        with pytest.raises(error, match=message):
            talks.padded(**({"batch_size": 4, "seed": 0} | options))
    with pytest.raises(ConfigInvalidError, match="max_tokens 41 and a sequence of 42 tokens"):
        talks.packed(41, seed=0)
    with pytest.raises(ConfigInvalidError, match="index 40"):
        talks.read(40)
    with pytest.raises(ConfigInvalidError, match="found sequences -1 to 0, expected rows"):
        talks.gather(np.array([0, -1]), is_packed=True, versions=False)


def test_staleness_needs_versions_and_groups_a_group(lake: Lake, make_dialogue: Make) -> None:
    lake.dataset("talks").append([make_dialogue("a"), make_dialogue("b")])
    talks = lake.snapshot("talks").token_sequences()
    with pytest.raises(SchemaMismatchError, match="2 of 2 sequences without policy versions"):
        talks.padded(1, seed=0, max_staleness=1, policy_version=5)
    with pytest.raises(SchemaMismatchError, match="2 of 2 sequences without group_id"):
        talks.padded(1, seed=0, groups=True)
    batch = talks.padded(2, seed=0).sample()
    assert batch.groups.tolist() == batch.oldest_versions.tolist() == [-1, -1]


def test_a_dataset_without_log_probs(lake: Lake, make_dialogue: Make) -> None:
    episode = make_dialogue("a", 1)
    del episode.extras["action_log_probs"]
    lake.dataset("talks").append([episode])
    talks = lake.snapshot("talks").token_sequences()
    assert not talks.has_log_probs
    assert talks.padded(1, seed=0).sample().log_probs is None
    assert talks.read(0).log_probs is None
