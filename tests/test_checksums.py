"""Every file that is read back has a checksum, which is compared when it is read."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import demo
import numpy as np
import pyarrow as pa
import pytest

import replaylake as rl
from replaylake.datastore.episodes.schema import DatasetSpec, UniqueKeys
from replaylake.datastore.errors import ReplayLakeError, StorageError
from replaylake.datastore.feedback import segments
from replaylake.datastore.feedback.segments import frame_records
from replaylake.datastore.lake.policies.manifest import (
    GRAPH,
    LEARNER,
    MANIFEST,
    hash_manifest,
    manifest_bytes,
    read_verified,
)
from replaylake.datastore.lake.policies.package import find_package
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.lake.profile import shard_statistics
from replaylake.datastore.lake.profile.profile import compute_profile
from replaylake.datastore.lake.runs.checkpoints import Checkpoints
from replaylake.datastore.lake.runs.lease import last_heartbeat
from replaylake.datastore.lake.runs.metrics import MetricsLog, read_metrics
from replaylake.datastore.lake.tombstones import Tombstones
from replaylake.datastore.maintenance.purge import purge as purge_module
from replaylake.datastore.query import summaries
from replaylake.datastore.replay.selectors.saved_priorities import PriorityFolder
from replaylake.datastore.storage.seals import seal_json
from replaylake.datastore.storage.table import key_index
from replaylake.datastore.storage.table.key_hashes import hash_keys


@dataclass(frozen=True)
class Kind:
    """Files that are read back: the pattern of their paths, who reads them, and the checksum."""

    pattern: str
    reader: str
    checksum: str


_ULID = "[0-9a-z]{26}"
_HEX = "[0-9a-f]{64}"
_TABLE = r"lake/[a-z0-9_]+(/_decisions|/_rewards|/_received|/_rejected)?"
READ_BACK = (
    Kind(r".*/_delta_log/\d{20}\.json", "commit_file.decode", "sha256 in its first line"),
    Kind(r".*/_delta_log/\d{20}\.checkpoint\.parquet", "read_checkpoint", "sha256 in its footer"),
    Kind(rf"{_TABLE}/shards/{_ULID}\.parquet", "Table.read", "sha256 in the commit"),
    Kind(rf"{_TABLE}/_journal/[^/]+\.jsonl", "segments.recover", "CRC-32 of each line"),
    Kind(r"lake/[a-z0-9_]+/_answers/[^/]+\.jsonl", "RetainedAnswers", "CRC-32 of each line"),
    Kind(
        rf"lake/[a-z0-9_]+/_derived/episodes/{_ULID}-{_HEX}\.parquet",
        "summaries",
        "sha256 in its name",
    ),
    Kind(
        rf"lake/[a-z0-9_]+/_derived/profile/{_ULID}-{_HEX}\.parquet",
        "shard_statistics",
        "sha256 in its name",
    ),
    Kind(rf"lake/[a-z0-9_]+/_keys/{_ULID}-{_HEX}\.keys", "KeyIndex", "sha256 in its name"),
    Kind(rf"lake/[a-z0-9_]+/_tombstones/{_ULID}\.\w+", "Tombstones", "sha256 in its first line"),
    Kind(r"lake/_lake/keys/tombstones-[0-9a-f]{16}", "Tombstones", "sha256 in its name"),
    Kind(
        rf"lake/_lake/policies/[^/]+/{_ULID}/manifest\.json",
        "read_verified",
        "sha256 in the registry's entry",
    ),
    Kind(
        rf"lake/_lake/policies/[^/]+/{_ULID}/(policy\.onnx|learner\.safetensors)",
        "read_verified",
        "sha256 in the manifest",
    ),
    Kind(
        rf"lake/_lake/runs/{_ULID}/checkpoints/{_ULID}\.safetensors",
        "Checkpoints.load",
        "sha256 in the checkpoint's JSON file",
    ),
    Kind(
        rf"lake/_lake/runs/{_ULID}/checkpoints/\d+\.json",
        "Checkpoints.load",
        "sha256 as its last member",
    ),
    Kind(rf"lake/_lake/runs/{_ULID}/heartbeat\.json", "RunLease", "sha256 as its last member"),
    Kind(rf"lake/_lake/runs/{_ULID}/metrics/\d+\.parquet", "metrics", "sha256 in its footer"),
    Kind(r"lake/_lake/keys/signing(\.sha256)?", "Lake.signing_key", "sha256 in signing.sha256"),
    Kind(rf"lake/_lake/keys/webhook-{_ULID}", "Webhooks.secret", "sha256 as its last member"),
    Kind(
        r"lake/[a-z0-9_]+/_derived/priorities/[^/]+\.npz",
        "PriorityFolder",
        "sha256 in its last line",
    ),
    Kind(
        rf"lake/[a-z0-9_]+/_derived/replay/{_HEX}/(records|runs|steps|bootstrappable)",
        "open_cached",
        "CRC-32 of each block in view.json",
    ),
    Kind(
        rf"lake/[a-z0-9_]+/_derived/replay/{_HEX}/(token_ids|loss_mask|log_probs|column-\d+"
        "|offsets|returns|groups|table|version_(offsets|starts|ends)|(oldest_)?versions)",
        "CheckedArray",
        "CRC-32 of each block in checksums",
    ),
    Kind(
        rf"lake/[a-z0-9_]+/_derived/replay/{_HEX}/(view\.json|shards|content_hash|checksums)",
        "open_cached",
        "sha256 of its own",
    ),
    Kind(
        rf"lake/[a-z0-9_]+/_derived/replay/spelt/{_HEX}",
        "ViewCache.find_canonical",
        "sha256 in its last line",
    ),
    Kind(rf"lake/_lake/evaluations/{_ULID}\.json", "Evaluations", "sha256 as its last member"),
    Kind(r"lake/_lake/purge/.*\.json", "purge", "sha256 as its last member"),
    Kind(
        r"bento/src/policy/manifest\.json",
        "read_verified",
        "sha256 in the Bento's service, or in --sha256",
    ),
    Kind(
        r"bento/src/policy/(policy\.onnx|learner\.safetensors)",
        "read_verified",
        "sha256 in the manifest",
    ),
)
# Path patterns of files that ReplayLake does not read back, and why a checksum would not help.
NOT_READ_BACK = {
    r".*/_delta_log/_last_checkpoint": "for other engines; ours list the log, or verify what it "
    "points to",
    r"lake/(?!.*/replay/).*/tmp/[^/]+": "being written: without its name, nobody reads it",
    rf".*/_derived/replay/(tmp/.*|spelt/{_ULID}|{_HEX}/content_hash\.{_ULID})": "being written",
    r"\.bento\.\d+/.*": "a Bento that is being written",
    r".*\.lock|lake/_lake/runs/[^/]+/lock": "only locked: it is empty",
    r"lake/_lake/runs/[^/]+/tensorboard/events\..*": "for TensorBoard; each record has a CRC-32C",
    r"bento/src/(replaylake_bento\.py|bentofile\.yaml)": "code and labels of the Bento, run and "
    "read by BentoML",
    r"bento/(README\.md|bento\.yaml|apis/.*|env/.*)": "read by BentoML, pip and people; the wheel "
    "has a list of its own hashes, which pip compares",
    r"MADE_BY_DEMO|server\.log": "of the demo itself",
    r"temporary/.*": "of a server while it runs: BentoML's own files",
}


def find_kinds(path: str) -> list[str]:
    """Return the patterns of all lists that a path matches."""
    patterns = [kind.pattern for kind in READ_BACK] + list(NOT_READ_BACK)
    return [pattern for pattern in patterns if re.fullmatch(pattern, path)]


@contextmanager
def watch_files(folder: Path) -> Iterator[set[str]]:
    """Collect the paths of all files that are in a folder at some time, as they are seen."""
    seen: set[str] = set()
    stop = threading.Event()

    def look() -> None:
        for root, _, files in os.walk(folder):
            seen.update(str(Path(root, name).relative_to(folder)) for name in files)

    def watch() -> None:
        while not stop.wait(0.02):
            look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()
        look()


@pytest.mark.slow
def test_every_file_of_the_demo_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `make demo` does, with fewer updates and one served episode."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("REPLAYLAKE_LAKE", str(demo.LAKE))
    demo.clear()
    temporary = demo.FOLDER.resolve() / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    log = demo.HERE / "data" / "rllib_cartpole" / "cartpole-v1_large"
    train = (
        *("train", "offline", "cartpole", "--algorithm", "bc", "--policy", "clone"),
        *("--where", "return >= 150", "--updates", "1000", "--set", "checkpoint_updates=200"),
    )
    with watch_files(demo.FOLDER) as seen:
        demo.replaylake("ingest", str(log), "--dataset", "cartpole", "--env", "CartPole-v1")
        demo.replaylake("sql", "select count(*) from cartpole.episodes")
        demo.replaylake(*train)
        demo.replaylake("policies", "package", "clone", "--output", str(demo.FOLDER / "bento"))
        with demo.Server(demo.free_port()) as server:
            server.play(0)
        demo.replaylake("feedback", "join", "cartpole")
        demo.replaylake(*train)
        demo.replaylake("lineage", "--decision", server.last_decision_id)
    unlisted = {path: kinds for path in sorted(seen) if len(kinds := find_kinds(path)) != 1}
    assert unlisted == {}
    # The patterns that this is about are not out of date.
    for part in ("metrics/", "checkpoints/", "heartbeat.json", "_journal/", "policy/manifest"):
        assert any(part in path for path in seen), part


# The flip loop: one bit of a file that is read back, its reader, and the bit again.


def _episode(number: int) -> rl.Episode:
    steps = np.arange(12)
    return rl.Episode(
        f"e{number}",
        observations=np.stack([steps + number, -steps], axis=1).astype(np.float32),
        actions=steps % 2,
        rewards=steps / 7,
        terminated=True,
        extras={"event": pa.array(steps + 100 * number, pa.int64())},
    )


def make_lake(folder: Path) -> Path:
    """Return a lake with at least one file of each kind but a Bento; its package is beside it."""
    lake = rl.open(folder / "lake", create=True)
    dataset = lake.dataset("d")
    spec = DatasetSpec(
        rl.Box((2,)), rl.Discrete(2), unique=UniqueKeys(("event",)), rewards_optional=True
    )
    for number in range(4):
        dataset.append([_episode(number)], spec=spec)
    dataset.table.log.checkpoint(2)
    Tombstones(lake.storage, "d").add({"source_episode_id": ["e9"]})
    snapshot = dataset.snapshot()
    view = snapshot.replay(where="return > 0")
    view.wait_cached()
    assert view.selections
    view.prioritized(2, seed=0).save_priorities("last")
    summaries._extend(snapshot.table, None, snapshot.table.files)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_statistics, "_WORTH", 0.0)
        shard_statistics.read_statistics(snapshot)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_index, "_MAX_HELD_SHARDS", len(snapshot.table.files))
        index = dataset.new_key_index(spec.unique)
        index.find(snapshot.table, np.arange(3, dtype=np.uint64))
    lake.signing_key()
    lake.webhooks.add("ci", "https://ci.example/", secret="s" * 16)
    about = {"policy": "p", "policy_version": 1, "dataset": "d", "dataset_version": 1}
    lake.registry.evaluations.save("ope", {"value": 0.5}, **about, verdict="weak")
    with MetricsLog(lake.storage, "r" * 26) as metrics:
        for update in range(50):
            metrics.add(update, {"loss": 1 / (update + 1)}, 0.0)
    state = {"seed": 7, "sums": [0.5, 1.25], "rng": {"state": 2**100}}
    Checkpoints(lake.storage, "r" * 26).save(5, {"w": np.ones(20)}, state)
    beat = {"owner": "o", "host": "h", "pid": 1, "lock": "l", "at_ms": 0}
    lake.storage.put(f"_lake/runs/{'r' * 26}/heartbeat.json", seal_json(beat))
    work = {"id": "w", "episodes": ["e1"], "decisions": []}
    lake.storage.put("_lake/purge/d/w.json", seal_json(work))
    files = {GRAPH: b"graph" * 50, LEARNER: b"weights" * 50}
    policy = PolicySpec(rl.Box((2,)), rl.Discrete(2, start=3), "categorical")
    package = folder / "package"
    package.mkdir()
    for name, data in {**files, MANIFEST: manifest_bytes(policy, {"seed": 7}, files)}.items():
        (package / name).write_bytes(data)
    lake.registry.register("p", package, run_id="r", lineage={})
    journal = folder / "lake" / "d" / "_decisions" / "_journal" / "w-0.jsonl"
    journal.parent.mkdir(parents=True)
    journal.write_bytes(b"".join(frame_records([b'{"a": %d}' % n for n in range(20)])))
    answers = folder / "lake" / "d" / "_answers" / "w-0.jsonl"
    answers.parent.mkdir()
    answers.write_bytes(b"".join(frame_records([b'{"a": %d}' % n for n in range(20)])))
    return folder


def _read_steps(folder: Path) -> Any:
    snapshot = rl.open(folder / "lake").dataset("d").snapshot()
    decoded = snapshot.replay(cache=False).packed.records.words.tobytes()
    return snapshot.version, snapshot.table.read().to_pylist(), decoded


def _read_view(folder: Path) -> Any:
    view = rl.open(folder / "lake").dataset("d").snapshot().replay(where="return > 0")
    view.wait_cached()
    return view.packed.records.words.tobytes(), view.packed.steps.tolist(), view.selections


def _read_summary(folder: Path) -> Any:
    summaries._FILE.forget()
    return rl.open(folder / "lake").sql("SELECT * FROM d.episodes ORDER BY ALL").to_pylist()


def _read_statistics(folder: Path) -> Any:
    shard_statistics._FILE.forget()
    return compute_profile(rl.open(folder / "lake").dataset("d").snapshot()).to_json()


def _read_keys(folder: Path) -> Any:
    dataset = rl.open(folder / "lake").dataset("d")
    unique = dataset.spec.unique
    assert unique is not None
    events = pa.array(range(300), pa.int64())
    needles = np.sort(hash_keys([pa.chunked_array([events])]))
    found = dataset.new_key_index(unique).find(dataset.snapshot().table, needles)
    return sorted(zip(found.query, found.file, found.row, strict=True))


def _read_tombstones(folder: Path) -> Any:
    lake = rl.open(folder / "lake")
    tombstones = Tombstones(lake.storage, "d")
    rows = pa.table({"episode_id": ["e9", "e1"], "source_episode_id": ["e9", "e1"]})
    return len(tombstones), sorted(tombstones.columns), tombstones.find(rows).tolist()


def _read_policy(folder: Path) -> Any:
    ref = rl.open(folder / "lake").registry.resolve("p")
    manifest, files = read_verified(ref.path, ref.manifest_sha256)
    return manifest.body, files


def _read_journal(folder: Path) -> Any:
    return _read_lines(folder / "lake" / "d" / "_decisions" / "_journal" / "w-0.jsonl")


def _read_answers(folder: Path) -> Any:
    return _read_lines(folder / "lake" / "d" / "_answers" / "w-0.jsonl")


def _read_lines(path: Path) -> list[bytes]:
    records, num_torn, faults = segments.read_segment(path)
    if faults or num_torn:
        raise StorageError(f"{path}: {faults}")
    return records


def _read_evaluations(folder: Path) -> Any:
    return rl.open(folder / "lake").registry.evaluations.list()


def _read_work_list(folder: Path) -> Any:
    path = folder / "lake" / "_lake" / "purge" / "d" / "w.json"
    work = purge_module._read_work_list(str(path), path.read_bytes())
    return {name: work[name] for name in ("id", "episodes", "decisions")}


def _storage(folder: Path) -> Any:
    return rl.open(folder / "lake").storage


def _read_priorities(folder: Path) -> Any:
    saved = PriorityFolder(_storage(folder), "d").read("last")
    return saved.keys.tolist(), saved.powered.tolist(), saved.alpha, saved.highest


def _read_checkpoint(folder: Path) -> Any:
    found = Checkpoints(_storage(folder), "r" * 26).load()
    return found.update, {name: a.tolist() for name, a in found.arrays.items()}, found.state


# By the name of the kind: which files are flipped, and what is read then.
FLIPPED: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "log of a dataset": ("lake/d/_delta_log/*.json", _read_steps),
    "checkpoint of a log": ("lake/d/_delta_log/*.checkpoint.parquet", _read_steps),
    "shards": ("lake/d/shards/*", _read_steps),
    "log of the lake": ("lake/_lake/_delta_log/*.json", _read_policy),
    "policy packages": ("lake/_lake/policies/*/*/*", _read_policy),
    "metrics": (
        "lake/_lake/runs/*/metrics/*",
        lambda folder: read_metrics(_storage(folder)).to_pylist(),
    ),
    "checkpoints of runs": ("lake/_lake/runs/*/checkpoints/*", _read_checkpoint),
    "heartbeats": (
        "lake/_lake/runs/*/heartbeat.json",
        lambda folder: last_heartbeat(_storage(folder), "r" * 26),
    ),
    "keys of the lake": (
        "lake/_lake/keys/*",
        lambda folder: (
            rl.open(folder / "lake").signing_key(create=False),
            _read_tombstones(folder),
            _read_webhook(folder),
        ),
    ),
    "replay views": ("lake/d/_derived/replay/*/*", _read_view),
    "priorities": ("lake/d/_derived/priorities/*", _read_priorities),
    "summaries": ("lake/d/_derived/episodes/*", _read_summary),
    "statistics of shards": ("lake/d/_derived/profile/*", _read_statistics),
    "key index": ("lake/d/_keys/*", _read_keys),
    "tombstones": ("lake/d/_tombstones/*", _read_tombstones),
    "saved evaluations": ("lake/_lake/evaluations/*", _read_evaluations),
    "work lists of purges": ("lake/_lake/purge/d/*", _read_work_list),
    "journals": ("lake/d/_decisions/_journal/*.jsonl", _read_journal),
    "answers of a gateway": ("lake/d/_answers/*.jsonl", _read_answers),
    "packages outside a lake": ("package/*", lambda folder: folder),
}


def _read_webhook(folder: Path) -> str:
    webhooks = rl.open(folder / "lake").webhooks
    return webhooks.secret(webhooks.get("ci"))


def flip_bits(folder: Path, num: int, seed: int) -> dict[str, list[int]]:
    """Flip bits, evenly over the kinds; return how many were detected and harmless, by kind."""
    make_lake(folder)
    sha256 = hash_manifest(folder / "package")

    def read_package(folder: Path) -> Any:
        manifest = find_package(folder / "package", sha256)[1]
        return manifest.body

    readers = {kind: read for kind, (_, read) in FLIPPED.items()}
    readers["packages outside a lake"] = read_package
    expected = {kind: read(folder) for kind, read in readers.items()}
    outcomes = {kind: [0, 0] for kind in FLIPPED}
    rng = np.random.default_rng(seed)
    kinds = list(FLIPPED)
    for number in range(num):
        kind = kinds[number % len(kinds)]
        paths = sorted(path for path in folder.glob(FLIPPED[kind][0]) if path.is_file())
        assert paths, kind
        path = paths[int(rng.integers(len(paths)))]
        whole = path.read_bytes()
        place = int(rng.integers(8 * len(whole)))
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        try:
            found = readers[kind](folder)
        except ReplayLakeError:
            outcomes[kind][0] += 1
        else:
            assert found == expected[kind], f"silent: bit {place} of {path}"
            outcomes[kind][1] += 1
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(whole)
    return outcomes


@pytest.mark.slow
def test_flipped_bits_are_never_silent(tmp_path: Path) -> None:
    outcomes = flip_bits(tmp_path, 68, seed=0)
    assert sum(map(sum, outcomes.values())) == 68


@pytest.mark.slow
@pytest.mark.chaos
def test_a_thousand_flipped_bits_are_never_silent(tmp_path: Path) -> None:
    """Prints the table of benchmarks/RESULTS.md."""
    outcomes = flip_bits(tmp_path, 1000, seed=1)
    for kind, (num_detected, num_harmless) in outcomes.items():
        print(f"| {kind} | {num_detected + num_harmless} | {num_detected} | {num_harmless} | 0 |")
    assert sum(map(sum, outcomes.values())) == 1000
