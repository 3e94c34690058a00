"""Writes every published number: `results/kernelbench-h200/summary.json` from records, and the marked blocks of the pages.

    python benchmarks/make_pages.py              # from records; twenty seconds
    python benchmarks/make_pages.py --pages      # the pages alone, from the summaries that are there
    python benchmarks/make_pages.py --publish RUN_DIR...    # first copy runs into results/kernelbench-h200

A block stands between `<!-- numbers: begin NAME -->` and `<!-- numbers: end NAME -->`. NAME is a key of `BLOCKS`, whose
function gives the text. `--publish` packs a run directory of `kernelwright bench` without the sources of what was only
screened, but for tasks of which the judge would still take a candidate; an unpacked copy is a run that `bench --out` goes on
with.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from publishing import copy_plain, write_packed
from race_numbers import (
    STOCK,
    SUITES,
    THEIRS,
    Line,
    Run,
    against_best,
    against_theirs,
    is_behind,
    is_counted,
    only_wraps,
    ours,
    summary_of,
)

from kernelwright.contrastive.held_out import geomean
from kernelwright.records import RunDirectory, unpacked
from kernelwright.records.decisions import CUT_SHORT
from kernelwright.records.tables import statistics_of
from kernelwright.rewrites.wrappers import ALL_BASELINES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
RACES = RESULTS / "kernelbench-h200"
SUMMARY = RACES / "summary.json"
PICTURE = ROOT / "docs" / "results.svg"
BLOCK = re.compile(r"(<!-- numbers: begin ([\w-]+) -->\n).*?(<!-- numbers: end \2 -->)", re.DOTALL)
NAMED = {
    "compile": "`torch.compile`",
    "reduce-overhead-fresh": "its `reduce-overhead`",
    "max-autotune-fresh": "its `max-autotune`",
    "cudagraph-fresh": "CUDA graph",
    "cudnn": "cuDNN's search",
    "channels-last": "channels-last",
    "eager": "eager",
}
"""Baselines as a page names them."""
PRODUCTS = "split-product"
"""Beginning of the techniques that multiply float32 in halves, which stock baselines do not with TF32 off."""
LARGE = 5.0
ENDS = 10
"""Tasks in a table of the largest wins, and of the hardest losses."""
MOST_NAMES = 3
"""Techniques of a task that a page's table names; the table beside the runs names all."""
CAMPAIGNS = ("contrastive-h200", "contrastive-device-bound-h200")
SASS = "sass-h200"
MODELS = "models-h200"
WHOLE_MODELS = {
    "bert": ("BERT-base, 8 x 128 tokens", "bert-base-bfloat16"),
    "resnet": ("ResNet-50, 32 images of 224 x 224", "resnet-50-bfloat16"),
}
"""Title and run directory of each whole model, by its name in `clock.jsonl`."""
TODAY, MODULES = "kernelbench", ("modules", "modules-bf16")
PLAIN = (
    "config.json",
    "environment.json",
    "errors.json",
    "entries.json",
    "exhausted.json",
    CUT_SHORT,
    "table.json",
    "notes.md",
)


# --- cells ------------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[object]], text: int = 1) -> str:
    """A table; columns from the one numbered `text` on are numbers."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * text + "---:|" * (len(head) - text)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows), ""])


def mean(speedups: Iterable[float], unit: str = "") -> str:
    """Geometric mean over tasks with its interval."""
    found = list(speedups)
    if not found:
        return "-"
    it = geomean(found)
    return f"{it.estimate:.2f}{unit} ({it.low:.2f} to {it.high:.2f})"


def short(speedups: Iterable[float]) -> str:
    """Geometric mean alone."""
    found = list(speedups)
    return f"{geomean(found).estimate:.2f}" if found else "-"


def ended(summary: Mapping[str, Any], key: str, unit: str = "") -> str:
    """A number of a summary of training with its interval; empty where it is not there."""
    if key not in summary:
        return ""
    low, high = summary["intervals"].get(key) or (summary.get(f"{key}_low"), summary.get(f"{key}_high"))
    return f"{summary[key]:.2f}{unit}" + (f" ({low:.2f} to {high:.2f})" if low else "")


def reading(name: str) -> Any:
    """A JSON file below results/."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def link(page: Path, name: str, text: str = "run") -> str:
    """A link from a page to something below results/, or to a page beside them."""
    return f"[{text}]({os.path.relpath(RESULTS / name, page.parent)})"


