"""Keeps tuned kernels in a cache and puts them back into Triton, into torch.compile and into candidates.

Modules are imported one by one, since some need torch or Triton and others do not.
"""
