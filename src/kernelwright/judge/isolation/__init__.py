"""Puts processes and walls between the judge and a candidate, and a gate before the device.

A worker may read what `sandbox.restrict` allows, and inherits `fork_server.INHERITED_VARIABLES`. `process.Worker` and `side`
send it everything else.
"""
