"""Seeds: small valid sources of every format that `ingest` reads, and how each is read."""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from mutations import pack_value

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import ReplayLakeError
from replaylake.datastore.interchange.export.export import export
from replaylake.datastore.interchange.formats.catalog import FORMATS
from replaylake.datastore.interchange.formats.detect import AUTO
from replaylake.datastore.interchange.formats.format import ReadOptions, WritableFormat
from replaylake.datastore.lake.lake import Lake, open_lake

_FIXTURES: Final = Path(__file__).parent.parent / "fixtures"
_LARGEST_SEED: Final = 2 << 20
Files = dict[str, bytes]


@dataclass(frozen=True)
class Seed:
    """Files by their paths in the source, and how they are read where that is not by default."""

    files: Files
    options: ReadOptions | None = None
    format: str = AUTO


def make_format_seeds(folder: Path) -> dict[str, Seed]:
    """Return valid sources of every format: exports, fixtures, and what no export writes."""
    seeds = {name: Seed(files) for name, files in _export_all(folder).items()}
    seeds |= {name: Seed(files) for name, files in _read_fixtures().items()}
    for several in (
        _make_arrays(),
        _make_hdf5(seeds),
        _make_minari(seeds),
        _make_tables(),
        _make_decisions(),
        _make_rllib(),
        _make_reagent(),
        _make_dialogues(),
        _make_events(),
        _make_generations(),
    ):
        seeds |= several
    return {
        name: seed
        for name, seed in seeds.items()
        if seed.files and sum(map(len, seed.files.values())) < _LARGEST_SEED
    }


def make_lake(root: Path) -> Lake:
    """Return a lake with a dataset `d` of four short episodes."""
    lake = open_lake(root, create=True)
    episodes = []
    for number in range(4):
        steps = np.arange(3 + number)
        episodes.append(
            Episode(
                episode_id=f"e{number}",
                observations=np.stack([steps, -steps], axis=1).astype(np.float32),
                actions=steps % 2,
                rewards=steps + 0.5,
                terminated=number % 2 == 0,
                truncated=number % 2 == 1,
                final_observation=np.zeros(2, np.float32),
                extras={"note": pa.array([f"n{i}" for i in steps])},
            )
        )
    lake.dataset("d").append(episodes)
    return lake


def read_files(path: Path) -> Files:
    """Return a file, or the files below a folder, by their paths in it."""
    if path.is_file():
        return {path.name: path.read_bytes()}
    return {
        str(one.relative_to(path)): one.read_bytes()
        for one in sorted(path.rglob("*"))
        if one.is_file() and one.stat().st_size
    }


def _export_all(folder: Path) -> dict[str, Files]:
    """Return what each format that is written makes of datasets of several kinds."""
    lake = make_lake(folder / "lake")
    _add_datasets(lake)
    files: dict[str, Files] = {}
    for known in FORMATS:
        if isinstance(known, WritableFormat):
            # Not every format can hold every dataset.
            for dataset in ("d", "continuous", "dialogues", "nested", "logged"):
                path = folder / f"{known.name}_{dataset}{known.suffix}"
                with contextlib.suppress(ReplayLakeError):
                    export(lake, dataset, path, format=known.name)
                    files[f"{known.name}_{dataset}"] = read_files(path)
    return files


def _add_datasets(lake: Lake) -> None:
    """Add datasets with continuous actions, of dialogues, with nested spaces, and all fields."""
    steps = np.arange(4)
    floats = np.stack([steps, -steps], axis=1).astype(np.float32)
    texts = np.array([f"turn {step}" for step in steps], object)
    logged = {
        "behavior_log_probs": np.full(4, -0.5, np.float32),
        "policies": np.array(["p"] * 4, object),
        "policy_versions": steps,
        "timestamps": 1_767_225_600_000_000 + steps,  # microseconds since 1970
        "extras": {"note": pa.array(["a", "b", "c", "d"]), "lives": pa.array(steps)},
    }
    for name, observations, last, actions, more in (
        ("continuous", floats, floats[0], floats / 8, {}),
        ("dialogues", texts, "the end", texts, {}),
        ("nested", {"x": floats, "y": steps % 3}, {"x": floats[0], "y": 1}, steps % 2, {}),
        ("logged", floats, floats[0], steps % 2, logged),
    ):
        episodes = [
            Episode(
                episode_id=f"e{number}",
                observations=observations,
                actions=actions,
                rewards=steps * 0.5,
                terminated=number == 0,
                truncated=number == 1,
                final_observation=last,
                **more,
            )
            for number in range(2)
        ]
        lake.dataset(name).append(episodes)


