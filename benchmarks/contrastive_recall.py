"""Makes a new campaign's `--work` that reuses the measurements of a published one, so that nothing is judged again.

    python benchmarks/contrastive_recall.py results/contrastive-h200 WORK

WORK gets the file of evaluations that all parts of a campaign share, with the first measurements of the published one:
teachers' code and answers, under the settings with which they were made, and baselines, which stand whatever text a later
version writes. Use it on the same kind of GPU alone; the kind is printed. Nothing else comes along: a campaign with other
settings of training begins anew with it. A WORK that is there already keeps what it knows, and gets the rest: of several
published campaigns the first one's measurements stand, and `contrastive_restart.py` may have made it.
"""

from __future__ import annotations

from pathlib import Path

from publishing import from_command_line

from kernelwright import config as settings
from kernelwright.contrastive.context import first_on
from kernelwright.contrastive.evaluations import SharedEvaluations
from kernelwright.contrastive.settings import JudgeSection
from kernelwright.errors import UsageError
from kernelwright.records import RunDirectory, append_lines

NOT_FIRST = "confirmations"
"""Folder of what was measured again."""
BASELINES = "baselines"
"""Folder of a part's baselines."""


def main() -> None:
    """Make the directory that the command line asks for."""
    from_command_line(__doc__, recall)


def recall(published: Path, work: Path) -> None:
    """Fill the shared evaluations of `work`, which is made where it is not there.

    Raises:
        UsageError: the published folder holds no stage 1.
    """
    stage_1 = RunDirectory(published / "sft")
    config, environment = stage_1.read_json("config.json"), stage_1.read_json("environment.json") or {}
    if config is None:
        raise UsageError(
            f"Wanted a published campaign in {published}; it lacks sft/config.json. Name one of contrastive training."
        )
    judge = settings.build(JudgeSection, config["config"]["judge"]).judge_settings()
    label = first_on(environment["device"])
    caches = {
        timed: SharedEvaluations(work / "judged.sqlite", label, judge.model_copy(update={"timed": timed}))
        for timed in (False, True)
    }
    count = 0
    for folder in published.glob(f"*/{BASELINES}"):
        _add_baselines(folder, work / folder.relative_to(published))
    for folder in sorted({path.parent for path in published.rglob("evaluations.jsonl*")}):
        if NOT_FIRST in folder.parts:
            continue
        for one in RunDirectory(folder).evaluations():
            # A run that does not time its candidates has accepted ones without a speedup.
            caches[not (one.accepted and one.speedup is None)].add(one)
            count += 1
    gpus = ", ".join(sorted({gpu["name"] for gpu in environment.get("gpu") or []})) or environment.get("processor")
    print(f"{count} first measurements, made on {gpus}")


def _add_baselines(published: Path, target: Path) -> None:
    """Add the baselines of tasks that `target` has none of."""
    known = {one.task_sha256 for one in RunDirectory(target).evaluations()}
    lacking = [one for one in RunDirectory(published).evaluations() if one.task_sha256 not in known]
    append_lines(target / "evaluations.jsonl", [one.model_dump_json() for one in lacking])


if __name__ == "__main__":
    main()
