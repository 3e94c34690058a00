"""Whether times of a campaign alternate from schedule to schedule, as they do when they depend on where code is loaded.

    python benchmarks/sass_placement.py results/sass-h200 --out results/sass-h200/placement.json

For each run: how far the ratio original / schedule lies from the mean of its neighbours', the median over the
schedules of odd number against that over those of even number, halved: the distance of two levels that take turns. Noise
and what an agent finds leave it near 0.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from pathlib import Path


def main() -> None:
    """Print or write the distance of every run of a campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", type=Path)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for path in sorted(options.campaign.glob("*/*/schedules.jsonl*")):
        ratios = read_ratios(path)
        if len(ratios) >= 8:
            found.setdefault(path.parent.parent.name, {})[path.parent.name] = round(alternation(ratios), 4)
    text = json.dumps(found, indent=1) + "\n"
    if options.out is None:
        print(text, end="")
    else:
        options.out.write_text(text)


def read_ratios(path: Path) -> list[float]:
    """Original / schedule of every schedule that was measured, in order."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    entries = map(json.loads, text.splitlines())
    return [entry["baseline"] / entry["cost"] for entry in entries if entry["cost"]]


def alternation(ratios: list[float]) -> float:
    """Distance of two levels that take turns."""
    off = [ratios[i] - (ratios[i - 1] + ratios[i + 1]) / 2 for i in range(1, len(ratios) - 1)]
    return abs(statistics.median(off[::2]) - statistics.median(off[1::2])) / 2


if __name__ == "__main__":
    main()
