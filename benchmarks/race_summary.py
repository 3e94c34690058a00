"""Sums up searched suites: how far winners are ahead of eager, compile, each task's best baseline and CUDA-L1's kernels.

    python benchmarks/race_summary.py RUN_DIR
    python benchmarks/race_summary.py RUN_DIR... --out results/kernelbench-h200 --page docs/kernelbench.md

A RUN_DIR is what `kernelwright bench SUITE --policy builtin` made, finished or not, or a run of the suite's own candidates.
Alone it gets a `summary.json`. With --out the summary of all goes there with a README, beside a packed copy of each run
without the sources of what was only screened, but for tasks of which the judge would still take a candidate. With --page the
part of that page between two marks is written anew; a page that does not exist is made. A line for each task and the numbers
of each level are printed. Runs of CUDA-L1's shapes have plain keys, those of KernelBench as it is today `today_`, on an H100
`h100_`. A `notes.md` in a RUN_DIR is told with its numbers.

A task counts once it is decided and its baselines are measured: its winner is confirmed, or the judge owes nothing more.
What is only screened is counted apart. A decided task without winner counts 1.0 against eager, whose user keeps the
reference, and so less than 1 against a faster baseline. Keys that end in `_filled` count 1.0 against any baseline, as
CUDA-L1's table does. Keys that begin with `floor_` are over all tasks with baselines, and the reference stands where the
judge still owes something. Baselines whose outputs the next call overwrites are not the best one. Decided tasks are
certainly ahead of the best baseline, certainly behind it, or within noise: the interval of their ratio holds 1.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from publishing import copy_plain, packed_bytes, write_packed

from kernelwright.records import Contract, Evaluation, RunDirectory
from kernelwright.records.screened import JUDGED, Screened, confirmed_best, next_to_judge
from kernelwright.report.bench_table import BenchEntry, task_results
from kernelwright.report.rows import BASELINE_POLICY
from kernelwright.report.standing import TaskOutcome, standings

THEIRS = "cuda-l1"
"""Policy of the kernels that CUDA-L1 released."""
NOTES = "notes.md"
PLAIN = ("config.json", "environment.json", "errors.json", "entries.json", "exhausted.json", "table.json", NOTES)
MARKS = ("<!-- written by benchmarks/race_summary.py -->", "<!-- until here -->")
NEAR = 1.02
"""Ratio of two estimates beyond which a technique helped or hurt. Our choice."""
Line = dict[str, Any]


def geomean(values: Iterable[float]) -> float | None:
    """Geometric mean; None of nothing."""
    logs = [math.log(value) for value in values]
    return round(math.exp(sum(logs) / len(logs)), 4) if logs else None


def middle(values: Iterable[float]) -> float | None:
    """Median; None of nothing."""
    found = list(values)
    return round(median(found), 4) if found else None


class Run(RunDirectory):
    """A run directory, or a published one whose estimates are packed without sources and hashes of tasks."""

    def screened(self) -> Iterable[Screened]:  # type: ignore[override]
        """Every estimate."""
        packed = self.path / "estimates.jsonl.gz"
        if not packed.exists():
            yield from super().screened()
            return
        hashes = {one.task: one.task_sha256 for one in self.evaluations()}
        for text in gzip.decompress(packed.read_bytes()).decode().splitlines():
            found = json.loads(text)
            yield Screened(task_sha256=hashes.get(found["task"], ""), **found)

    @property
    def group(self) -> str:
        """Prefix of its keys."""
        gpus = (self.read_json("environment.json") or {}).get("gpu") or [{}]
        if "H100" in str(gpus[0].get("name")):
            return "h100_"
        return "today_" if (self.read_json("config.json") or {}).get("suite") == "kernelbench" else ""

    def lines(self) -> list[Line]:
        """Where each task stands."""
        own: dict[str, list[Evaluation]] = defaultdict(list)
        hashes = {}
        for one in self.evaluations():
            hashes[one.task] = one.task_sha256
            if one.policy not in (BASELINE_POLICY, THEIRS):
                own[one.task].append(one)
        entries = []
        for task in self.read_json("tasks.json") or [{"id": name} for name in self.read_json("config.json")["tasks"]]:
            name, winner = task["id"], confirmed_best(own[task["id"]])
            level = re.search(r"level(\d+)", name)
            sha256 = winner.candidate_sha256 if winner else None
            entries.append(BenchEntry(name, hashes.get(name, ""), int(level[1]) if level else None, sha256))
        found = standings(self, task_results(self, entries, self.read_json("errors.json") or {}))
        return [line | {"run": self.path.name} for line in found]

    def open_tasks(self) -> set[str]:
        """Tasks of which the judge would still take a candidate."""
        looks: dict[str, list[Screened]] = defaultdict(list)
        verdicts: dict[str, dict[str, Evaluation]] = defaultdict(dict)
        for look in self.screened():
            looks[look.task].append(look)
        # As for the search, the first verdict on a candidate counts before its confirmation.
        for one in sorted(self.evaluations(), key=lambda one: not one.confirms):
            if one.policy != BASELINE_POLICY:
                verdicts[one.task][one.candidate_sha256] = one
        count = (self.read_json("config.json") or {}).get("judge") or JUDGED
        return {task for task, found in looks.items() if next_to_judge(found, verdicts[task], count) is not None}

    def released(self) -> dict[str, float | None]:
        """Speedup over eager of CUDA-L1's own kernel by task; None where it does not keep KernelBench's contract."""
        found: dict[str, float | None] = {}
        for one in self.evaluations():
            if one.policy == THEIRS:
                kept = one.contracts[Contract.KERNELBENCH].kept if one.contracts else one.accepted
                if not kept or one.speedup is not None:
                    found[one.task] = one.speedup if kept else None
        return found


def is_counted(line: Line) -> bool:
    """Whether a task is decided and its baselines are measured."""
    return line["outcome"] in (TaskOutcome.WINNER, TaskOutcome.NONE) and line["baselines_measured"]


def ours(line: Line) -> float:
    """Speedup over eager of what the user gets: the winner, or the reference."""
    return line["speedup"] or 1.0


def against_best(line: Line) -> float:
    """What the user gets, as a multiple of the best baseline; 1 where the winner is that baseline."""
    return line["vs_best_baseline"] if line["speedup"] else 1.0 / line["best_baseline_speedup"]


def is_behind(line: Line) -> bool:
    """Whether the best baseline is certainly faster than what the user gets."""
    if line["speedup"]:
        interval = line["vs_best_baseline_interval"]
        return interval is not None and interval[1] < 1.0
    known = line["best_baseline_interval"]
    return known is not None and known[0] > 1.0


def part(lines: Sequence[Line], released: Mapping[str, float | None]) -> dict[str, Any]:
    """Numbers of some tasks."""
    counted = [line for line in lines if is_counted(line)]
    won = [line for line in counted if line["speedup"]]
    behind = sum(map(is_behind, counted))
    ahead = sum(line["ahead"] for line in counted)
    measured = [line for line in lines if line["baselines_measured"]]
    compiled = [line for line in counted if "compile" in line["baselines"]]
    beside = [line for line in counted if line["task"] in released]
    undecided = [line for line in lines if line["outcome"] == TaskOutcome.SCREENED and line["estimate"]]
    shares = [line["roofline"]["winner"] for line in won if line["roofline"] and line["roofline"]["winner"]]
    return {
        "asked": len(lines),
        "tasks": len(counted),
        "screened_only": sum(line["outcome"] == TaskOutcome.SCREENED for line in lines),
        "untouched": sum(line["outcome"] == TaskOutcome.UNTOUCHED for line in lines),
        "verified": len(won),
        "verified_not_below_best_baseline": sum(line["vs_best_baseline"] >= 1.0 for line in won),
        "geomean_vs_eager": geomean(map(ours, counted)),
        "geomean_vs_compile": geomean(ours(line) / line["baselines"]["compile"] for line in compiled),
        "geomean_vs_best_baseline": geomean(map(against_best, counted)),
        "geomean_vs_best_baseline_filled": geomean(line["vs_best_baseline"] or 1.0 for line in counted),
        "geomean_best_baseline_vs_eager": geomean(line["best_baseline_speedup"] for line in counted),
        "floor_tasks": len(measured),
        "floor_vs_eager": geomean(map(ours, measured)),
        "floor_vs_best_baseline": geomean(map(against_best, measured)),
        "median_vs_eager": middle(map(ours, counted)),
        "median_vs_best_baseline": middle(map(against_best, counted)),
        "ahead_of_best_baseline": ahead,
        "within_noise_of_best_baseline": len(counted) - ahead - behind,
        "behind_best_baseline": behind,
        # Where theirs fails its user takes the best baseline.
        "geomean_vs_cuda_l1": geomean(
            ours(line) / theirs if (theirs := released[line["task"]]) else against_best(line) for line in beside
        ),
        "tasks_vs_cuda_l1": len(beside),
        "median_roofline_share": middle(shares),
        # May be fooled, and taken beside other work: no result, only what the judge still has to look at.
        "screened_only_estimates": geomean(line["estimate"] for line in undecided),
    }


def with_levels(lines: Sequence[Line], released: Mapping[str, float | None]) -> dict[str, Any]:
    """Numbers of all tasks and of each level."""
    levels = sorted({line["level"] for line in lines if line["level"]})
    by_level = {f"level{level}": part([one for one in lines if one["level"] == level], released) for level in levels}
    return part(lines, released) | {"levels": by_level}


def best_by_task(runs: Iterable[Run]) -> list[Line]:
    """One line for each task: the furthest, then the fastest of several runs."""
    found: dict[str, Line] = {}
    order = list(TaskOutcome)
    for line in (line for run in runs for line in run.lines()):
        known = found.setdefault(line["task"], line)
        if (order.index(known["outcome"]), -(known["low"] or 0.0)) > (order.index(line["outcome"]), -(line["low"] or 0.0)):
            found[line["task"]] = line
    return list(found.values())


def summary_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Numbers of all groups, and the lines of their tasks."""
    summary: dict[str, Any] = {}
    released = {name: speedup for run in runs for name, speedup in run.released().items()}
    for group in ("", "today_", "h100_"):
        chosen = [run for run in runs if run.group == group and (run.read_json("config.json") or {}).get("policy")]
        if chosen:
            lines = best_by_task(chosen)
            summary |= {f"{group}{key}": value for key, value in with_levels(lines, released).items()}
            summary |= {f"{group}runs": [run.path.name for run in chosen], f"{group}rows": lines}
    return summary


