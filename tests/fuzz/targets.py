"""Targets: what reads bytes that others may have written, and valid seeds for each."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import pyarrow as pa
from mutations import flip_bytes, mutate_file, mutate_json, mutate_tree, pack
from readings import archive_files, change_options, find_names, small_blocks, spell_source
from seeds import Files, make_format_seeds, make_lake, read_files

from replaylake.cli.main import main
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ReplayLakeError
from replaylake.datastore.feedback.journal import Journal, JournalConfig
from replaylake.datastore.feedback.row_encoder import RowEncoder
from replaylake.datastore.feedback.segments import frame_records, journal_folder, recover
from replaylake.datastore.interchange.formats.catalog import FORMATS
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.ingest.preview import preview
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import load_policy, save_package
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.lake.runs.checkpoints import Checkpoints
from replaylake.datastore.replay.cache.view_cache import ViewCache
from replaylake.datastore.storage.storage import LocalStorage
from replaylake.datastore.storage.table.table import Table


class _FileTarget:
    """Seeds of one or several files each, of which a case changes one."""

    name = ""

    def __init__(self, folder: Path) -> None:
        self._files = self._make(folder / self.name)

    def _make(self, folder: Path) -> dict[str, Files]:
        raise NotImplementedError

    def seeds(self) -> list[str]:
        return sorted(self._files)

    def mutated(self, seed: str, number: int) -> Files:
        """Return the files of a case; the same for the same seed files and number.

        Number 0 is the seed itself, which has to be read.
        """
        if number == 0:
            return dict(self._files[seed])
        rng = Random(f"{self.name}:{seed}:{number}")
        files = dict(self._files[seed])
        name = rng.choice(sorted(files))
        files[name] = self._change(name, files[name], rng)
        return self._finish(files, rng)

    def _change(self, name: str, data: bytes, rng: Random) -> bytes:
        try:
            return mutate_file(name, data, rng)
        except Exception:
            return flip_bytes(data, rng)  # not every change can be written

    def _finish(self, files: Files, rng: Random) -> Files:
        return files

    def run(self, seed: str, number: int, folder: Path) -> None:
        write_files(self.mutated(seed, number), folder / "case")
        try:
            self._read(seed, number, folder / "case", folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _read(self, seed: str, number: int, case: Path, folder: Path) -> None:
        raise NotImplementedError


class FormatTarget(_FileTarget):
    """Every format that `ingest` reads, with changed options, sources and sizes of blocks."""

    name = "formats"

    def _make(self, folder: Path) -> dict[str, Files]:
        self._seeds = make_format_seeds(folder)
        return {name: seed.files for name, seed in self._seeds.items()}

    def _finish(self, files: Files, rng: Random) -> Files:
        if rng.random() < 0.08:
            return {"files.zip": archive_files(files, rng)}
        if len(files) == 1:
            return {name: pack(data, rng) for name, data in files.items()}
        return files

    def _read(self, seed: str, number: int, case: Path, folder: Path) -> None:
        known, rng = self._seeds[seed], Random(f"reading:{seed}:{number}")
        options, format = known.options or ReadOptions(), known.format
        sources: list[str] = [str(case)]
        lake = open_lake(folder / "lake", create=True)
        with contextlib.ExitStack() as stack:
            if number:
                if rng.random() < 0.15:
                    # A dataset that exists has spaces, further columns and vocabularies already.
                    write_files(known.files, folder / "seed")
                    ingest(lake, [folder / "seed"], "x", options=options, format=format)
                if rng.random() < 0.2:
                    options = change_options(options, find_names(known.files), rng)
                # Long ones are there for what they decode to, in few blocks.
                is_long = seed.startswith("long")
                if rng.random() < 0.04 and not is_long:
                    format = rng.choice(FORMATS).name
                if rng.random() < 0.35 and not is_long:
                    num_bytes = sum(map(len, known.files.values()))
                    stack.enter_context(small_blocks(num_bytes, rng))
                sources = spell_source(case, rng)
                if rng.random() < 0.1:
                    preview(lake, sources, "y", options=options, format=format)
            ingest(lake, sources, "x", options=options, format=format)


class PackageTarget(_FileTarget):
    """Policy packages: the manifest, and graphs whose hashes were made to agree."""

    name = "packages"

    def _make(self, folder: Path) -> dict[str, Files]:
        folder.mkdir()
        save_package(
            folder / "p",
            onnx=_linear_graph(),
            spec=PolicySpec(Box((4,)), Discrete(2), "categorical"),
            manifest={"algorithm": "by_hand", "config": {"a": 1}},
            learner_weights={"w": np.ones((2, 2), np.float32)},
        )
        return {"linear": read_files(folder / "p")}

    def _finish(self, files: Files, rng: Random) -> Files:
        if rng.random() < 0.85:
            with contextlib.suppress(
                ValueError, KeyError, TypeError, AttributeError, RecursionError
            ):
                body = json.loads(files["manifest.json"])
                for name, about in body["files"].items():
                    about["sha256"] = hashlib.sha256(files[name]).hexdigest()
                    about["bytes"] = len(files[name])
                files["manifest.json"] = json.dumps(body).encode()
        return files

    def _read(self, seed: str, number: int, case: Path, folder: Path) -> None:
        policy = load_policy(case)
        policy.act(
            np.zeros((1, 4), np.float32),
            policy.initial_state(1),
            rng=np.random.default_rng(0),
            deterministic=True,
        )


class JournalTarget(_FileTarget):
    """Journals of decisions, whose frames were made to agree."""

    name = "journals"
    _SCHEMA = pa.schema([pa.field("x", pa.int64(), nullable=False), pa.field("y", pa.string())])

    def _make(self, folder: Path) -> dict[str, Files]:
        records = [b'{"x":%d,"y":"text"}' % i for i in range(6)]
        return {"records": {"0.segment": b"".join(frame_records(records))}}

    def _change(self, name: str, data: bytes, rng: Random) -> bytes:
        if rng.random() < 0.4:
            return flip_bytes(data, rng)
        records = [b'{"x":%d,"y":"text"}' % i for i in range(6)]
        at = rng.randrange(6)
        records[at] = mutate_json(records[at], rng).replace(b"\n", b" ")
        return b"".join(frame_records(records))

    def _read(self, seed: str, number: int, case: Path, folder: Path) -> None:
        table, encode = Table(LocalStorage(folder / "lake"), "t"), self._encode
        if number % 2:
            encode = RowEncoder(self._encode, self._SCHEMA)
        table.create(self._SCHEMA)
        journal = Journal(table, encode, worker="w", config=JournalConfig(flush_interval_s=3600))
        journal.append([b'{"x":1,"y":null}'])
        (segment,) = [
            path
            for path in journal_folder(table).rglob("*")
            if path.stat().st_size and path.is_file()
        ]
        data = segment.read_bytes()
        journal.close()
        segment.parent.mkdir(parents=True, exist_ok=True)
        segment.write_bytes(data + (case / "0.segment").read_bytes())
        recover(table, encode)

    def _encode(self, records: Any) -> pa.Table:
        return pa.Table.from_pylist(list(records), schema=self._SCHEMA)


class CacheTarget(_FileTarget):
    """Cached replay views: what is known of them, and arrays that were cut."""

    name = "caches"

    def _make(self, folder: Path) -> dict[str, Files]:
        self._root = folder / "lake"
        lake = make_lake(self._root)
        lake.snapshot("d").replay().wait_cached()
        home = ViewCache(lake.storage, "d").home
        (self._key,) = [path.name for path in home.iterdir() if len(path.name) == 64]
        return {"view": read_files(home / self._key)}

    def _change(self, name: str, data: bytes, rng: Random) -> bytes:
        if name.endswith(".json"):
            return mutate_json(data, rng)
        # A view's numbers are ours and are not checked; its sizes are.
        return data[: rng.randrange(len(data) + 1)] + data[: rng.choice((0, 0, 8))]

    def _read(self, seed: str, number: int, case: Path, folder: Path) -> None:
        lake = open_lake(self._root)
        view = ViewCache(lake.storage, "d").home / self._key
        shutil.rmtree(view, ignore_errors=True)
        shutil.copytree(case, view)
        opened = lake.snapshot("d").replay()
        batch = opened.uniform(8, seed=0).sample()
        if len(batch.actions) != 8:
            raise AssertionError(f"found {len(batch.actions)} actions")
        opened.wait_cached()


class CheckpointTarget(_FileTarget):
    """Checkpoints of a training run, whose hashes were made to agree."""

    name = "checkpoints"

    def _make(self, folder: Path) -> dict[str, Files]:
        storage = LocalStorage(folder / "lake")
        state = {"step": 3, "rng": {"key": np.arange(4)}, "names": ["a", None, 0.5]}
        Checkpoints(storage, "run").save(3, {"w": np.ones((3, 2), np.float32)}, state)
        return {"run": read_files(folder / "lake")}

    def _finish(self, files: Files, rng: Random) -> Files:
        about = next(name for name in files if name.endswith("0003.json"))
        arrays = next(name for name in files if name.endswith(".safetensors"))
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            body = json.loads(files[about])
            if isinstance(body, dict) and "sha256" in body and rng.random() < 0.7:
                body["sha256"] = hashlib.sha256(files[arrays]).hexdigest()
                files[about] = json.dumps(body).encode()
        return files

    def _read(self, seed: str, number: int, case: Path, folder: Path) -> None:
        Checkpoints(LocalStorage(case), "run").load()


class HttpTarget:
    """Bodies of /act, /feedback and /episodes, as JSON, msgpack and npy, in this process."""

    name = "http"
    _BODIES: Final[dict[str, tuple[str, Any]]] = {
        "act": (
            "/act",
            {"observation": [0.1, 0.2, 0.3, 0.4], "episode_id": "e", "request_id": "r"},
        ),
        "act_batch": ("/act", {"observations": [[0.1, 0.2, 0.3, 0.4]] * 3}),
        "feedback": ("/feedback", {"decision_id": "x", "reward": 1.0, "terminated": True}),
        "episodes": (
            "/episodes",
            {
                "episode_id": "e",
                "steps": [
                    {"observation": [0.0] * 4, "action": 1, "reward": 1.0, "terminated": True}
                ],
            },
        ),
    }

    def __init__(self, folder: Path) -> None:
        self._folder = folder / self.name
        self._client: Any = None

    def seeds(self) -> list[str]:
        return sorted(self._BODIES)

    def run(self, seed: str, number: int, folder: Path) -> None:
        import msgpack

        rng = Random(f"{self.name}:{seed}:{number}")
        path, body = self._BODIES[seed]
        kind = rng.choice(("application/json", "application/json", "application/msgpack", "npy"))
        if kind == "npy":
            kind, sink = "application/x-npy", io.BytesIO()
            np.save(sink, np.zeros(rng.choice(((4,), (3, 4), (0, 4), (4, 1))), rng.choice("fdi?")))
            content = flip_bytes(sink.getvalue(), rng) if rng.random() < 0.7 else sink.getvalue()
        elif kind == "application/json":
            content = mutate_json(json.dumps(body).encode(), rng)
        else:
            tree = mutate_tree(json.loads(json.dumps(body)), rng)
            try:
                content = msgpack.packb(tree, unicode_errors="surrogatepass")
            except (ValueError, OverflowError, RecursionError):
                content = msgpack.packb(body)
            content = flip_bytes(content, rng) if rng.random() < 0.4 else content
        if self._client is None:
            self._client = self._make_client()
        response = self._client.post(path, content=content, headers={"content-type": kind})
        if response.status_code >= 500 and response.status_code != 503:
            raise AssertionError(f"answered {response.status_code}")
        response.json()

    def _make_client(self) -> Any:
        # Imported here, as the other targets need no server.
        sys.path.insert(0, str(Path(__file__).parent.parent / "serve"))
        import conftest as kit

        folder = self._folder / str(os.getpid())
        folder.mkdir(parents=True)
        policy = load_policy(kit.save_policy(folder / "p"))
        client = kit.AppClient(kit.create_app(lambda: kit.make_serving(policy)))
        return client.__enter__()


class SqlTarget:
    """Results of SQL: values of every type, printed in each form."""

    name = "sql"
    _VALUES: Final = (
        "170141183460469231731687303715884105727::hugeint",
        "340282366920938463463374607431768211455::uhugeint",
        "18446744073709551615::ubigint",
        "interval '1 year 2 months 3 days 4.000005 seconds'",
        "'nan'::double",
        "'-infinity'::float",
        "'infinity'::timestamp",
        "'290000-01-01'::timestamp",
        "'0044-03-15 (BC)'::date",
        "time '23:59:59.999999'",
        "'12:00:00+15:59'::timetz",
        "timestamptz '2026-01-01 00:00:00+00'",
        "timestamp_ns '2026-01-01 00:00:00.123456789'",
        "'\\xff\\x00'::blob",
        "'101010'::bit",
        "uuid '00000000-0000-0000-0000-000000000001'",
        "99999999999999999999.123::decimal(38, 3)",
        "chr(0) || 'a'",
        "chr(27) || '[31m' || chr(8238)",
        "repeat('x', 100000)",
        "[]",
        "[1, NULL, 3]",
        "[[1.5], []]",
        "{'a': [{'b': NULL}], 'b c': 'x'}",
        "map {'k': [1]}",
        "map {[1]: 2}",
        "union_value(num := 2)",
        "NULL",
        "'a'::enum('a', 'b')",
        "array_value(1.0, 2.0)",
        "1e308 * 10",
        "0.0 / 0",
        "true",
        "''",
        "'a' || chr(10) || '\"b,'",
        "(select observation from d.steps limit 1)",
        "(select list(note) from d.steps)",
    )

    def __init__(self, folder: Path) -> None:
        self._root = folder / self.name / "lake"
        make_lake(self._root)

    def seeds(self) -> list[str]:
        return ["table", "csv", "json", "jsonl", "parquet"]

    def run(self, seed: str, number: int, folder: Path) -> None:
        rng = Random(f"{self.name}:{seed}:{number}")
        values = [self._wrap(rng.choice(self._VALUES), rng) for _ in range(rng.randint(1, 3))]
        names = ["", " as a", ' as "x y"', ' as ""', " as a"]
        listed = ", ".join(value + rng.choice(names) for value in values)
        query = f"select {listed} from range({rng.choice((0, 1, 3))})"
        arguments = ["sql", query, "--lake", str(self._root)]
        arguments += ["--json"] if seed == "json" and rng.random() < 0.5 else ["--format", seed]
        if seed == "parquet" or rng.random() < 0.3:
            arguments += ["--output", str(folder / f"out.{seed}")]
        stdout, stderr = io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO())
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = main(arguments)
        stderr.flush()
        said = stderr.buffer.getvalue().decode()
        shutil.rmtree(folder, ignore_errors=True)
        if code not in (0, 1, 2, 3) or "fault in ReplayLake" in said:
            raise AssertionError(f"{query}: exit {code}: {said.split(':')[1][:40]}")
        if code:
            raise ReplayLakeError(said)

    def _wrap(self, value: str, rng: Random) -> str:
        kind = rng.randrange(8)
        return {0: f"[{value}]", 1: f"{{'k': {value}}}", 2: f"map {{'m': {value}}}"}.get(
            kind, value
        )


TARGETS: Final[Mapping[str, Callable[[Path], Any]]] = {
    target.name: target
    for target in (
        FormatTarget,
        PackageTarget,
        JournalTarget,
        CacheTarget,
        CheckpointTarget,
        HttpTarget,
        SqlTarget,
    )
}


def write_files(files: Files, folder: Path) -> None:
    """Write files by their paths in a folder, which is made."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _linear_graph() -> bytes:
    from onnx import TensorProto, helper, numpy_helper

    graph = helper.make_graph(
        [helper.make_node("MatMul", ["observations", "w"], ["logits"])],
        "linear",
        [helper.make_tensor_value_info("observations", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 2])],
        [numpy_helper.from_array(np.ones((4, 2), np.float32), "w")],
    )
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString()
