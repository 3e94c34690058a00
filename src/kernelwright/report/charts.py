"""Draws charts as SVG text. Colours and fonts come from the page's style sheet, through class names.

Speedups are drawn on a logarithmic axis, on which 2x faster and 2x slower are equally far from 1. Every
text that reaches an SVG is escaped here; every chart carries a title and a description, and its numbers are
also in the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH = 600
LEFT, RIGHT, TOP = 64, 14, 14
WHISKER_ROOM = 3.0
"""Factor beyond the speedups by which an interval may stretch the axis."""
CATERPILLAR_LIMIT = 80
"""Most intervals that are drawn singly; more become a histogram. Chosen for legibility."""


@dataclass(frozen=True, slots=True)
class ChartPoint:
    """One evaluation in a chart. `speedup` is None for a rejected or untimed one."""

    number: int
    anchor: str
    state: str
    label: str
    speedup: float | None
    low: float | None
    high: float | None
    counts: bool = True
    """False where the same candidate was measured again later."""


@dataclass(frozen=True, slots=True)
class EstimatePoint:
    """One screened candidate that was judged. `speedup` is None for a rejected one."""

    anchor: str
    state: str
    label: str
    estimate: float
    speedup: float | None


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """One decided task of a suite, by how far eager is from the roofline."""

    anchor: str
    """Id in the page of the winner's evaluation; empty where the page has none."""
    state: str
    label: str
    distance: float
    """Eager's latency over the roofline's time."""
    speedup: float
    """Speedup over eager of what the user gets; 1 without a winner."""


@dataclass(frozen=True, slots=True)
class _LinearAxis:
    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


@dataclass(frozen=True, slots=True)
class _LogAxis:
    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        inside = min(max(value, self.low), self.high)
        share = math.log(inside / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


def _axis(marks: Iterable[ChartPoint], start: float, end: float) -> _LogAxis:
    marks = list(marks)
    speedups = [1.0, *(mark.speedup for mark in marks if mark.speedup is not None)]
    ends = [*speedups, *(end for mark in marks for end in (mark.low, mark.high) if end is not None)]
    # An interval of two processes may span decades; the speedups must stay apart, so it is cut at the edge.
    low = max(min(ends), min(speedups) / WHISKER_ROOM)
    high = min(max(ends), max(speedups) * WHISKER_ROOM)
    pad = max((high / low) ** 0.06, 1.02)
    return _LogAxis(low / pad, high * pad, start, end)


def ticks(low: float, high: float) -> list[float]:
    """About five round values between `low` and `high`, both above 0; 1 is one of them when it is inside."""
    if high / low > 3:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digits in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1,)):
            found = [digit * 10.0**power for power in decades for digit in digits]
            found = [value for value in found if low <= value <= high]
            if len(found) <= 9:
                break
        return found
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    # Counting from 1 keeps the line that matters on a tick.
    first, last = math.ceil((low - 1) / step), math.floor((high - 1) / step)
    return [1 + index * step for index in range(first, last + 1)]


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _tick_label(value: float) -> str:
    return f"{value:.4g}×"


def _figure(name: str, title: str, description: str, height: float, body: Sequence[str]) -> Markup:
    head = (
        f'<svg class="chart {name}" viewBox="0 0 {WIDTH} {_number(height)}" role="img" '
        f'aria-labelledby="{name}-title {name}-about"><title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-about">{escape(description)}</desc>'
    )
    return Markup(head + "".join(body) + "</svg>")


def _grid_kind(value: float) -> str:
    return "one" if abs(value - 1) < 1e-9 else "grid"


def _horizontal_line(kind: str, y: float) -> str:
    place = _number(y)
    return f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place}" y2="{place}"/>'


def _left_text(y: str, words: str) -> str:
    return f'<text class="tick" x="{LEFT - 8}" y="{y}" dy="0.32em" text-anchor="end">{words}</text>'


