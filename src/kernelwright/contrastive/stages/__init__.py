"""CUDA-L1's three stages (arXiv 2507.14111): supervised, self-supervised and contrastive training under the judge.

Importing this package does not load transformers; a stage asks for it when it runs (`[train]` extra).
"""
