"""SQL from others: what it may read, and that all else is refused or stopped in bounded time."""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from replaylake.datastore.errors import ConfigInvalid, NotFound, QueryFailed, QueryRefused
from replaylake.datastore.query.connections import connect
from replaylake.datastore.query.sandbox import lock
from replaylake.datastore.query.statements import check_select
from replaylake.datastore.query.untrusted import QueryLimits, _Sandbox

SMALL = QueryLimits(wall_s=20, cpu_s=5, memory_bytes=512 << 20, max_rows=100, max_bytes=1 << 20)


@pytest.fixture
def filled(lake, make_episode):
    lake.dataset("mine").append([make_episode("a"), make_episode("b", 5)])
    lake.dataset("theirs").append([make_episode("c")])
    return lake


def _shard(lake, name):
    (path,) = lake.dataset(name).snapshot().table.paths()
    return path


def test_the_same_rows_as_trusted_sql(filled):
    for view in (
        "mine.steps",
        "mine.episodes",
        "mine.transitions",
        "datasets",
        "shards",
        "commits",
    ):
        query = f"select * from {view} order by all"
        result = filled.sql_untrusted(query)
        assert result.rows.to_pylist() == filled.sql(query).to_pylist()
        assert result.truncated is None


def test_two_datasets_with_parameters_and_shadowing(filled):
    query = """
        with steps as (select * from mine.steps union all select * from theirs.steps)
        select count(*) as n, $label as label, sum(u.x) as units
        from steps, unnest([1, 2]) as u(x) where reward >= $least
    """
    (row,) = filled.sql_untrusted(query, {"label": "all", "least": 2.0}).rows.to_pylist()
    assert row == {"n": 2 * (2 + 4 + 2), "label": "all", "units": 3 * 8}


def test_an_empty_result_and_an_empty_dataset(filled, make_episode):
    filled.dataset("empty").create(
        filled.dataset("mine").spec.observation_space, filled.dataset("mine").spec.action_space
    )
    result = filled.sql_untrusted("select episode_id, reward from empty.steps")
    assert result.rows.num_rows == 0
    assert result.rows.column_names == ["episode_id", "reward"]


def test_more_shards_than_it_may_open_files(filled, make_episode):
    dataset = filled.dataset("many")
    written = []
    dataset.append([make_episode("e0")])
    for number in range(1, 300):
        written.append(dataset.write([make_episode(f"e{number}")]))
    dataset.commit(written, producer="test", sequence=0)
    result = filled.sql_untrusted("select count(distinct episode_id) as n from many.steps")
    assert result.rows["n"].to_pylist() == [300]


