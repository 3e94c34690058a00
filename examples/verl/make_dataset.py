"""Writes built-in tasks, or Python files in KernelBench's format, as a data set for verl.

python make_dataset.py train.parquet diag_matmul rms_norm_composite my_task.py
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from kernelwright.contrastive.grader import chat_prompt, task_text
from kernelwright.errors import KernelwrightError
from kernelwright.records import Task
from kernelwright.tasks import load_task


def row(number: int, task: Task, hardware: str) -> dict[str, Any]:
    """One prompt."""
    return {
        "data_source": "kernelwright",
        "prompt": chat_prompt(task, hardware=hardware),
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": task_text(task)},
        "extra_info": {"index": number, "task": task.id},
    }


def main() -> None:
    """Read tasks, write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="the parquet file to write")
    parser.add_argument("tasks", nargs="+", help="ids of built-in tasks, or files")
    parser.add_argument("--hardware", default="", help="what the service judges on, as the prompt names it")
    arguments = parser.parse_args()

    from datasets import Dataset

    try:
        rows = [row(number, load_task(name), arguments.hardware) for number, name in enumerate(arguments.tasks)]
    except KernelwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    Dataset.from_list(rows).to_parquet(arguments.out)


if __name__ == "__main__":
    main()
