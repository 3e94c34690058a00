"""Renders two pages on searched suites in Markdown, from the same numbers.

The README beside the runs has everything: notes on each run, every task without a winner, techniques by suite. The page in
docs has what a reader asks for first, and links to it.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from race_numbers import GROUPS, ON_EITHER, Line, Run, against_best, geomean, is_alike, is_counted, on_both, once_on_either

from kernelwright.records.decisions import TaskStatus
from kernelwright.records.screened import Screened

NOTES = "notes.md"
ONCE = "Each task once"
"""The README's section of tasks that two kinds of GPU searched."""
MARKS = ("<!-- written by benchmarks/race_summary.py -->", "<!-- until here -->")
NEAR = 1.02
"""Ratio of two estimates beyond which a technique helped or hurt. Our choice."""


def interval(line: Line) -> str:
    """Speedup over eager with its interval."""
    if line["speedup"]:
        return f"{line['speedup']:.2f} ({line['low']:.2f} to {line['high']:.2f})"
    if line["outcome"] == TaskStatus.NONE:
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


HEAD = """| task | eager, us | over eager | best baseline, over eager | over it | of the roofline | how, or why not |
|---|---:|---:|---:|---:|---:|---|"""


def headline(summary: Mapping[str, Any], group: str) -> list[str]:
    """The table of numbers of one group."""
    numbers = {key.removeprefix(group): value for key, value in summary.items() if key.startswith(group)}
    parts = {"all": numbers, **numbers["levels"]}
    names = {
        "asked": "tasks asked for", "tasks": "decided, with baselines", "screened_only": "screened only",
        "untouched": "untouched", "verified": "with a verified winner",
        "ahead_of_best_baseline": "certainly ahead of the best baseline",
        "ahead_by_wrapper_alone": "of these by a wrapper of the reference alone, such as a CUDA graph of torch.compile",
        "within_noise_of_best_baseline": "within noise of it", "behind_best_baseline": "certainly behind it",
        "geomean_vs_eager": "geomean over eager", "median_vs_eager": "median over eager",
        "geomean_vs_compile": "geomean over torch.compile",
        "geomean_vs_best_baseline": "geomean over the best baseline",
        "median_vs_best_baseline": "median over the best baseline",
        "geomean_vs_best_baseline_filled": "geomean over it, 1.0 without a winner",
        "geomean_vs_best_baseline_own_code": "geomean over it, where a wrapper alone counts 1.0 at most",
        "geomean_best_baseline_vs_eager": "geomean of the best baseline over eager",
        "floor_vs_best_baseline": "geomean over the best baseline, all tasks, undecided ones as the reference",
        "tasks_vs_cuda_l1": "tasks beside CUDA-L1's own kernels",
        "geomean_vs_cuda_l1": "geomean over these",
        "tasks_vs_cuda_l1_same_gpu": "of these with winner and kernel on the same kind of GPU",
        "geomean_vs_cuda_l1_same_gpu": "geomean over those",
        "median_roofline_share": "median share of the roofline",
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
    """Techniques that help, hurt and combine: estimates with one against the same candidate without it, task by task."""
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


def conditions(runs: Sequence[Run]) -> str:
    """Machine, versions, commits and links of some runs, whose copies are beside the page."""
    environments = [run.read_json("environment.json") or {} for run in runs]
    environment = environments[0]
    gpu, packages = (environment.get("gpu") or [{}])[0], environment.get("packages") or {}
    driver = f"driver {gpu['driver_version']}, " if gpu.get("driver_version") else ""
    links = ", ".join(f"[{run.path.name}]({run.path.name})" for run in runs)
    devices = dict.fromkeys(run.gpu or str(found.get("processor")) for run, found in zip(runs, environments, strict=True))
    commits = list(dict.fromkeys(str(found.get("commit"))[:7] for found in environments))
    return (
        f"{' and '.join(devices)} ({driver}torch {packages.get('torch')}, Triton {packages.get('triton')}), "
        f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}: {links}."
    )


def notes_of(run: Run) -> str:
    """Text of its `notes.md`, a paragraph of how it was made; empty without one."""
    path = run.path / NOTES
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


def once(told: Mapping[str, Any], title: str) -> list[str]:
    """Numbers of all tasks, each on one GPU."""
    return [
        f"## {title}",
        "",
        f"Of the {told['asked']} tasks of CUDA-L1's shapes that an H200 or an H100 searched, {told['tasks']} are decided. "
        f"{told['h100_tasks']} of them count with an H100's numbers and the others with an H200's: those of the run that "
        "decided the task last, whichever way it went.",
        "",
        *headline(told, ""),
        "",
    ]


