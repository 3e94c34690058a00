"""Puts every code into a sentence fragment for people. The long descriptions are in `docs/verdicts.md`."""

from __future__ import annotations

from kernelwright.records import Evaluation, Label, Reason

REASONS: dict[Reason, str] = {
    Reason.SYNTAX_ERROR: "the source is not valid Python",
    Reason.NO_MODEL_NEW: "the module defines no torch.nn.Module class ModelNew",
    Reason.BUILD_FAILED: "importing it or constructing ModelNew raised an exception",
    Reason.BUILD_TIMEOUT: "importing and constructing it took longer than the limit",
    Reason.RUNTIME_ERROR: "a call raised an exception",
    Reason.TIMEOUT: "all calls together took longer than an evaluation may",
    Reason.RUN_TIMEOUT: "a call did not finish within the limit",
    Reason.CRASHED: "its process died of a signal",
    Reason.EXITED: "its process ended before it had answered",
    Reason.OUT_OF_MEMORY: "it used more memory than it may",
    Reason.TOO_MANY_PROCESSES: "it started more processes than it may",
    Reason.PROTOCOL_VIOLATION: "something other than the harness wrote to the channel",
    Reason.STATE_MISMATCH: "its state_dict is not the reference's, or does not take new weights",
    Reason.MODE_MISMATCH: "it is in another train/eval mode than the reference, or wrong in the other one",
    Reason.BUFFER_MISMATCH: "its buffers differ from the reference's after the same calls",
    Reason.WRONG_TYPE: "an output is no plain tensor, or the structure of outputs differs",
    Reason.WRONG_SHAPE: "an output has another shape",
    Reason.WRONG_DTYPE: "an output has another dtype",
    Reason.WRONG_DEVICE: "an output is on another device",
    Reason.WRONG_STRIDES: "an output has other strides",
    Reason.WRONG_OUTPUT: "an output is further from the float64 truth than the tolerance allows",
    Reason.PRECISION_DOWNGRADE: "its error is that of a lower precision than the reference's",
    Reason.NON_FINITE_OUTPUT: "NaN or infinity where the truth is finite",
    Reason.STALE_WEIGHTS: "wrong after new weights were loaded",
    Reason.STALE_OUTPUT: "an output belongs to an earlier call's input",
    Reason.TIMED_OUTPUT_WRONG: "right when checked, wrong in a timed call",
    Reason.INPUT_MUTATED: "it changed its inputs, which the reference does not",
    Reason.OUTPUT_OVERWRITTEN: "a later call changed the output of an earlier one",
    Reason.OUTPUT_ALIASES: "an output shares memory with an input, parameter or buffer",
    Reason.LAYOUT_DEPENDENT: "wrong, or raises, on inputs laid out otherwise than the task makes them",
    Reason.NONDETERMINISTIC: "the same input gave outputs further apart than the tolerance",
    Reason.CLOCK_DISAGREEMENT: "seen from outside it takes longer than its own clock says",
    Reason.WORK_OUTSIDE_TIMING: "it computed between timed calls",
    Reason.DEVICE_NOT_QUIET: "the device was still busy after its call had ended",
    Reason.GLOBAL_STATE_CHANGED: "it changed process-wide state that a module must leave alone",
    Reason.FORBIDDEN_LABEL: "it carries a label that the settings forbid",
}

LABELS: dict[Label, str] = {
    Label.WRAPPER_ONLY: "the same operators behind torch.compile or a CUDA graph, no new kernel",
    Label.TF32: "lets matrix products use TF32, within the tolerance",
    Label.SPLIT_PRECISION: "computes float32 products from 16-bit pieces of each value",
    Label.FP16_OPERANDS: "rounds float32 values to 16 bits, within the tolerance",
    Label.LIBRARY_CALL: "its work is done by PyTorch's or a vendor's operators",
    Label.CUSTOM_KERNEL: "has CUDA, Triton or C++ source of its own",
    Label.CUDA_GRAPH: "replays a CUDA graph",
    Label.ALIASED_OUTPUT: "a later call overwrites the output of an earlier one",
    Label.GLOBAL_FLAGS: "sets process-wide performance flags",
    Label.STATE_DIFFERS: "weights cannot be loaded into it: judged with its first ones, which were not drawn anew",
    Label.CONTIGUOUS_ONLY: "refuses inputs laid out otherwise than the task makes them",
    Label.STRIDES_DIFFER: "an output's strides differ from the reference's",
    Label.STOCHASTIC_TASK: "the reference draws random numbers; both sides were seeded alike",
    Label.VACUOUS_TASK: "a trivial output passes this task's check, so being right proves little",
    Label.PREPACKED_WEIGHTS: "prepares weights when they are loaded; a later change goes unnoticed",
    Label.UNCALIBRATED_PRECISION: "no input tells the reference's precision from the next lower one",
    Label.SUSPICIOUS_SOURCE: "static analysis found patterns known from cheats; advice only",
    Label.NOT_RETIMED: "checked but not timed, by request",
}


def near_miss(evaluation: Evaluation) -> str:
    """Sentence on how far a near miss falls short and how to settle it; empty for anything else."""
    if not evaluation.is_near_miss:
        return ""
    wanted = 1.0 + (evaluation.noise_floor or 0.0)
    processes = evaluation.processes_to_settle
    settle = "more processes than can be asked for would be needed; quiet the machine"
    if processes is not None:
        settle = f"--processes {processes} is likely to settle it"
    return f"the lower end {evaluation.speedup_low:.3f} is not above {wanted:.3f}, 1 + the noise floor; {settle}"