# --- the page ---------------------------------------------------------------------------------------------------------


def interval(line: Line) -> str:
    """Speedup over eager with its interval."""
    if line["speedup"]:
        return f"{line['speedup']:.2f} ({line['low']:.2f} to {line['high']:.2f})"
    if line["outcome"] == TaskOutcome.NONE:
        return "1.00, the reference"
    return f"no result; estimate {line['estimate']:.2f}" if line["estimate"] else "no result"


def row(line: Line) -> str:
    """One task as a row of a table."""
    share = (line["roofline"] or {}).get("winner" if line["speedup"] else "reference")
    over, beside = line["vs_best_baseline_interval"], "-"
    if line["speedup"] and line["baselines_measured"]:
        beside = f"{line['vs_best_baseline']:.2f}" + (f" ({over[0]:.2f} to {over[1]:.2f})" if over else "")
    best = f"{line['best_baseline_speedup']:.2f}, {line['best_baseline']}" if line["baselines_measured"] else "-"
    us = f"{line['reference_us']:.0f}" if line["reference_us"] else "-"
    how = ", ".join(line["techniques"]) or line["reason"]
    near = f"{share:.0%}".replace("%", " %") if share else "-"
    return f"| {line['task']} | {us} | {interval(line)} | {best} | {beside} | {near} | {how} |"


