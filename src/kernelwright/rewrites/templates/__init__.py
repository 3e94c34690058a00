"""Emits self-contained source for an operator from kernel templates, whose knobs a search can tune."""
