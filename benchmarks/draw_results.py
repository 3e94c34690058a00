"""Draws docs/results.svg, the README's picture, from published results. Needs matplotlib.

python benchmarks/draw_results.py
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import matplotlib
from matplotlib import pyplot
from race_numbers import ON_EITHER, Run, against_best, is_counted, later_by_task

from kernelwright.records import RunDirectory

ROOT = Path(__file__).parents[1]
RELEASE = ROOT / "results" / "2026-11-22-cuda-l1-h200"
RACE = ROOT / "results" / "kernelbench-h200"
SEARCHED = {"CUDA-L1's shapes": ON_EITHER, "today's shapes": ("today_",)}
"""Suites that the search raced on, and their groups in `race_numbers`, one for each kind of GPU."""
TRAINING = ROOT / "results" / "contrastive-h200" / "summary.json"
STAGES = {
    "supervised": "sft",
    "self-supervised": "self_supervised",
    "evolutionary": "evolutionary",
    "vanilla GRPO *": "vanilla_grpo",
    "contrastive": "contrastive",
}


def release_speedups() -> list[float]:
    """Speedups of CUDA-L1's accepted kernels over each task's best baseline, eager included, sorted."""
    candidates: dict[str, float] = {}
    baselines: dict[str, list[float]] = defaultdict(lambda: [1.0])
    for found in RunDirectory(RELEASE).evaluations():
        if found.speedup is None:
            continue
        if found.policy == "baseline":
            baselines[found.task].append(found.speedup)
        else:
            candidates[found.task] = found.speedup
    return sorted(speedup / max(baselines[task]) for task, speedup in candidates.items())


def searched_speedups() -> dict[str, list[float]]:
    """The user's speedups over each decided task's best baseline, by suite, sorted."""
    runs = [run for path in sorted(RACE.iterdir()) if path.is_dir() and (run := Run(path)).searches]
    return {
        name: sorted(map(against_best, filter(is_counted, later_by_task(run for run in runs if run.group in groups))))
        for name, groups in SEARCHED.items()
    }


def draw(target: Path) -> None:
    """Write the picture."""
    pyplot.switch_backend("svg")
    # Fixed ids: the same results give the same bytes.
    matplotlib.rcParams.update({"svg.hashsalt": "kernelwright", "svg.fonttype": "none", "font.size": 9})
    matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    curves = {f"search, {name}, {len(found)} decided": found for name, found in searched_speedups().items()}
    release = release_speedups()
    for label, speedups in {**curves, f"CUDA-L1's {len(release)} right kernels of 210": release}.items():
        places = [100 * (index + 0.5) / len(speedups) for index in range(len(speedups))]
        left.plot(places, speedups, label=label, linewidth=2)
    left.axhline(1, color="grey", linewidth=0.8)
    left.set(yscale="log", xlabel="tasks, sorted, %", ylabel="speedup", title="KernelBench, over each task's best baseline")
    left.set_yticks([0.25, 0.5, 1, 2, 4, 8, 16], ["0.25", "0.5", "1", "2", "4", "8", "16"], minor=False)
    left.legend(frameon=False, fontsize=8)

    summary = json.loads(TRAINING.read_text(encoding="utf-8"))
    values = [summary[f"speedup_{key}"] for key in STAGES.values()]
    ends = [
        summary["intervals"].get(f"speedup_{key}", (value, value))
        for key, value in zip(STAGES.values(), values, strict=True)
    ]
    errors = [[value - low for value, (low, _) in zip(values, ends, strict=True)]]
    errors += [[high - value for value, (_, high) in zip(values, ends, strict=True)]]
    right.barh(list(STAGES), values, xerr=errors, color="C0", ecolor="0.3")
    right.invert_yaxis()
    right.axvline(1, color="grey", linewidth=0.8)
    right.set(xlabel="geomean of eager, best of 8 answers, 30 held-out tasks")
    right.set_title("Training stages, 1.5B model, H200")
    right.annotate(
        "* this run lost the form\n  of its answers",
        (0.98, 0.93),
        xycoords="axes fraction",
        ha="right",
        va="top",
        fontsize=8,
    )
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    draw(ROOT / "docs" / "results.svg")