def _text_below(x: str, y: float, words: str) -> str:
    return f'<text class="tick" x="{x}" y="{_number(y)}" text-anchor="middle">{words}</text>'


def _hover(mark: ChartPoint) -> str:
    value = "not timed" if mark.speedup is None else f"{mark.speedup:.4g}×"
    if mark.speedup is not None and mark.low is not None and mark.high is not None:
        value += f" [{mark.low:.4g}, {mark.high:.4g}]"
    return str(escape(f"#{mark.number} {mark.label}: {mark.state}, {value}"))


def _link(mark: ChartPoint, body: str) -> str:
    return f'<a href="#{escape(mark.anchor)}"><title>{_hover(mark)}</title>{body}</a>'


def search_over_time(marks: Sequence[ChartPoint]) -> Markup:
    """Every evaluation in order, the best improvement so far as a step line, rejections in a lane below."""
    height, lane = 300.0, 262.0
    timed = [mark for mark in marks if mark.speedup is not None]
    axis = _axis(timed, lane - 26, TOP)
    step = (WIDTH - LEFT - RIGHT - 16) / max(len(marks) - 1, 1)
    x_of = {mark.number: LEFT + 8 + index * step for index, mark in enumerate(marks)}
    body = []
    for value in ticks(axis.low, axis.high):
        body.append(_horizontal_line(_grid_kind(value), axis.at(value)))
        body.append(_left_text(_number(axis.at(value)), _tick_label(value)))
    body.append(_horizontal_line("lane", lane - 14))
    body.append(_left_text(_number(lane), "rejected"))
    body.append(_best_so_far(marks, axis, x_of))
    for mark in marks:
        x = _number(x_of[mark.number])
        if mark.speedup is None:
            kind = "rejected" if mark.state == "rejected" else "untimed"
            body.append(_link(mark, f'<path class="mark {kind}" d="M{x} {lane}m-4 -4l8 8m0 -8l-8 8"/>'))
            continue
        y = _number(axis.at(mark.speedup))
        whisker = ""
        if mark.low is not None and mark.high is not None:
            top, bottom = _number(axis.at(mark.high)), _number(axis.at(mark.low))
            whisker = f'<line class="whisker {mark.state}" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>'
        body.append(_link(mark, f'{whisker}<circle class="mark {mark.state}" cx="{x}" cy="{y}" r="4"/>'))
    for index in _spread(len(marks)):
        x = _number(x_of[marks[index].number])
        body.append(_text_below(x, height - 8, str(marks[index].number)))
    improvements = sum(mark.state == "improvement" for mark in marks)
    about = f"{len(marks)} evaluations in order, {len(timed)} timed, {improvements} improvements."
    return _figure("search", "Speedup of each candidate in the order of judging", about, height, body)


def _best_so_far(marks: Sequence[ChartPoint], axis: _LogAxis, x_of: dict[int, float]) -> str:
    best, path = 0.0, ""
    for mark in marks:
        low = mark.low or 0.0
        if mark.state != "improvement" or not mark.counts or mark.speedup is None or low <= best:
            continue
        x, y = _number(x_of[mark.number]), _number(axis.at(mark.speedup))
        path += f"H{x}V{y}" if path else f"M{x} {y}"
        best = low
    return f'<path class="best" d="{path}H{WIDTH - RIGHT}"/>' if path else ""


def _spread(count: int) -> list[int]:
    """At most eight indices from 0 to count - 1, evenly apart."""
    if count == 0:
        return []
    step = max(1, math.ceil(count / 8))
    return list(range(0, count, step))


def distribution(marks: Sequence[ChartPoint]) -> Markup:
    """Every timed speedup: with its interval where there are few, as a histogram where there are many."""
    timed = sorted((mark for mark in marks if mark.speedup is not None), key=lambda mark: mark.speedup or 0)
    return _caterpillar(timed) if len(timed) <= CATERPILLAR_LIMIT else _histogram(timed)


