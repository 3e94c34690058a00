"""Names the reasons of a rejection and the labels of a candidate, each with its meaning in one table.

Reports, messages and prompts take the words from here. `docs/verdicts.md` adds typical causes and the fine print.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class DescribedCode(StrEnum):
    """Code with its meaning in words."""

    meaning: str
    """Fragment of a sentence."""

    def __new__(cls, code: str, meaning: str = "") -> Self:
        """A member from its code and meaning."""
        member = str.__new__(cls, code)
        member._value_, member.meaning = code, meaning
        return member


class Reason(StrEnum):
    """Reason of a rejection."""

    meaning: str
    """Finding, as a fragment of a sentence."""
    hint: str
    """Change that mends it, in one line without a full stop."""

    def __new__(cls, code: str, meaning: str = "", hint: str = "") -> Reason:
        """A member from its code, meaning and hint."""
        member = str.__new__(cls, code)
        member._value_, member.meaning, member.hint = code, meaning, hint
        return member

    SYNTAX_ERROR = "syntax-error", "the source is not valid Python", "mend the line that Python's parser names"
    NO_MODEL_NEW = (
        "no-model-new",
        "the module defines no torch.nn.Module class ModelNew",
        "define a class ModelNew(torch.nn.Module) at the top level of the file",
    )
    BUILD_FAILED = (
        "build-failed",
        "importing it or constructing ModelNew raised an exception",
        "mend the first error above; ModelNew takes what get_init_inputs() returns, and its file imports installed "
        "packages only, nothing beside it",
    )
    BUILD_TIMEOUT = (
        "build-timeout",
        "importing and constructing it took longer than the limit",
        "build less at import, or raise --build-timeout",
    )
    RUNTIME_ERROR = (
        "runtime-error",
        "a call raised an exception",
        "mend the error above; forward must take other values of the task's inputs too",
    )
    TIMEOUT = "timeout", "all calls together took longer than an evaluation may", "make calls faster, or raise budget_s"
    RUN_TIMEOUT = (
        "run-timeout",
        "a call did not finish within the limit",
        "end every wait, and move long work into the first call, or raise --timeout",
    )
    CRASHED = (
        "crashed",
        "its process died of a signal",
        "check pointers, bounds and alignment of the kernel; compute-sanitizer finds most such errors",
    )
    EXITED = "exited", "its process ended before it had answered", "return from forward instead of ending the process"
    OUT_OF_MEMORY = (
        "out-of-memory",
        "it used more memory than it may",
        "free or reuse memory between calls; nothing may grow with their number",
    )
    TOO_MANY_PROCESSES = "too-many-processes", "it started more processes than it may", "start no processes in a call"
    PROTOCOL_VIOLATION = (
        "protocol-violation",
        "something other than the harness wrote to the channel",
        "write to no file descriptor that the module has not opened",
    )
    STATE_MISMATCH = (
        "state-mismatch",
        "its state_dict is not the reference's, or does not take new weights",
        "register parameters and buffers under the reference's names, shapes and dtypes; --contract kernelbench "
        "leaves names free",
    )
    MODE_MISMATCH = (
        "mode-mismatch",
        "it is in another train/eval mode than the reference, or wrong in the other one",
        "leave self.training alone and compute in both modes what the reference computes; --contract kernelbench asks "
        "for the built mode only",
    )
    BUFFER_MISMATCH = (
        "buffer-mismatch",
        "its buffers differ from the reference's after the same calls",
        "update running statistics and counters as the reference does, in both modes; --contract kernelbench does not "
        "compare them",
    )
    WRONG_TYPE = (
        "wrong-type",
        "an output is no plain tensor, or the structure of outputs differs",
        "return plain torch.Tensor objects in the reference's structure",
    )
    WRONG_SHAPE = "wrong-shape", "an output has another shape", "return the reference's shape"
    WRONG_DTYPE = "wrong-dtype", "an output has another dtype", "convert the output to the reference's dtype"
    WRONG_DEVICE = "wrong-device", "an output is on another device", "return the output on the inputs' device"
    WRONG_STRIDES = (
        "wrong-strides",
        "an output has other strides",
        "return the reference's strides, as by .contiguous(); --contract kernelbench leaves them free",
    )
    WRONG_OUTPUT = (
        "wrong-output",
        "an output is further from the float64 truth than the tolerance allows",
        "compare forward with the reference in float64 on the input set that is named above",
    )
    PRECISION_DOWNGRADE = (
        "precision-downgrade",
        "its error is that of a lower precision than the reference's",
        "keep float32 in products and sums: no TF32, float16 or bfloat16 that the reference lacks",
    )
    NON_FINITE_OUTPUT = (
        "non-finite-output",
        "NaN or infinity where the truth is finite",
        "subtract the maximum before exp, write every element, and divide by no zero",
    )
    STALE_WEIGHTS = (
        "stale-weights",
        "wrong after new weights were loaded",
        "derive folded or packed weights from the parameters in every call, or whenever one was changed",
    )
    STALE_OUTPUT = (
        "stale-output",
        "an output belongs to an earlier call's input",
        "compute every call's output from its own inputs; a cache must compare all of them",
    )
    TIMED_OUTPUT_WRONG = (
        "timed-output-wrong",
        "right when checked, wrong in a timed call",
        "compute every call alike, whatever its number, its time and the process",
    )
    INPUT_MUTATED = (
        "input-mutated",
        "it left its inputs otherwise than the reference does",
        "work on a copy of the inputs, and write into them what the reference writes",
    )
    OUTPUT_OVERWRITTEN = (
        "output-overwritten",
        "a later call changed the output of an earlier one",
        "allocate a new output for each call, or clone the buffer that is reused",
    )
    OUTPUT_ALIASES = (
        "output-aliases",
        "an output shares memory with an input, parameter or buffer",
        "return memory of the output's own: clone a view of inputs, parameters or buffers",
    )
    LAYOUT_DEPENDENT = (
        "layout-dependent",
        "wrong, or raises, on inputs laid out otherwise than the task makes them",
        "read inputs by their strides, or call .contiguous() on them; a pointer may lie off a vector's boundary. "
        "--contract kernelbench gives only the task's own layout",
    )
    NONDETERMINISTIC = (
        "nondeterministic",
        "the same input gave outputs further apart than the tolerance",
        "look for a race or memory that is read before it is written",
    )
    CLOCK_DISAGREEMENT = (
        "clock-disagreement",
        "seen from outside it takes longer than its own clock says",
        "do all work inside the call, on the current stream",
    )
    WORK_OUTSIDE_TIMING = (
        "work-outside-timing",
        "it computed between timed calls",
        "join threads and processes before forward returns",
    )
    DEVICE_NOT_QUIET = (
        "device-not-quiet",
        "the device was still busy after its call had ended",
        "let the current stream wait for every other stream before forward returns",
    )
    GLOBAL_STATE_CHANGED = (
        "global-state-changed",
        "it changed process-wide state that a module must leave alone",
        "put back the setting that is named above before forward returns, or do not change it",
    )
    FORBIDDEN_LABEL = (
        "forbidden-label",
        "it carries a label that the settings forbid",
        "avoid what the label names, or take it off the forbidden ones with --allow",
    )


class Label(DescribedCode):
    """Remark on an accepted candidate. Settings can turn any of them into a rejection."""

    WRAPPER_ONLY = "wrapper-only", "the same operators behind torch.compile or a CUDA graph, no new kernel"
    TF32 = "tf32", "lets matrix products use TF32, within the tolerance"
    SPLIT_PRECISION = "split-precision", "computes float32 products from 16-bit pieces of each value"
    FP16_OPERANDS = "fp16-operands", "rounds float32 values to 16 bits, within the tolerance"
    LIBRARY_CALL = "library-call", "its work is done by PyTorch's or a vendor's operators"
    CUSTOM_KERNEL = "custom-kernel", "has CUDA, Triton or C++ source of its own"
    CUDA_GRAPH = "cuda-graph", "replays a CUDA graph"
    ALIASED_OUTPUT = "aliased-output", "a later call overwrites the output of an earlier one"
    SIGNATURE_DIFFERS = "signature-differs", "forward takes fewer arguments than the reference's"
    SHARED_COPIES = "shared-copies", "a deep copy and the original do not compute each with its own weights"
    GRADIENTS_DIFFER = "gradients-differ", "gradients of parameters or inputs are lost, or are others than the reference's"
    IGNORES_AUTOCAST = "ignores-autocast", "under autocast its outputs have another type than the reference's"
    GLOBAL_FLAGS = "global-flags", "sets process-wide flags of speed or precision, environment variables, filters or seeds"
    STATE_DIFFERS = (
        "state-differs",
        "weights cannot be loaded into it: judged with its first ones, which were not drawn anew",
    )
    CONTIGUOUS_ONLY = "contiguous-only", "refuses inputs laid out otherwise than the task makes them"
    PREPACKED_WEIGHTS = "prepacked-weights", "prepares weights when they are loaded; a later change goes unnoticed"
    STRIDES_DIFFER = "strides-differ", "an output's strides differ from the reference's"
    STOCHASTIC_TASK = "stochastic-task", "the reference draws random numbers; both sides were seeded alike"
    OTHER_DRAWS = "other-draws", "in its other mode it draws other random numbers than the reference, distributed alike"
    MODE_UNCHECKED = "mode-unchecked", "a mode was left out: the reference does not work there, or is not like itself"
    VACUOUS_TASK = "vacuous-task", "a trivial output passes this task's check, so being right proves little"
    UNCALIBRATED_PRECISION = "uncalibrated-precision", "no input tells the reference's precision from the next lower one"
    SUSPICIOUS_SOURCE = "suspicious-source", "static analysis found patterns known from cheats; advice only"
    RELIES_ON_SORTED = "relies-on-sorted", "wrong on unsorted inputs; the task sorts them"
    RELIES_ON_SYMMETRIC = "relies-on-symmetric", "wrong on a matrix that is not symmetric; the task's is"
    RELIES_ON_PERMUTATION = "relies-on-permutation", "wrong on integers that come twice; the task's never do"
    RELIES_ON_PREFIX_MASK = "relies-on-prefix-mask", "wrong on masks with holes or padded from the left; the task's are not"
    RELIES_ON_ONE_HOT = "relies-on-one-hot", "wrong on rows with two elements; the task's have one"
    RELIES_ON_ZEROS = "relies-on-zeros", "wrong without zeros that are always in the same places"
    RELIES_ON_LEAST_INTEGER = "relies-on-least-integer", "wrong on integers below the least that the task draws"
    SLOW_ON_SOME_INPUTS = "slow-on-some-inputs", "much slower on other inputs than on the task's own, beside the reference"
    NOT_RETIMED = "not-retimed", "checked but not timed, by request"
