"""Counts what prompts showed and what came of it, from the records of the fourth slice; writes `counts.json`.

    python results/contrastive-device-bound-h200/counts.py

Intervals are of 95 %, by a bootstrap over tasks; each arm was trained once, so they say nothing about other seeds.
"""

import json
import math
import re
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from kernelwright.contrastive.answers import parse_completion, rewrites_in
from kernelwright.contrastive.samples import RolloutLog
from kernelwright.contrastive.held_out import geomean, read_result
from kernelwright.records import RunDirectory, Verdict
from kernelwright.tasks.generated import device_bound_tasks

HERE = Path(__file__).parent
RUN = HERE.parent / "2026-11-26-contrastive-device-bound-fourth-h100"
ARMS = ("vanilla-grpo", "contrastive-bucket")
MODELS = ("self-supervised", "evolutionary", *ARMS)
SHOWN = ("contrastive-bucket", "contrastive-bucket-shuffled", "contrastive-bucket-one-level", "evolutionary")
STRUCTURAL = {
    "copy-dropped": (r"^\s*y = x$", ("transposed-twice", "permuted-blocks", "interleaved", "repeated-mean")),
    "implicit-broadcast": (r"^\s*y = a \+ b$", ("outer-sum",)),
    "diagonal-as-scale": (
        r"\bb \* a\b|\ba\[:, None\] \* b\b|\ba\.unsqueeze\(1\) \* b\b",
        ("diagonal-left", "diagonal-right"),
    ),
}
"""Techniques that `rewrites_in` has no pattern for: a pattern, and sources of tasks to which it applies. They were written
after the best answers had been read."""


def right(rollout):
    """Accepted by the judge, or given an estimate in its place by screening."""
    return rollout.verdict is Verdict.ACCEPTED or (rollout.verdict is None and rollout.estimate is not None)


def worth(rollout):
    """Binary logarithm of a held-out answer's speedup over the best baseline; 0 where it is not right."""
    return math.log2(rollout.reward) if rollout.verdict is Verdict.ACCEPTED and rollout.reward else 0.0


def repeats(rollout):
    """Whether an answer is one of the programs that its prompt showed."""
    return rollout.candidate_sha256 in rollout.exemplars


