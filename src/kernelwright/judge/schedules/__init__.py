"""Judges schedules of machine code: runs them contained, compares their outputs, times them."""
