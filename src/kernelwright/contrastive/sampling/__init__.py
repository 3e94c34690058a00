"""Answers of the model in training: drawn, judged, rewarded and written down."""