def mean(values):
    """Mean with its interval, a value for each task."""
    data = np.asarray(values, dtype=float)
    draws = np.random.default_rng(0).choice(data, (10_000, data.size)).mean(axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return {"mean": data.mean(), "low": low, "high": high, "tasks": data.size}


def ratio(first, second):
    """Geometric mean of the ratio of two models' values, task by task."""
    return geomean([one / other for one, other in zip(first, second, strict=True)]).model_dump()


def by_prompt(rollouts):
    """One answer of each prompt."""
    return {(one.step, one.task_sha256): one for one in rollouts}.values()


def training():
    """Steps of both arms, what the prompts of the contrastive one showed, and the arms' difference on the same tasks."""
    logs = {arm: list(RolloutLog(RUN / arm).rollouts()) for arm in ARMS}
    stage_2 = list(RolloutLog(RUN / "self-supervised").rollouts())
    asked = {one.task_sha256 for one in stage_2}
    solved = {one.task_sha256 for one in stage_2 if one.verdict is Verdict.ACCEPTED}
    steps = {}
    for arm, rollouts in logs.items():
        steps[arm] = []
        for step in range(16):
            own = [one for one in rollouts if one.step == step]
            tasks = {one.task_sha256 for one in own}
            steps[arm].append(
                {
                    "step": step + 1,
                    "right": sum(map(right, own)),
                    "reward": np.mean([one.reward for one in own]),
                    "above_1.1": sum(one.reward > math.log2(1.1) for one in own),
                    "different": len({(one.task_sha256, one.candidate_sha256) for one in own if one.candidate_sha256}),
                    "prompts_showing": Counter(str(len(one.exemplars)) for one in by_prompt(own)),
                    "repeats": sum(map(repeats, own)),
                    "tasks_of_stage_2": len(tasks & asked),
                    "tasks_solved_in_stage_2": len(tasks & solved),
                }
            )
    groups = {arm: defaultdict(list) for arm in ARMS}
    for arm, rollouts in logs.items():
        for one in rollouts:
            groups[arm][one.step, one.task_sha256].append(one)
    told = {}
    for name, wanted in {
        "steps 1-8, none": lambda step, shown: step < 8 and shown == 0,
        "steps 1-8, one": lambda step, shown: step < 8 and shown == 1,
        "steps 1-8, two": lambda step, shown: step < 8 and shown == 2,
        "steps 9-15, none": lambda step, shown: 8 <= step < 15,
        "steps 13-16": lambda step, shown: step >= 12,
    }.items():
        keys = [key for key, own in groups[ARMS[1]].items() if wanted(key[0], len(own[0].exemplars))]
        pairs = [(groups[ARMS[0]][key], groups[ARMS[1]][key]) for key in keys]
        told[name] = {
            "prompts": len(keys),
            "answers": sum(len(own) for _, own in pairs),
            "repeats": sum(map(repeats, (one for _, own in pairs for one in own))),
            "reward": np.mean([one.reward for _, own in pairs for one in own]),
            "reward_of_vanilla": np.mean([one.reward for own, _ in pairs for one in own]),
            "reward_difference": mean([np.mean([o.reward for o in b]) - np.mean([o.reward for o in a]) for a, b in pairs]),
            "right_difference": mean([np.mean([*map(right, b)]) - np.mean([*map(right, a)]) for a, b in pairs]),
        }
    visits = Counter(key[1] for key in groups[ARMS[1]])
    return {
        "steps": steps,
        "contrastive_minus_vanilla_on_the_same_tasks": told,
        "prompts_showing": Counter(str(len(one.exemplars)) for one in by_prompt(logs[ARMS[1]])),
        "tasks_by_visits": Counter(map(str, visits.values())),
        "same_tasks_at_each_step": all(
            {k for k in groups[ARMS[0]] if k[0] == step} == {k for k in groups[ARMS[1]] if k[0] == step}
            for step in range(16)
        ),
    }


def held_out(answers):
    """What the prompts of models that are shown programs showed, and what came of it."""
    run = RunDirectory(RUN / "held-out")
    judged = {(one.task_sha256, one.candidate_sha256): one for one in run.evaluations()}
    told = {}
    for model, rollouts in answers.items():
        accepted = [one for one in rollouts if one.verdict is Verdict.ACCEPTED]
        told[model] = {
            "answers": len(rollouts),
            "right": len(accepted),
            "different": len({(one.task, one.candidate_sha256) for one in rollouts if one.candidate_sha256}),
            "different_right": len({(one.task, one.candidate_sha256) for one in accepted}),
        }
        if model not in SHOWN:
            continue
        later = [one for one in rollouts if one.step > 0]
        tasks = defaultdict(lambda: defaultdict(list))
        for one in later:
            tasks[one.task][len(one.exemplars)].append(one)
        shown = {}
        for count in (0, 1, 2):
            own = [one for one in later if len(one.exemplars) == count]
            better = certainly = 0
            for one in own:
                if count and one.verdict is Verdict.ACCEPTED and not repeats(one):
                    seen = [judged[one.task_sha256, name] for name in one.exemplars]
                    found = judged[one.task_sha256, one.candidate_sha256]
                    better += found.speedup > 1.05 * max(each.speedup for each in seen)
                    certainly += found.speedup_low > max(each.speedup_high for each in seen)
            shown[count] = {
                "prompts": len(by_prompt(own)),
                "answers": len(own),
                "tasks": len({one.task for one in own}),
                "right": sum(one.verdict is Verdict.ACCEPTED for one in own),
                "repeats": sum(map(repeats, own)),
                "above_the_best_shown_by_5_percent": better,
                "certainly_above_the_best_shown": certainly,
            }
        both = [by for by in tasks.values() if by[1] and by[2]]
        told[model] |= {
            "after_the_first_round_by_programs_shown": shown,
            "two_minus_one_on_tasks_with_both": {
                "log2": mean([np.mean([*map(worth, by[2])]) - np.mean([*map(worth, by[1])]) for by in both]),
                "right": mean([np.mean([*map(right, by[2])]) - np.mean([*map(right, by[1])]) for by in both]),
            },
        }
        result = read_result(run, model)
        firsts = Counter()
        for task in result.tasks:
            best = task.task_sha256, task.candidate_sha256
            rounds = [one.step for one in rollouts if (one.task_sha256, one.candidate_sha256) == best]
            firsts[f"round {min(rounds) + 1}" if rounds else "no best"] += 1
        told[model]["round_that_first_wrote_the_confirmed_best"] = firsts
    whole = {(one.task, one.step, one.sample): one for one in answers["contrastive-bucket"]}
    for model in ("contrastive-bucket-shuffled", "contrastive-bucket-one-level"):
        pairs = [(whole[one.task, one.step, one.sample], one) for one in answers[model]]
        told[model]["other_prompt_than_contrastive_bucket"] = sum(a.prompt_sha256 != b.prompt_sha256 for a, b in pairs)
        told[model]["other_answer_than_contrastive_bucket"] = sum(a.candidate_sha256 != b.candidate_sha256 for a, b in pairs)
    return told


def comparisons():
    """Ratios of models, on all held-out tasks and on those with and without a part that no training task has."""
    drawn = device_bound_tasks(128, 40, 0)
    sides = {
        "all": None,
        "known parts": {one.sha256 for one in drawn.known},
        "a new part": {one.sha256 for one in drawn.new},
    }
    run = RunDirectory(RUN / "held-out")
    results = {model: read_result(run, model) for model in (*MODELS, *SHOWN)}
    told = {}
    for side, wanted in sides.items():
        kept = [n for n, one in enumerate(results["vanilla-grpo"].tasks) if wanted is None or one.task_sha256 in wanted]
        measures = {
            "best": {model: [result.speedups()[n] for n in kept] for model, result in results.items()},
            "improvements_only": {model: [result.improvements_only()[n] for n in kept] for model, result in results.items()},
            "worth": {model: [result.tasks[n].worth() for n in kept] for model, result in results.items()},
        }
        told[side] = {
            "right": {model: sum(result.tasks[n].correct for n in kept) for model, result in results.items()},
            **{
                measure: {model: geomean(own).model_dump() for model, own in values.items()}
                | {
                    f"{one} / {other}": ratio(values[one], values[other])
                    for one, other in (
                        ("contrastive-bucket", "vanilla-grpo"),
                        ("vanilla-grpo", "self-supervised"),
                        ("contrastive-bucket", "self-supervised"),
                        ("evolutionary", "self-supervised"),
                        ("contrastive-bucket", "evolutionary"),
                        ("vanilla-grpo", "evolutionary"),
                    )
                }
                for measure, values in measures.items()
            },
        }
    told["confirmed improvements"] = {model: sum(task.improvement for task in one.tasks) for model, one in results.items()}
    return told


def scores(answers):
    """Scores in prompts, which are lower ends of intervals, beside medians; bests chosen by either."""
    run = RunDirectory(RUN / "held-out")
    stage_2, stage_3 = (list(RunDirectory(RUN / name).evaluations()) for name in ("self-supervised", "contrastive-bucket"))
    known = {(one.task_sha256, one.candidate_sha256): one for one in (*stage_2, *stage_3, *run.evaluations())}
    timed = [one for one in run.evaluations() if one.accepted and one.speedup]
    shares = np.array([one.speedup_low / one.speedup for one in timed])
    told = {
        "accepted_held_out_programs": len(timed),
        "lower_end_below_half_of_the_median": int((shares < 0.5).sum()),
        "lower_end_below_0.8_of_the_median": int((shares < 0.8).sum()),
        "prompts_with_two_programs": {},
        "best": {},
    }
    training_log = list(RolloutLog(RUN / "contrastive-bucket").rollouts())
    named = {"training": training_log, **{model: answers[model] for model in ("contrastive-bucket", "evolutionary")}}
    for name, rollouts in named.items():
        two = [one for one in by_prompt(rollouts) if len(one.exemplars) == 2]
        pairs = [[known[one.task_sha256, each] for each in one.exemplars] for one in two]
        turned = [(a, b) for a, b in pairs if (a.speedup - b.speedup) * (a.speedup_low - b.speedup_low) < 0]
        told["prompts_with_two_programs"][name] = {
            "prompts": len(pairs),
            "order_of_the_scores_is_not_that_of_the_medians": len(turned),
            "of_these_medians_20_percent_apart": sum(
                abs(math.log(a.speedup / b.speedup)) >= math.log(1.2) for a, b in turned
            ),
        }
    largest = {}
    for model in MODELS:
        chosen, other, tasks = [], [], []
        for task in read_result(run, model).tasks:
            own = {o.candidate_sha256 for o in answers[model] if o.task_sha256 == task.task_sha256 and right(o)}
            found = [known[task.task_sha256, each] for each in own]
            found = [one for one in found if one.speedup / task.baseline_speedup >= 1.02]
            by_low, by_median = (
                max(found, key=lambda one: getattr(one, key), default=None) for key in ("speedup_low", "speedup")
            )
            chosen.append(by_low.speedup / task.baseline_speedup if found else 1.0)
            other.append(by_median.speedup / task.baseline_speedup if found else 1.0)
            if found and by_median.speedup > 1.05 * by_low.speedup:
                tasks.append([task.task, by_low.speedup, by_low.speedup_low, by_median.speedup, by_median.speedup_low])
        largest[model] = other
        told["best"][model] = {
            "chosen_by_lower_end": geomean(chosen).estimate,
            "by_largest_median": geomean(other).estimate,
            "another_answer_is_5_percent_faster": tasks,
        }
    over = ratio(largest["contrastive-bucket"], largest["vanilla-grpo"])
    told["best"]["contrastive-bucket / vanilla-grpo by largest median, not confirmed"] = over
    return told


def tags_of(rollout):
    """Techniques of an answer: those of the recipe's summary, and the structural ones above."""
    code = parse_completion(rollout.answered()).source or ""
    source = rollout.task.split("/")[1].partition("+")[0]
    own = [tag for tag, (pattern, sources) in STRUCTURAL.items() if source in sources and re.search(pattern, code, re.M)]
    return {*rewrites_in(code), *own}


def techniques(answers):
    """Share of right held-out answers that use a technique, by model, and the difference from stage 2."""
    used = {model: defaultdict(Counter) for model in MODELS}
    number = {model: Counter() for model in MODELS}
    for model in MODELS:
        for one in answers[model]:
            if one.verdict is Verdict.ACCEPTED:
                number[model][one.task] += 1
                for tag in tags_of(one):
                    used[model][tag][one.task] += 1
    tasks = sorted({one.task for one in answers["vanilla-grpo"]})
    draws = np.random.default_rng(0).integers(len(tasks), size=(10_000, len(tasks)))
    told = {}
    for tag in sorted({tag for model in MODELS for tag in used[model]}):
        counts = {m: np.array([used[m][tag][task] for task in tasks]) for m in MODELS}
        totals = {m: np.array([number[m][task] for task in tasks]) for m in MODELS}
        told[tag] = {
            m: {
                "answers": int(counts[m].sum()),
                "tasks": int((counts[m] > 0).sum()),
                "share": counts[m].sum() / totals[m].sum(),
            }
            for m in MODELS
        }
        before = counts["self-supervised"][draws].sum(1) / totals["self-supervised"][draws].sum(1)
        for m in ARMS:
            gained = counts[m][draws].sum(1) / totals[m][draws].sum(1) - before
            low, high = np.quantile(gained, [0.025, 0.975])
            told[tag][f"{m} - self-supervised"] = {
                "share": told[tag][m]["share"] - told[tag]["self-supervised"]["share"],
                "low": low,
                "high": high,
            }
    return told


def techniques_in_training():
    """The same in training: right answers to training tasks, whose tasks differ from step to step."""
    told = {}
    for name, run, steps in (
        ("stage 2, round 1 (the model of stage 1)", "self-supervised", range(1)),
        ("stage 2, round 2", "self-supervised", range(1, 2)),
        *((f"{arm}, steps {first + 1}-{first + 4}", arm, range(first, first + 4)) for arm in ARMS for first in (0, 12)),
    ):
        own = [one for one in RolloutLog(RUN / run).rollouts() if one.step in steps and right(one)]
        counts = Counter(tag for one in own for tag in tags_of(one))
        told[name] = {"right": len(own)} | {tag: count / len(own) for tag, count in sorted(counts.items())}
    return told


def main():
    """Write the counts."""
    answers = defaultdict(list)
    for one in RolloutLog(RUN / "held-out").rollouts():
        answers[one.model.rpartition(":")[2]].append(one)
    told = {
        "training": training(),
        "held_out": held_out(answers),
        "comparisons": comparisons(),
        "scores": scores(answers),
        "techniques": techniques(answers),
        "techniques_in_training": techniques_in_training(),
    }
    text = json.dumps(told, indent=1, default=float, sort_keys=False)
    rounded = re.sub(r"-?\d+\.\d{5,}(e-?\d+)?", lambda found: f"{float(found.group()):.4f}", text)
    (HERE / "counts.json").write_text(rounded + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