def _read_fixtures() -> dict[str, Files]:
    """Return the files of other tools that the tests keep."""
    files: dict[str, Files] = {}
    for pattern in ("lerobot/*/*", "rlds/*"):
        for path in sorted(filter(Path.is_dir, _FIXTURES.glob(pattern))):
            files[str(path.relative_to(_FIXTURES)).replace("/", "_")] = read_files(path)
    for kind in (
        "areal",
        "art",
        "atif",
        "easyr1",
        "otlp",
        "roll",
        "slime",
        "tinker",
        "trl",
        "verifiers",
        "verl",
    ):
        for path in sorted((_FIXTURES / kind).rglob("*")):
            name = "_".join(path.relative_to(_FIXTURES).with_suffix("").parts)
            # Beside the traces are the branches that verifiers gives.
            if path.is_file() and path.stem != "branches":
                files[name] = read_files(path)
    sampled = _FIXTURES / "skyrl" / "dumped_evals" / "global_step_12_evals"
    files["skyrl"] = read_files(sampled / "openai_gsm8k.jsonl")
    for path in sorted((_FIXTURES / "rllib_episodes").glob("*.parquet")):
        files[f"rllib_{path.stem}"] = read_files(path)
    for name in ("multi_agent", "multi_agent_packed"):
        lines = (_FIXTURES / "rllib_episodes" / f"{name}.json").read_bytes()
        files[f"rllib_{name}"] = {"log.jsonl": lines}
    return files


def _make_arrays() -> dict[str, Seed]:
    steps = {
        "obs": np.asfortranarray(np.zeros((6, 2), np.float32)),
        "actions": np.arange(6) % 2,
        "rewards": np.ones(6),
        "episode_starts": np.asarray([1, 0, 0, 1, 0, 0], bool),
        "episode_returns": np.asarray([3.0, 3.0]),
    }
    trajectories = {
        "obs": np.zeros((8, 2), np.float32),
        "acts": np.arange(6) % 2,
        "rews": np.ones(6),
        "infos": np.array([{}] * 6, object),
        "terminal": np.asarray([True, True]),
        "indices": np.asarray([3]),
    }
    recordings = {
        "observations": np.zeros((6, 2), np.float32),
        "actions": np.linspace(-1, 1, 12, dtype=np.float32).reshape(6, 2),
        "terminals": np.arange(6) % 3 == 2,
        "version": np.asarray(2),
    }
    unknown = ReadOptions(reward_unknown=True)
    return {
        "npz": Seed({"steps.npz": _write_npz(steps)}),
        "npz_trajectories": Seed({"trajectories.npz": _write_npz(trajectories)}),
        "npz_recordings": Seed({"recordings.npz": _write_npz(recordings)}, unknown),
    }


def _write_npz(arrays: Mapping[str, Any]) -> bytes:
    sink = io.BytesIO()
    np.savez(sink, **arrays)
    return sink.getvalue()


_D4RL: Final = {
    "observations": np.zeros((8, 2), np.float32),
    "actions": np.linspace(-1, 1, 8, dtype=np.float32)[:, None],
    "rewards": np.ones(8, np.float32),
    "terminals": np.arange(8) == 3,
    "timeouts": np.arange(8) == 7,
    "infos/qpos": np.zeros((8, 3)),
    "infos/action_log_probs": np.full(8, -0.5, np.float32),
    "infos/note": np.array([b"n"] * 8, "S1"),
    "metadata/algorithm": "SAC",
    "metadata/weights": np.zeros((2, 2)),
}
_D3RLPY_1: Final = {
    "observations": np.zeros((8, 2), np.float32),
    "actions": np.arange(8) % 2,
    "rewards": np.ones(8, np.float32),
    "terminals": (np.arange(8) == 3).astype(np.float32),
    "episode_terminals": (np.arange(8) % 4 == 3).astype(np.float32),
    "discrete_action": True,
    "version": "1.0",
}
_D3RLPY_PAIRS: Final = {
    **{f"observations_{i}_0": np.zeros((3, 2), np.float32) for i in range(2)},
    **{f"observations_{i}_1": np.zeros((3, 4, 4), np.float32) for i in range(2)},
    **{f"actions_{i}": np.zeros((3, 1), np.float32) for i in range(2)},
    **{f"rewards_{i}": np.ones((3, 1), np.float32) for i in range(2)},
    **{f"terminated_{i}": i == 0 for i in range(2)},
    "columns": np.array(["observations", "actions", "rewards", "terminated"], object),
    "num_episodes": 2,
    "version": "2.1",
}


