"""Clusters of tokens from distances, features or scores. Labels are (B, N) int64, numbered by their first member.

``agglomerate`` merges bottom-up and is exact, ``dendrogram`` gives the hierarchy. Its rivals are ``bipartite_match``,
``kmeans``, ``kmedoids`` and ``density_peaks``; ``top_k`` and ``random_tokens`` only choose tokens to keep.
"""

from .agglomerate import agglomerate
from .bipartite import bipartite_match
from .centres import kmeans, kmedoids
from .dendrogram import Dendrogram, dendrogram
from .density import density_peaks
from .distance import check_finite, cosine_distance, manifold_distance, pairwise_distance
from .select import random_tokens, top_k

__all__ = [
    "Dendrogram",
    "agglomerate",
    "bipartite_match",
    "check_finite",
    "cosine_distance",
    "dendrogram",
    "density_peaks",
    "kmeans",
    "kmedoids",
    "manifold_distance",
    "pairwise_distance",
    "random_tokens",
    "top_k",
]