REFUSED = {
    "a file as a table": ("select * from '/etc/passwd'", "no view"),
    "read_csv": ("select * from read_csv('/etc/passwd')", "read_csv"),
    "read_text": ("select content from read_text('/etc/passwd')", "read_text"),
    "read_blob": ("select content from read_blob('/etc/passwd')", "read_blob"),
    "read_json": ("select * from read_json('/etc/passwd')", "read_json"),
    "read_parquet": ("select * from read_parquet('{theirs}')", "read_parquet"),
    "in a subquery": ("select (select content from read_text('/etc/passwd'))", "read_text"),
    "below lateral": (
        "select * from mine.steps s, lateral (select * from read_text(s.episode_id))",
        "read_text",
    ),
    "in another case": ("SELECT * FROM System.Main.READ_TEXT('/etc/passwd')", "read_text"),
    "quoted": ("select * from \"read_text\"('/etc/passwd')", "read_text"),
    "behind a comment": ("select /* ; */ * from /**/ read_text -- ;\n('/etc/passwd')", "read_text"),
    "glob": ("select * from glob('/etc/*')", "glob"),
    "globs beside allowed files": ("select * from '{folder}/*.parquet'", "no view"),
    "another dataset's file": ("select * from mine.steps, '{theirs}'", "no view"),
    "an allowed file itself": ("select * from parquet_metadata('{mine}')", "parquet_metadata"),
    "a symlink": ("select * from '{link}'", "no view"),
    "the signing key": ("select * from read_blob('{key}')", "read_blob"),
    "the network": ("select * from read_csv('http://127.0.0.1:1/x')", "read_csv"),
    "a name of WITH that is a file": (
        "with t as (with \"/etc/passwd\" as (select 1) select 1) select * from t, '/etc/passwd'",
        "passwd",
    ),
    "a name of WITH that is DuckDB's": (
        "with t as (with duckdb_tables as (select 1) select 1) select * from t, duckdb_tables",
        "duckdb_tables",
    ),
    "query()": ("select * from query('select 1')", "query"),
    "query_table()": ("select * from query_table('mine.steps')", "query_table"),
    "SQL in JSON": ("select * from json_execute_serialized_sql('{{}}')", "json_execute"),
    "settings": ("select * from duckdb_settings()", "duckdb_settings"),
    "one setting": ("select current_setting('allowed_paths')", "current_setting"),
    "secrets": ("select * from duckdb_secrets()", "duckdb_secrets"),
    "tables of DuckDB": ("select * from pg_catalog.pg_tables", "pg_catalog"),
    "information_schema": ("select * from information_schema.tables", "information_schema"),
    "sqlite_master": ("select * from sqlite_master", "sqlite_master"),
    "another catalogue": ("select * from system.main.duckdb_tables", "system"),
    "views' definitions": ("select sql from duckdb_views()", "duckdb_views"),
    "describe": ("select * from (describe mine.steps)", "DESCRIBE"),
    "show": ("show tables", "SHOW"),
    "the environment": ("select getenv('HOME')", "getenv"),
    "a Python variable": ("select * from secret_of_the_caller", "secret_of_the_caller"),
    "a dataset alone": ("select * from steps", "steps"),
    "attach": ("attach '/tmp/x.db'", "ATTACH"),
    "copy": ("copy (select 1) to '{folder}/x.parquet'", "COPY"),
    "copy in WITH": (
        "with x as (copy (select 1 as a) to '{mine}' (use_tmp_file false)) select 1",
        "COPY",
    ),
    "insert in WITH": ("with x as (insert into mine.steps values (1)) select 1", "INSERT"),
    "export": ("export database '{folder}'", "EXPORT"),
    "install": ("install httpfs", "LOAD"),
    "load": ("load '/tmp/x.duckdb_extension'", "LOAD"),
    "pragma": ("pragma database_list", "PRAGMA"),
    "set": ("set memory_limit = '100GB'", "SET"),
    "create": ("create table t as select 1", "CREATE"),
    "create a macro": ("create macro f() as 1", "CREATE"),
    "call": ("call pragma_version()", "CALL"),
    "explain": ("explain analyze select 1", "EXPLAIN"),
    "prepare": ("prepare p as select 1", "PREPARE"),
    "two statements": ("select 1; select 2", "SELECT, SELECT"),
    "a statement behind a select": ("select 1; attach '/tmp/x.db'", "ATTACH"),
    "nothing": (" ; -- select 1", "no statement"),
    "no SQL": ("selekt 1", "selekt"),
    "too long": ("select " + "1 + " * 50_000 + "1", "100,000"),
    "too deep": ("select " + "1 + " * 20_000 + "1", "depth"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(filled, tmp_path, name):
    secret_of_the_caller = pa.table({"a": [1]})  # noqa: F841 - what a replacement scan would find
    filled.signing_key()
    (tmp_path / "link.parquet").symlink_to(_shard(filled, "theirs"))
    query, said = REFUSED[name]
    mine = _shard(filled, "mine")
    before = mine.read_bytes()
    query = query.format(
        mine=mine,
        theirs=_shard(filled, "theirs"),
        folder=mine.parent,
        link=tmp_path / "link.parquet",
        key=Path(filled.path) / "_lake" / "keys" / "signing",
    )
    with pytest.raises((QueryRefused, QueryFailed, NotFound)) as caught:
        filled.sql_untrusted(query, limits=SMALL)
    assert said in str(caught.value)
    assert "root:" not in str(caught.value)
    assert mine.read_bytes() == before
    assert sorted(path.name for path in mine.parent.iterdir()) == [mine.name]


@pytest.mark.parametrize(
    "name", [n for n, (q, _) in REFUSED.items() if "'{" in q or "'/" in q or n == "the network"]
)
def test_the_engine_alone_would_refuse_files_too(filled, tmp_path, name):
    """Behind our own look at the query, DuckDB's locked configuration says no as well."""
    filled.signing_key()
    (tmp_path / "link.parquet").symlink_to(_shard(filled, "theirs"))
    mine = _shard(filled, "mine")
    query = REFUSED[name][0].format(
        mine=mine,
        theirs=_shard(filled, "theirs"),
        folder=mine.parent,
        link=tmp_path / "link.parquet",
        key=Path(filled.path) / "_lake" / "keys" / "signing",
    )
    with connect() as connection:
        lock(connection, [str(mine)])
        if name in ("an allowed file itself", "copy in WITH"):
            return  # reading it is allowed; writing it is what the kernel refuses (below)
        with pytest.raises(duckdb.Error):
            connection.execute(query).fetchall()


def test_with_may_not_write_in_trusted_sql_either(filled, tmp_path):
    out = tmp_path / "out.csv"
    query = f"with x as (copy (select 1) to '{out}') select 1"
    with pytest.raises(QueryRefused, match="COPY"):
        filled.sql(query)
    with connect() as connection, pytest.raises(QueryRefused, match="DELETE"):
        check_select(connection, "select * from (with x as (delete from t) select 1)")
    assert not out.exists()


STOPPED = {
    "list_sum": ("select list_sum(range(1000000000))", "Out of Memory"),
    "a list of everything": ("select list(a.range) from range(100000000) a", "Out of Memory"),
    "one huge value": ("select repeat('x', 20000000) as x", "first row"),
    "cpu": ("select sum(hash(a.range, b.range)) from range(1000000) a, range(1000000) b", "CPU"),
    "recursion without end": (
        "with recursive t as (select 1 a union all select a + 1 from t) select max(a) from t",
        "CPU",
    ),
    "sleeping": ("select pg_sleep(100)", "still running after 4 s"),
    "sleeping rows": ("select sleep_ms(10) from range(100000)", "still running after 4 s"),
}


@pytest.mark.parametrize("name", STOPPED)
@pytest.mark.slow
def test_stopped(filled, name):
    query, said = STOPPED[name]
    wall_s = 4 if "sleep" in query else 60
    limits = QueryLimits(wall_s=wall_s, cpu_s=3, memory_bytes=512 << 20)
    began = time.monotonic()
    with pytest.raises(QueryFailed, match=said):
        filled.sql_untrusted(query, limits=limits)
    assert time.monotonic() - began < wall_s + 5
    assert filled.sql("select 1 as a")["a"].to_pylist() == [1]


def test_a_result_is_cut_and_says_so(filled):
    by_rows = filled.sql_untrusted("select * from range(10000000)", limits=SMALL)
    assert (by_rows.rows.num_rows, by_rows.truncated) == (100, "rows")
    exactly = filled.sql_untrusted("select * from range(100)", limits=SMALL)
    assert (exactly.rows.num_rows, exactly.truncated) == (100, None)
    query = "select repeat('x', 100000) as x from range(10000)"
    by_bytes = filled.sql_untrusted(query, limits=SMALL)
    assert (by_bytes.rows.num_rows, by_bytes.truncated) == (10, "bytes")
    assert by_bytes.rows.nbytes <= SMALL.max_bytes


def test_recursion_without_end_ends_one_way_or_the_other(filled):
    """DuckDB may hand over rows while it recurses, or hold them back until it is stopped."""
    query = "with recursive t as (select 1 a union all select a + 1 from t) select * from t"
    began = time.monotonic()
    with suppress(QueryFailed):
        result = filled.sql_untrusted(query, limits=SMALL)
        assert (result.rows.num_rows, result.truncated) == (100, "rows")
    assert time.monotonic() - began < SMALL.wall_s + 5


def test_where_policies_lie_and_run_records_are_withheld(filled, package):
    registry = filled.registry
    registry.register("p", package, run_id="r", lineage={}, run={"kind": "t", "error": "/home/x"})
    assert filled.sql("select path from policies")["path"].null_count == 0
    query = "select p.policy, p.path, r.run_id, r.record from policies p, runs r"
    (row,) = filled.sql_untrusted(query).rows.to_pylist()
    assert row == {"policy": "p", "path": None, "run_id": "r", "record": None}


def test_the_process_inherits_nothing_and_is_gone_afterwards(filled, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted")
    with _Sandbox(SMALL) as sandbox:
        process = sandbox._process
        told = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert b"planted" not in told
        open_files = {os.readlink(p) for p in Path(f"/proc/{process.pid}/fd").iterdir()}
        assert not [name for name in open_files if str(filled.path) in name]
    assert process.returncode is not None
    assert not Path(f"/proc/{process.pid}/environ").exists()


def test_limits_that_are_none(filled):
    with pytest.raises(ConfigInvalid, match="wall_s"):
        QueryLimits(wall_s=0)
    with pytest.raises(ConfigInvalid, match="memory_bytes"):
        QueryLimits(memory_bytes=1)


def test_parameters_that_arrow_cannot_hold(filled):
    with pytest.raises(QueryRefused, match="parameters"):
        filled.sql_untrusted("select $a", {"a": object()})


_CONFINED = """
import resource, socket, sys
from replaylake.datastore.query.confine import limit_resources, read_only
allowed, other = sys.argv[1:3]
limit_resources(memory_bytes=256 << 20, cpu_s=5, wall_s=5, num_files=64)
if not read_only([allowed], []):
    print("no landlock"); sys.exit()
assert open(allowed).read() == "allowed"
for path, mode in ((other, "r"), (allowed, "r+"), (allowed, "w"), (other + ".new", "w")):
    try:
        open(path, mode)
    except PermissionError:
        print("refused", mode)
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[3])), timeout=2)
except PermissionError:
    print("refused tcp")
try:
    bytearray(1 << 30)
except MemoryError:
    print("refused memory")
try:
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096)) if resource.getrlimit(
        resource.RLIMIT_NOFILE) != (64, 64) else print("files 64")
except ValueError:
    pass
"""


def test_the_kernel_holds_the_process_to_its_files(tmp_path):
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    allowed.write_text("allowed")
    other.write_text("other")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = [sys.executable, "-c", _CONFINED, str(allowed), str(other), str(port)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    if "no landlock" in ran.stdout:
        pytest.skip("this kernel has no Landlock")
    expected = ["r", "r+", "w", "w", "tcp", "memory"]
    assert ran.stdout.split("\n")[:6] == [f"refused {what}" for what in expected]
    assert "files 64" in ran.stdout
    assert allowed.read_text() == "allowed"