HEAD = """| task | eager, us | over eager | best baseline, over eager | over it | of memory's speed | how, or why not |
|---|---:|---:|---:|---:|---:|---|"""
GROUPS = {"": "CUDA-L1's shapes", "today_": "today's shapes", "h100_": "on an H100"}


def headline(summary: Mapping[str, Any], group: str) -> list[str]:
    """The table of numbers of one group."""
    parts = {"all": {key.removeprefix(group): value for key, value in summary.items()}, **summary[f"{group}levels"]}
    names = {
        "asked": "tasks asked for", "tasks": "decided, with baselines", "screened_only": "screened only",
        "untouched": "untouched", "verified": "with a verified winner",
        "ahead_of_best_baseline": "certainly ahead of the best baseline",
        "within_noise_of_best_baseline": "within noise of it", "behind_best_baseline": "certainly behind it",
        "geomean_vs_eager": "geomean over eager", "median_vs_eager": "median over eager",
        "geomean_vs_compile": "geomean over torch.compile",
        "geomean_vs_best_baseline": "geomean over the best baseline",
        "median_vs_best_baseline": "median over the best baseline",
        "geomean_vs_best_baseline_filled": "geomean over it, 1.0 without a winner",
        "geomean_best_baseline_vs_eager": "geomean of the best baseline over eager",
        "floor_vs_best_baseline": "geomean over the best baseline, all tasks, undecided ones as the reference",
        "tasks_vs_cuda_l1": "tasks beside CUDA-L1's own kernels",
        "geomean_vs_cuda_l1": "geomean over these",
        "median_roofline_share": "median share of memory's speed",
        "screened_only_estimates": "estimates of what is screened only, no result",
    }  # fmt: skip
    lines = [
        "| | " + " | ".join(name.replace("level", "level ") for name in parts) + " |",
        "|---" + "|---:" * len(parts) + "|",
    ]
    for key, name in names.items():
        values = [one.get(key) for one in parts.values()]
        if any(value is not None for value in values):
            lines.append(f"| {name} | " + " | ".join("-" if value is None else f"{value:.4g}" for value in values) + " |")
    return lines


