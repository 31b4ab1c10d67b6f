"""Curves drawn in characters, compared with drawings made by hand."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaylake.cli.output import text_plot as module
from replaylake.cli.output.text_plot import curve_letters, sparkline, text_plot


@pytest.fixture
def ascii_only(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(module, "result_stream", lambda: stream)


@pytest.fixture
def unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(module, "result_stream", lambda: stream)


@pytest.mark.usefixtures("unicode")
def test_a_lone_curve_is_drawn_in_dots() -> None:
    xs = np.array([0, 4, 8])
    assert text_plot({"x": (xs, np.array([0.0, 8.0, 8.0]))}, width=4, height=2) == [
        "8 │ ⡼⠉⠉",
        "0 │⡼⠁",
        "  └────",
        "   0  8",
    ]


@pytest.mark.usefixtures("unicode")
def test_several_curves_are_letters_and_a_star_where_they_meet() -> None:
    xs = np.array([0, 100])
    rising, falling = np.array([0.0, 1.0]), np.array([1.0, 0.0])
    drawn = text_plot({"A": (xs, rising), "B": (xs, falling)}, is_lone=False, width=5, height=5)
    assert drawn == [
        "1 │B   A",
        "  │ B A",
        "  │  *",
        "  │ A B",
        "0 │A   B",
        "  └─────",
        "   0 100",
    ]


@pytest.mark.usefixtures("ascii_only")
def test_an_output_without_unicode_gets_plain_characters() -> None:
    xs = np.arange(4)
    drawn = text_plot({"x": (xs, xs * 1.0)}, width=4, height=2, mark=2)
    assert all(line.isascii() for line in drawn)
    assert drawn[2] == "  +--^-"
    assert sparkline(np.array([0.0, 1.0, 2.0])) == "_=#"


@pytest.mark.usefixtures("unicode")
def test_sparklines() -> None:
    assert sparkline(np.arange(8.0)) == "▁▂▃▄▅▆▇█"
    assert sparkline(np.repeat(np.arange(8.0), 5), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(np.array([1.0, np.nan, 2.0, np.inf])) == "▁ █ "
    assert sparkline(np.array([3.0, 3.0])) == "▅▅"
    assert sparkline(np.array([np.nan])) == ""
    assert sparkline(np.array([])) == ""


@pytest.mark.usefixtures("unicode")
def test_a_curve_that_begins_later_is_not_drawn_before() -> None:
    whole, late = (np.array([0, 9]), np.zeros(2)), (np.array([5, 9]), np.ones(2))
    drawn = text_plot({"A": whole, "B": late}, is_lone=False, width=10, height=2)
    assert drawn[:2] == ["1 │     BBBBB", "0 │AAAAAAAAAA"]


@pytest.mark.usefixtures("unicode")
def test_what_is_not_finite_is_left_out() -> None:
    assert text_plot({"x": (np.array([1]), np.array([np.nan]))}) == ["no finite values"]
    drawn = text_plot({"x": (np.array([1, 2, 3]), np.array([1.0, np.inf, 2.0]))}, height=2)
    assert (drawn[0][:3], drawn[1][:3]) == ("2 │", "1 │")


@pytest.mark.usefixtures("unicode")
def test_a_single_point_has_one_label() -> None:
    drawn = text_plot({"x": (np.array([7000]), np.array([-171.0]))}, height=3)
    assert [line.split(" ")[0] for line in drawn[:3]] == ["", "-171", ""]


@given(
    st.lists(
        st.tuples(st.integers(0, 10**9), st.floats(width=32, allow_nan=True)),
        min_size=1,
        max_size=40,
        unique_by=lambda point: point[0],
    ),
    st.integers(1, 40),
    st.integers(1, 12),
    st.booleans(),
)
def test_any_curve_is_drawn_in_its_frame(
    points: list[tuple[int, float]], width: int, height: int, is_lone: bool
) -> None:
    xs, ys = (np.array(one, float) for one in zip(*sorted(points), strict=True))
    drawn = text_plot({"A": (xs, ys)}, is_lone=is_lone, width=width, height=height)
    assert len(drawn) in (1, height + 2)
    if len(drawn) > 1:
        gutter = len(drawn[-2]) - width
        assert max(len(line) for line in drawn[:-1]) <= gutter + width
        assert any(line[gutter:].strip() for line in drawn[:height])


def test_every_curve_of_a_few_dozens_has_a_letter_of_its_own() -> None:
    assert curve_letters(3) == ["A", "B", "C"]
    assert len(set(curve_letters(62))) == 62
