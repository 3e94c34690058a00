"""Prints what runs of CUDA-L1's own kernels say: the contracts they keep, their speedups, and ours beside them.

    python benchmarks/released_kernels.py results/kernelbench-h200 --kernels cuda-l1-kernels-1-h200,cuda-l1-kernels-2-h200 \\
        --searched cuda-l1-fp16-1-h200,cuda-l1-fp16-2-h200

Of a kernel that several runs judged the last one named counts. Ours is what the user gets on the tasks that are decided:
the winner of the run that decided the task last, or else the reference. Where a kernel breaks the contract `kernelbench`
its user takes the best baseline. Those of --searched ran beside the kernels, on the same host; the others at other times,
some on other GPUs, so that each ratio is a quotient of two speedups over eager. With --winners ours are what that run
measured of sources that `race_winners.py` wrote, and a task that it accepted none for counts as eager; best baselines stay
those of the searches.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from race_numbers import THEIRS, Line, Run, against_theirs, geomean, is_counted, middle, once_on_either, ours

from kernelwright.records import Contract, Evaluation
from kernelwright.records.decisions import BASELINE_POLICY


def kernels_of(runs: Iterable[Run]) -> dict[str, Evaluation]:
    """The last evaluation of each task's released kernel."""
    return {one.task: one for run in runs for one in run.evaluations() if one.policy == THEIRS and one.contracts}


def keeps(kernel: Evaluation, contract: Contract = Contract.KERNELBENCH) -> bool:
    """True where a kernel keeps a contract."""
    return bool(kernel.contracts and kernel.contracts[contract].kept)


def contracts(kernels: Sequence[Evaluation]) -> None:
    """Print how many keep which contract, and what is missing for KernelBench's."""
    print(f"{len(kernels)} judged")
    for contract in Contract:
        kept = [one for one in kernels if keeps(one, contract)]
        print(f"{len(kept)} keep the contract {contract}")
        speedups(f"  of these over eager ({contract})", kept)
    reasons = Counter(str(one.reason) for one in kernels if one.reason)
    print("reasons:", ", ".join(f"{count} {reason}" for reason, count in reasons.most_common()))


def speedups(name: str, kernels: Iterable[Evaluation]) -> None:
    """Print the sums of speedups over eager, and how many are certainly faster and slower."""
    timed = [one for one in kernels if one.speedup is not None and one.speedup_high is not None]
    found = sorted(one.speedup for one in timed if one.speedup)
    slower = sum((one.speedup_high or 1.0) < 1.0 for one in timed)
    print(
        f"{name}: {len(found)} timed, mean {fmean(found):.2f}, most {found[-1]:.2f}, median {middle(found)}, "
        f"geomean {geomean(found)}, {sum(one.is_improvement for one in timed)} certainly faster, {slower} certainly slower"
    )


def beats_baseline(kernel: Evaluation, line: Line) -> bool:
    """True for a kernel that keeps KernelBench's contract and has an interval above the best baseline's, timed apart."""
    known = line["best_baseline_interval"] or (1.0, 1.0)
    return keeps(kernel) and kernel.is_improvement and (kernel.speedup_low or 0.0) > known[1]


def beside(name: str, lines: Iterable[Line], released: Mapping[str, float | None]) -> None:
    """Print ours over theirs, where theirs keeps its contract and where the best baseline stands for it."""
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for line in lines:
        theirs = released[line["task"]]
        ratios[theirs is not None].append(against_theirs(line, theirs))
    kept, broken = ratios[True], ratios[False]
    print(f"{name}: {geomean(kept + broken)} over {len(kept + broken)} tasks")
    print(f"  {geomean(kept)} on {len(kept)} whose kernel keeps its contract, {geomean(broken)} on {len(broken)} others")


def measured_again(line: Line, speedups: Mapping[str, float]) -> Line:
    """A task's line with what another run measured of its winner; without a winner where that run accepted none."""
    speedup = speedups.get(line["task"])
    return line | {"speedup": speedup, "vs_best_baseline": speedup / line["best_baseline_speedup"] if speedup else None}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the race: each run directory is in it")
    parser.add_argument("--kernels", required=True, metavar="LIST", help="runs that judged the released kernels")
    parser.add_argument("--searched", default="", metavar="LIST", help="searches that ran beside them")
    parser.add_argument("--winners", metavar="RUN", help="run that measured our winners beside them")
    options = parser.parse_args(arguments)
    judged = [Run(options.folder / name) for name in options.kernels.split(",")]
    kernels, released = kernels_of(judged), dict[str, float | None]()
    for run in judged:
        released |= run.released()
    runs = [Run(path.parent) for path in sorted(options.folder.glob("*/config.json"))]
    lines = once_on_either(runs)
    decided = [line for line in lines if is_counted(line) and line["task"] in kernels.keys() & released.keys()]
    if options.winners:
        found = Run(options.folder / options.winners).evaluations()
        again = {one.task: one.speedup for one in found if one.policy != BASELINE_POLICY and one.speedup}
        decided = [measured_again(line, again) for line in decided]
    contracts(list(kernels.values()))
    winning = [line["task"] for line in decided if beats_baseline(kernels[line["task"]], line)]
    print(f"{len(winning)} keep it and are certainly faster than the best baseline: {', '.join(winning)}")
    searched = options.searched.split(",")
    same, others = ([line for line in decided if (line["run"] in searched) == there] for there in (True, False))
    for line in same:
        theirs = released[line["task"]]
        said = "theirs breaks its contract" if theirs is None else f"theirs {theirs:.2f}"
        best = line["best_baseline_speedup"]
        print(f"  {line['task']}: ours {ours(line):.2f} of eager, {said}, the best baseline {best:.2f}")
    beside("searched beside them", same, released)
    beside("the others", others, released)
    beside("all", decided, released)


if __name__ == "__main__":
    main()
