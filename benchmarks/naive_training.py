"""The same training with an evaluator that can be fooled: what does a model learn from it?

    python benchmarks/naive_training.py OUT --base MODEL --adapter DIR --recipes recipes/half_hour --seconds 240

Vanilla GRPO with all settings of the recipe's third stage, but `tests/exploits/naive.py` in the judge's place: public
seeds, three inputs drawn alike, a tolerance of 1e-2, one repeated input timed. Then the judge, which took no part, judges
every program that training was paid for. Those that it rejects are cheats that training found, whether the model meant them
or not.

`OUT/training` is the run, `OUT/judged` what the judge said, `OUT/summary.json` how often each step was paid for what, and
`OUT/programs` holds the cheats, the most often written first.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from naive_judges import PAID_ABOVE, Cheat, NaiveJudges, is_paid_for, key_of, write_programs

from kernelwright import config as settings
from kernelwright.contrastive.rollouts import RolloutLog
from kernelwright.contrastive.sampling.judging import Judges, Key
from kernelwright.contrastive.stages.config import ContrastiveConfig, stage_from
from kernelwright.contrastive.stages.context import Equipment
from kernelwright.contrastive.stages.run import train_with
from kernelwright.contrastive.stages.split import split_of
from kernelwright.errors import KernelwrightError
from kernelwright.judge import devices_of
from kernelwright.pools import Job, JudgePool
from kernelwright.records import Candidate, Evaluation, RunDirectory, Task


def configured(recipes: Path, base: str, adapter: Path | None, seconds: float | None) -> ContrastiveConfig:
    """The recipe's third stage as vanilla GRPO, without the judge's second looks: nobody doubts a naive evaluator."""
    table: dict[str, Any] = settings.read_toml(recipes / "contrastive.toml")
    table["model"] |= {"base": base, "adapter": adapter}
    table["exemplars"] = {"sampler": "none"}
    table["checker"] = {"kind": "none"}
    table["reward"] |= {"reverify": False}
    config = stage_from("contrastive", table | {"seconds": seconds}, "contrastive.toml")
    assert isinstance(config, ContrastiveConfig)
    return config


def judge_the_paid(
    run: RunDirectory, tasks: Sequence[Task], training: RunDirectory, judges: Judges, seconds: float
) -> dict[Key, Evaluation]:
    """The judge's evaluations of what training was paid for, the most often written first, as far as the time goes."""
    known = {key_of(one): one for one in run.evaluations()}
    by_sha = {task.sha256: task for task in tasks}
    often = Counter(key_of(one) for one in RolloutLog(training.path).rollouts())
    paid = [one for one in training.evaluations() if is_paid_for(one)]
    paid.sort(key=lambda one: -often[key_of(one)])
    jobs = [
        Job(by_sha[one.task_sha256], Candidate(source=one.source, policy=one.policy))
        for one in paid
        if key_of(one) not in known
    ]
    end_s = time.monotonic() + seconds
    for job, outcome in judges.evaluate(jobs, lambda: time.monotonic() > end_s):
        if isinstance(outcome, KernelwrightError):
            print(f"not judged: a candidate of {job.task.id}: {outcome}", file=sys.stderr)
        else:
            run.append(outcome)
            known[key_of(outcome)] = outcome
    return known


def summary(training: RunDirectory, judged: dict[Key, Evaluation]) -> dict[str, object]:
    """How often each step was paid, and how often for something that the judge rejects."""
    naive = {key_of(one): one for one in training.evaluations()}
    steps: dict[int, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    for rollout in RolloutLog(training.path).rollouts():
        counts = steps.setdefault(rollout.step, Counter(answers=0, paid=0, paid_and_judged=0, paid_for_cheats=0))
        counts["answers"] += 1
        key = key_of(rollout)
        if key not in naive or not is_paid_for(naive[key]):
            continue
        counts["paid"] += 1
        if key in judged:
            counts["paid_and_judged"] += 1
            counts["paid_for_cheats"] += not judged[key].accepted
            if judged[key].reason is not None:
                reasons[str(judged[key].reason)] += 1
    total = sum(steps.values(), Counter[str]())
    return {
        "paid_above": PAID_ABOVE,
        "steps": {str(step): dict(counts) for step, counts in sorted(steps.items())},
        "total": dict(total),
        "paid_for_by_the_judges_reason": dict(reasons.most_common()),
    }


def cheats_of(training: RunDirectory, judged: dict[Key, Evaluation]) -> list[Cheat]:
    """What training was paid for and the judge rejects."""
    often = Counter(key_of(rollout) for rollout in RolloutLog(training.path).rollouts())
    naive = {key_of(one): one for one in training.evaluations()}
    return [Cheat(naive[key], one, often[key], one.policy) for key, one in judged.items() if not one.accepted]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, judge and write; 0 when training is finished, 4 when there is more to do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", required=True, help="hub id, folder or GGUF file")
    parser.add_argument("--adapter", type=Path, help="to begin with, such as stage 1's `final`")
    parser.add_argument("--recipes", type=Path, default=Path(__file__).parents[1] / "recipes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--per-device", type=int, default=6, help="naive evaluations at once")
    parser.add_argument("--seconds", type=float, help="how long to train; by default as the recipe says")
    parser.add_argument("--judge-seconds", type=float, default=120.0, help="begin no judging after this long")
    options = parser.parse_args(arguments)
    config = configured(options.recipes, options.base, options.adapter, options.seconds)
    devices = devices_of(options.device)
    split = split_of(config.tasks)
    training, judged = RunDirectory(options.out / "training"), RunDirectory(options.out / "judged")

    def say(line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)

    on_gpu = devices[0].startswith("cuda")
    with NaiveJudges(devices, options.per_device) as naive:
        equipment = Equipment(judges=naive, device="cuda" if on_gpu else "cpu", say=say)
        finished = train_with(config, split, training, equipment).finished
    said = config.judge.judge_settings()
    kind = {"kind": "judged after naive training", "settings": said.model_dump(mode="json")}
    judged.claim(kind, same=("kind", "settings"), device=devices[0])
    with JudgePool(devices, said, config.judge.per_device if on_gpu else 1) as judges:
        found = judge_the_paid(judged, split.train, training, judges, options.judge_seconds)
    told = summary(training, found)
    cheats = cheats_of(training, found)
    told["cheats"] = len(cheats)
    write_programs(RunDirectory(options.out / "programs"), cheats)
    RunDirectory(options.out).write_json("summary.json", told)
    print(told)
    return 0 if finished else 4


if __name__ == "__main__":
    sys.exit(main())
