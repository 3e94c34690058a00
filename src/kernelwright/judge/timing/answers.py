"""Compares what stock configurations and finalists answer with eager's answers: loosely, since nobody attacks there.

A difference is as large as KernelBench allows, or larger where eager itself is far from the truth: through a hundred batch
norms in training mode rounding grows until PyTorch's own modes have little in common.
"""

from __future__ import annotations

import math
from typing import Any

from kernelwright.judge.check.compare import LEGAL_ERRORS, Distance, apart, farthest
from kernelwright.judge.check.findings import Failed
from kernelwright.judge.check.oracle import OutOfDomainError
from kernelwright.judge.check.trial import Trial
from kernelwright.judge.isolation.side import CallOutput
from kernelwright.records import Reason

TOLERANCE = Distance(rms=1e-2, worst=1e-1, differing=1e-2)
"""KernelBench allows 1e-2 absolute and relative; ours is relative to the output's size, and to its row's for one element."""


class LooseAnswers:
    """Comparison with eager's answers in one trial."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.allowed = TOLERANCE
        """Distance allowed from eager's; grows where rounding explains more."""

    def failure(self, answer: CallOutput, wanted: CallOutput, inputs: list[Any]) -> Failed | None:
        """Return why an answer is wrong; None where it is right, or cannot be compared."""
        facts = self._trial.facts
        # Sampling needs the reference's own sequence of draws, which no compiler promises to keep.
        if facts.stochastic and not facts.stateful:
            return None
        found = apart(answer.outputs, wanted.outputs)
        # The truth knows nothing of a state that moves with each call. A CUDA graph replays the one that it captured.
        if not found.within(self.allowed) and not facts.stateful:
            self.allowed = farthest([self.allowed, self._explained(inputs, wanted)])
        if found.within(self.allowed):
            return None
        return Failed(Reason.WRONG_OUTPUT, f"the output is {found} from eager's; allowed {self.allowed}")

    def _explained(self, inputs: list[Any], wanted: CallOutput) -> Distance:
        """Distance of two legal ways of rounding on these inputs, by eager's own distance from the float64 truth, and by
        that of TF32 where PyTorch may use it."""
        trial, oracle = self._trial, self._trial.facts.oracle
        try:
            truth = oracle.truth(inputs, trial.state, training=oracle.training)
            rounded = [wanted.outputs]
            if trial.lets_cudnn_use_tf32:
                products = trial.settings.tf32_products
                emulated = oracle.with_tf32(inputs, trial.state, training=oracle.training, products=products)
                rounded.append(emulated or truth)
        except OutOfDomainError:
            return TOLERANCE
        if any([one.shape for one in outputs] != [one.shape for one in truth] for outputs in rounded):
            return TOLERANCE
        error = farthest([apart(outputs, truth) for outputs in rounded])
        if not (math.isfinite(error.rms) and math.isfinite(error.worst)):
            return TOLERANCE
        return (error * LEGAL_ERRORS).without("differing")
