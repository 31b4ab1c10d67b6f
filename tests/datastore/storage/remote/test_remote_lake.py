"""A lake on S3: what a lake in a folder does, through a store that other processes write to."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import deltalake
import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import NotFoundError, PackageInvalidError, ShardCorruptError
from replaylake.datastore.feedback.segments import journal_folder
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.policies.manifest import describe_model, read_verified
from replaylake.datastore.lake.policies.package import check_package
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.lineage import lineage
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage.remote.shard_cache import trim_cache
from replaylake.datastore.storage.table.shard import blob_of

MakeEpisode = Callable[..., Episode]


@pytest.fixture
def url(bucket: str) -> str:
    return f"s3://{bucket}/team a/läke"


@pytest.fixture
def s3_lake(url: str) -> Lake:
    return open_lake(url, create=True)


def steps(lake: Lake, dataset: str = "d") -> int:
    return lake.sql(f"SELECT count(*) AS n FROM {dataset}.steps")["n"][0].as_py()


def copies(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "own-cache").rglob("*.parquet"))


@pytest.mark.parametrize("on", ["s3", "memory"])
def test_append_query_pin_and_replay(
    request: pytest.FixtureRequest, make_episode: MakeEpisode, on: str
) -> None:
    url = request.getfixturevalue("url") if on == "s3" else f"memory://{new_ulid()}"
    lake = open_lake(url, create=True)
    dataset = lake.dataset("d")
    for i in range(3):
        dataset.append([make_episode(f"e{i}", num_steps=3 - i)], producer="p", sequence=i)
    assert dataset.append([make_episode("e0")], producer="p", sequence=0).already_present
    again = open_lake(url)
    assert again.datasets() == ["d"]
    assert again.url == url
    assert steps(again) == 6
    pinned = again.snapshot("d@2")
    assert pinned.sql("SELECT count(*) AS n FROM episodes")["n"][0].as_py() == 2
    view = again.snapshot("d").replay(where="num_steps > 1")
    assert view.num_steps == 5
    again.tags.set("d", "paper", 1)
    assert lake.snapshot("d@paper").num_steps == 3
    assert [row["version"] for row in lake.sql("SELECT version FROM commits").to_pylist()] == [
        *range(4)
    ]


def test_other_engines_open_the_same_table(s3_lake: Lake, make_episode: MakeEpisode, s3) -> None:
    s3_lake.dataset("d").append([make_episode(num_steps=4)])
    options = {**s3.environment, "AWS_ALLOW_HTTP": "true"}
    bucket, _, path = s3_lake.dataset("d").url.removeprefix("s3://").partition("/")
    table = deltalake.DeltaTable(f"s3://{bucket}/{path}", storage_options=options)
    assert table.to_pyarrow_table().num_rows == 4


def test_a_lake_that_is_not_there_is_not_made_by_reading(url: str, s3) -> None:
    s3.requests.clear()
    with pytest.raises(NotFoundError, match="found none there"):
        open_lake(url)
    assert [request for request in s3.requests if request[0] != "GET"] == []


@pytest.mark.slow
def test_opening_lists_from_the_newest_checkpoint_and_then_probes(
    s3_lake: Lake, url: str, make_episode: MakeEpisode, s3
) -> None:
    log = s3_lake.dataset("d").table.log
    dataset = s3_lake.dataset("d")
    for i in range(30):
        dataset.append([make_episode(f"e{i}", num_steps=1)])
    log.checkpoint(20)
    opened = open_lake(url).dataset("d")
    s3.requests.clear()
    assert opened.snapshot().version == 30
    (listing,) = [path for _, path in s3.requests if "list-type" in path]
    assert f"{20:020d}" in listing
    names = [path.rpartition("/")[2] for _, path in s3.requests if path != listing]
    versions = {int(name[:20]) for name in names if name[:20].isdecimal()}
    # Version 0 says that the table exists, and 31 is the probe.
    assert versions == {0, *range(20, 32)}
    s3.requests.clear()
    assert opened.snapshot().version == 30
    assert len(s3.requests) <= 3
    assert all("list-type" not in path for _, path in s3.requests)


def test_shards_are_there_before_the_commit_that_names_them(
    s3_lake: Lake, make_episode: MakeEpisode, s3
) -> None:
    dataset = s3_lake.dataset("d")
    dataset.append([make_episode()])
    s3.requests.clear()
    dataset.append([make_episode("later")])
    written = [path for method, path in s3.requests if method == "PUT"]
    assert ["/shards/" in path for path in written] == [True, False]
    assert written[1].endswith(f"_delta_log/{2:020d}.json")


def test_a_commit_whose_reply_is_lost_is_made_once(
    s3_lake: Lake, make_episode: MakeEpisode, s3
) -> None:
    dataset = s3_lake.dataset("d")
    dataset.append([make_episode()])
    s3.fail("PUT", "_delta_log", done=True)
    commit = dataset.append([make_episode("e2")], producer="p", sequence=0)
    assert (commit.version, commit.already_present) == (2, False)
    assert dataset.snapshot().version == 2
    assert steps(s3_lake) == 6


def test_a_damaged_copy_is_reported_removed_and_made_again(
    s3_lake: Lake, make_episode: MakeEpisode, tmp_path: Path
) -> None:
    s3_lake.dataset("d").append([make_episode()])
    snapshot = s3_lake.snapshot("d")
    assert snapshot.replay().num_steps == 3
    (copy,) = copies(tmp_path)
    data = bytearray(copy.read_bytes())
    data[len(data) // 2] ^= 1
    copy.write_bytes(data)
    with pytest.raises(ShardCorruptError, match="copy of it was damaged and is removed now"):
        snapshot.replay()
    assert snapshot.replay().num_steps == 3


def test_a_shard_damaged_in_the_store_is_never_copied(
    s3_lake: Lake, make_episode: MakeEpisode, tmp_path: Path
) -> None:
    dataset = s3_lake.dataset("d")
    dataset.append([make_episode()])
    (entry,) = dataset.snapshot().files
    path = f"d/{entry.path}"
    storage = dataset.table.storage
    data = bytearray(storage.get(path) or b"")
    data[len(data) // 2] ^= 1
    storage.put(path, bytes(data))
    for read in (lambda: steps(s3_lake), lambda: dataset.snapshot().replay()):
        with pytest.raises(ShardCorruptError, match=r"s3://.*/d/shards/.*expected"):
            read()
    storage.delete([path])
    with pytest.raises(ShardCorruptError, match=r"s3://.*No such file"):
        steps(s3_lake)
    assert copies(tmp_path) == []


def test_reading_goes_on_after_the_cache_was_emptied(
    s3_lake: Lake, make_episode: MakeEpisode, tmp_path: Path
) -> None:
    dataset = s3_lake.dataset("d")
    for i in range(3):
        dataset.append([make_episode(f"e{i}")])
    snapshot = dataset.snapshot()
    assert snapshot.sql("SELECT count(*) AS n FROM steps")["n"][0].as_py() == 9
    paths = snapshot.table.paths()
    assert trim_cache(0).num_files == 0
    assert copies(tmp_path) == sorted(paths)
    dataset.table.storage.release([blob_of("d", entry) for entry in snapshot.files])
    assert trim_cache(0).num_files == 3
    assert snapshot.sql("SELECT count(*) AS n FROM steps")["n"][0].as_py() == 9
    dataset.table.storage.forget(f"d/{entry.path}" for entry in snapshot.files)
    assert copies(tmp_path) == []
    assert snapshot.sql("SELECT count(*) AS n FROM steps")["n"][0].as_py() == 9


def test_a_cache_folder_of_odd_characters(
    s3_lake: Lake, url: str, make_episode: MakeEpisode, tmp_path: Path, monkeypatch
) -> None:
    s3_lake.dataset("d").append([make_episode()])
    monkeypatch.setenv("REPLAYLAKE_CACHE", str(tmp_path / "my ca'che [1]*?ü"))
    lake = open_lake(url)
    assert steps(lake) == 3
    assert lake.snapshot("d").replay(where="num_steps > 1").num_steps == 3


@pytest.mark.slow
def test_a_table_larger_than_the_cap_is_read_through_it(
    s3_lake: Lake, url: str, make_episode: MakeEpisode, tmp_path: Path, monkeypatch
) -> None:
    dataset = s3_lake.dataset("d")
    dataset.append([make_episode("e", num_steps=2)])
    written = [dataset.write([make_episode(f"e{i}", num_steps=1)]) for i in range(70)]
    dataset.commit(written, producer="p", sequence=0)
    monkeypatch.setenv("REPLAYLAKE_CACHE_BYTES", "1")
    lake = open_lake(url)
    most = 0
    for _ in lake.snapshot("d").table.batches():
        most = max(most, len(copies(tmp_path)))
    # Two groups of 16 while one is read, and the one that is being copied.
    assert 0 < most <= 48
    assert lake.snapshot("d").table.read().num_rows == 72
    assert steps(lake) == 72


def test_policies_are_copied_when_they_are_loaded_and_not_before(
    s3_lake: Lake, package: Path, url: str, tmp_path: Path, s3
) -> None:
    ref = s3_lake.registry.register("clone", package, run_id="r1", lineage={"datasets": []})
    assert ref.version == 1
    assert lineage.trace_policy(open_lake(url), "clone")["policy"]["version"] == 1
    again = open_lake(url).registry.resolve("clone")
    assert not (tmp_path / "own-cache").exists()
    assert read_verified(again.path)[0].body["version"] == 1
    assert again.path.is_relative_to(tmp_path / "own-cache")
    s3.requests.clear()
    assert again.path == ref.path
    assert s3.requests == []
    (again.path / "policy.onnx").unlink()
    assert (again.path / "policy.onnx").read_bytes() == b"graph"


def test_a_language_model_is_copied_with_its_folders(s3_lake: Lake, tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "additional_chat_templates").mkdir(parents=True)
    config = json.dumps({"architectures": ["Tiny"], "vocab_size": 8})
    files = {"config.json": config, "tokenizer.json": "{}", "model.safetensors": "weights"}
    files["additional_chat_templates/tools.jinja"] = "{{ tools }}"
    for name, text in files.items():
        (model / name).write_text(text)
    sha256s = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    manifest = describe_model(model, sha256s, {})
    s3_lake.registry.register_model("agent", model, manifest, run_id="", lineage={})
    ref = open_lake(s3_lake.url).registry.resolve("agent")
    assert check_package(ref.path, ref.manifest_sha256).is_language
    assert {name: (ref.path / name).read_text() for name in files} == files
    assert fsck(s3_lake).is_clean


def test_a_policy_damaged_in_the_store_is_not_copied(s3_lake: Lake, package: Path) -> None:
    ref = s3_lake.registry.register("clone", package, run_id="r1", lineage={"datasets": []})
    ref.storage.put(f"{ref.folder}/policy.onnx", b"Graph")
    with pytest.raises(PackageInvalidError, match=r"policy\.onnx: found 5 bytes"):
        _ = ref.path


def test_the_signing_key_is_made_once(s3_lake: Lake, url: str) -> None:
    assert s3_lake.signing_key() == open_lake(url).signing_key(create=False)


def test_journals_are_in_this_machines_folder(s3_lake: Lake, url: str, tmp_path: Path) -> None:
    folder = journal_folder(s3_lake.dataset("d").decisions)
    assert folder.is_relative_to(tmp_path / "own-state")
    assert folder == journal_folder(open_lake(url).dataset("d").decisions)


WRITER = """
    import sys
    import numpy as np
    from replaylake.datastore.episodes.episode import Episode
    from replaylake.datastore.lake.lake import open_lake

    url, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    dataset = open_lake(url).dataset("d")
    for k in range(dataset.next_sequence(name), count):
        episode = Episode(
            f"{name}/{k}",
            observations=np.full((3, 2), k, np.float32),
            actions=np.array([0, 1, 0]),
            rewards=np.ones(3),
            terminated=True,
        )
        dataset.append([episode], producer=name, sequence=k)
        print(k, flush=True)
