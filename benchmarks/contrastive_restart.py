"""A campaign's `--work` from a published one, whose weights are gone: its stages 1 and 2 are then trained once more.

    python benchmarks/contrastive_restart.py results/contrastive-h200 WORK

Stage 1's examples and stage 2's answers, with their verdicts, are put where a run that was broken off would have left them.
A campaign that goes on with WORK learns from them what the first one learnt, and neither draws nor judges for it; of results
only the untrained model's come along, where there are any. The weights may differ from the first ones by rounding,
so that whatever was measured of trained models is to be measured again, unless the losses say otherwise
(results/2026-11-23-contrastive-spared-h200).
"""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Iterable
from pathlib import Path

from contrastive_export import PACKED
from publishing import copy_plain, from_command_line, require_new

from kernelwright import config as settings
from kernelwright.contrastive.exemplars import Exemplar, ExemplarDatabase
from kernelwright.contrastive.prompts import Prompt
from kernelwright.contrastive.rollouts import Rollout, RolloutLog
from kernelwright.contrastive.sampling.drawing import drawn
from kernelwright.contrastive.sampling.prompting import fill
from kernelwright.contrastive.sampling.scoring import Attempt
from kernelwright.contrastive.stages.config import TasksSection
from kernelwright.contrastive.stages.self_supervised import round_folder
from kernelwright.contrastive.stages.split import split_of
from kernelwright.errors import UsageError
from kernelwright.records import RunDirectory, Task, append_lines

UNTRAINED = "zero-shot"
COPIED = (f"sft/{PACKED}", f"self-supervised/{PACKED}")
RESULT = f"held-out/results/{UNTRAINED}.json"
READ = ("sft/examples.jsonl.gz", "self-supervised/rollouts.jsonl.gz")


def main() -> None:
    """Make the directory that the command line asks for."""
    from_command_line(__doc__, restart)


def restart(published: Path, work: Path) -> None:
    """Make `work`, which must be new.

    Raises:
        UsageError: there is something there already, or the published folder holds no stages 1 and 2.
    """
    require_new(work)
    lacking = [name for name in (*READ, *COPIED) if not (published / name).exists()]
    if lacking:
        raise UsageError(
            f"Wanted a published campaign in {published}; it lacks {', '.join(lacking)}. Name one of contrastive training."
        )
    copy_plain(published, work, (*COPIED, RESULT))
    (work / "sft" / "examples.jsonl").write_bytes(gzip.decompress((published / "sft" / "examples.jsonl.gz").read_bytes()))
    for number, attempts in attempts_of(published).items():
        folder = round_folder(RunDirectory(work / "self-supervised"), number)
        drawn(folder / "attempts.json", lambda attempts=attempts: attempts)  # type: ignore[misc]
    if (published / RESULT).exists():
        _untrained(published / "held-out", work / "held-out")


def attempts_of(published: Path) -> dict[int, list[Attempt]]:
    """Stage 2's answers by round, in the order in which they were drawn, with what their prompts showed."""
    run = RunDirectory(published / "self-supervised")
    config, environment = run.read_json("config.json") or {}, run.read_json("environment.json") or {}
    tasks = {task.sha256: task for task in split_of(settings.build(TasksSection, config["config"]["tasks"])).train}
    shown = _exemplars(published, tasks, environment["device"])
    rounds: dict[int, list[Attempt]] = {}
    for rollout in RolloutLog(published / "self-supervised").rollouts():
        rounds.setdefault(rollout.step, []).append(_attempt(rollout, tasks[rollout.task_sha256], shown))
    return rounds


def _exemplars(published: Path, tasks: Iterable[str], device: str) -> dict[tuple[str, str], Exemplar]:
    """What prompts may have shown, by task and candidate: teachers' code, and answers of the round before."""
    with tempfile.TemporaryDirectory() as folder:
        database = ExemplarDatabase(Path(folder, "exemplars.sqlite"))
        fill(database, [published / "sft", published / "self-supervised"])
        return {(task, one.candidate_sha256): one for task in tasks for one in database.exemplars(task, device=device)}


def _attempt(rollout: Rollout, task: Task, shown: dict[tuple[str, str], Exemplar]) -> Attempt:
    prompt = Prompt(rollout.prompt, tuple(shown[task.sha256, each] for each in rollout.exemplars))
    if prompt.sha256 != rollout.prompt_sha256:
        raise UsageError(f"Wanted the prompt of each answer; one to {task.id} has another hash. Was the folder edited?")
    return Attempt(task=task, prompt=prompt, completion=rollout.answered(), step=rollout.step, sample=rollout.sample)


def _untrained(published: Path, held_out: Path) -> None:
    """What the untrained model answered and what was measured of it."""
    for name in ("", "confirmations"):
        found = [one for one in RunDirectory(published / name).evaluations() if one.policy.endswith(f":{UNTRAINED}")]
        append_lines(held_out / name / "evaluations.jsonl", [one.model_dump_json() for one in found])
    RolloutLog(held_out).append(one for one in RolloutLog(published).rollouts() if one.model.endswith(f":{UNTRAINED}"))


if __name__ == "__main__":
    main()
