"""Makes a task of a model in memory and example inputs of it. The task's text imports from here."""

from __future__ import annotations

from kernelwright.tasks.in_memory.inputs import (
    Inputs,
    ModelCall,
    alike,
    call_untouched,
    check_model,
    device_of,
    form_of,
    leaves_of,
    name_of,
    sets_of,
    tried,
    untouched,
)
from kernelwright.tasks.in_memory.stored import candidate_of, folder_on_path, stored_inputs, stored_model, task_of

__all__ = [
    "Inputs", "ModelCall", "alike", "call_untouched", "candidate_of", "check_model", "device_of", "folder_on_path",
    "form_of", "leaves_of", "name_of", "sets_of", "stored_inputs", "stored_model", "task_of", "tried", "untouched",
]  # fmt: skip
