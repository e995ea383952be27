"""Metrics of reduced tokens: accuracy, speed, FLOPs."""