def carrying(summary: Mapping[str, Any]) -> list[str]:
    """Gains on the first GPU beside those on an H100 that searched for itself."""
    told = summary.get("h100_carried")
    if not told:
        return []
    table = [
        f"| {first['task']} | {against_best(first):.2f} | {against_best(second):.2f} "
        f"| {', '.join(second['techniques']) or '-'} | {'yes' if is_alike(first, second) else 'no'} |"
        for first, second in sorted(on_both(summary), key=lambda pair: -against_best(pair[0]))
    ]
    return [
        "### What carries over, H200 and H100",
        "",
        f"Each GPU was searched for itself. Over the {told['tasks']} tasks that are decided on both, the geomean over the "
        f"best baseline is {told['geomean_vs_best_baseline']:.2f} on the H200 and "
        f"{told['h100_geomean_vs_best_baseline']:.2f} on the H100. Both have a winner of their own on "
        f"{told['winners_on_both']}, made by the same techniques on {told['winners_alike']}.",
        "",
        "| task | H200, over the best baseline | H100 | the H100's winner | same techniques |",
        "|---|---:|---:|---|---|",
        *table,
        "",
        *rejudged(summary),
    ]


def rejudged(summary: Mapping[str, Any]) -> list[str]:
    """Section on the first GPU's winners on an H100."""
    told = summary.get("h100_carried_winners")
    if not told:
        return []
    table = [
        f"| {line['task']} | {line['speedup']:.2f} | {_measured(line) or line['reason']} "
        f"| {f'{own:.2f}' if (own := line['h100_own']) else '-'} |"
        for line in sorted(told["rows"], key=lambda line: -line["speedup"])
    ]
    return [
        "### The H200's winners, judged on an H100",
        "",
        f"The very sources of {told['tasks']} winners, knobs and all. {told['accepted']} are accepted there, and "
        f"{told['ahead_of_eager']} of these are certainly faster than eager, by one measurement each. Over the accepted "
        f"ones the geomean over eager is {told['geomean_vs_eager']:.2f} on the H200 and "
        f"{told['h100_geomean_vs_eager']:.2f} on the H100. On {told['searched_too']} of them the H100 has a winner of its "
        f"own, found at another time: {told['own_over_carried']:.2f} of the carried one in the geomean, certainly ahead on "
        f"{told['own_certainly_ahead']} and certainly behind on {told['own_certainly_behind']}.",
        "",
        "| task | over eager on the H200 | the same source on the H100 | the H100's own winner |",
        "|---|---:|---:|---:|",
        *table,
        "",
    ]


def _measured(line: Line) -> str:
    """Speedup and interval on the H100; nothing where the source was rejected."""
    if not line["h100_speedup"]:
        return ""
    low, high = line["h100_interval"]
    return f"{line['h100_speedup']:.2f} ({low:.2f} to {high:.2f})"


def title_of(group: str) -> str:
    """A group's heading."""
    name = GROUPS[group]
    return f"{name[0].upper()}{name[1:]}"


def undecided(summary: Mapping[str, Any], group: str) -> list[str]:
    """Count of a group's undecided tasks; empty where all are decided."""
    left = summary[f"{group}screened_only"] + summary[f"{group}untouched"]
    if not left:
        return []
    return [
        f"**{left} of {len(summary[f'{group}rows'])} tasks are not decided.** The judge takes those first that promise "
        "most, so that the decided ones are no fair sample of all.",
        "",
    ]


def ends(rows: Sequence[Line]) -> dict[str, list[Line]]:
    """The ten largest wins and the ten hardest losses, by the title of their table."""
    counted = sorted(filter(is_counted, rows), key=against_best)
    return {
        "The largest wins over the best baseline": [one for one in counted[::-1] if one["speedup"]][:10],
        "The hardest losses": [one for one in counted if against_best(one) < 1.0][:10],
    }


def tables(some: Mapping[str, Sequence[Line]], group: str) -> list[str]:
    """Tasks in tables, by their titles; an empty one is left out."""
    return [
        line
        for title, rows in some.items()
        if rows
        for line in (f"### {title}, {GROUPS[group]}", "", HEAD, *map(row, rows), "")
    ]


