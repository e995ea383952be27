"""Metrics by task."""

from hyptree.evaluate.hierarchy.reconstruction import ConeScore, Reconstruction, cone_score, reconstruction

__all__ = ["ConeScore", "Reconstruction", "cone_score", "reconstruction"]