def percent(share: float) -> str:
    """A share as a whole percentage."""
    return f"{100 * share:.0f} %"


# --- what the blocks read ---------------------------------------------------------------------------------------------


class Numbers:
    """The summary of all searches, and what blocks ask of it more than once."""

    def __init__(self, summary: Mapping[str, Any]) -> None:
        self.summary = summary
        self.suites: Mapping[str, Sequence[Line]] = summary["suites"]
        self.released = {row["task"]: row for row in summary["released"]}

    def decided(self, suite: str) -> list[Line]:
        """Lines of a suite's decided tasks."""
        return [row for row in self.suites[suite] if is_counted(row)]

    def runs(self, suite: str, *, searches: bool = True) -> list[Line]:
        """Runs of a suite, the first one first."""
        return [run for run in self.summary["runs"] if run["suite"] == suite and run["searches"] is searches]

    def task(self, name: str) -> str:
        """A task by level, number and operators, or by its own name."""
        suite, level, number = name.split("/")
        operators = self.summary["names"].get(f"{level}/{number}", "")
        if suite not in (THEIRS, TODAY):
            return number
        return f"{level.replace('level', 'level ')}, {number} ({operators})"

    def theirs(self) -> list[tuple[Line, Line]]:
        """Our line and CUDA-L1's kernel of each decided task that has one."""
        return [(row, self.released[row["task"]]) for row in self.decided(THEIRS) if row["task"] in self.released]


def kept_speedup(kernel: Line) -> float | None:
    """Speedup over eager of a released kernel; None where it breaks KernelBench's contract."""
    return kernel["speedup"] if kernel["kept"]["kernelbench"] else None


def against_stock(row: Line, kernel: Line) -> float:
    """Speedup of a released kernel over the task's best stock baseline."""
    return float(kernel["speedup"]) / (row["best_baseline_speedup"] or 1.0)


def kind_of(gpu: str) -> str:
    """A GPU's name without its maker and memory."""
    return re.sub(r"^NVIDIA | 80GB HBM3$", "", gpu)


def gpus(runs: Iterable[Line]) -> str:
    """Kinds of GPU of some runs."""
    return " and ".join(sorted({kind_of(run["gpu"]) for run in runs}, reverse=True))


# --- blocks: searched suites --------------------------------------------------------------------------------------------


def suites(numbers: Numbers, page: Path) -> str:
    """Each suite in a line."""
    head = ["suite", "GPU", "tasks", "decided", "over the best stock baseline, all tasks", "over eager, decided",
            "over `torch.compile`", "ahead", "level", "behind"]  # fmt: skip
    rows = []
    for suite, name in SUITES.items():
        every, decided = numbers.suites[suite], numbers.decided(suite)
        ahead, behind = sum(row["ahead"] for row in decided), sum(map(is_behind, decided))
        compiled = [ours(row) / row["baselines"]["compile"] for row in decided if row["baselines"].get("compile")]
        cells = [name, gpus(numbers.runs(suite)), len(every), len(decided), f"**{mean(map(against_best, every))}**"]
        cells += [short(map(ours, decided)), f"{short(compiled)} on {len(compiled)}", ahead]
        rows.append([*cells, len(decided) - ahead - behind, behind])
    return table(head, rows, 2)


def otherwise(numbers: Numbers, page: Path) -> str:
    """The same means under other rules."""
    rules: dict[str, Callable[[Line], float | None]] = {
        "all tasks, an undecided one as eager": against_best,
        "decided tasks alone": lambda row: against_best(row) if is_counted(row) else None,
        "a task's first decision instead of its last": lambda row: row["first_vs_best"]
        if is_counted(row)
        else against_best(row),
        "a winner that only wraps the reference counts 1 at most": lambda row: (
            min(1.0, against_best(row)) if only_wraps(row) else against_best(row)
        ),
        "a float32 product in split halves counts 1 at most": lambda row: (
            min(1.0, against_best(row))
            if any(name.startswith(PRODUCTS) for name in row["techniques"])
            else against_best(row)
        ),
        f"without tasks above {LARGE:.0f}": lambda row: value if (value := against_best(row)) <= LARGE else None,
    }
    return table(
        ["over the best stock baseline, if", *SUITES.values()],
        [
            [name, *(short(filter(None, map(rule, numbers.suites[suite]))) for suite in SUITES)]
            for name, rule in rules.items()
        ],
    )


