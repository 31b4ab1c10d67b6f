"""Charts: heights, labels and links, against numbers worked out by hand."""

import re

from replaylake.datastore.lake.profile.column_statistics import Histogram
from replaylake.serve.pages.charts import (
    FlowNode,
    Interval,
    ParallelAxis,
    ParallelLine,
    bar_list,
    column_chart,
    density_map,
    flow_chart,
    histogram_chart,
    interval_chart,
    parallel_chart,
    sparkline,
    stacked_chart,
)


def _heights(picture: str, name: str = "bar") -> list[str]:
    return re.findall(rf'height="([\d.]+)" class="{name}"', picture)


def test_columns_are_as_high_as_their_values():
    picture = column_chart([0, 1, 4], ["a", "b", "<c>"], label="n", axis=["x", "y", "z"])
    # Of a picture 100 high: a quarter and all of it; nothing has no height.
    assert _heights(picture) == ["0", "25", "100"]
    assert "<title>&lt;c&gt;</title>" in picture
    assert 'class="axis each"' in picture
    assert "max 4" in picture


def test_what_is_rare_is_still_seen():
    assert _heights(column_chart([1, 1_000_000], ["", ""], label="n", axis=[])) == ["1", "100"]


def test_few_columns_are_no_wider_than_a_tenth_of_the_picture():
    for num, width in ((1, 1), (2, 2), (5, 5), (8, 7), (40, 9)):
        picture = column_chart([1] * num, [""] * num, label="n", axis=[])
        (found,) = set(re.findall(r'width="([\d.]+)" height="100" class="bar"', picture))
        assert float(found) == width, num


def test_what_is_unknown_is_gray():
    parts = [("not recorded", [4, 0], "4"), ("walker:1", [0, 2], "2")]
    picture = stacked_chart(parts, label="n", axis=[], unknown="not recorded")
    assert re.findall(r'height="(\d+)" class="(c\d)"', picture) == [
        ("100", "c7"),
        ("50", "c0"),
        ("10", "c7"),
        ("10", "c0"),
    ]


def test_a_sparkline_has_no_bar_where_there_is_nothing():
    picture = sparkline([4, 0, 1, 1000], label="returns <of> d")
    assert _heights(picture) == ["8", "8", "100"]
    assert "<title>returns &lt;of&gt; d</title>" in picture


def test_nothing_is_drawn_of_nothing():
    assert histogram_chart(None, "return") is None
    assert _heights(column_chart([], [], label="n", axis=[])) == []
    assert "<rect" not in density_map([[0, 0], [0, 0]], label="map")


def test_bins_of_whole_numbers_are_named_by_them():
    picture = histogram_chart(Histogram((-0.5, 0.5, 1.5), (3, 1)), "action", "steps")
    assert picture is not None
    assert "<title>0: 3 steps</title>" in picture
    assert "<span>0</span><span>1</span>" in picture


def test_a_bin_leads_to_its_values():
    def link(low: float, high: float, is_last: bool) -> str:
        return f"/e?{low}-{high}-{is_last}"

    picture = histogram_chart(Histogram((0.0, 1.5, 3.0), (2, 1)), "return", link=link)
    assert picture is not None
    assert re.findall(r'href="([^"]+)"', picture) == ["/e?0.0-1.5-False", "/e?1.5-3.0-True"]
    assert "0 to 1.5: 2 episodes" in picture


def test_bars_have_their_names_beside_them():
    picture = bar_list([("a<b", 2, "2 of 3"), ("", 0, "0")], label="ends")
    assert "a&lt;b" in picture
    assert "(empty)" in picture
    assert re.findall(r'width="([\d.]+)" height="10"', picture) == ["100", "0"]


def test_parts_are_stacked():
    picture = stacked_chart(
        [("p", [1, 0], "1"), ("q", [3, 2], "5")], label="steps", axis=["first", "last"]
    )
    places = re.findall(r'y="([\d.]+)" width="10" height="([\d.]+)"', picture)
    assert places[:3] == [("75", "25"), ("0", "75"), ("50", "50")]


def test_cells_of_a_map_are_darker_where_there_is_more():
    picture = density_map([[0, 1], [3, 0]], label="map")
    # log(2) / log(4) is a half. The second row of a column lies above the first.
    cells = re.findall(r'x="(\d)" y="(\d)" width="1" height="1" fill-opacity="([\d.]+)"', picture)
    assert [(x, y) for x, y, _ in cells] == [("0", "0"), ("1", "1")]
    assert [opacity for _, _, opacity in cells] == ["0.57", "1"]


def test_intervals_share_one_axis():
    rows = [Interval("a<b", 1.0, 0.0, 2.0, "1 (0 to 2)"), Interval("c", 4.0, None, None, "4")]
    picture = interval_chart(rows, label="return", reference=("mean", 2.0))
    assert "a&lt;b" in picture
    # 0 to 4 is spread from 4% to 96%; the mean's line is in both rows, the end of a only there.
    assert picture.count('x1="50%" x2="50%" y1="0"') == 2
    assert 'x1="4%" x2="50%" y1="50%"' in picture
    assert 'cx="27%"' in picture
    assert 'cx="96%"' in picture
    assert interval_chart([Interval("c", 4.0, None, None, "4")], label="x").count('cx="4%"') == 1


def test_a_flow_has_boxes_and_lines_between_their_middles():
    stages = [
        ("From", {"a": FlowNode("a", "one", "/a"), "b": FlowNode("<b>")}),
        ("To", {"z": FlowNode("")}),
    ]
    picture = flow_chart(stages, [(0, "b", "z")], label="flow")
    assert '<svg width="48" height="112"' in picture
    # From the middle of the second row to that of the first.
    assert 'd="M0 84 C24 84 24 28 48 28"' in picture
    assert picture.count("<path") == 1
    assert '<a href="/a">a</a>' in picture
    assert "&lt;b&gt;" in picture
    assert "(empty)" in picture
    # The lines, in words.
    assert picture.count('class="from"') == 1
    assert '<span class="from">from &lt;b&gt;</span>' in picture


def test_bars_of_several_lists_have_one_scale():
    picture = bar_list([("a", 1.0, "1")], label="n", top=4.0)
    assert 'width="25"' in picture


def test_a_line_of_parallel_coordinates_ends_where_its_values_do():
    axes = [ParallelAxis("<rate>", "1", "0"), ParallelAxis("value", "9", "3")]
    lines = [
        ParallelLine([0.0, 1.0], "best", "/runs/a", 1.0, is_best=True),
        ParallelLine([0.5, None], "running", "/runs/b", 0.0),
    ]
    picture = parallel_chart(axes, lines, label="n")
    assert 'points="50,96 150,4"' in picture
    assert 'points="50,50"' in picture
    assert "&lt;rate&gt;" in picture
    # The best one is above the others.
    assert picture.index("/runs/b") < picture.index("/runs/a")
    assert picture.count('class="line best"') == 1
