"""Clusters of tokens from distances, features or scores, as labels (B, N) int64.

They are numbered by their first member, but for ``bipartite_match``, which has the order of its paper.

``agglomerate`` merges bottom-up and is exact, ``dendrogram`` gives the hierarchy. Its rivals are ``bipartite_match``,
``kmeans``, ``kmedoids`` and ``density_peaks``; ``top_k`` and ``random_tokens`` only choose tokens to keep.
"""

from hyptree.cluster.bipartite import bipartite_match
from hyptree.cluster.centres import kmeans, kmedoids
from hyptree.cluster.dendrogram import Dendrogram, dendrogram
from hyptree.cluster.density import density_peaks
from hyptree.cluster.distance import check_finite, manifold_distance, pairwise_distance
from hyptree.cluster.select import random_tokens, top_k
from hyptree.ops.agglomerate import agglomerate
from hyptree.ops.cosine import cosine_distance

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