def _make_hdf5(seeds: Mapping[str, Seed]) -> dict[str, Seed]:
    cut = {name: values for name, values in _D4RL.items() if name != "timeouts"}
    several = {"a.hdf5": _write_hdf5(cut), "b.hdf5": _write_hdf5({**cut, "rewards": np.zeros(8)})}
    renamed = {"log.hdf5": _write_hdf5({"states": np.ones((8, 2)), **_D4RL})}
    return {
        "d4rl": Seed({"log.hdf5": _write_hdf5(_D4RL)}),
        "d4rl_several": Seed(several),
        "d4rl_mapped": Seed(
            renamed, ReadOptions(mapping={"observation": "states,infos/qpos"}), "d4rl"
        ),
        "d3rlpy_1": Seed({"log.h5": _write_hdf5(_D3RLPY_1)}),
        "d3rlpy_pairs": Seed({"log.h5": _write_hdf5(_D3RLPY_PAIRS)}),
    }


def _write_hdf5(arrays: Mapping[str, Any]) -> bytes:
    import h5py

    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        for name, values in arrays.items():
            file[name] = values
    return image.getvalue()


_BOX: Final = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-1, -1], "high": [1, 1]}
_DISCRETE: Final = {"type": "Discrete", "dtype": "int64", "start": 0, "n": 2}


def _make_minari(seeds: Mapping[str, Seed]) -> dict[str, Seed]:
    steps = np.arange(4)
    zeros = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(8, np.float32)), 2)
    flags = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(12, np.int8)), 3)
    counts = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(8, np.int64)), 2)
    pair = {"type": "Tuple", "subspaces": [_BOX, {"type": "MultiBinary", "n": 3}]}
    grid = {"type": "MultiBinary", "n": [3]}
    several = {"type": "MultiDiscrete", "dtype": "int64", "nvec": [2, 3], "start": [0, 0]}
    pairs = pa.StructArray.from_arrays([zeros, flags], ["_index_0", "_index_1"])
    offset = {**several, "start": [0, -1]}
    members = {"type": "Dict", "subspaces": {"a": _BOX, "b": grid}}
    structs = pa.StructArray.from_arrays([zeros, flags], ["a", "b"])
    seeds_of = {
        "minari_arrow": _minari_arrow(_BOX, zeros, _DISCRETE, pa.array(steps % 2)),
        "minari_pairs": _minari_arrow(pair, pairs, several, counts),
        "minari_members": _minari_arrow(members, structs, offset, counts),
    }
    # Before 0.5 there was no metadata.json beside the file.
    alone = seeds["minari_continuous"].files["data/main_data.hdf5"]
    seeds_of["minari_alone"] = {"main_data.hdf5": alone}
    return {name: Seed(files) for name, files in seeds_of.items()}


def _minari_arrow(
    observation_space: Any, observations: pa.Array, action_space: Any, actions: pa.Array
) -> Files:
    """Return two episodes of three steps as Minari's Arrow storage has them."""
    about = {
        "total_episodes": 2,
        "total_steps": 6,
        "data_format": "arrow",
        "observation_space": json.dumps(observation_space),
        "action_space": json.dumps(action_space),
        "dataset_id": "fuzz/arrow-v0",
        "minari_version": "0.5.4",
        "env_spec": json.dumps({"id": "Fuzz-v0", "max_episode_steps": 3}),
        "ref_min_score": 0.0,
        "ref_max_score": 3.0,
    }
    files = {"data/metadata.json": json.dumps(about).encode()}
    is_step = pa.array([True, True, True, False])
    for number in range(2):
        table = pa.table(
            {
                "observations": observations,
                "actions": actions.take(pa.array([0, 1, 0, None])),
                "rewards": pa.array([1.0, 1.0, 1.0, None]),
                "terminations": pa.array([False, False, True, None]),
                "truncations": pa.array([False, False, False, None]),
                "infos": pa.StructArray.from_arrays([pa.array(np.arange(4)), is_step], ["a", "b"]),
            }
        )
        sink = io.BytesIO()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        files[f"data/{number}/part-0.arrow"] = sink.getvalue()
        label = {"id": number, "total_steps": 3, "seed": 7}
        files[f"data/{number}/metadata.json"] = json.dumps(label).encode()
    return files


_VISITS: Final = ReadOptions(
    mapping={"observation": "age,country,at", "action": "shown", "reward": "payoff"},
    episode_by=("visit",),
    order_by=("at",),
    timezone="UTC",
    open_ends="truncated",
)


