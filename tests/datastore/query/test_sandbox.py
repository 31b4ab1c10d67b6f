"""SQL from others that is refused: by our own look at it, and by the locked engine behind that."""

import socket
import subprocess
import sys
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import NotFoundError, QueryError, QueryRefusedError
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.query.connections import connect
from replaylake.datastore.query.sandbox import lock_down
from replaylake.datastore.query.untrusted import QueryLimits

SMALL = QueryLimits(wall_s=60, cpu_s=10, memory_bytes=512 << 20)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A lake of two datasets, which no test changes: each that could asserts that it did not."""
    lake = open_lake(tmp_path_factory.mktemp("filled"), create=True)
    for name, num_episodes in (("mine", 2), ("theirs", 1)):
        observations = np.zeros((3, 2), np.float32)
        lake.dataset(name).append(
            [
                Episode(f"{name}{i}", observations, np.zeros(3, int), np.ones(3), terminated=True)
                for i in range(num_episodes)
            ]
        )
    lake.signing_key()
    return lake


def _shard(lake, name):
    (path,) = lake.dataset(name).snapshot().table.paths()
    return path


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
    with pytest.raises((QueryRefusedError, QueryError, NotFoundError)) as caught:
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
        lock_down(connection, [str(mine)])
        if name in ("an allowed file itself", "copy in WITH"):
            return  # reading it is allowed; writing it is what the kernel refuses (below)
        with pytest.raises(duckdb.Error):
            connection.execute(query).fetchall()


_CONFINED = """
import resource, socket, sys
from replaylake.datastore.query.sandbox import limit_resources, restrict_access
allowed, other = sys.argv[1:3]
limit_resources(memory_bytes=256 << 20, cpu_s=60, wall_s=60, num_files=64)
if not restrict_access([allowed], []):
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
