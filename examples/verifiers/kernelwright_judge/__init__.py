"""Kernelwright's judge as a verifiers environment: `vf-eval kernelwright-judge`."""

from kernelwright_judge.environment import KernelEnv, KernelTaskset, OneAnswer

__all__ = ["KernelEnv", "KernelTaskset", "OneAnswer"]