def _make_tables() -> dict[str, Seed]:
    """Return CSV, JSON Lines, Parquet and Arrow as people write them."""
    visits, events = {"log.csv": _visits()}, {"log.jsonl": _events()}
    more = _visits().replace(b"\nv", b"\nw")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("logs/a.csv", _visits())
        packed.writestr("logs/b.csv", more)
    sorted_ = replace(_VISITS, order_by=("age", "at"), time_limit=3, open_ends="time-limit")
    filled = replace(
        _VISITS,
        mapping={**_VISITS.mapping, "observation": "age,member,country,birth"},
        fill={"age": "30", "country": "xx", "member": "false", "birth": "2000-01-01"},
        episode_by=("visit", "country"),
        timezone="Europe/Berlin",
    )
    struct = ReadOptions(
        mapping={"truncated": "infos.TimeLimit.truncated", "lives": "infos.more.lives"},
        reward_unknown=True,
    )
    scaled = ReadOptions(
        action_range=(-2.0, 2.0), reward_scale=-1.0, reward_unknown=True, gaps="split"
    )
    densities = ReadOptions(action_scale=2.0, reward_unknown=True)
    # Long enough that a dictionary of one text decodes to gigabytes.
    table = _make_steps(3000)
    parquet, arrow = io.BytesIO(), io.BytesIO()
    pq.write_table(table, parquet)
    with pa.ipc.new_file(arrow, table.schema) as writer:
        writer.write_table(table)
    return {
        "mapped": Seed(visits, _VISITS),
        "mapped_zip": Seed({"logs.zip": archive.getvalue()}, _VISITS),
        "mapped_several": Seed({"a.csv": _visits(), "b.csv": more}, _VISITS),
        "sorted": Seed(visits, sorted_),
        "filled": Seed(visits, filled),
        "events": Seed(events),
        "struct": Seed(events, struct),
        "scaled": Seed(events, scaled),
        "densities": Seed(events, densities),
        "long_parquet": Seed({"long.parquet": parquet.getvalue()}),
        "long_arrow": Seed({"long.arrow": arrow.getvalue()}),
    }


