"""Puts processes and walls between the judge and a candidate, and a gate before the device.

A worker may read what `sandbox.restrict` allows and inherits `zygote.INHERITED_VARIABLES`. `process.Worker` and `side` tell
it the rest.
"""
