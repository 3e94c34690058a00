"""How narrow is the judge's interval for short calls, with short and with long series under one request?

    python benchmarks/short_calls.py RUN_DIR --device cuda

Judges the reference against itself (A/A) and one program with half the launches, for calls of about 20 to 400 us on a GPU,
under two settings: `as-now` (series of 16 calls) and `long-series` (128 calls, few single calls). From each record three
intervals are computed: the judge's own; by the inner clock in series alone; by the outer clock in series alone. Only the
first is safe from a candidate that lies; the others say what a better estimate could reach. Writes one evaluation a line
and `summary.json`. About five minutes on one H200; `--repetitions 1 --launches 4` is a quick look.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kernelwright.judge import Judge, Settings
from kernelwright.judge.isolation import side
from kernelwright.judge.timing import triple
from kernelwright.records import Candidate, Evaluation, RunDirectory, Task
from kernelwright.records.intervals import Interval, ratio_interval

LAUNCHES = (4, 8, 16, 40, 80)
"""A launch of a small kernel takes about 5 us from Python."""
LONG_SERIES_CALLS, LONG_SERIES_US = 128, 40_000.0


def task(launches: int, elements: int) -> Task:
    """A chain of small kernels."""
    source = f'''import torch


class Model(torch.nn.Module):
    """A chain of {launches} multiplications."""

    def forward(self, x):
        for _ in range({launches}):
            x = x * 1.0001
        return x


def get_inputs():
    return [torch.randn({elements})]


def get_init_inputs():
    return []
'''
    return Task(id=f"chain-{launches}", source=source)


def candidates(of: Task, launches: int) -> dict[str, Candidate]:
    """The reference itself, and a program with half the launches."""
    same = of.source.replace("class Model(", "class ModelNew(")
    half = same.replace(f"range({launches})", f"range({launches // 2})").replace("x * 1.0001", "x * (1.0001 * 1.0001)")
    return {"same": Candidate(source=same, policy="identity"), "half": Candidate(source=half, policy="half-the-launches")}


@contextlib.contextmanager
def long_series() -> Iterator[None]:
    """Series of many calls on distinct inputs, so that the noise of one request is shared among them."""
    kept = side.SERIES_CALLS_MAX, triple._SERIES_US
    side.SERIES_CALLS_MAX, triple._SERIES_US = LONG_SERIES_CALLS, LONG_SERIES_US
    try:
        yield
    finally:
        side.SERIES_CALLS_MAX, triple._SERIES_US = kept


SETTINGS = {
    "as-now": (contextlib.nullcontext, {}),
    # The time goes to series: the least number of single calls, and as many series as the settings want.
    "long-series": (long_series, {"triple_s": 0.0, "audits": 6}),
}


def by_series(found: Evaluation, clock: str) -> Interval | None:
    """The speedup by one clock in series alone; the outer one's harness is what the reference shows."""
    if found.scoring is None or not found.series:
        return None
    processes = []
    for one in found.series:
        own_us = 0.0
        if clock == "outer":
            pairs = zip(one.reference_outer_us, one.reference_inner_us, strict=True)
            own_us = statistics.median(outer - inner for outer, inner in pairs)
        theirs, mine = getattr(one, f"reference_{clock}_us"), getattr(one, f"candidate_{clock}_us")
        processes.append([math.log(max(r - own_us, 0.1) / max(c - own_us, 0.1)) for r, c in zip(theirs, mine, strict=True)])
    return ratio_interval(processes, miss_probability=found.scoring.miss_probability)


def row(name: str, found: Evaluation, seconds: float) -> dict[str, Any]:
    """One evaluation in numbers."""
    line: dict[str, Any] = {
        "setting": name,
        "task": found.task,
        "candidate": found.policy,
        "verdict": found.verdict.value,
        "reason": found.reason and found.reason.value,
        "reference_us": found.reference_us,
        "processes": len(found.series),
        "calls_in_series": found.series[0].calls if found.series else None,
        "device_s": found.checks.get("device_s"),
        "seconds": round(seconds, 2),
    }
    if found.speedup is None or found.speedup_low is None or found.speedup_high is None:
        return line
    intervals = {"judge": Interval(found.speedup, found.speedup_low, found.speedup_high)}
    intervals |= {clock: one for clock in ("inner", "outer") if (one := by_series(found, clock)) is not None}
    for kind, interval in intervals.items():
        line[kind] = {"speedup": interval.estimate, "low": interval.low, "high": interval.high}
        line[kind]["half_width"] = interval.half_width
    return line


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over repetitions for each setting, task and candidate."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for one in rows:
        groups.setdefault((one["setting"], one["task"], one["candidate"]), []).append(one)
    found = []
    for (setting, name, candidate), members in groups.items():
        line: dict[str, Any] = {"setting": setting, "task": name, "candidate": candidate, "evaluations": len(members)}
        line["seconds"] = statistics.median(one["seconds"] for one in members)
        timed = [one for one in members if "judge" in one]
        line["timed"] = len(timed)
        if timed:
            line["reference_us"] = statistics.median(one["reference_us"] for one in timed)
            for kind in ("judge", "inner", "outer"):
                line[f"{kind}_speedup"] = statistics.median(one[kind]["speedup"] for one in timed)
                line[f"{kind}_half_width"] = statistics.median(one[kind]["half_width"] for one in timed)
        if timed and candidate == "identity":
            line["judge_holds_1"] = sum(one["judge"]["low"] <= 1 <= one["judge"]["high"] for one in timed)
        found.append(line)
    return found


def main() -> None:
    """Judge every chain under both settings, and write what the intervals are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--launches", default=",".join(map(str, LAUNCHES)))
    parser.add_argument("--elements", type=int, default=65536)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--settings", default=",".join(SETTINGS), help="of " + ", ".join(SETTINGS))
    parser.add_argument("--seconds", type=float, default=330.0, help="begin no evaluation after so long")
    parser.add_argument("--quick", action="store_true", help="few processes and calls, to try the script")
    options = parser.parse_args()
    base = Settings.quick() if options.quick else Settings(thorough=False)
    run = RunDirectory(options.run)
    config = {"kind": "short-calls", "launches": options.launches, "settings": base.model_dump(mode="json")}
    run.claim(config, same=("kind", "launches"), device=options.device)
    rows: list[dict[str, Any]] = []
    start_s = time.monotonic()
    with Judge(options.device, base) as judge:
        for _ in range(options.repetitions):
            for launches in map(int, options.launches.split(",")):
                of = task(launches, options.elements)
                for candidate in candidates(of, launches).values():
                    for name in options.settings.split(","):
                        patched, changes = SETTINGS[name]
                        began_s = time.monotonic()
                        if began_s - start_s > options.seconds:
                            continue
                        with patched():
                            found = judge.evaluate(of, candidate, settings=base.model_copy(update=changes))
                        run.append(found)
                        rows.append(row(name, found, time.monotonic() - began_s))
                        print(rows[-1], flush=True)
                        run.write_json("summary.json", {"rows": rows, "medians": summary(rows)})
    for line in summary(rows):
        print(line)


if __name__ == "__main__":
    main()