def techniques(found: Sequence[Screened]) -> list[str]:
    """Which techniques help, hurt and combine: estimates with one against the same candidate without it, task by task."""
    best: dict[str, dict[frozenset[str], float]] = defaultdict(dict)
    for one in found:
        if one.correct and one.estimate:
            key = frozenset(one.techniques)
            best[one.task][key] = max(one.estimate, best[one.task].get(key, 0.0))
    effects: dict[str, list[float]] = defaultdict(list)
    joint: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for by_set in best.values():
        by_set.setdefault(frozenset(), 1.0)
        for names, estimate in by_set.items():
            for name in names:
                if names - {name} in by_set:
                    effects[name].append(estimate / by_set[names - {name}])
            pair = tuple(sorted(names))
            if len(pair) == 2 and all(frozenset({name}) in by_set for name in pair):
                joint[pair].append(estimate / max(by_set[frozenset({name})] for name in pair))
    lines = ["| technique | tasks compared | geomean of its effect | helps on | hurts on |", "|---|---:|---:|---:|---:|"]
    for name, ratios in sorted(effects.items(), key=lambda one: -(geomean(one[1]) or 0.0)):
        helped, hurt = sum(ratio > NEAR for ratio in ratios), sum(ratio < 1 / NEAR for ratio in ratios)
        lines.append(f"| {name} | {len(ratios)} | {geomean(ratios):.2f} | {helped} | {hurt} |")
    if joint:
        lines += ["", "| two together | tasks compared | geomean over the better of the two |", "|---|---:|---:|"]
    for pair, ratios in sorted(joint.items(), key=lambda one: (-len(one[1]), one[0]))[:12]:
        lines.append(f"| {' and '.join(pair)} | {len(ratios)} | {geomean(ratios):.2f} |")
    return lines


def conditions(runs: Sequence[Run], folder: str) -> str:
    """Machine, versions and links of some runs."""
    environment = runs[0].read_json("environment.json") or {}
    gpu, packages = (environment.get("gpu") or [{}])[0], environment.get("packages") or {}
    driver = f"driver {gpu['driver_version']}, " if gpu.get("driver_version") else ""
    links = ", ".join(f"[{run.path.name}]({os.path.normpath(f'{folder}/{run.path.name}')})" for run in runs)
    return (
        f"{gpu.get('name', environment.get('processor'))} ({driver}"
        f"torch {packages.get('torch')}, Triton {packages.get('triton')}), "
        f"commit {str(environment.get('commit'))[:7]}: {links}."
    )


def notes_of(run: Run) -> str:
    """What its `notes.md` says, a paragraph of how it was made; nothing without one."""
    path = run.path / NOTES
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


def section(summary: Mapping[str, Any], group: str, runs: Sequence[Run], folder: str) -> list[str]:
    """Numbers, wins, losses, tasks without winner and techniques of one group."""
    name, rows = GROUPS[group], summary[f"{group}rows"]
    counted = sorted(filter(is_counted, rows), key=against_best)
    text = [f"## {name[0].upper()}{name[1:]}", "", conditions(runs, folder), ""]
    text += [line for run in runs if (told := notes_of(run)) for line in (told, "")]
    text += [*headline(summary, group), ""]
    if left := summary[f"{group}screened_only"] + summary[f"{group}untouched"]:
        text += [
            f"**{left} of {len(rows)} tasks are not decided.** The judge takes the best estimates first, so that the "
            "decided ones are no fair sample of all.",
            "",
        ]
    losses = [one for one in counted if against_best(one) < 1.0][:10]
    for title, some in (
        ("The largest wins over the best baseline", [one for one in counted[::-1] if one["speedup"]][:10]),
        ("The hardest losses", losses),
        ("Further tasks without a winner", [one for one in counted if not one["speedup"] and one not in losses]),
        ("Not decided: estimates are no results", [one for one in rows if not is_counted(one)]),
    ):
        if some:
            text += [f"### {title}, {name}", "", HEAD, *map(row, some), ""]
    estimates = [one for run in runs for one in run.screened()]
    if estimates:
        text += [
            f"### Techniques on {name}",
            "",
            f"From {len(estimates)} screened estimates, each against the one of the same candidate without the technique, "
            f"or against eager. It helps or hurts where the two are more than {NEAR - 1:.0%} apart.".replace("%", " %"),
            "",
            *techniques(estimates),
            "",
        ]
    return text


