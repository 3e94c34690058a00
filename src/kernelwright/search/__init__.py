"""Searches candidates for one task or a whole suite."""
