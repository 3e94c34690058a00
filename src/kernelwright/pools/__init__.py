"""Runs evaluations: judges on this machine's devices, on a Ray cluster, or behind an HTTP service.

Nothing is imported here, so that a client of the service needs no torch.
"""
