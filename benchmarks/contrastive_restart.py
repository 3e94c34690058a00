"""Makes a campaign's `--work` from a published one: it goes on there, or its stages 1 and 2 are trained once more.

    python benchmarks/contrastive_restart.py results/contrastive-h200 WORK

Of a campaign that was published with its weights (`contrastive_publish.py --weights`) everything is put back: what is
trained is not trained again, what is measured is not measured again, and an unfinished arm goes on at its step. Its
optimiser's state is not kept, so that Adam begins anew; databases of exemplars are made again from the evaluations.
contrastive_recall.py then adds what was judged. Of a campaign without weights the data of stages 1 and 2 come along:

Stage 1's examples and stage 2's answers, with their verdicts, are put where a run that was broken off would have left them.
A campaign that goes on with WORK learns from them what the first one learnt, and neither draws nor judges for it; of results
only the untrained model's come along, where there are any. The weights may differ from the first ones by rounding,
so that whatever was measured of trained models is to be measured again, unless the losses say otherwise
(results/2026-11-23-contrastive-spared-h200).
"""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from contrastive_export import ARMS, PACKED, PACKED_WEIGHTS, RESTARTED, restore_weights
from publishing import copy_plain, from_command_line, require_new

from kernelwright import config as settings
from kernelwright.contrastive.exemplars import Exemplar, ExemplarDatabase
from kernelwright.contrastive.held_out import split_of
from kernelwright.contrastive.prompts import Prompt, fill
from kernelwright.contrastive.samples import Rollout, RolloutLog, Sample, write_drawn
from kernelwright.contrastive.settings import TasksSection
from kernelwright.contrastive.supervised import round_folder
from kernelwright.errors import UsageError
from kernelwright.records import RunDirectory, Task, append_lines, files_of, unpacked

EXEMPLARS = "exemplars.sqlite"
UNTRAINED = "zero-shot"
COPIED = ("sft/evaluations.jsonl", "self-supervised/evaluations.jsonl")
RESULT = f"held-out/results/{UNTRAINED}.json"
READ = ("sft/examples.jsonl", "self-supervised/rollouts.jsonl")


def main() -> None:
    """Make the directory that the command line asks for."""
    from_command_line(__doc__, restart)


def restart(published: Path, work: Path) -> None:
    """Make `work`, which must be new.

    Raises:
        UsageError: there is something there already, or the published folder holds no stages 1 and 2.
    """
    require_new(work)
    if any(published.rglob(PACKED_WEIGHTS)):
        put_back(published, work)
        return
    lacking = [name for name in (*READ, *COPIED) if not files_of(published / name)]
    if lacking:
        raise UsageError(
            f"Wanted a published campaign in {published}; it lacks {', '.join(lacking)}. Name one of contrastive training."
        )
    copy_plain(published, work, (RESULT,))
    for name in COPIED:
        (work / name).parent.mkdir(parents=True)
        (work / name).with_name(PACKED).write_bytes(gzip.compress(unpacked(published / name)))
    (work / "sft" / "examples.jsonl").write_bytes(unpacked(published / "sft" / "examples.jsonl"))
    for number, samples in samples_of(published).items():
        write_drawn(round_folder(RunDirectory(work / "self-supervised"), number) / "attempts.json", samples)
    if (published / RESULT).exists():
        _untrained(published / "held-out", work / "held-out")


def put_back(published: Path, work: Path) -> None:
    """Make `work` as the campaign left it, from what was published with its weights."""
    for path in sorted(published.rglob("*")):
        target = work / path.relative_to(published)
        if path.is_dir() or path.name == "README.md":
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".gz", ".xz"):
            data = unpacked(path.with_suffix(""))
            if path.stem == Path(PACKED).stem:
                target.with_name(PACKED).write_bytes(gzip.compress(data))
            else:
                target.with_suffix("").write_bytes(data)
        else:
            shutil.copyfile(path, target)
    restore_weights(work)
    for name in [path.name for path in work.iterdir() if path.name.partition("-seed-")[0] in ARMS]:
        config = RunDirectory(work / name).read_json("config.json") or {}
        seeds = [work / Path(seed).name for seed in config["config"]["exemplars"]["seeds"]]
        fill(ExemplarDatabase(work / name / EXEMPLARS), [*seeds, work / name])
    (work / RESTARTED).touch()


def samples_of(published: Path) -> dict[int, list[Sample]]:
    """Stage 2's answers by round, in the order in which they were drawn, with what their prompts showed."""
    run = RunDirectory(published / "self-supervised")
    config, environment = run.read_json("config.json") or {}, run.read_json("environment.json") or {}
    tasks = {task.sha256: task for task in split_of(settings.build(TasksSection, config["config"]["tasks"])).train}
    shown = _exemplars(published, tasks, environment["device"])
    rounds: dict[int, list[Sample]] = {}
    for rollout in RolloutLog(published / "self-supervised").rollouts():
        rounds.setdefault(rollout.step, []).append(_sample(rollout, tasks[rollout.task_sha256], shown))
    return rounds


def _exemplars(published: Path, tasks: Iterable[str], device: str) -> dict[tuple[str, str], Exemplar]:
    """Code that prompts may have shown, by task and candidate: teachers' code, and answers of the round before."""
    with tempfile.TemporaryDirectory() as folder:
        database = ExemplarDatabase(Path(folder, EXEMPLARS))
        fill(database, [published / "sft", published / "self-supervised"])
        return {(task, one.candidate_sha256): one for task in tasks for one in database.exemplars(task, device=device)}


def _sample(rollout: Rollout, task: Task, shown: dict[tuple[str, str], Exemplar]) -> Sample:
    prompt = Prompt(rollout.prompt, tuple(shown[task.sha256, each] for each in rollout.exemplars))
    if prompt.sha256 != rollout.prompt_sha256:
        raise UsageError(f"Wanted the prompt of each answer; one to {task.id} has another hash. Was the folder edited?")
    return Sample(task=task, prompt=prompt, completion=rollout.answered(), step=rollout.step, sample=rollout.sample)


def _untrained(published: Path, held_out: Path) -> None:
    """Answers of the untrained model and their measurements."""
    for name in ("", "confirmations"):
        found = [one for one in RunDirectory(published / name).evaluations() if one.policy.endswith(f":{UNTRAINED}")]
        append_lines(held_out / name / "evaluations.jsonl", [one.model_dump_json() for one in found])
    RolloutLog(held_out).append(one for one in RolloutLog(published).rollouts() if one.model.endswith(f":{UNTRAINED}"))


if __name__ == "__main__":
    main()
