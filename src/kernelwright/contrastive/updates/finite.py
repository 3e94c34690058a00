"""Updates whose gradient is not a number are left out: one of them makes every weight one too. Imported on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from kernelwright.errors import InfrastructureError

PATIENCE = 5
"""Updates in succession that may be left out before training ends. Our choice: one is bad luck, more are a fault."""


class FiniteUpdates(TrainerCallback, ExportableState):
    """Drops gradients that are not finite before the optimiser sees them. Comes before the callback that keeps the logs.

    Args:
        model: What is trained.
        say: Told of each update that is left out.

    Raises:
        InfrastructureError: from the trainer, when `PATIENCE` updates in succession would have been left out.
    """

    def __init__(self, model: Any, say: Callable[[str], None]) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._say = say
        self._norm: torch.Tensor | None = None
        """Of this update's gradients, once they were clipped."""
        self._in_succession = 0
        self.skipped = 0
        """Updates left out so far, in earlier processes too."""

    def listen(self, trainer: Any) -> None:
        """Hear the norm of each update's gradients from the trainer's clipping, which computes it anyway."""
        clip = trainer.accelerator.clip_grad_norm_

        def clip_and_tell(*given: Any, **named: Any) -> Any:
            self._norm = clip(*given, **named)
            return self._norm

        trainer.accelerator.clip_grad_norm_ = clip_and_tell

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this, in transformers' form."""
        return {"args": {}, "attributes": {"skipped": self.skipped}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Go on counting from the checkpoint; transformers itself would bring all callbacks back, and make them anew."""
        # The trainer wants a place for it in what it saves next, which a checkpoint of an earlier version has not.
        held = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self.skipped = held["attributes"]["skipped"]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Keep an update, or take its gradients away: an optimiser passes over parameters that have none."""
        # An update's norm says nothing of the next one's.
        norm, self._norm = self._norm, None
        if norm is None:
            norm = torch.nn.utils.get_total_norm([each.grad for each in self._parameters if each.grad is not None])
        if bool(torch.isfinite(norm)):
            self._in_succession = 0
            return
        self.skipped += 1
        self._in_succession += 1
        if self._in_succession >= PATIENCE:
            raise InfrastructureError(
                f"Wanted finite gradients; found none in {PATIENCE} updates in succession, the last of them update "
                f'{state.global_step + 1}. Lower optimiser.learning_rate, or set model.dtype = "float32".'
            )
        self._say(f"update {state.global_step + 1} is left out: its gradient is not finite")
        for parameter in self._parameters:
            parameter.grad = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        """Add the count to what is logged; callbacks that come later see it."""
        if logs is not None:
            logs["skipped_updates"] = float(self.skipped)
