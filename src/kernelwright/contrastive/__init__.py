"""CUDA-L1 (arXiv 2507.14111): exemplars, prompts, rewards, known hacks and the three stages of training."""
