"""Kernel templates: modules that emit self-contained source for an operator, with knobs that a search can tune."""
