"""CuAsmRL (arXiv 2501.08071): a game over machine-code schedules, its agents, and what a winner consists of."""