def lacking(numbers: Numbers, page: Path) -> str:
    """How many tasks lack which stock baseline, and what else a number rests on."""
    rows: list[list[object]] = [
        [
            f"no run measured {NAMED[name]}",
            *(sum(name in row["missing"] for row in some) for some in numbers.suites.values()),
        ]
        for name in STOCK
    ]

    def counts(name: str, rule: Callable[[Line], bool]) -> None:
        rows.append([name, *(sum(map(rule, numbers.decided(suite))) for suite in SUITES)])

    counts("ahead", lambda row: row["ahead"])
    counts("of these by a ratio of two runs or processes", lambda row: row["ahead"] and apart(row))
    counts("winners", lambda row: bool(row["speedup"]))
    counts("of these with one evaluation", lambda row: bool(row["speedup"]) and row["evaluations"] == 1)
    counts("of these that only wrap the reference", only_wraps)
    return table(["tasks", *SUITES.values()], rows)


def apart(row: Line) -> bool:
    """True where the winner and the best stock baseline were not timed in the same processes."""
    return row["best_baseline"] != "eager" and row["best_baseline"] not in row["beside"]


def measured(numbers: Numbers, page: Path) -> str:
    """How the suites were searched."""
    rows = []
    for suite, name in SUITES.items():
        runs, every = numbers.runs(suite), numbers.suites[suite]
        searches = sum(row["searches"] for row in every) / len(every)
        evaluations = sum(sum(run["evaluations"].values()) for run in runs)
        dates = f"{runs[0]['began'][:10]} to {max(run['ended'] for run in runs)[:10]}"
        cells = [name, dates, len(runs), f"{searches:.1f}", sum(run["estimates"] for run in runs), evaluations]
        rows.append([*cells, sum(row["decisions"] > 1 for row in every)])
    return table(
        ["suite", "dates", "runs", "searches a task", "estimates", "evaluations", "decided more than once"], rows, 2
    )


def levels(numbers: Numbers, suite: str) -> str:
    """A suite's numbers by level."""
    every = numbers.suites[suite]
    parts = {"all": every, **{f"level {n}": [row for row in every if row["level"] == n] for n in (1, 2, 3)}}
    parts = {name: rows for name, rows in parts.items() if rows and (name == "all" or len(rows) < len(every))}
    rows: list[list[object]] = []

    def add(name: str, rule: Callable[[Sequence[Line]], object]) -> None:
        rows.append([name, *map(rule, parts.values())])

    def counted(some: Sequence[Line]) -> list[Line]:
        return [row for row in some if is_counted(row)]

    add("tasks", len)
    add("decided", lambda some: len(counted(some)))
    add("with a winner", lambda some: sum(bool(row["speedup"]) for row in counted(some)))
    add("over the best stock baseline, all", lambda some: mean(map(against_best, some)))
    add("the same, decided", lambda some: mean(map(against_best, counted(some))))
    add("over eager, decided", lambda some: mean(map(ours, counted(some))))
    add("ahead of the best stock baseline", lambda some: sum(row["ahead"] for row in counted(some)))
    add("behind it", lambda some: sum(map(is_behind, counted(some))))
    return table(["", *parts], rows)


def by_technique(numbers: Numbers, suite: str) -> str:
    """Winners ahead of the best stock baseline by technique; one with several counts for each."""
    found = defaultdict(list)
    for row in numbers.decided(suite):
        for name in row["techniques"] if row["ahead"] else ():
            found[name].append(against_best(row))
    frequent = sorted(found.items(), key=lambda one: (-len(one[1]), one[0]))[:ENDS]
    rows = [[f"`{name}`", len(gains), short(gains), f"{max(gains):.2f}"] for name, gains in frequent]
    return table(["technique of winners that are ahead", "tasks", "over the best stock baseline", "most"], rows)


def why_not(row: Line) -> str:
    """Reason in a few words for which a task has no win; empty where it has one."""
    if not is_counted(row):
        return "undecided: " + (row["reason"] or "its baselines were not measured")
    if row["speedup"]:
        return "" if row["ahead"] else "winner behind the best stock baseline" if is_behind(row) else "winner level with it"
    for words, reason in {
        "none an improvement": "judged, no certain gain over eager",
        "held when": "a gain did not hold when it was measured again",
        "none right": "no proposal was right",
        "none faster": "right proposals, none estimated to be faster",
    }.items():
        if words in row["reason"]:
            return reason
    return str(row["reason"])


