"""Writes re-measurements of schedules into a run directory, and reads them again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelwright.judge.schedules import Confirmation

_NUMBERS = ("speedup", "low", "high", "noise_floor", "baseline", "wrong", "processes")


def numbers_of(confirmation: Confirmation) -> dict[str, Any]:
    """The numbers of a re-measurement as one JSON object."""
    numbers = {name: getattr(confirmation, name) for name in _NUMBERS}
    return {**numbers, "is_improvement": confirmation.is_improvement}


def numbers_and_ratios_of(confirmation: Confirmation) -> dict[str, Any]:
    """Its numbers and what they follow from, as one JSON object."""
    ratios = {"log_ratios": confirmation.log_ratios, "null_log_ratios": confirmation.null_log_ratios}
    return {**numbers_of(confirmation), **ratios}


def read_confirmation(values: Mapping[str, Any]) -> Confirmation:
    """The re-measurement whose `numbers_of` these are."""
    return Confirmation(*(values.get(name) for name in _NUMBERS))  # type: ignore[arg-type]
