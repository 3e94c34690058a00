"""Runs work: judges and screening on this machine's devices, judges on a Ray cluster, or behind an HTTP service.

Nothing is imported here, so that a client of the service needs no torch.
"""