def by_reason(numbers: Numbers, suite: str) -> str:
    """Tasks without a win by reason."""
    reasons = Counter(filter(None, map(why_not, numbers.suites[suite])))
    return table(["no win, because", "tasks"], reasons.most_common())


def ends(numbers: Numbers, suite: str) -> str:
    """The largest wins and the hardest losses."""
    order = sorted(numbers.decided(suite), key=lambda row: (-against_best(row), row["task"]))
    wins = [row for row in order if row["speedup"] and row["ahead"]][:ENDS]
    losses = [row for row in order[::-1] if against_best(row) < 1.0][:ENDS]
    return "\n".join([listed(numbers, "largest wins", wins), listed(numbers, "hardest losses", losses)])


def listed(numbers: Numbers, title: str, rows: Iterable[Line]) -> str:
    """Tasks in lines."""
    cells = []
    for row in rows:
        best = f"{NAMED[row['best_baseline']]} {row['best_baseline_speedup'] or 1.0:.2f}"
        eager = f"{row['reference_us']:.0f}" if row["reference_us"] else "-"
        names, more = row["techniques"][:MOST_NAMES], len(row["techniques"][MOST_NAMES:])
        how = ", ".join([f"`{name}`" for name in names] + [f"{more} more"] * bool(more)) or why_not(row)
        cells.append([numbers.task(row["task"]), how, eager, f"{ours(row):.2f}", best, over_best(row)])
    return table(
        [title, "how, or why not", "eager, us", "over eager", "best stock baseline, over eager", "over it"], cells, 2
    )


def over_best(row: Line) -> str:
    """Speedup over the best stock baseline, with its interval where it has one."""
    ends = row["vs_best_baseline_interval"] if row["speedup"] else None
    return f"{against_best(row):.2f}" + (f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else "")


def told(suite: str) -> Callable[[Numbers, Path], str]:
    """Block of one suite."""
    return lambda numbers, page: "\n".join(make(numbers, suite) for make in (levels, by_technique, by_reason, ends))


def carried(numbers: Numbers, page: Path) -> str:
    """Winners of H200s that an H100 judged from the same text."""
    rows = numbers.summary["carried"]
    kept = [row for row in rows if row["h100"]]
    faster = sum(row["is_improvement"] for row in kept)
    first, second = short(row["h200"] for row in kept), short(row["h100"] for row in kept)
    return (
        f"An H100 judged the text of {len(rows)} winners of H200s. It accepts {len(kept)}, and {faster} of these are\n"
        f"certainly faster than eager there. Their mean over eager is {first} on the H200 and {second} on the H100.\n"
    )


def runs(numbers: Numbers, page: Path) -> str:
    """Every run with where and when it was made."""
    rows = []
    for run in numbers.summary["runs"]:
        kind = (
            "search"
            if run["searches"]
            else "kernels of CUDA-L1"
            if THEIRS in run["evaluations"]
            else "winners of other runs"
        )
        notes = f"[notes]({run['run']}/notes.md)" if (RACES / run["run"] / "notes.md").exists() else ""
        cells = [f"[{run['run']}]({run['run']})", SUITES.get(run["suite"], run["suite"]), kind, run["began"][:10]]
        cells += [f"{run['gpus']} x {kind_of(run['gpu'])}", run["commit"], run["asked"], run["estimates"]]
        rows.append([*cells, sum(run["evaluations"].values()), run["decided"], run["winners"], notes])
    head = ["run", "suite", "what", "date", "GPU", "commit", "tasks", "estimates", "evaluations", "decided", "winners", ""]
    return table(head, rows, 6)


def tasks(numbers: Numbers, page: Path) -> str:
    """Every task of every suite."""
    text = []
    for suite, name in SUITES.items():
        cells = []
        for row in numbers.suites[suite]:
            how = ", ".join(row["techniques"]) if row["speedup"] else why_not(row)
            interval = f"{row['speedup']:.2f} ({row['low']:.2f} to {row['high']:.2f})" if row["speedup"] else "1"
            best = f"{row['best_baseline']} {row['best_baseline_speedup'] or 1.0:.2f}"
            cells.append([numbers.task(row["task"]), row["run"], how, interval, best, over_best(row)])
        text.append(f"## {name[0].upper()}{name[1:]}\n")
        text.append(table(["task", "run", "how, or why not", "over eager", "best stock baseline", "over it"], cells, 3))
    return "\n".join(text)


