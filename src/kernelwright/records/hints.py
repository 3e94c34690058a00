"""Says for each reason of a rejection what to change, in one line."""

from __future__ import annotations

from kernelwright.records.models import Reason

HINTS: dict[Reason, str] = {
    Reason.SYNTAX_ERROR: "mend the line that Python's parser names",
    Reason.NO_MODEL_NEW: "define a class ModelNew(torch.nn.Module) at the top level of the file",
    Reason.BUILD_FAILED: "mend the first error above; ModelNew takes what get_init_inputs() returns, and its file imports "
    "installed packages only, nothing beside it",
    Reason.BUILD_TIMEOUT: "build less at import, or raise --build-timeout",
    Reason.RUNTIME_ERROR: "mend the error above; forward must take other values of the task's inputs too",
    Reason.TIMEOUT: "make calls faster, or raise budget_s",
    Reason.RUN_TIMEOUT: "end every wait, and move long work into the first call, or raise --timeout",
    Reason.CRASHED: "check pointers, bounds and alignment of the kernel; compute-sanitizer finds most such errors",
    Reason.EXITED: "return from forward instead of ending the process",
    Reason.OUT_OF_MEMORY: "free or reuse memory between calls; nothing may grow with their number",
    Reason.TOO_MANY_PROCESSES: "start no processes in a call",
    Reason.PROTOCOL_VIOLATION: "write to no file descriptor that the module has not opened",
    Reason.STATE_MISMATCH: "register parameters and buffers under the reference's names, shapes and dtypes; "
    "--contract kernelbench leaves names free",
    Reason.MODE_MISMATCH: "leave self.training alone and compute in both modes what the reference computes; "
    "--contract kernelbench asks for the built mode only",
    Reason.BUFFER_MISMATCH: "update running statistics and counters as the reference does, in both modes; "
    "--contract kernelbench does not compare them",
    Reason.WRONG_TYPE: "return plain torch.Tensor objects in the reference's structure",
    Reason.WRONG_SHAPE: "return the reference's shape",
    Reason.WRONG_DTYPE: "convert the output to the reference's dtype",
    Reason.WRONG_DEVICE: "return the output on the inputs' device",
    Reason.WRONG_STRIDES: "return the reference's strides, as by .contiguous(); --contract kernelbench leaves them free",
    Reason.WRONG_OUTPUT: "compare forward with the reference in float64 on the input set that is named above",
    Reason.PRECISION_DOWNGRADE: "keep float32 in products and sums: no TF32, float16 or bfloat16 that the reference lacks",
    Reason.NON_FINITE_OUTPUT: "subtract the maximum before exp, write every element, and divide by no zero",
    Reason.STALE_WEIGHTS: "derive folded or packed weights from the parameters in every call, or whenever one was changed",
    Reason.STALE_OUTPUT: "compute every call's output from its own inputs; a cache must compare all of them",
    Reason.TIMED_OUTPUT_WRONG: "compute every call alike, whatever its number, its time and the process",
    Reason.INPUT_MUTATED: "work on a copy of the inputs",
    Reason.OUTPUT_OVERWRITTEN: "allocate a new output for each call, or clone the buffer that is reused",
    Reason.OUTPUT_ALIASES: "return memory of the output's own: clone a view of inputs, parameters or buffers",
    Reason.LAYOUT_DEPENDENT: "read inputs by their strides, or call .contiguous() on them; a pointer may lie off a vector's "
    "boundary. --contract kernelbench gives only the task's own layout",
    Reason.NONDETERMINISTIC: "look for a race or memory that is read before it is written",
    Reason.CLOCK_DISAGREEMENT: "do all work inside the call, on the current stream",
    Reason.WORK_OUTSIDE_TIMING: "join threads and processes before forward returns",
    Reason.DEVICE_NOT_QUIET: "let the current stream wait for every other stream before forward returns",
    Reason.GLOBAL_STATE_CHANGED: "put back the setting that is named above before forward returns, or do not change it",
    Reason.FORBIDDEN_LABEL: "avoid what the label names, or take it off the forbidden ones with --allow",
}


def with_hint(reason: Reason, detail: str) -> str:
    """The detail of a rejection with a last line that says what to change."""
    return f"{detail}\nTo change: {HINTS[reason]}.".strip()
