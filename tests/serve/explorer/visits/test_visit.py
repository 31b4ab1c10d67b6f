"""What a visit remembers of its queries."""

import pytest

from replaylake.serve.explorer.visits import visit
from replaylake.serve.explorer.visits.visit import Links, QueryMemory, Visit


def test_the_memory_of_queries_has_a_budget_of_bytes(monkeypatch):
    monkeypatch.setattr(visit, "_MAX_REMEMBERED_BYTES", 800)
    memory = QueryMemory()
    for number in range(12):
        memory.put(number, [number], 100)
    assert [number for number in range(12) if memory.get(number)] == list(range(4, 12))
    # One that was there is replaced, and counts once.
    memory.put(11, ["again"], 100)
    assert memory.get(4) == [4]
    assert memory.get(11) == ["again"]
    # One that takes more than an eighth would push the others out.
    memory.put("large", ["x"], 101)
    assert memory.get("large") is None
    assert memory.get(4) == [4]


def test_what_is_too_old_is_forgotten_with_its_bytes(monkeypatch):
    monkeypatch.setattr(visit, "_MAX_REMEMBERED_BYTES", 800)
    memory = QueryMemory()
    for number in range(8):
        memory.put(number, [number], 100)
    monkeypatch.setattr(visit, "_REMEMBERED_S", -1.0)
    assert memory.get(0) is None
    monkeypatch.setattr(visit, "_REMEMBERED_S", 120.0)
    memory.put("new", ["new"], 100)
    assert memory.get(1) == [1]


@pytest.mark.parametrize(("num", "is_remembered"), [(10, True), (5000, False)])
def test_large_results_are_not_remembered(explored_lake, num, is_remembered):
    memory = QueryMemory()
    of = Visit(explored_lake, Links(), memory, None, {}, {})
    text = f"SELECT repeat('x', 1000) AS text FROM walks.steps, range({num}) LIMIT {num}"
    rows = of.sql(text, explored_lake.snapshot("walks"))
    assert len(rows) == num
    assert bool(memory._results) == is_remembered