# --- blocks: CUDA-L1's kernels ------------------------------------------------------------------------------------------


def released(numbers: Numbers, page: Path) -> str:
    """Contracts that the released kernels keep, and their speedups."""
    every = list(numbers.released.values())
    rows = []
    for contract, name in (("kernelbench", "keep KernelBench's contract"), ("drop-in", "are drop-ins")):
        kept = [row for row in every if row["kept"][contract] and row["speedup"]]
        speedups = statistics_of([row["speedup"] for row in kept])
        faster, slower = sum(row["is_improvement"] for row in kept), sum((row["high"] or 1.0) < 1.0 for row in kept)
        values = [f"{value:.2f}" for value in (speedups.mean, speedups.p50, speedups.geomean, speedups.largest)]
        rows.append([name, sum(row["kept"][contract] for row in every), faster, slower, *values])
    neither = sum(not any(row["kept"].values()) for row in every)
    rows.append(["keep neither", neither, "", "", "", "", "", ""])
    head = [f"of the {len(every)}", "kernels", "faster than eager", "slower", "mean over eager", "median", "geomean", "most"]
    return table(head, rows)


def rejected(numbers: Numbers, page: Path) -> str:
    """Reasons for which released kernels break KernelBench's contract."""
    found = Counter(str(row["reason"]) for row in numbers.released.values() if not row["kept"]["kernelbench"])
    return table(["why not", "kernels"], [[f"`{reason}`", count] for reason, count in found.most_common()])


def beating(numbers: Numbers) -> list[Line]:
    """Lines of tasks whose released kernel is right and certainly faster than the best stock baseline."""
    found = []
    for row, kernel in numbers.theirs():
        limit = (row["best_baseline_interval"] or [1.0, row["best_baseline_speedup"] or 1.0])[1]
        if kept_speedup(kernel) and kernel["is_improvement"] and kernel["low"] > limit:
            found.append(row)
    return found


def beside(numbers: Numbers, page: Path) -> str:
    """Ours and theirs over the same best stock baselines, and over one another."""
    pairs = numbers.theirs()
    right = [(row, kernel) for row, kernel in pairs if kept_speedup(kernel)]
    broken = [(row, kernel) for row, kernel in pairs if not kept_speedup(kernel)]
    alike = [(row, kernel) for row, kernel in pairs if row["gpu"] == kernel["gpu"]]
    rows = []
    for name, some in {
        "all whose search is decided": pairs,
        "their kernel keeps KernelBench's contract": right,
        "it does not: its user takes the best stock baseline": broken,
        "kernel and winner were timed on one kind of GPU": alike,
    }.items():
        stock = [against_stock(row, kernel) if kept_speedup(kernel) else 1.0 for row, kernel in some]
        ratios = [against_theirs(row, kept_speedup(kernel)) for row, kernel in some]
        rows.append([name, len(some), mean(against_best(row) for row, _ in some), mean(stock), mean(ratios)])
    said = [
        [numbers.task(row["task"]), f"{kernel['speedup']:.2f}", f"{ours(row):.2f}"]
        for row, kernel in sorted(right, key=lambda one: -one[1]["speedup"])
        if kernel["is_improvement"] and kernel["speedup"] > 1.05 * ours(row)
    ]
    head = ["tasks", "number", "ours over the best stock baseline", "theirs over it", "ours over theirs"]
    ahead = table(["theirs ahead by more than a twentieth", "theirs over eager", "ours"], said)
    count = (
        f"{len(beating(numbers))} of their {len(right)} right kernels are certainly faster than the best stock baseline.\n"
    )
    return "\n".join([table(head, rows), count, ahead])


def kernel_runs(numbers: Numbers, page: Path) -> str:
    """Runs of the released kernels."""
    counts = Counter(row["run"] for row in numbers.released.values())
    rows = []
    for run in numbers.runs(THEIRS, searches=False):
        if run["run"] in counts:
            path = link(page, f"{RACES.name}/{run['run']}", run["run"])
            rows.append([path, run["began"][:10], kind_of(run["gpu"]), run["commit"], counts[run["run"]]])
    return table(["run", "date", "GPU", "commit", "verdicts that count"], rows, 4)


