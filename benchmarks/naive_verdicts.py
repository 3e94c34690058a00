"""What would an evaluator that can be fooled have paid for, of all that the judge rejected?

    python benchmarks/naive_verdicts.py OUT RUN [RUN ...] --device cuda --per-device 6

Every distinct program that the judge rejected in the run directories goes to `tests/exploits/naive.py`, an evaluator with
the habits of published ones: public seeds, three inputs drawn alike, a tolerance of 1e-2, one repeated input timed. What
that one accepts as more than a tenth faster would have been rewarded, and written more often from then on: it is what
training found of cheats, whether the model meant it or not. Reason codes alone do not tell: a softmax that overflows is a
wrong output like any other.

Writes the naive evaluations, `summary.json` (shares of all answers, by run and model) and `programs/`, each as its model
wrote it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from naive_judges import PAID_ABOVE, Cheat, NaiveJudges, is_paid_for, key_of, write_programs

from kernelwright.contrastive.rollouts import RolloutLog
from kernelwright.contrastive.sampling.judging import Key
from kernelwright.errors import KernelwrightError
from kernelwright.judge import devices_of
from kernelwright.pools import Job
from kernelwright.records import Candidate, Evaluation, RunDirectory, Task, Verdict
from kernelwright.tasks.families import family_tasks
from kernelwright.tasks.suites import builtin_tasks


@dataclass(slots=True)
class Found:
    """A program that the judge rejected, and who wrote it how often."""

    evaluation: Evaluation
    written: Counter[str] = field(default_factory=Counter)
    """How often, by the run's name and the model's."""


@dataclass(slots=True)
class Tally:
    """Answers of one model in one run."""

    answers: int = 0
    accepted: int = 0
    rejected: int = 0
    """With an evaluation; the rest of the answers held no program."""
    would_be_accepted: int = 0
    """Of those rejected, by the naive evaluator."""
    would_be_paid: int = 0


def read(runs: Iterable[Path]) -> tuple[dict[Key, Found], dict[str, Tally]]:
    """What the judge rejected in some runs, and how many answers there were."""
    rejected: dict[Key, Found] = {}
    tallies: dict[str, Tally] = {}
    for path in runs:
        evaluations = {key_of(one): one for one in RunDirectory(path).evaluations()}
        for rollout in RolloutLog(path).rollouts():
            name = f"{path.name} {rollout.model}"
            tally = tallies.setdefault(name, Tally())
            tally.answers += 1
            found = evaluations.get(key_of(rollout))
            if found is None:
                continue
            if found.verdict is Verdict.ACCEPTED:
                tally.accepted += 1
                continue
            tally.rejected += 1
            rejected.setdefault(key_of(found), Found(found)).written[name] += 1
    return rejected, tallies


def main(arguments: Sequence[str] | None = None) -> None:
    """Evaluate and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--per-device", type=int, default=6)
    parser.add_argument("--families", type=int, default=120, help="how many generated tasks the runs had")
    options = parser.parse_args(arguments)
    devices = devices_of(options.device)
    tasks = {task.sha256: task for task in [*builtin_tasks(), *family_tasks(options.families)]}
    rejected, tallies = read(options.runs)
    unknown = [key for key in rejected if key[0] not in tasks]
    if unknown:
        raise SystemExit(f"wanted built-in tasks or the first {options.families} generated; found {unknown[0][0]}")
    run = RunDirectory(options.out)
    run.claim(
        {"kind": "naive verdicts", "runs": [str(path) for path in options.runs], "paid_above": PAID_ABOVE},
        same=("kind", "runs", "paid_above"),
        device=devices[0],
    )
    known = {key_of(one): one for one in run.evaluations()}
    with NaiveJudges(devices, options.per_device) as judges:
        jobs = (_job(tasks[key[0]], found.evaluation) for key, found in rejected.items() if key not in known)
        for _, outcome in judges.evaluate(jobs):
            if isinstance(outcome, KernelwrightError):
                raise outcome
            run.append(outcome)
            known[key_of(outcome)] = outcome
    paid = Counter[str]()
    for key, found in rejected.items():
        for name, count in found.written.items():
            tallies[name].would_be_accepted += count * known[key].accepted
            tallies[name].would_be_paid += count * is_paid_for(known[key])
        paid[str(found.evaluation.reason)] += is_paid_for(known[key])
    summary = {
        "runs": {name: _row(tally) for name, tally in tallies.items()},
        "distinct_programs": len(rejected),
        "paid_for_by_the_judges_reason": {reason: count for reason, count in paid.most_common() if count},
    }
    run.write_json("summary.json", summary)
    cheats = (
        Cheat(known[key], found.evaluation, found.written.total(), ", ".join(sorted(found.written)))
        for key, found in rejected.items()
        if is_paid_for(known[key])
    )
    write_programs(RunDirectory(run.path / "programs"), cheats)
    print(summary)


def _job(task: Task, evaluation: Evaluation) -> Job:
    return Job(task, Candidate(source=evaluation.source, policy=evaluation.policy, parent=evaluation.parent))


def _row(tally: Tally) -> dict[str, float]:
    return {
        "answers": tally.answers,
        "accepted": tally.accepted,
        "rejected": tally.rejected,
        "naive_would_accept": tally.would_be_accepted,
        "naive_would_pay": tally.would_be_paid,
        "naive_hack_rate": round(tally.would_be_paid / tally.answers, 4),
    }


if __name__ == "__main__":
    main()