"""


def start_writer(url: str, name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), url, name, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def create(lake: Lake, make_episode: MakeEpisode) -> None:
    spec = make_episode()
    lake.dataset("d").append([spec], producer="first", sequence=0)


def per_episode(lake: Lake) -> dict[str, int]:
    rows = lake.sql("SELECT episode_id, count(*) AS n FROM d.steps GROUP BY 1").to_pylist()
    return {row["episode_id"]: row["n"] for row in rows if row["episode_id"] != "e"}


@pytest.mark.slow
def test_two_processes_commit_at_once_and_nothing_is_lost(
    s3_lake: Lake, url: str, make_episode: MakeEpisode
) -> None:
    create(s3_lake, make_episode)
    writers = [start_writer(url, name, 12) for name in ("a", "b")]
    for writer in writers:
        out, _ = writer.communicate(timeout=120)
        assert writer.returncode == 0
        assert out.split() == [str(k) for k in range(12)]
    assert per_episode(s3_lake) == {f"{name}/{k}": 3 for name in "ab" for k in range(12)}
    assert s3_lake.snapshot("d").version == 25


@pytest.mark.slow
def test_killed_in_the_middle_and_run_again(
    s3_lake: Lake, url: str, make_episode: MakeEpisode
) -> None:
    create(s3_lake, make_episode)
    rng = np.random.default_rng(0)
    acknowledged = -1
    for _ in range(4):
        writer = start_writer(url, "a", 10_000)
        assert writer.stdout is not None
        for _ in range(int(rng.integers(1, 5))):
            acknowledged = int(writer.stdout.readline())
        time.sleep(float(rng.uniform(0, 0.02)))
        os.kill(writer.pid, signal.SIGKILL)
        rest = writer.stdout.read().split()
        writer.wait()
        writer.stdout.close()
        acknowledged = int(rest[-1]) if rest else acknowledged
        found = per_episode(open_lake(url))
        assert set(found.values()) == {3}
        assert acknowledged + 1 <= len(found) <= acknowledged + 2
        assert sorted(found) == sorted(f"a/{k}" for k in range(len(found)))