# --- blocks: the other results ------------------------------------------------------------------------------------------


def training(numbers: Numbers, page: Path) -> str:
    """Models of the two campaigns of training."""
    first, second = (reading(f"{name}/summary.json") for name in CAMPAIGNS)
    stages = {
        "stage 1, supervised": "sft",
        "stage 2, self-supervised": "self_supervised",
        "evolutionary, stage 2's model frozen": "evolutionary",
        "stage 3, vanilla GRPO": "vanilla_grpo",
        "stage 3, contrastive, random exemplars": "contrastive_random",
        "stage 3, contrastive, buckets": "contrastive_bucket",
        "stage 3, contrastive, islands": "contrastive_island",
    }
    rows = [[name, ended(first, f"speedup_{key}"), ended(second, f"speedup_{key}")] for name, key in stages.items()]
    rows = [row for row in rows if any(row[1:])]
    rows.append(["**buckets over vanilla GRPO**", *(ended(one, "contrastive_over_vanilla_grpo") for one in (first, second))])
    rows.append(["the same, one answer instead of the best of 8", "", ended(second, "worth_ratio")])
    rows.append(["held-out tasks", first["held_out_tasks"], second["held_out_tasks"]])
    heads = (link(page, CAMPAIGNS[0], "a graph decides, H200"), link(page, CAMPAIGNS[1], "it does not, H100"))
    return table(["model, best of 8 answers, one seed", *heads], rows)


def schedules(numbers: Numbers, page: Path) -> str:
    """Deployed schedules kernel by kernel."""
    found = reading(f"{SASS}/summary.json")
    agents = list(found["controls"])
    rows = []
    for name, one in found["per_kernel"].items():
        low, high = one["interval"] if one["interval"] else (1.0, 1.0)
        deployed = f"{one['speedup']:.3f} ({low:.3f} to {high:.3f})" if one["deployed"] else "1"
        best = [f"{one['controls'][agent]['speedup'] or 1:.3f}".replace("1.000", "1") for agent in agents]
        original = f"{one['original_us']:.1f}" if one["original_us"] else "-"
        rows.append([f"`{name}`", original, deployed, one["agent"] or "", *best])
    means = [f"{found['controls'][agent]:.3f}" for agent in agents]
    rows.append([f"geomean of {found['kernels']}", "", f"**{found['geomean']:.3f}**", "", *means])
    rows.append(["geomean of the paper's six", "", f"**{found['paper_kernels_geomean']:.3f}**", "", *[""] * len(agents)])
    return table(["kernel", "original, us", "deployed", "by", *agents], rows)


def model_lines() -> list[dict[str, Any]]:
    """Of each whole model: its winner's evaluation, the best stock baseline beside it, and the other clock's line."""
    clocks = (RESULTS / MODELS / "clock.jsonl").read_text(encoding="utf-8").splitlines()
    lines = []
    for clock in map(json.loads, clocks):
        name = WHOLE_MODELS[clock["model"]]
        (winner,) = (one for one in RunDirectory(RESULTS / MODELS / name[1]).evaluations() if one.confirms)
        stock = {key: ratio for key, ratio in winner.versus.items() if key in ALL_BASELINES}
        best = min(stock, key=lambda key: stock[key][0])
        lines.append({"name": name[0], "winner": winner, "best": best, "over_best": stock[best], "clock": clock})
    return lines


def models(numbers: Numbers, page: Path) -> str:
    """Whole models in bfloat16."""
    head = ["model, bfloat16, H200", "winner", "best stock baseline", "over it", "over eager",
            "over `reduce-overhead`, another clock", "search, s"]  # fmt: skip
    rows = []
    for line in model_lines():
        winner, us, (over, low, high) = line["winner"], line["clock"]["median_us"], line["over_best"]
        eager = f"{winner.speedup:.2f} ({winner.speedup_low:.2f} to {winner.speedup_high:.2f})"
        cells = [line["name"], ", ".join(winner.techniques), f"`{line['best']}`"]
        cells += [f"**{over:.2f} ({low:.2f} to {high:.2f})**", eager]
        rows.append([*cells, f"{us['reduce-overhead'] / us['ours']:.2f}", f"{line['clock']['search_s']:.0f}"])
    return table(head, rows, 3)