def estimates_against_verdicts(points: Sequence[EstimatePoint]) -> Markup:
    """Speedups that screening estimated, to the right, against those that the judge measured, upwards."""
    height, lane = 320.0, 276.0
    values = [*(one.estimate for one in points), *(one.speedup for one in points if one.speedup is not None)]
    across, up = _padded(values, LEFT, WIDTH - RIGHT), _padded(values, lane - 26, TOP)
    body = [*_vertical_grid(across, lane + 12), *_horizontal_grid(up), _diagonal(across, up)]
    body.append(_left_text(_number(lane), "rejected"))
    for one in points:
        x = _number(across.at(one.estimate))
        if one.speedup is None:
            mark, told = f'<path class="mark rejected" d="M{x} {lane}m-4 -4l8 8m0 -8l-8 8"/>', one.state
        else:
            mark = f'<circle class="mark {one.state}" cx="{x}" cy="{_number(up.at(one.speedup))}" r="4"/>'
            told = f"judged {one.speedup:.4g}×"
        hover = escape(f"{one.label}: screened {one.estimate:.4g}×, {told}")
        body.append(f'<a href="#{escape(one.anchor)}"><title>{hover}</title>{mark}</a>')
    about = f"{len(points)} candidates, estimates to the right, the judge's speedups upwards; on the line both agree."
    return _figure("estimates", "Estimates of screening against the judge's speedups", about, height, body)


def speedups_against_roofline(points: Sequence[RooflinePoint]) -> Markup:
    """Distance of eager from the roofline, to the right, against the speedup over eager, upwards."""
    height, bottom = 320.0, 288.0
    across = _padded([one.distance for one in points], LEFT, WIDTH - RIGHT)
    up = _padded([one.speedup for one in points], bottom - 12, TOP)
    body = [*_vertical_grid(across, bottom), *_horizontal_grid(up), _diagonal(across, up)]
    for one in points:
        x, y = _number(across.at(one.distance)), _number(up.at(one.speedup))
        hover = escape(f"{one.label}; eager takes {one.distance:.4g}× the roofline's time")
        mark = f'<title>{hover}</title><circle class="mark {one.state}" cx="{x}" cy="{y}" r="4"/>'
        body.append(f'<a href="#{escape(one.anchor)}">{mark}</a>' if one.anchor else f"<g>{mark}</g>")
    about = f"{len(points)} tasks, eager's distance from the roofline to the right, speedups upwards."
    return _figure("roofline", "Speedups against the distance from the roofline", about, height, body)


def _padded(values: Sequence[float], start: float, end: float) -> _LogAxis:
    """An axis that holds these values and 1."""
    low, high = min(1.0, *values), max(1.0, *values)
    pad = max((high / low) ** 0.06, 1.02)
    return _LogAxis(low / pad, high * pad, start, end)


def _diagonal(across: _LogAxis, up: _LogAxis) -> str:
    """The line on which both axes have the same value, as far as both reach."""
    shared = max(across.low, up.low), min(across.high, up.high)
    ends = " ".join(f"{_number(across.at(value))} {_number(up.at(value))}" for value in shared)
    return f'<path class="best" d="M{ends}"/>'


def _horizontal_grid(axis: _LogAxis) -> list[str]:
    body = []
    for value in ticks(axis.low, axis.high):
        body.append(_horizontal_line("grid", axis.at(value)))
        body.append(_left_text(_number(axis.at(value)), _tick_label(value)))
    return body


def _vertical_grid(axis: _LogAxis, bottom: float) -> list[str]:
    body = []
    for value in ticks(axis.low, axis.high):
        x = _number(axis.at(value))
        body.append(f'<line class="{_grid_kind(value)}" x1="{x}" x2="{x}" y1="{TOP}" y2="{_number(bottom)}"/>')
        body.append(_text_below(x, bottom + 18, _tick_label(value)))
    return body


