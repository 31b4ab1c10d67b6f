from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.replay.items.episodes import Episodes
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.mixture import mixture
from replaylake.datastore.replay.prefetch import prefetch
from replaylake.datastore.replay.to_torch import TorchSampler, convert_sharing, to_torch
from replaylake.datastore.replay.view import ReplayView

Make = Callable[..., Episode]


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> ReplayView:
    """4,000 transitions of 100 episodes of different lengths, with action masks."""
    episodes = []
    for i, num in enumerate(np.random.default_rng(0).integers(1, 80, 100).tolist()):
        observations = np.arange(2 * num + 2, dtype=np.float32).reshape(-1, 2) + 1000 * i
        actions = np.arange(num) % 2
        episodes.append(
            Episode(
                episode_id=f"e{i}",
                observations=observations[:-1],
                actions=actions,
                rewards=observations[:-1, 0],
                final_observation=observations[-1],
                action_masks=np.stack([actions == 0, actions == 1], axis=1) | (i % 2 == 0),
            )
        )
    dataset = open_lake(tmp_path_factory.mktemp("lake"), create=True).dataset("d")
    dataset.append(episodes)
    return dataset.snapshot().replay(cache=False)


def make_batch(**changes: Any) -> Batch:
    fields: dict[str, Any] = {
        "observations": np.ones((2, 3), np.float32),
        "actions": np.array([0, 1]),
        "rewards": np.zeros(2, np.float32),
        "discounts": np.full(2, 0.99, np.float32),
        "next_observations": np.zeros((2, 3), np.float32),
        "behavior_log_probs": np.full(2, np.nan, np.float32),
        "weights": np.ones(2, np.float32),
        "keys": np.zeros((2, 2), np.uint64),
    }
    return Batch(**{**fields, **changes})


