"""Draws docs/results.svg, the README's picture, from published results. Needs matplotlib.

python benchmarks/draw_results.py
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import matplotlib
from matplotlib import pyplot

from kernelwright.records import RunDirectory

ROOT = Path(__file__).parents[1]
RELEASE = ROOT / "results" / "2026-11-22-cuda-l1-h200"
TRAINING = ROOT / "results" / "contrastive-h200" / "summary.json"
STAGES = {
    "supervised": "sft",
    "self-supervised": "self_supervised",
    "evolutionary": "evolutionary",
    "vanilla GRPO *": "vanilla_grpo",
    "contrastive": "contrastive",
}


def release_speedups() -> tuple[list[float], list[float]]:
    """Speedups of CUDA-L1's accepted kernels over eager, and over each task's best baseline (eager included), sorted."""
    candidates: dict[str, float] = {}
    baselines: dict[str, list[float]] = defaultdict(lambda: [1.0])
    for found in RunDirectory(RELEASE).evaluations():
        if found.speedup is None:
            continue
        if found.policy == "baseline":
            baselines[found.task].append(found.speedup)
        else:
            candidates[found.task] = found.speedup
    return sorted(candidates.values()), sorted(speedup / max(baselines[task]) for task, speedup in candidates.items())


def draw(target: Path) -> None:
    """Write the picture."""
    pyplot.switch_backend("svg")
    # Fixed ids: the same results give the same bytes.
    matplotlib.rcParams.update({"svg.hashsalt": "kernelwright", "svg.fonttype": "none", "font.size": 9})
    matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for speedups, label in zip(release_speedups(), ("eager", "the best baseline"), strict=True):
        left.plot(range(1, len(speedups) + 1), speedups, label=f"against {label}", linewidth=2)
    left.axhline(1, color="grey", linewidth=0.8)
    left.set(
        yscale="log", xlabel="kernel, sorted", ylabel="speedup", title="CUDA-L1's 138 right kernels of 210, judged on H200"
    )
    left.set_yticks([0.25, 0.5, 1, 2, 4, 8, 16], ["0.25", "0.5", "1", "2", "4", "8", "16"], minor=False)
    left.legend(frameon=False)

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
