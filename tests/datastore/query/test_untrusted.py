"""SQL from others: what it may read, and that all else is refused or stopped in bounded time."""

import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from replaylake.datastore.errors import ConfigInvalidError, QueryError, QueryRefusedError
from replaylake.datastore.lake.catalog import LakeCatalog
from replaylake.datastore.query import untrusted
from replaylake.datastore.query.connections import connect
from replaylake.datastore.query.statements import check_select
from replaylake.datastore.query.untrusted import QueryLimits, _Sandbox, keep_spare_sandbox

# Busy cores start a process late; what nothing stops would run for 100 s or for ever.
SLACK_S = 90
SMALL = QueryLimits(wall_s=20, cpu_s=5, memory_bytes=512 << 20, max_rows=100, max_bytes=1 << 20)


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


@pytest.mark.slow
def test_more_shards_than_it_may_open_files(filled, make_episode):
    dataset = filled.dataset("many")
    written = []
    dataset.append([make_episode("e0")])
    for number in range(1, 300):
        written.append(dataset.write([make_episode(f"e{number}")]))
    dataset.commit(written, producer="test", sequence=0)
    result = filled.sql_untrusted("select count(distinct episode_id) as n from many.steps")
    assert result.rows["n"].to_pylist() == [300]


@pytest.mark.parametrize(
    "call",
    [
        "from json_execute_serialized_sql(json_serialize_sql("
        "'with x as (copy (select 1) to ''{out}'') select * from x'))",
        "from query('select * from enable_logging(''QueryLog'')')",
        "from Enable_Logging('QueryLog', storage='file', storage_config={{'path':'{out}'}})",
        "select json_serialize_plan('select current_setting(''allowed_paths'')', optimize := true)",
        "select write_log('x')",
    ],
)
def test_functions_that_do_more_than_read(filled, tmp_path, call):
    out = tmp_path / "out"
    query = call.format(out=out)
    for run in (filled.sql, filled.sql_untrusted):
        with pytest.raises(QueryRefusedError, match=r"functions that only read|expected the views"):
            run(query)
    assert not out.exists()


@pytest.mark.slow
def test_the_clock_counts_while_datasets_are_looked_up(filled, monkeypatch):
    looked_up = []

    def slow(catalog, dataset, view):
        looked_up.append(dataset)
        time.sleep(2.1)
        return filled.dataset(dataset).snapshot().table

    monkeypatch.setattr(LakeCatalog, "table", slow)
    query = "select 1 from mine.steps, theirs.steps"
    limits = replace(SMALL, wall_s=2)
    with pytest.raises(QueryError, match=r"still running after 2 s"):
        filled.sql_untrusted(query, limits=limits)
    assert len(looked_up) < 2


def test_with_may_not_write_in_trusted_sql_either(filled, tmp_path):
    out = tmp_path / "out.csv"
    query = f"with x as (copy (select 1) to '{out}') select 1"
    with pytest.raises(QueryRefusedError, match="COPY"):
        filled.sql(query)
    with connect() as connection, pytest.raises(QueryRefusedError, match="DELETE"):
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
    with pytest.raises(QueryError, match=said):
        filled.sql_untrusted(query, limits=limits)
    assert time.monotonic() - began < wall_s + SLACK_S
    assert filled.sql("select 1 as a")["a"].to_pylist() == [1]


@pytest.mark.slow
def test_a_result_is_cut_and_says_so(filled):
    by_rows = filled.sql_untrusted("select * from range(10000000)", limits=SMALL)
    assert (by_rows.rows.num_rows, by_rows.truncated) == (100, "rows")
    exactly = filled.sql_untrusted("select * from range(100)", limits=SMALL)
    assert (exactly.rows.num_rows, exactly.truncated) == (100, None)
    query = "select repeat('x', 100000) as x from range(10000)"
    by_bytes = filled.sql_untrusted(query, limits=SMALL)
    assert (by_bytes.rows.num_rows, by_bytes.truncated) == (10, "bytes")
    assert by_bytes.rows.nbytes <= SMALL.max_bytes


@pytest.mark.slow
def test_recursion_without_end_ends_one_way_or_the_other(filled):
    """DuckDB may hand over rows while it recurses, or hold them back until it is stopped."""
    query = "with recursive t as (select 1 a union all select a + 1 from t) select * from t"
    began = time.monotonic()
    with suppress(QueryError):
        result = filled.sql_untrusted(query, limits=SMALL)
        assert (result.rows.num_rows, result.truncated) == (100, "rows")
    assert time.monotonic() - began < SMALL.wall_s + SLACK_S


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
        open_files = set()
        for path in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # as it starts, it opens modules and closes them
                open_files.add(os.readlink(path))
        assert not [name for name in open_files if str(filled.path) in name]
    assert process.returncode is not None
    assert not Path(f"/proc/{process.pid}/environ").exists()


def test_limits_that_are_none(filled):
    with pytest.raises(ConfigInvalidError, match="wall_s"):
        QueryLimits(wall_s=0)
    with pytest.raises(ConfigInvalidError, match="memory_bytes"):
        QueryLimits(memory_bytes=1)


def test_parameters_that_arrow_cannot_hold(filled):
    with pytest.raises(QueryRefusedError, match="parameters"):
        filled.sql_untrusted("select $a", {"a": object()})


def test_a_process_waits_for_the_next_query(filled, monkeypatch):
    started = []
    start = untrusted._start

    def note():
        started.append(start())
        return started[-1]

    monkeypatch.setattr(untrusted, "_start", note)
    with keep_spare_sandbox():
        waiting = started[0]
        assert filled.sql_untrusted("select 1 as x").rows.to_pylist() == [{"x": 1}]
        assert waiting.poll() is not None, "it answers one query, then ends"
        assert len(started) == 2
        started[1].kill()
        started[1].wait()
        assert filled.sql_untrusted("select 2 as x").rows.to_pylist() == [{"x": 2}]
        assert len(started) == 4, "one that died is replaced"
    assert all(process.poll() is not None for process in started)
    filled.sql_untrusted("select 1")
    assert len(started) == 5, "none waits any more"
