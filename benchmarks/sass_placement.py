"""Whether times of a campaign alternate from schedule to schedule, as they do when they depend on where code is loaded.

    python benchmarks/sass_placement.py results/sass-h200 --out results/sass-h200/placement.json

For each run: how far the ratio original / schedule lies from the mean of its neighbours', the median over the
schedules of odd number against that over those of even number, halved: the distance of two levels that take turns. Noise
and what an agent finds leave it near 0.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from kernelwright.records import read_objects


def main() -> None:
    """Print or write the distance of every run of a campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", type=Path)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for run in sorted(path for path in options.campaign.glob("*/*") if path.is_dir()):
        ratios = read_ratios(run / "schedules.jsonl")
        if len(ratios) >= 8:
            found.setdefault(run.parent.name, {})[run.name] = round(alternation(ratios), 4)
    text = json.dumps(found, indent=1) + "\n"
    if options.out is None:
        print(text, end="")
    else:
        options.out.write_text(text)


def read_ratios(path: Path) -> list[float]:
    """Original / schedule of every schedule that was measured, in order."""
    return [entry["baseline"] / entry["cost"] for entry in read_objects(path) if entry["cost"]]


def alternation(ratios: list[float]) -> float:
    """Distance of two levels that take turns."""
    off = [ratios[i] - (ratios[i - 1] + ratios[i + 1]) / 2 for i in range(1, len(ratios) - 1)]
    return abs(statistics.median(off[::2]) - statistics.median(off[1::2])) / 2


if __name__ == "__main__":
    main()