def judge(numbers: Numbers, page: Path) -> str:
    """How far the judge's numbers can be relied on, and how fast it is."""
    alike, again = numbers.summary["references_alike"], numbers.summary["repeated"]
    simulated = min(row["holds_1"] for row in reading("2026-11-23-interval-coverage-cpu/summary.json")["rows"])
    search, speed = reading("search-h200/summary.json"), reading("judge-2-h200/before/summary.json")
    seconds = ", ".join(f"{speed[key]:.1f}" for key in ("layer_s", "bert_s", "resnet_s"))
    apart_by = f"{percent(again['median'])} in the median, {percent(again['ninth_decile'])} at the ninth decile"
    near = "screening's first choice within 3 % of the best verdict, tasks"
    rows = [
        [
            f"intervals of a reference against itself that hold 1, of {alike['evaluations']}",
            percent(alike["share"]),
            RACES.name,
        ],
        ["the same on simulated clocks, lowest of all noise models", percent(simulated), "2026-11-23-interval-coverage-cpu"],
        [f"two runs that measured one text, {again['texts']} texts, apart by", apart_by, RACES.name],
        [near, "{} of {}".format(*search["screen_agreement"]), "2026-11-26-agreement-h100"],
        ["evaluations a minute on an H200, beside screening", search["judged_per_minute"], "search-h200"],
        ["seconds of one evaluation: a layer, BERT-base, ResNet-50", seconds, "judge-2-h200"],
        ["seconds from the command to a confirmed winner, a layer", search["optimize_s"], "2026-11-25-search-h200"],
    ]
    return table(["what", "measured", "evidence"], [[*row, link(page, run)] for *row, run in rows], 3)


def headlines(numbers: Numbers, page: Path) -> str:
    """The README's results."""
    second, sass = reading(f"{CAMPAIGNS[1]}/summary.json"), reading(f"{SASS}/summary.json")
    best = {suite: mean(map(against_best, rows), "x") for suite, rows in numbers.suites.items()}
    where = {suite: gpus(numbers.runs(suite)) for suite in SUITES}
    held_out, over_grpo = second["held_out_tasks"], ended(second, "contrastive_over_vanilla_grpo", "x")
    modules = f"{best['modules']} in float32; {best['modules-bf16']} in bfloat16: no gain shown"
    kernelbench = link(page, "../docs/kernelbench.md", "page")
    rows = [
        [f"KernelBench, all {len(numbers.suites[TODAY])} tasks, {where[TODAY]}", f"**{best[TODAY]}**", kernelbench],
        [f"the same tasks at CUDA-L1's shapes, {where[THEIRS]}", f"**{best[THEIRS]}**", kernelbench],
        [f"20 modules of torchvision and transformers, {where['modules']}", modules, kernelbench],
        [
            "whole models in bfloat16, H200",
            "; ".join(f"{line['name'].partition(',')[0]} **{line['over_best'][0]:.2f}x**" for line in model_lines()),
            link(page, "../docs/models-end-to-end.md", "page"),
        ],
        [
            f"contrastive RL over vanilla GRPO, {held_out} held-out tasks, H100",
            f"{over_grpo}, one seed: no gain shown",
            link(page, CAMPAIGNS[1]),
        ],
        [
            "machine-code schedules of the paper's six kernels, H200",
            f"{sass['paper_kernels_geomean']:.2f}x over `ptxas -O3`; PPO is level with random play",
            link(page, SASS),
        ],
    ]
    return table(["what", "geomean over the best stock baseline, or as said", "evidence"], rows, 3)


# --- blocks: the index of results ---------------------------------------------------------------------------------------


def index(numbers: Numbers, page: Path) -> str:
    """Each folder of results: its title, date, device and commit."""
    rows = []
    for folder in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        environments = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("environment.json"))]
        commits = sorted({one["commit"][:7] for one in environments if one.get("commit")})
        gpus_there = [one.get("gpu") or "CPU" for one in environments]
        devices = sorted({one if isinstance(one, str) else one[0]["name"] for one in gpus_there})
        dated = re.match(r"\d{4}-\d\d-\d\d", folder.name)
        title = (folder / "README.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").replace("|", "/")
        commit = ", ".join(commits) if len(commits) < 4 else f"{len(commits)} commits"
        device = ", ".join(map(kind_of, devices)) or "see its README"
        rows.append([f"[{folder.name}]({folder.name})", title, dated[0] if dated else "", device, commit])
    return table(["folder", "what", "date", "device", "commit"], rows, 5)


