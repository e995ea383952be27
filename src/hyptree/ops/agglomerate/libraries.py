"""Hierarchies from scipy and fastcluster, image by image on the CPU, in the form of ``ops.agglomerate``'s forest.

Where a hierarchy is unique they agree with ours. Where equal distances compete they make choices of their own, which
may differ from ours, from each other and from version to version.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from hyptree.errors import require
from hyptree.ops.agglomerate.forest import Forest

LIBRARIES = ("fastcluster", "scipy")  # in the order of preference
_MODULES = {"fastcluster": "fastcluster", "scipy": "scipy.cluster.hierarchy"}


@cache
def installed() -> str | None:
    """The library to prefer of those that are installed, or None."""
    return next((name for name in LIBRARIES if find_spec(name) is not None), None)


def build_forest(D: Tensor, linkage: str, library: str) -> Forest:
    """All N - 1 merges of each image as the library makes them, slots in the order of the merges, on D's device.

    Args:
        D: (B, N, N) symmetric finite distances; for ward the squared ones, as everywhere in hyptree.
        linkage: one of ``ops.agglomerate.reference.LINKAGES``.
        library: "scipy" or "fastcluster". Fastcluster works outside the interpreter's lock, so images are spread over
            ``torch.get_num_threads()`` threads; scipy holds it, so there one thread does.
    """
    linkage_of = require(_MODULES[library], "tokens").linkage
    num_images, num_tokens = D.shape[:2]
    distances = D.detach().cpu().numpy()
    if num_tokens == 1 or num_images == 0:
        return _forest(np.zeros((num_images, num_tokens - 1, 4)), D)
    merges_of: Callable[[np.ndarray], np.ndarray] = partial(_merges, linkage_of, linkage)
    num_threads = min(torch.get_num_threads(), num_images, os.cpu_count() or 1) if library == "fastcluster" else 1
    if num_threads > 1:
        with ThreadPoolExecutor(num_threads) as pool:
            merges = list(pool.map(merges_of, distances))
    else:
        merges = [merges_of(image) for image in distances]
    return _forest(np.stack(merges), D)


def _merges(linkage_of: Callable[..., np.ndarray], linkage: str, distances: np.ndarray) -> np.ndarray:
    """The linkage matrix of one image, (N - 1, 4)."""
    condensed = np.concatenate([row[i + 1 :] for i, row in enumerate(distances)], dtype=np.float64)
    if linkage != "ward":
        return linkage_of(condensed, linkage)
    merges = linkage_of(np.sqrt(condensed), linkage)  # both libraries take distances and square them
    merges[:, 2] **= 2
    return merges


def _forest(merges: np.ndarray, D: Tensor) -> Forest:
    """The forest of linkage matrices (B, N - 1, 4): clusters go by their smallest token, not by own numbers."""
    num_images, num_tokens = D.shape[:2]
    image = np.arange(num_images)
    smallest = np.tile(np.arange(2 * num_tokens - 1), (num_images, 1))  # (B, 2N - 1) of every cluster
    slots = np.tile(np.arange(num_tokens), (2, num_images, 1))  # both ends of each link; empty ones hold the slot
    pairs = merges[:, :, :2].astype(np.int64)
    for i in range(num_tokens - 1):  # all images at once
        first, second = smallest[image, pairs[:, i, 0]], smallest[image, pairs[:, i, 1]]
        slots[0, :, i], slots[1, :, i] = np.minimum(first, second), np.maximum(first, second)
        smallest[:, num_tokens + i] = slots[0, :, i]
    height = np.full((num_images, num_tokens), np.inf)
    height[:, :-1] = merges[:, :, 2]
    up, edge = torch.from_numpy(slots).to(D.device)
    return Forest(up, torch.from_numpy(height).to(D.device), edge)