def _make_steps(num: int) -> pa.Table:
    steps = np.arange(num)
    return pa.table(
        {
            "episode_id": (steps // 3).astype(str),
            "step": steps % 3,
            "observation": steps * 0.5,
            "action": steps % 2,
            "reward": np.ones(num),
            "terminated": steps % 3 == 2,
            "note": ["n"] * num,
        }
    )


def _visits() -> bytes:
    """Return a table whose columns a mapping names: numbers, texts, times and flags."""
    rows = ["visit,at,age,country,member,birth,shown,payoff,note"]
    rows += [
        f"v{n // 3},2026-01-0{1 + n % 3}T10:00:00,{20 + n},{'de' if n % 2 else 'fr'},"
        f"{str(n % 2 == 0).lower() if n != 4 else ''},{'' if n == 3 else '1990-05-06'},"
        f'{"ab"[n % 2]},{n / 4},"a ""quoted"" text, {n}"'
        for n in range(9)
    ]
    return "\n".join(rows).encode()


def _events() -> bytes:
    """Return rows with nested columns, as a hand-written logger writes them."""
    rows = [
        {
            "episode_id": f"e{n // 3}",
            "step": n % 3,
            "observation": {"image": [[n, 1], [2, 3]], "speed": n / 2},
            "action": [0.5, -0.5],
            "reward": None if n == 4 else 1.0,
            "terminated": n % 3 == 2,
            "behavior_log_prob": -1.5,
            "infos": {"TimeLimit.truncated": False, "more": {"lives": n}},
            "action_mask": None,
            "timestamp": f"2026-01-01T00:00:{n:02d}Z",
        }
        for n in range(9)
    ]
    return b"\n".join(json.dumps(row).encode() for row in rows)


def _make_decisions() -> dict[str, Seed]:
    """Return logs of one decision a row: the Open Bandit Dataset's, and others by a mapping."""
    items = b"item_id,item_feature_0,item_feature_1\n0,0.5,a\n1,0.25,b\n2,0.125,a"
    rows = [
        {
            "context_age": 20 + n,
            "context_country": ["de", "fr"][n % 2],
            "position": n % 3,
            "choice": ["a", "b", "c"][n % 3],
            "outcome": n % 2,
            "prob": 0.25,
            "impression_id": f"i{n}",
        }
        for n in range(9)
    ]
    table = pa.Table.from_pylist(rows)
    lines = b"\n".join(json.dumps(row).encode() for row in rows)
    names = ",".join(rows[0])
    cells = "\n".join(",".join(map(str, row.values())) for row in rows)
    parquet = io.BytesIO()
    pq.write_table(table, parquet)
    mapping = {"action": "choice", "reward": "outcome"}
    options = ReadOptions(mapping=mapping)
    keyed = ReadOptions(mapping={**mapping, "episode_id": "impression_id"})
    named = ReadOptions(mapping={**mapping, "impression_id": "impression_id"})
    return {
        "decisions": Seed({"log.csv": _decisions()}),
        "decisions_items": Seed({"item_context.csv": items, "log.csv": _decisions()}),
        "bandit_csv": Seed({"log.csv": f"{names}\n{cells}".encode()}, options, "bandit"),
        "bandit_lines": Seed({"log.jsonl": lines}, keyed, "bandit"),
        "bandit_parquet": Seed({"log.parquet": parquet.getvalue()}, named, "bandit"),
    }


def _decisions() -> bytes:
    """Return a log like the Open Bandit Dataset's."""
    rows = ["timestamp,item_id,position,click,propensity_score,user_feature_0,affinity_0"]
    rows += [
        f"2019-11-24 00:03:{n:02d}.5+00:00,{n % 3},{1 + n % 2},{n % 2},0.25,u{n % 2},{n / 7}"
        for n in range(12)
    ]
    return "\n".join(rows).encode()


def _make_rllib() -> dict[str, Seed]:
    """Return RLlib's logs that no fixture holds: packed cells, rows, and Ray's tensors."""
    batch = {
        "type": "SampleBatch",
        "eps_id": [5, 5, 6, 6],
        "obs": pack_value(np.arange(8, dtype=np.float32).reshape(4, 2)),
        "new_obs": pack_value(np.arange(2, 10, dtype=np.float32).reshape(4, 2)),
        "actions": [0, 1, 0, 1],
        "rewards": [1.0, 1.0, 0.5, 0.5],
        "terminateds": [False, True, False, True],
        "infos": pack_value([{"lives": "three"}, {}, {}, {}]),
        "pairs": pack_value((np.arange(4), {"a": np.ones((4, 2))})),
    }
    rows = [
        {
            "eps_id": n // 2,
            "obs": pack_value(np.full(2, n, np.float32)),
            "new_obs": pack_value(np.full(2, n + 1, np.float32)),
            "actions": n % 2,
            "rewards": 1.0,
            "terminateds": n % 2 == 1,
        }
        for n in range(4)
    ]
    lines = [json.dumps({**batch, "eps_id": [n, n, n + 1, n + 1]}).encode() for n in (5, 7)]
    kind = pa.struct([("data", pa.list_(pa.float32())), ("shape", pa.list_(pa.int64()))])
    metadata = {"ARROW:extension:name": "ray.data.arrow_variable_shaped_tensor"}
    cells = [{"data": [1.0, n], "shape": [2]} for n in range(3)]
    logits = [{"data": [1.0] * n, "shape": [n]} for n in range(3)]
    table = pa.table(
        {
            "actions": [0, 1, 0],
            "rewards": [1.0, 2.0, 3.0],
            "eps_id": [5, 5, 5],
            "terminateds": [False, False, True],
        }
    )
    for name, values in (("obs", cells), ("logits", logits)):
        table = table.append_column(pa.field(name, kind, metadata=metadata), pa.array(values, kind))
    pickled = pa.field(
        "infos", pa.binary(), metadata={"ARROW:extension:name": "ray.data.arrow_pickled_object"}
    )
    table = table.append_column(pickled, pa.array([b"\x80\x05N."] * 3))
    parquet = io.BytesIO()
    pq.write_table(table, parquet)
    return {
        "rllib_batch": Seed({"log.jsonl": b"\n".join(lines)}),
        "rllib_rows": Seed({"log.jsonl": b"\n".join(json.dumps(row).encode() for row in rows)}),
        "rllib_tensors": Seed({"log.parquet": parquet.getvalue()}),
    }


def _make_reagent() -> dict[str, Seed]:
    sparse = pa.map_(pa.int64(), pa.float32())
    steps = range(6)
    table = pa.table(
        {
            "mdp_id": [f"m{n // 3}" for n in steps],
            "sequence_number": [n % 3 for n in steps],
            "state_features": pa.array([{1: n * 0.5, 2 + n % 2: 1.0} for n in steps], sparse),
            "action": pa.array([{n % 2: 1.0} for n in steps], sparse),
            "reward": [1.0] * 6,
            "metrics": pa.array([{1: 0.5}] * 6, sparse),
            "possible_actions": pa.array([[{0: 1.0}, {1: 1.0}]] * 6, pa.list_(sparse)),
        }
    )
    dense = pa.table(
        {
            "mdp_id": [f"m{n // 3}" for n in steps],
            "sequence_number": [n % 3 for n in steps],
            "state_features": [[n * 0.5, 1.0] for n in steps],
            "state_features_presence": [[True, n % 2 == 0] for n in steps],
            "next_state_features": [[n * 0.5 + 0.5, 1.0] for n in steps],
            "next_state_features_presence": [[True, n % 2 == 1] for n in steps],
            "action": [[1, 0] if n % 2 else [0, 1] for n in steps],
            "next_action": [[0, 1] if n % 2 else [1, 0] for n in steps],
            "reward": [1.0] * 6,
            "not_terminal": [n % 3 < 2 for n in steps],
            "step": [1] * 6,
            "possible_actions_mask": [[1, 1]] * 6,
            "possible_next_actions_mask": [[1, 1]] * 6,
        }
    )
    files = {}
    for name, one in (("map", table), ("dense", dense)):
        sink = io.BytesIO()
        pq.write_table(one, sink)
        files[name] = {"log.parquet": sink.getvalue()}
    fill = ReadOptions(fill={"state_features": "0"})
    return {
        "reagent": Seed({"log.jsonl": _reagent()}),
        "reagent_arrays": Seed({"log.jsonl": _reagent(is_sparse=False)}),
        "reagent_filled": Seed({"log.jsonl": _reagent(has_gaps=True)}, fill),
        "reagent_map": Seed(files["map"], fill),
        "reagent_dense": Seed(files["dense"], fill),
    }


def _reagent(*, is_sparse: bool = True, has_gaps: bool = False) -> bytes:
    rows = []
    for number in range(6):
        rows.append(
            {
                "ds": "2026-01-01",
                "mdp_id": f"m{number // 3}",
                "sequence_number": number % 3,
                "state_features": {
                    "0": 0.5,
                    **({"x": 1} if number > 3 and has_gaps else {"1": 1.0}),
                },
                "action": ["l", "r"][number % 2] if is_sparse else {"0": 0.5, "1": -0.5},
                "reward": 1.0,
                "possible_actions": ["l", "r"] if is_sparse else None,
                "action_probability": 0.5,
            }
        )
    return b"\n".join(json.dumps(row).encode() for row in rows)


_SIMULATION: Final = {
    "id": "s0",
    "task_id": "7",
    "trial": 0,
    "termination_reason": "user_stop",
    "reward_info": {"reward": 1.0},
    "messages": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "tool_calls": [{"id": "c", "name": "f", "arguments": {"x": 1}}]},
        {"role": "tool", "tool_messages": [{"role": "tool", "id": "c", "content": "7"}]},
        {"role": "assistant", "content": "It is 7."},
    ],
}
_MESSAGES: Final = {
    "messages": [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "assistant", "content": "Sunny.", "reward": 1.0},
    ],
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}],
    "metadata": {"model": "m"},
}
_TAU: Final = [
    {
        "task_id": 1,
        "reward": 1.0,
        "trial": 0,
        "info": {"task": {"user_id": "u"}},
        "traj": [
            {"role": "system", "content": "rules"},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "yes", "tool_calls": None},
        ],
    },
    {
        "task_id": 2,
        "reward": 0.0,
        "trial": 0,
        "info": {"error": "out of time"},
        "traj": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
    },
    {
        "task_id": 3,
        "reward": 0.0,
        "trial": 0,
        "info": {"reward_info": None},
        "traj": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
    },
]
_PROMPT: Final = [{"role": "user", "content": "1+1?"}]
_DIALOGUES: Final[Mapping[str, Any]] = {
    "messages": [_MESSAGES, _MESSAGES],
    "display": [
        {"task_id": 3, "messages_display": "user: hi\nassistant: None\ntool: ok\nassistant: bye"},
        {"task_id": 4, "messages_display": "system: rules\nuser: hi\nassistant: yes\nno"},
    ],
    "lists": [[*_PROMPT, {"role": "assistant", "content": "2"}]] * 2,
    "sharegpt": [
        {
            "id": "same",
            "conversations": [
                {"from": "human", "value": "hi", "weight": 0},
                {"from": "gpt", "value": "hello"},
            ],
        }
    ]
    * 2,
    "langchain": [
        {
            "history": [
                {"type": "human", "content": "hi"},
                {"type": "ai", "content": "hello"},
                {"role": "model", "parts": [{"text": "more"}]},
            ],
            "status": status,
            "model": "m",
        }
        for status in ("done", "max_turns", "other")
    ],
    "completions": [
        {"prompt": "1+1?", "completions": ["2", "3"], "rewards": [1.0, None], "id": 7},
        {"prompt": _PROMPT, "completion": [{"role": "assistant", "content": "2"}], "score": 1},
        {"prompt": "1+1?", "response": "2", "reward": 1},
    ],
    "pairs": [
        {"prompt": "1+1?", "chosen": "2", "rejected": "3", "prompt_id": "p"},
        {
            "prompt": _PROMPT,
            "chosen": [*_PROMPT, {"role": "assistant", "content": "2"}],
            "rejected": [*_PROMPT, {"role": "assistant", "content": "3"}],
        },
    ],
    "rated": [
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "d"},
            ],
            "rewards": [None, 1],
            "terminated": True,
            "group_id": "g",
            "group_id_source": "derived",
        },
        {"messages": []},
        {"messages": [{"role": "user", "content": "nobody answers"}]},
    ],
}


