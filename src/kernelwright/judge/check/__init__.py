"""Checks whether a candidate is right: inputs, references, tolerances, and labels by its source."""
