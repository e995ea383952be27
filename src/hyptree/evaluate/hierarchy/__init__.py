"""Metrics of hierarchies: embeddings of them, and how wrong wrong answers are."""