PAGE = f"""# KernelBench, searched

How far the built-in policy gets on KernelBench: what `kernelwright bench SUITE --policy builtin` confirmed, against eager
and against the best stock baseline of each task. That is the fastest of those that were measured and keep the contract of a
drop-in: eager, `torch.compile`, a CUDA graph whose output the next call leaves alone, and cuDNN's algorithm search. A task
without a winner counts as the reference. `kernelwright rescore` computes each number again from the runs that are linked.

- *certainly ahead* or *behind*: the interval of the ratio lies above or below 1; *within noise*: it holds 1.
- *of memory's speed*: the time in which the GPU writes as many bytes as inputs and outputs have, as a share of the winner's.

{MARKS[0]}
{MARKS[1]}
"""
README = """# KernelBench, searched on a GPU

Made by `kernelwright bench SUITE --policy builtin`, and summed up by `benchmarks/race_summary.py`. `summary.json` has the
numbers for programs. What was only screened has no source here, but for tasks of which the judge would still take a
candidate: a copy of a folder goes on after `gunzip *.gz` with the command that made it.
"""


def sections(summary: Mapping[str, Any], runs: Sequence[Run], folder: Path, page: Path) -> str:
    """Everything that a page in the folder `page` says of runs whose copies are in `folder`."""
    link = os.path.relpath(folder, page)
    texts = []
    for group in GROUPS:
        if f"{group}runs" in summary:
            some = [run for run in runs if run.path.name in summary[f"{group}runs"]]
            texts.append("\n".join(section(summary, group, some, link)))
    return "\n".join(texts)


def publish(run: Run, target: Path) -> None:
    """A packed copy that `rescore` and `report` accept; what was only screened comes without its source.

    Tasks of which the judge would still take a candidate keep theirs: unpacked, the copy is a run that `bench --out` goes
    on with.
    """
    open_tasks = run.open_tasks()
    copy_plain(run.path, target, PLAIN)
    packed = run.path / "evaluations.jsonl.gz"
    write_packed(target, "evaluations.jsonl", packed.read_bytes() if packed.exists() else packed_bytes(run.evaluations_path))
    estimates = "".join(
        (one if one.task in open_tasks else one.model_copy(update={"source": ""})).model_dump_json() + "\n"
        for one in run.screened()
    )
    if estimates:
        write_packed(target, "screened.jsonl", gzip.compress(estimates.encode(), mtime=0))
    if tasks := run.read_json("tasks.json"):
        write_packed(target, "tasks.json", gzip.compress(json.dumps(tasks).encode(), mtime=0))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, help="folder for the summary and packed copies of the runs")
    parser.add_argument("--page", type=Path, help="page whose marked part is written anew")
    options = parser.parse_args(arguments)
    runs = [Run(path) for path in options.runs]
    names = [run.path.resolve().name for run in runs]
    if options.out is None and len(runs) > 1:
        parser.error("several runs need --out for their summary")
    if len(set(names)) < len(names):
        parser.error(f"wanted runs with different names, found {', '.join(names)}: rename a folder")
    summary = summary_of(runs)
    if not summary:
        parser.error("wanted a run of `kernelwright bench --policy`; found none")
    folder = options.out or runs[0].path
    if options.out is not None:
        for run, name in zip(runs, names, strict=True):
            publish(run, options.out / name)
        (folder / "README.md").write_text(f"{README}\n{sections(summary, runs, folder, folder)}\n", encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    if options.page is not None:
        known = options.page.read_text(encoding="utf-8") if options.page.exists() else PAGE
        before, _, rest = known.partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        body = f"{MARKS[0]}\n\n{sections(summary, runs, folder, options.page.parent)}\n{MARKS[1]}"
        options.page.write_text(f"{before}{body}{after}", encoding="utf-8")
    for group in GROUPS:
        if f"{group}rows" in summary:
            print(GROUPS[group], HEAD.splitlines()[0], sep="\n")
            for line in sorted(summary[f"{group}rows"], key=lambda line: (not is_counted(line), -against_best(line))):
                print(row(line), "" if is_counted(line) else f"({line['outcome']})")
            print("", *headline(summary, group), "", sep="\n")
    print(f"written  {folder / 'summary.json'}", *([options.page] if options.page else []))


if __name__ == "__main__":
    main()
