"""Timing and dependence rules of the hardware that every legal schedule respects."""