def _caterpillar(timed: Sequence[ChartPoint]) -> Markup:
    row = min(30.0, max(6.0, 230.0 / max(len(timed), 1)))
    bottom = TOP + max(row * len(timed), 40.0) + 6
    axis = _axis(timed, LEFT, WIDTH - RIGHT)
    body = _vertical_grid(axis, bottom)
    for index, mark in enumerate(reversed(timed)):
        y = _number(TOP + row * (index + 0.5) + 3)
        line = ""
        if mark.low is not None and mark.high is not None:
            left, right = _number(axis.at(mark.low)), _number(axis.at(mark.high))
            line = f'<line class="whisker {mark.state}" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>'
        x = _number(axis.at(mark.speedup or 1))
        radius = _number(min(4.0, row / 2.4))
        text = ""
        if row >= 12:
            text = _left_text(y, f"#{mark.number}")
        body.append(_link(mark, f'{text}{line}<circle class="mark {mark.state}" cx="{x}" cy="{y}" r="{radius}"/>'))
    about = f"{len(timed)} timed candidates, fastest first, each with its 95 % interval."
    return _figure("spread", "Speedups with their intervals", about, bottom + 28, body)


def _histogram(timed: Sequence[ChartPoint]) -> Markup:
    bottom = 220.0
    axis = _axis(timed, LEFT, WIDTH - RIGHT)
    bins = 40
    edges = [math.exp(math.log(axis.low) + i * math.log(axis.high / axis.low) / bins) for i in range(bins + 1)]
    counts: list[dict[str, int]] = [{"improvement": 0, "accepted": 0, "rejected": 0} for _ in range(bins)]
    for mark in timed:
        share = math.log((mark.speedup or 1) / axis.low) / math.log(axis.high / axis.low)
        counts[min(int(share * bins), bins - 1)][mark.state] += 1
    most = max((sum(kinds.values()) for kinds in counts), default=1) or 1
    body = _vertical_grid(axis, bottom)
    for value in sorted({most, most // 2, 0}):
        y = _number(bottom - (bottom - TOP) * value / most)
        body.append(_left_text(y, str(value)))
    for index, kinds in enumerate(counts):
        x, right = axis.at(edges[index]), axis.at(edges[index + 1])
        base = bottom
        for state, count in kinds.items():
            if count == 0:
                continue
            tall = (bottom - TOP) * count / most
            base -= tall
            about = escape(f"{count} {state}, {edges[index]:.3g}× to {edges[index + 1]:.3g}×")
            body.append(
                f'<rect class="bar {state}" x="{_number(x + 0.5)}" y="{_number(base)}" '
                f'width="{_number(right - x - 1)}" height="{_number(tall)}"><title>{about}</title></rect>'
            )
    about_all = f"Histogram of {len(timed)} timed candidates on a logarithmic axis."
    return _figure("spread", "Distribution of speedups", about_all, bottom + 28, body)


def curves(lines: Sequence[Sequence[tuple[int, float]]], about: str, steps: str, low: float, unit: str = "") -> Markup:
    """Lines over a count of `steps`, upwards on a linear axis from `low`; `about` says what they show."""
    height, bottom = 220.0, 194.0
    last = max(number for line in lines for number, _ in line) or 1
    top = low + max(max(value for line in lines for _, value in line) - low, 0.001) * 1.1
    across, up = _LinearAxis(0, last, LEFT, WIDTH - RIGHT), _LinearAxis(low, top, bottom, TOP)
    body = []
    for share in (0.0, 0.5, 1.0):
        value = low + (top - low) * share
        body.append(_horizontal_line("grid", up.at(value)))
        body.append(_left_text(_number(up.at(value)), f"{value:.4g}{unit}"))
    for index, line in enumerate(lines):
        points = " ".join(f"{_number(across.at(number))},{_number(up.at(value))}" for number, value in line)
        body.append(f'<polyline class="line{index}" points="{points}"/>')
    body.append(f'<text class="tick" x="{LEFT}" y="{_number(height - 6)}">0</text>')
    body.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{_number(height - 6)}" text-anchor="end">{last} {steps}</text>')
    return _figure("curve", about, about, height, body)
