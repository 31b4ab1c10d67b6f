"""An export that is read again gives equal rows, in every format that can be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
)
from replaylake.datastore.interchange.export.export import export
from replaylake.datastore.interchange.formats.catalog import FORMATS
from replaylake.datastore.interchange.formats.format import ReadOptions, WritableFormat
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import Lake, open_lake

_WRITABLE = [known.name for known in FORMATS if isinstance(known, WritableFormat)]
# Of one row a step, with a place for everything that a row has.
_TABLES = ["parquet", "arrow", "jsonl", "csv"]
_TYPED = ["parquet", "arrow"]
# Transcripts hold dialogues alone, dsjson single decisions: the tests of these formats have their
# round trips.
_OF_NUMBERS = sorted({*_WRITABLE} - {"dsjson", "transcripts"})


def _values(space: Space, num: int, rng: np.random.Generator) -> Any:
    if isinstance(space, Dict):
        return {key: _values(sub, num, rng) for key, sub in space.spaces.items()}
    if isinstance(space, Tuple):
        return {f"_{i}": _values(sub, num, rng) for i, sub in enumerate(space.spaces)}
    if isinstance(space, Text):
        texts = ["plain", 'a "quote", and\ncomma', "", "ünï", " x ", "tab\t\\"]
        return np.asarray([f"t{texts[i]}" for i in rng.integers(0, 6, num)], object)
    if isinstance(space, Discrete):
        return rng.integers(space.start, space.start + space.n, num)
    if isinstance(space, MultiDiscrete):
        return np.stack([rng.integers(0, n, num) for n in space.nvec], axis=1)
    if isinstance(space, MultiBinary):
        return rng.integers(0, 2, (num, space.n))
    dtype = np.dtype(space.dtype)
    if dtype.kind == "f":
        # Whole ones, tiny and huge ones, and those whose float32 is no short decimal.
        large = 3e4 if space.dtype == "float16" else -3e20
        drawn = rng.choice([0.0, -0.0, 1.0, 0.1, 1e-7, large, 1 / 3], (num, *space.shape))
        return (drawn + rng.normal(size=drawn.shape) * rng.integers(0, 2)).astype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, (num, *space.shape)).astype(bool)
    info = np.iinfo(dtype)
    low, high = max(info.min, -(2**62)), min(info.max, 2**62)
    return rng.integers(low, high, (num, *space.shape), dtype=np.int64, endpoint=True).astype(dtype)


def _one(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _one(sub) for key, sub in values.items()}
    return values[0]


def _episode(
    name: str, spec: DatasetSpec, num: int, rng: np.random.Generator, **fields: Any
) -> Episode:
    observations = _values(spec.observation_space, num, rng)
    final = _one(_values(spec.observation_space, 1, rng))
    actions = _values(spec.action_space, num, rng)
    return Episode(
        f"p/{name}",
        observations,
        actions,
        rng.normal(size=num),
        **{"final_observation": final, "source_episode_id": name, **fields},
    )


def _full(spec: DatasetSpec, rng: np.random.Generator) -> list[Episode]:
    """Episodes with everything that a row can have, and without."""
    num = 5
    log_probs = np.log(rng.uniform(0.1, 1, num))
    log_probs[2] = np.nan
    known = {
        "behavior_log_probs": log_probs,
        "policies": np.asarray(["a", None, "run:b", "a", "a"], object),
        "policy_versions": rng.integers(0, 2**40, num),
        "timestamps": rng.integers(0, 2**50, num),
        "env_steps": np.arange(num) * 2 + 1,
        "extras": {
            "note": ["x1", None, 'q"', "y,z", "w\nv"],
            "score": [0.1, 2.0, None, -1e-9, 5.0],
            "vector": np.arange(10, dtype=np.float32).reshape(5, 2) / 3,
            "flag": [True, False, None, True, False],
            "big": [2**53 + 1, -1, None, 0, 2**62],
        },
    }
    if spec.mask_size is not None:
        known["action_masks"] = np.ones((num, spec.mask_size), bool)
    return [
        _episode("007", spec, num, rng, terminated=True, agent_id="left", **known),
        _episode("007", spec, 3, rng, truncated=True, agent_id="right"),
        _episode("open", spec, 2, rng, final_observation=None),
        _episode("later", spec, 4, rng, first_step=11, terminated=True),
        _episode("both", spec, 1, rng, truncated=True, terminated=True),
    ]


def _made(lake: Lake, spec: DatasetSpec, episodes: list[Episode]) -> None:
    dataset = lake.dataset("a")
    dataset.append(episodes, spec=spec)


def _again(lake: Lake, path: Path, form: str) -> None:
    export(lake, "a", path, format=form)
    options = ReadOptions(gaps="split")
    receipt = ingest(lake, [path], "b", format=form, options=options)
    assert receipt.episodes.rejected == 0


def _rows(lake: Lake, name: str) -> list[dict[str, Any]]:
    """The rows in an order of their own, without what ingest gives anew."""
    rows = lake.snapshot(name).table.read().to_pylist()
    for row in rows:
        del row["episode_id"]
    return sorted(rows, key=lambda row: (row["source_episode_id"], row["agent_id"], row["step"]))


_SPACES = (
    Discrete(5),
    Discrete(3, start=2),
    MultiDiscrete((2, 7)),
    MultiBinary(3),
    Box((), "float64", -5, 5),
    Box((3,), "float32"),
    Box((2, 2), "float32"),
    Box((2,), "float16"),
    Box((4,), "uint8"),
    Box((2, 3), "uint8", 0, 255),
    Box((2, 2, 2), "uint8", 0, 255),
    Box((2,), "int8"),
    Box((2,), "uint32"),
    Box((3,), "int64"),
    Box((3,), "bool"),
    Text(),
    Dict({"camera": Box((2, 2, 3), "uint8", 0, 255), "speed": Box((1,), "float32")}),
    Dict({"a": Discrete(3), "b": Dict({"c": Box((), "float64"), "d": Text()})}),
    Tuple((Discrete(2), Box((2,), "float64"))),
)
# Each as the observation of one dataset and the action of another.
_PAIRS = [(space, _SPACES[(i + 7) % len(_SPACES)]) for i, space in enumerate(_SPACES)]


@pytest.mark.parametrize("form", _TYPED)
@pytest.mark.parametrize(("observation", "action"), _PAIRS)
def test_typed_tables_keep_everything(
    tmp_path: Path, form: str, observation: Space, action: Space
) -> None:
    lake = open_lake(tmp_path / "lake", create=True)
    spec = DatasetSpec(observation, action, 9)
    _made(lake, spec, _full(spec, np.random.default_rng(7)))
    _again(lake, tmp_path / f"out.{form}", form)
    assert _rows(lake, "b") == _rows(lake, "a")
    first, second = lake.dataset("a").spec, lake.dataset("b").spec
    assert (first.observation_space, first.action_space) == (
        second.observation_space,
        second.action_space,
    )
    assert first.mask_size == second.mask_size
    assert first.extras == second.extras


_INFERRED = [
    (Box((3,), "float32"), Discrete(9)),
    (Box((2, 2), "float32"), Box((2,), "float64")),
    (Box((3,), "int64"), MultiDiscrete((3, 4))),
    (Box((2, 2, 2), "uint8", 0, 255), Discrete(9)),
    (Text(), Text()),
    (Dict({"a": Box((2,), "float64"), "b": Box((1,), "float32")}), Discrete(9)),
]


@pytest.mark.parametrize("form", ["csv", "jsonl"])
@pytest.mark.parametrize(("observation", "action"), _INFERRED)
def test_text_tables_keep_every_value(
    tmp_path: Path, form: str, observation: Space, action: Space
) -> None:
    lake = open_lake(tmp_path / "lake", create=True)
    spec = DatasetSpec(observation, action, 9)
    _made(lake, spec, _full(spec, np.random.default_rng(3)))
    _again(lake, tmp_path / f"out.{form}", form)
    first, second = _rows(lake, "a"), _rows(lake, "b")
    assert [_loose(row) for row in second] == [_loose(row) for row in first]


def _loose(row: dict[str, Any]) -> dict[str, Any]:
    """Compare numbers and not their dtypes; frames by their bytes, of any integer type."""
    return {name: _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return [float(byte) for byte in value]
    if isinstance(value, dict):
        return {key: _plain(sub) for key, sub in value.items()}
    if isinstance(value, list):
        return [_plain(sub) for sub in value]
    return float(value) if isinstance(value, float) else value


@pytest.mark.parametrize("form", _OF_NUMBERS)
@pytest.mark.parametrize(
    "action", [Discrete(3), Box((2,), "float32", -1, 1)], ids=["discrete", "continuous"]
)
def test_every_format_gives_back_the_steps(tmp_path: Path, form: str, action: Space) -> None:
    lake = open_lake(tmp_path / "lake", create=True)
    spec = DatasetSpec(Box((3,), "float32"), action)
    rng = np.random.default_rng(1)
    episodes = []
    for i in range(4):
        ended = {"terminated": True} if i % 2 else {"truncated": True}
        episodes.append(_episode(str(i), spec, 3 + i, rng, **ended))
    _made(lake, spec, episodes)
    _again(lake, tmp_path / f"out.{form}", form)
    columns = "observation, final_observation, action, reward, terminated, truncated, step"
    query = f"SELECT {columns} FROM {{}}.steps ORDER BY source_episode_id, step"
    first, second = (lake.sql(query.format(name)).to_pylist() for name in ("a", "b"))
    if all(row["final_observation"] is None for row in second):
        first = [{**row, "final_observation": None} for row in first]
    assert [_loose(row) for row in second] == [_loose(row) for row in first]


@pytest.mark.parametrize("form", ["d4rl", "d3rlpy", "minari"])
def test_further_columns_come_back_under_their_own_names(tmp_path: Path, form: str) -> None:
    lake = open_lake(tmp_path / "lake", create=True)
    rng = np.random.default_rng(1)
    extras = {
        "geo": ["a", "b", "c"],
        "infos_qpos": np.arange(6.0).reshape(3, 2),
        "seed": np.array([7, 7, 8]),
    }
    episode = Episode(
        "e",
        rng.normal(size=(3, 2)).astype(np.float32),
        np.array([0, 1, 1]),
        np.ones(3),
        truncated=True,
        final_observation=np.zeros(2, np.float32),
        extras=extras,
    )
    lake.dataset("a").append([episode])
    for before, after in (("a", "b"), ("b", "c")):
        path = tmp_path / f"{after}-v0"
        export(lake, before, path, format=form)
        ingest(lake, [path], after, format=form)
        found = lake.snapshot(after).spec.extras
        assert {name: str(found[name]) for name in found} == {
            "geo": "string",
            "infos_qpos": "fixed_size_list<element: double>[2]",
            "seed": "int64",
        }
    rows = lake.snapshot("c").sql("SELECT geo, infos_qpos, seed FROM steps ORDER BY step")
    assert rows.to_pylist()[2] == {"geo": "c", "infos_qpos": [4.0, 5.0], "seed": 8}
