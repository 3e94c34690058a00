"""Data of the supervised stage: what teachers write, and how it becomes examples to learn from."""