def _make_events() -> dict[str, Seed]:
    """Return events of Vowpal Wabbit: of one decision, of slots, and of slates."""
    folder = Path(__file__).parents[2] / "examples" / "data" / "dsjson"
    return {
        f"dsjson_{path.stem}": Seed({path.name: b"".join(path.read_bytes().splitlines(True)[:8])})
        for path in sorted(folder.glob("*.dsjson"))
    }


def _make_dialogues() -> dict[str, Seed]:
    """Return a source for each layout in which dialogues are written."""
    seeds = {
        f"dialogues_{name}": Seed(
            {"log.jsonl": b"\n".join(json.dumps(record).encode() for record in records)},
            format="transcripts",
        )
        for name, records in _DIALOGUES.items()
    }
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    file = io.BytesIO()
    rows = [{"id": "a", "messages": talk, "reward": 1.0}] * 2
    pq.write_table(pa.Table.from_pylist(rows), file)
    seeds["messages_parquet"] = Seed({"log.parquet": file.getvalue()})
    run = {"info": {}, "tasks": [{"id": "7"}], "simulations": [_SIMULATION, _SIMULATION]}
    seeds["tau2"] = Seed({"results.json": json.dumps(run).encode()})
    return {**seeds, "tau": Seed({"log.json": json.dumps(_TAU).encode()})}


