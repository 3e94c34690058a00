"""Draws, judges, rewards and records answers of the model in training."""
