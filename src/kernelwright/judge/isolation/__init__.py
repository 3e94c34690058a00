"""Processes and walls between the judge and a candidate, and the gate to the device."""
