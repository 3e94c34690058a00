"""The charts: marks where the numbers are, whatever the numbers are."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelwright.report.charts import (
    CATERPILLAR_LIMIT,
    ChartPoint,
    RooflinePoint,
    distribution,
    search_over_time,
    speedups_against_roofline,
    ticks,
)


def mark(number: int, speedup: float | None, state: str = "improvement", label: str = "x") -> ChartPoint:
    low, high = (None, None) if speedup is None else (speedup * 0.98, speedup * 1.02)
    return ChartPoint(number, f"e{number}", state, label, speedup, low, high)


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def circles(svg: str) -> list[ElementTree.Element]:
    return [element for element in parsed(svg).iter() if element.tag == "circle"]


def test_a_faster_candidate_is_drawn_higher_and_further_right():
    slow, fast = circles(search_over_time([mark(1, 0.5, "accepted"), mark(2, 3.0)]))
    assert float(fast.get("cy")) < float(slow.get("cy"))
    fast, slow = circles(distribution([mark(1, 0.5, "accepted"), mark(2, 3.0)]))
    assert float(fast.get("cx")) > float(slow.get("cx"))


def test_twice_as_fast_and_twice_as_slow_are_equally_far_from_one():
    rows = [mark(1, 0.5, "accepted"), mark(2, 1.0, "accepted"), mark(3, 2.0)]
    heights = [float(circle.get("cy")) for circle in circles(search_over_time(rows))]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)


def test_the_best_line_never_follows_a_candidate_that_does_not_count():
    def path(marks):
        return [e.get("d") for e in parsed(search_over_time(marks)).iter() if e.get("class") == "best"]

    assert path([mark(1, 3.0, "accepted")]) == []
    steps = path([mark(1, 1.5), mark(2, 9.0, "accepted"), mark(3, 1.2), mark(4, 2.0)])
    assert len(steps) == 1
    assert steps[0].count("V") == 1
    superseded = ChartPoint(2, "e2", "improvement", "x", 9.0, 8.0, 10.0, counts=False)
    assert path([mark(1, 1.5), superseded])[0].count("V") == 0


def test_a_rejection_is_a_cross_and_no_speedup():
    svg = search_over_time([mark(1, None, "rejected")])
    assert not circles(svg)
    assert 'class="mark rejected"' in svg


def test_many_candidates_make_a_histogram_that_counts_each_once():
    marks = [mark(number, 1 + number / 100) for number in range(CATERPILLAR_LIMIT + 1)]
    bars = [e for e in parsed(distribution(marks)).iter() if e.tag == "rect"]
    counted = sum(int(bar[0].text.split()[0]) for bar in bars)
    assert counted == len(marks)


def test_a_label_is_escaped():
    svg = search_over_time([mark(1, 2.0, label="</title><script>")])
    assert "<script>" not in svg
    assert parsed(svg) is not None


positive = st.floats(min_value=1e-6, max_value=1e6)


@given(st.lists(st.one_of(st.none(), positive), min_size=1, max_size=100))
def test_every_mark_lies_inside_the_picture(speedups):
    marks = [mark(number, value, "improvement" if value else "rejected") for number, value in enumerate(speedups, 1)]
    for draw in (search_over_time, distribution):
        root = parsed(draw(marks))
        width, height = map(float, root.get("viewBox").split()[2:])
        for circle in circles(draw(marks)):
            assert 0 <= float(circle.get("cx")) <= width
            assert 0 <= float(circle.get("cy")) <= height


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=20))
def test_a_task_at_the_roofline_lies_on_the_line_and_every_task_inside(pairs):
    points = [RooflinePoint("", "improvement", "x", distance, speedup) for distance, speedup in [*pairs, (1.0, 1.0)]]
    svg = speedups_against_roofline(points)
    width, height = map(float, parsed(svg).get("viewBox").split()[2:])
    places = [(float(circle.get("cx")), float(circle.get("cy"))) for circle in circles(svg)]
    assert all(0 <= x <= width and 0 <= y <= height for x, y in places)
    line = next(e.get("d") for e in parsed(svg).iter() if e.get("class") == "best")
    x0, y0, x1, y1 = map(float, line.removeprefix("M").split())
    x, y = places[-1]
    assert min(x0, x1) - 0.2 <= x <= max(x0, x1) + 0.2
    assert (y - y0) * (x1 - x0) == pytest.approx((y1 - y0) * (x - x0), abs=0.3 * (abs(x1 - x0) + abs(y1 - y0) + 1))


@given(positive, st.floats(min_value=1.02, max_value=1e6))
def test_ticks_are_few_inside_and_rising(low, ratio):
    found = ticks(low, low * ratio)
    assert len(found) <= 15
    assert found == sorted(set(found))
    assert all(low * 0.999 <= value <= low * ratio * 1.001 for value in found)


@pytest.mark.parametrize(("low", "high"), [(0.9, 1.1), (0.3, 5.0), (0.98, 1.4), (0.01, 400.0)])
def test_one_is_a_tick_where_it_is_in_range(low, high):
    assert any(abs(value - 1) < 1e-9 for value in ticks(low, high))


def test_an_interval_over_decades_does_not_crush_the_speedups_together():
    wide = ChartPoint(1, "e1", "accepted", "x", 1.5, 1e-6, 1e6)
    slow, fast = circles(search_over_time([wide, mark(2, 3.0)]))
    assert float(slow.get("cy")) - float(fast.get("cy")) > 30