BLOCKS: Mapping[str, Callable[[Numbers, Path], str]] = {
    "headlines": headlines,
    "suites": suites,
    "otherwise": otherwise,
    "lacking": lacking,
    "judge": judge,
    "measured": measured,
    "carried": carried,
    "runs": runs,
    "tasks": tasks,
    "released": released,
    "rejected": rejected,
    "beside": beside,
    "kernel-runs": kernel_runs,
    "training": training,
    "schedules": schedules,
    "models": models,
    "index": index,
    **{suite: told(suite) for suite in SUITES},
}
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("results", "kernelbench", "cuda-l1-release", "training", "assembly-game")),
    ROOT / "docs" / "models-end-to-end.md",
    RESULTS / "README.md",
    RACES / "README.md",
)


def written(path: Path, numbers: Numbers) -> str:
    """A page with its blocks as they should be; KeyError for one without a function."""
    text = path.read_text(encoding="utf-8")
    return BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]](numbers, path).rstrip()}\n\n{found[3]}", text)


# --- the picture, published copies, and the command ---------------------------------------------------------------------


def draw(numbers: Numbers, target: Path) -> None:
    """Draw the README's picture: both searches and CUDA-L1's kernels, over the same best stock baselines."""
    import matplotlib
    from matplotlib import pyplot

    pyplot.switch_backend("svg")
    # Fixed ids: the same results give the same bytes.
    matplotlib.rcParams.update({"svg.hashsalt": "kernelwright", "svg.fonttype": "none", "font.size": 9})
    matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    figure, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    right = [(row, kernel) for row, kernel in numbers.theirs() if kept_speedup(kernel)]
    curves = {
        f"today's shapes, {len(numbers.suites[TODAY])} tasks": [against_best(row) for row in numbers.suites[TODAY]],
        f"CUDA-L1's shapes, {len(right)} tasks with a right kernel of theirs": [against_best(row) for row, _ in right],
        f"CUDA-L1's {len(right)} right kernels, same tasks and baselines": [against_stock(*pair) for pair in right],
    }
    for label, speedups in curves.items():
        places = [100 * (number + 0.5) / len(speedups) for number in range(len(speedups))]
        axes.plot(places, sorted(speedups), label=label, linewidth=2)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(yscale="log", xlabel="tasks, sorted, %", ylabel="speedup", title="Over each task's best stock baseline")
    axes.set_yticks([0.25, 0.5, 1, 2, 4, 8, 16], ["0.25", "0.5", "1", "2", "4", "8", "16"], minor=False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(target, metadata={"Date": None})


def publish(run: Run, target: Path) -> None:
    """A packed copy that `rescore` and `report` accept; what was only screened comes without its source."""
    open_tasks = run.open_tasks()
    copy_plain(run.path, target, PLAIN)
    write_packed(target, "evaluations.jsonl", unpacked(run.evaluations_path))
    looks = (one if one.task in open_tasks else one.model_copy(update={"source": ""}) for one in run.screened())
    estimates = "".join(f"{one.model_dump_json()}\n" for one in looks)
    write_packed(target, "screened.jsonl", estimates.encode())
    if found := run.read_json("tasks.json"):
        write_packed(target, "tasks.json", json.dumps(found).encode())


@functools.cache
def stored() -> Numbers:
    """The numbers of the summary that is there."""
    return Numbers(json.loads(SUMMARY.read_text(encoding="utf-8")))


def summary_text() -> str:
    """The summary from records."""
    found = summary_of([Run(path.parent) for path in sorted(RACES.glob("*/config.json"))])
    return json.dumps(found, indent=1) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write everything, and name what has changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", action="store_true", help="leave the summary of all searches as it is")
    parser.add_argument("--publish", type=Path, nargs="+", default=[], metavar="RUN_DIR", help="runs to copy first")
    options = parser.parse_args(arguments)
    for path in options.publish:
        publish(Run(path), RACES / path.resolve().name)
    if not options.pages:
        SUMMARY.write_text(summary_text(), encoding="utf-8")
    numbers = stored()
    for page in PAGES:
        text = written(page, numbers)
        if text != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            print(f"changed  {page.relative_to(ROOT)}")
    draw(numbers, PICTURE)


if __name__ == "__main__":
    main()
