"""Rewrites a task's operator graph into candidates: exact rules, fused kernels, wrappers, and a search over them."""