def effects_of(runs: Sequence[Run], heading: str) -> list[str]:
    """Section on techniques in some runs; empty where none was screened."""
    estimates = [one for run in runs for one in run.screened()]
    if not estimates:
        return []
    return [
        heading,
        "",
        f"From {len(estimates)} screened estimates, each against the one of the same candidate without the technique, "
        f"or against eager. It helps or hurts where the two are more than {NEAR - 1:.0%} apart.".replace("%", " %"),
        "",
        *techniques(estimates),
        "",
    ]


def section(summary: Mapping[str, Any], group: str, runs: Sequence[Run]) -> list[str]:
    """Everything about one group: conditions, notes, numbers, wins, losses, tasks without winner and techniques."""
    rows = summary[f"{group}rows"]
    text = [f"## {title_of(group)}", "", conditions(runs), ""]
    text += [line for run in runs if (told := notes_of(run)) for line in (told, "")]
    text += [*headline(summary, group), "", *undecided(summary, group)]
    if group == "h100_":
        text += carrying(summary)
    told = ends(rows)
    shown = [one for some in told.values() for one in some]
    further = [one for one in rows if is_counted(one) and not one["speedup"] and one not in shown]
    told |= {
        "Further tasks without a winner": sorted(further, key=against_best),
        "Not decided: estimates are no results": [one for one in rows if not is_counted(one)],
    }
    return [*text, *tables(told, group), *effects_of(runs, f"### Techniques, {GROUPS[group]}")]


def outline(summary: Mapping[str, Any], group: str, folder: str) -> list[str]:
    """Numbers, wins and losses of one group, and a link to the rest."""
    return [
        f"## {title_of(group)}",
        "",
        *headline(summary, group),
        "",
        *undecided(summary, group),
        *tables(ends(summary[f"{group}rows"]), group),
        *rest(folder, title_of(group)),
    ]


def rest(folder: str, title: str) -> list[str]:
    """A link to the README's section of that title."""
    anchor = re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
    return [f"[Each run, every task without a winner and techniques]({folder}/README.md#{anchor}).", ""]


PAGE = f"""# KernelBench, searched

How far the built-in policy gets on KernelBench: what `kernelwright bench SUITE --policy builtin` confirmed, against eager
and against the best stock baseline of each task. That is the fastest of those that were measured and keep the contract of a
drop-in: eager, `torch.compile`, a CUDA graph whose output the next call leaves alone, and cuDNN's algorithm search. A task
without a winner counts as the reference. `kernelwright rescore` computes each number again from the runs that are linked.

- *certainly ahead* or *behind*: the interval of the ratio lies above or below 1; *within noise*: it holds 1.
- *of the roofline*, which older tables call *of memory's speed*: the roofline's time as a share of the winner's, or of
  eager's without a winner. It is the longer of two times: moving inputs and outputs once, and the operations of the
  reference's products, convolutions and attention at the rate of a large product (TF32 for float32), where the run recorded
  it. Runs before 2026-11-27 recorded bytes alone. A rewrite that avoids operations can have more than 100 %.

{MARKS[0]}
{MARKS[1]}
"""
README = """# KernelBench, searched on a GPU

Made by `kernelwright bench SUITE --policy builtin`, and summed up by `benchmarks/race_summary.py`. `summary.json` has the
numbers for programs. What was only screened has no source here, but for tasks of which the judge would still take a
candidate: a copy of a folder goes on after `gunzip *.gz` with the command that made it. Runs whose notes say so have none.
"""


def sections(summary: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """All that the README says beside copies of these runs."""
    told = summary.get("each_once")
    lines = once(told, ONCE) if told else []
    for group in GROUPS:
        if f"{group}runs" in summary:
            lines += section(summary, group, [run for run in runs if run.path.name in summary[f"{group}runs"]])
    return "\n".join(lines)


def outlines(summary: Mapping[str, Any], runs: Sequence[Run], folder: Path, page: Path) -> str:
    """Text of a page in the folder `page` on runs whose copies are in `folder`; a task of two GPUs comes once."""
    link, searched, told = os.path.relpath(folder, page), [run for run in runs if run.searches], summary.get("each_once")
    lines = []
    if told:
        lines += [*once(told, title_of("")), *tables(ends(once_on_either(searched)), ""), *rest(link, ONCE)]
    for group in GROUPS:
        if f"{group}runs" in summary and not (told and group in ON_EITHER):
            lines += outline(summary, group, link)
    return "\n".join([*lines, *effects_of(searched, "## Techniques")])