def _make_generations() -> dict[str, Seed]:
    """Return logs of language models whose fields a mapping names by paths."""
    fixtures = _read_fixtures()
    mappings = {
        "verl_legacy_7": {"reward": "acc", "group_id": "gts", "guess": "pred"},
        "verl_v1_7": {"guess": "gts", "reward": "score"},
        "roll_rollout_dump_data": {"tagged": "tag", "group_id": "ground_truth"},
        "atif_runs": {"reward": "extra.reward", "model": "agent.model_name", "all": "agent"},
        "verifiers_run_traces": {"group_id": "task.key"},
        "trl_chat_completions_00001": {"reward": "score_length", "more": "number"},
        "tinker_capture": {"group_id": "run_id"},
        "slime_7": {"group_id": "group_index", "label": "label"},
    }
    nemorl = {"train_data_step1.jsonl": _nemorl()}
    seeds = {
        f"{name}_mapped": Seed(fixtures[name], ReadOptions(mapping=mapping))
        for name, mapping in mappings.items()
        if name in fixtures
    }
    turns = {"train_data_step2.jsonl": _nemorl_turns()}
    spans = {"spans.jsonl": _otlp()}
    return {
        **seeds,
        "nemorl": Seed(nemorl),
        "nemorl_turns": Seed(turns),
        "otlp_attributes": Seed(spans, format="otlp"),
    }


def _nemorl_turns() -> bytes:
    """Return samples of two turns with texts and without log-probs, one cut off, and bad ones."""
    sample = {
        "content": [["question", "answer", "more", "end"]],
        "rewards": [1.0],
        "input_lengths": [6],
        "token_ids": [[1, 2, 3, 4, 5, 6, 0]],
        "token_loss_mask": [[0, 1, 1, 0, 1, 1, 0]],
    }
    wrong: list[Any] = [
        {"token_ids": [[1, 2**40, 3, 4, 5, 6, 0]]},
        {"token_loss_mask": [[0, 2, 1, 0, 1, 1, 0]]},
        {"token_loss_mask": [[0, 1, 1, 0, 1, 1, 1]]},
        {"input_lengths": [9]},
        {"input_lengths": [True]},
        {"rewards": []},
        {"token_loss_mask": [[0, 1]]},
    ]
    lines = [{**sample, **more} for more in ({}, {"content": [["a", 1, "b", "c"]]}, *wrong)]
    return b"\n".join(json.dumps(line).encode() for line in (*lines, [3]))