def leaves(batch: Batch, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}

    def put(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, sub in value.items():
                put(f"{name}.{key}", sub)
        elif value is not None:
            found[name] = value

    for name, value in vars(batch).items():
        put(name, value)
    return found


def same(tensors: Batch, arrays: Batch) -> bool:
    """Whether a batch of tensors, of any device, holds the arrays' values, shapes and dtypes."""
    one, other = leaves(tensors), leaves(arrays)
    assert one.keys() == other.keys()
    for name, value in other.items():
        found = one[name]
        assert isinstance(found, np.ndarray) == (name in ("keys", "indices")), name
        array = found if isinstance(found, np.ndarray) else found.cpu().numpy()
        assert (array.dtype, array.shape) == (value.dtype, value.shape), name
        if not np.array_equal(array, value, equal_nan=value.dtype.kind == "f"):
            return False
    return True


def test_shapes_and_dtypes_stay() -> None:
    tensors = to_torch(make_batch(action_masks=np.ones((2, 4), bool)))
    assert tensors.observations.dtype == torch.float32
    assert tensors.actions.dtype == torch.int64
    assert tensors.action_masks.dtype == torch.bool
    assert tensors.next_action_masks is None
    assert tensors.bootstrappable is None
    flags = to_torch(make_batch(bootstrappable=np.array([True, False]))).bootstrappable
    assert flags.tolist() == [True, False]
    assert isinstance(tensors.keys, np.ndarray)
    assert len(tensors) == 2


def test_mappings_nest() -> None:
    observations = {"a": np.ones((2, 1), np.float32), "b": {"c": np.zeros(2, np.int64)}}
    tensors = to_torch(make_batch(observations=observations))
    assert tensors.observations["a"].shape == (2, 1)
    assert tensors.observations["b"]["c"].dtype == torch.int64


def test_fields_are_taken_whatever_their_strides() -> None:
    # 4 + 1 bytes a record: strides that torch cannot take as they are.
    records = np.zeros(2, dtype=[("reward", "<f4"), ("flag", "?")])
    records["reward"] = [1.5, 2.5]
    backwards = np.arange(2, dtype=np.float32)[::-1]
    batch = make_batch(rewards=records["reward"], weights=backwards)
    for convert in (convert_sharing, to_torch):
        if convert is to_torch:
            batch = make_batch(rewards=records["reward"])
        assert same(convert(batch), batch)


def test_tensors_share_memory_as_the_arrays_do(view: ReplayView) -> None:
    batch = view.uniform(8, Transitions(0.9), seed=0).sample()
    moves = []

    def move(memory: torch.Tensor) -> torch.Tensor:
        moves.append(memory)
        return memory.clone()

    tensors = convert_sharing(batch, move)
    assert same(tensors, batch)
    # Records, discounts and weights; of the block that the batch was cut from, its own rows.
    assert sorted(len(memory) for memory in moves)[:2] == [32, 32]
    assert len(moves) == 3
    num_bytes = 2 * view.packed.records.layout.dtype.itemsize * 8
    assert num_bytes - 64 <= max(len(memory) for memory in moves) <= num_bytes
    tensors.rewards[0] = 77.0
    assert batch.rewards[0] != 77.0
    assert tensors.observations.untyped_storage().data_ptr() == (
        tensors.rewards.untyped_storage().data_ptr()
    )


def test_stacked_frames_overlap_in_memory_too(lake: Lake, make_episode: Make) -> None:
    frames = np.random.default_rng(0).integers(0, 255, (9, 4, 5), np.uint8)
    lake.dataset("f").append(
        [make_episode("e", 8, observations=frames[:8], final_observation=frames[8])]
    )
    view = lake.dataset("f").snapshot().replay(frame_stack=3, cache=False)
    for item in (Transitions(), Transitions(n_step=2), Sequences(4)):
        batch = view.uniform(6, item, seed=0).sample()
        assert same(to_torch(batch), batch)
        assert same(convert_sharing(batch, lambda memory: memory.clone()), batch)


def make_samplers(view: ReplayView) -> dict[str, Callable[[int], Any]]:
    return {
        "uniform": lambda seed: view.uniform(32, seed=seed),
        "large": lambda seed: view.uniform(1500, seed=seed),
        "n_step": lambda seed: view.uniform(256, Transitions(0.9, n_step=3), seed=seed),
        "returns": lambda seed: view.uniform(
            256, Transitions(0.9, returns=True, next_actions=True), seed=seed
        ),
        "sequences": lambda seed: view.uniform(32, Sequences(5), seed=seed),
        "episodes": lambda seed: view.uniform(4, Episodes(only_complete=False), seed=seed),
        "shuffled": lambda seed: view.shuffled(32, seed=seed),
        "prioritized": lambda seed: view.prioritized(32, seed=seed),
        "mixture": lambda seed: mixture(
            [view.uniform(1, seed=seed)] * 2, [1, 2], batch_size=32, seed=seed
        ),
    }


KINDS = [
    "uniform",
    "large",
    "n_step",
    "returns",
    "sequences",
    "episodes",
    "shuffled",
    "prioritized",
    "mixture",
]


@pytest.mark.parametrize(
    ("kind", "reuse"),
    # A mixture has no blocks to write into.
    [(kind, reuse) for kind in KINDS for reuse in (0, 1, 2, 40) if kind != "mixture" or not reuse],
)
def test_batches_are_those_of_the_sampler(view: ReplayView, kind: str, reuse: int) -> None:
    make = make_samplers(view)[kind]
    sampler, alone = TorchSampler(make(1), reuse=reuse), make(1)
    kept = []
    for _ in range(150):
        expected, found = alone.sample(), sampler.sample()
        assert same(found, expected)
        kept.append((found, expected))
        # Valid until `reuse` more were drawn, so each batch once more before that; with memory of
        # its own for good.
        valid = kept[-reuse:]
        for earlier in (valid[0], valid[len(valid) // 2], valid[-1]) if reuse else kept[::30]:
            assert same(*earlier)


def test_memory_is_written_again(view: ReplayView) -> None:
    sampler = TorchSampler(view.uniform(32, seed=0), reuse=2)
    addresses = {sampler.sample().observations.data_ptr() for _ in range(500)}
    assert len(addresses) == 2 * sampler.sampler.num_ahead  # type: ignore[attr-defined]
    one = TorchSampler(view.prioritized(32, seed=0), reuse=1)
    assert len({one.sample().observations.data_ptr() for _ in range(9)}) == 1


@pytest.mark.parametrize("num_before", [0, 1, 130])
@pytest.mark.parametrize("reuse", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_resumes_bit_for_bit(view: ReplayView, kind: str, reuse: int, num_before: int) -> None:
    """Also into a sampler without torch, and what was drawn ahead is not lost."""
    make = make_samplers(view)[kind]
    reuse = 0 if kind == "mixture" else reuse
    sampler = TorchSampler(make(1), reuse=reuse)
    for _ in range(num_before):
        sampler.sample()
    state = sampler.state_dict()
    if kind != "prioritized":
        state = json.loads(json.dumps(state))
    other, plain = TorchSampler(make(2), reuse=reuse), make(3)
    other.sample()
    other.load_state_dict(state)
    plain.load_state_dict(state)
    for _ in range(100):
        expected = plain.sample()
        assert same(sampler.sample(), expected)
        assert same(other.sample(), expected)


def test_priorities_pass_through_as_tensors_too(view: ReplayView) -> None:
    sampler = TorchSampler(view.prioritized(32, seed=0))
    sampler.sample()
    num = view.num_transitions
    errors = torch.zeros(num, requires_grad=True)
    sampler.update_priorities(np.arange(num), errors * 1 + torch.eye(num)[7])
    assert set(sampler.sample().indices.tolist()) == {7}
    with pytest.raises(ConfigInvalidError, match="expected one that draws by priorities"):
        TorchSampler(view.uniform(32, seed=0)).update_priorities([0], [1.0])


def test_tensors_are_taken_as_priorities(view: ReplayView) -> None:
    sampler = view.prioritized(8, seed=0, alpha=1.0)
    sampler.update_priorities(np.array([1, 0]), torch.tensor([5.0, 3.0]))
    assert sampler.state_dict()["priorities"]["leaves"][:2].tolist() == [3.0, 5.0]


def test_of_batches_drawn_ahead(view: ReplayView) -> None:
    alone = view.uniform(32, seed=0)
    with prefetch(view.uniform(32, seed=0)) as ahead:
        sampler = TorchSampler(ahead)
        assert all(same(sampler.sample(), alone.sample()) for _ in range(50))


def test_what_makes_no_sense_is_refused(view: ReplayView) -> None:
    mixed = mixture([view.uniform(1, seed=0)], [1], batch_size=4, seed=0)
    with pytest.raises(ConfigInvalidError, match="found reuse 2 of a MixtureSampler"):
        TorchSampler(mixed, reuse=2)
    with pytest.raises(ConfigInvalidError, match="found reuse -1"):
        TorchSampler(view.uniform(4, seed=0), reuse=-1)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigInvalidError, match="pinned=True without a CUDA device"):
            TorchSampler(view.uniform(4, seed=0), pinned=True)


class MovingSampler(TorchSampler):
    """Moves its memory as to a GPU, to somewhere else on the CPU."""

    @property
    def _shares_memory(self) -> bool:
        return False

    def _stage(self, stretch: torch.Tensor) -> torch.Tensor:
        return stretch.clone()


@pytest.mark.parametrize("reuse", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_moved_batches_are_those_of_the_sampler(view: ReplayView, kind: str, reuse: int) -> None:
    make = make_samplers(view)[kind]
    reuse = 0 if kind == "mixture" else reuse
    sampler, alone = MovingSampler(make(1), reuse=reuse), make(1)
    kept = []
    for _ in range(100):
        kept.append((sampler.sample(), alone.sample()))
        for earlier in kept[-reuse:] if reuse else kept[::30]:
            assert same(*earlier)


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("reuse", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(view: ReplayView, kind: str, reuse: int, pinned: bool) -> None:
    make = make_samplers(view)[kind]
    reuse = 0 if kind == "mixture" else reuse
    sampler, alone = TorchSampler(make(1), "cuda", reuse=reuse, pinned=pinned), make(1)
    kept = []
    for _ in range(100):
        batch = sampler.sample()
        assert batch.observations.device.type == "cuda"
        kept.append((batch, alone.sample()))
        for earlier in kept[-reuse:] if reuse else kept[::30]:
            assert same(*earlier)


@pytest.mark.gpu
def test_pinned_on_the_cpu(view: ReplayView) -> None:
    for reuse in (0, 2):
        sampler = TorchSampler(view.uniform(32, seed=0), reuse=reuse, pinned=True)
        alone = view.uniform(32, seed=0)
        for _ in range(100):
            batch = sampler.sample()
            assert batch.observations.is_pinned()
            assert same(batch, alone.sample())
