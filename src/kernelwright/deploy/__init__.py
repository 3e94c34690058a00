"""Running machine-code schedules: launch specs, measuring in contained processes, the cache of tuned kernels,
and putting tuned kernels back into Triton, into torch.compile and into candidates.

Modules are imported one by one: the process that runs schedules needs neither torch nor Triton.
"""