def _otlp() -> bytes:
    """Return spans whose messages are events and attributes of earlier conventions."""

    def span(number: int, attributes: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        named = {"gen_ai.operation.name": {"stringValue": "chat"}, **attributes}
        return {
            "traceId": f"{number + 1:032x}",
            "spanId": f"{number + 1:016x}",
            "name": "chat",
            "startTimeUnixNano": str(10**18 + number),
            "endTimeUnixNano": str(10**18 + number + 1),
            "attributes": [{"key": key, "value": value} for key, value in named.items()],
            **more,
        }

    def event(name: str, **attributes: str) -> dict[str, Any]:
        pairs = [
            {"key": key.replace("__", "."), "value": {"stringValue": value}}
            for key, value in attributes.items()
        ]
        return {"name": name, "timeUnixNano": str(10**18), "attributes": pairs}

    def text(value: Any) -> dict[str, str]:
        return {"stringValue": value if isinstance(value, str) else json.dumps(value)}

    said = [{"role": "user", "content": "hi"}]
    kinds = {
        "a": {"intValue": "7"},
        "b": {"intValue": 7},
        "c": {"doubleValue": 0.5},
        "d": {"boolValue": True},
        "e": {"arrayValue": {"values": [{"intValue": "1"}]}},
        "f": {"kvlistValue": {"values": [{"key": "x", "value": {"stringValue": "y"}}]}},
        "g": {},
        "gen_ai.evaluation.score.value": {"doubleValue": 1.0},
    }
    indexed = {
        "gen_ai.prompt.0.role": text("user"),
        "gen_ai.prompt.0.content": text("hi"),
        "gen_ai.completion.0.content": text("ho"),
        "gen_ai.completion.0.finish_reason": text("stop"),
        "gen_ai.completion.0.tool_calls.0.name": text("add"),
        "gen_ai.completion.0.tool_calls.0.arguments": text("{}"),
    }
    messages = {
        "gen_ai.system_instructions": text("Be brief."),
        "gen_ai.input.messages": text(
            [{"role": "user", "parts": [{"type": "text", "content": "?"}]}]
        ),
        "gen_ai.output.messages": text([{"parts": [{"type": "text", "content": "!"}]}]),
    }
    spans = [
        span(0, {"gen_ai.prompt": text(said), "gen_ai.completion": text("ho"), **kinds}),
        span(1, {"gen_ai.prompt": text({"messages": said}), "gen_ai.completion": text("{no JSON")}),
        span(2, indexed),
        span(3, messages, kind=3, status={"code": 2}, parentSpanId="00000000000000ff"),
        span(
            4,
            {},
            events=[
                event("gen_ai.content.prompt", gen_ai__prompt=json.dumps(said)),
                event("gen_ai.content.completion", gen_ai__completion="ho"),
            ],
        ),
        span(
            5,
            {},
            events=[
                event("gen_ai.user.message", content="hi"),
                event("gen_ai.tool.message", content="7", id="c"),
                event("gen_ai.choice", message=json.dumps({"content": "ho"}), finish_reason="stop"),
                event("gen_ai.choice", message="ho", index="1"),
            ],
        ),
        span(6, {"gen_ai.prompt": {"arrayValue": {}}}),
        span(7, {"gen_ai.prompt": text(["hi"]), "gen_ai.completion": text([{"content": "ho"}])}),
    ]
    scopes = [{"scope": {"name": "test"}, "spans": spans}]
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "agent"}}]}
    return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]}).encode()


def _nemorl() -> bytes:
    """Return two samples as NeMo-RL logs them: each value in a list of one."""
    sample = {
        "content": ["question answer"],
        "rewards": [1.0],
        "input_lengths": [5],
        "token_ids": [[1, 2, 3, 4, 5, 0]],
        "token_loss_mask": [[0, 0, 1, 1, 1, 0]],
        "sample_loss_mask": [1],
        "advantages": [[0.5] * 6],
        "generation_logprobs": [[0.0, 0.0, -0.5, -0.25, -0.125, 0.0]],
        "prev_logprobs": [[0.0, 0.0, -0.5, -0.25, -0.125, 0.0]],
        "idx": [0],
    }
    return b"\n".join(json.dumps({**sample, "idx": [n]}).encode() for n in range(2))
