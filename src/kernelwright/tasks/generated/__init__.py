"""Generates tasks to train on, and the ways that are known to compute each."""
