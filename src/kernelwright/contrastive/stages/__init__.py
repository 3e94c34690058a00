"""CUDA-L1's three stages (arXiv 2507.14111): supervised, self-supervised and contrastive training under the judge.

Importing this package loads neither TRL nor transformers; a stage asks for them when it runs (`[train]` extra).
"""
