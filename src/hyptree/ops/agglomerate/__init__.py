"""Agglomerative clustering of a batch of distance matrices into a fixed number of clusters.

``labels`` is the operation; ``reference`` holds its definition (and whole merge forests), ``triton`` its kernels.
It is registered as ``hyptree::agglomerate``, so a compiled or exported model holds it as one node.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hyptree.ops.agglomerate import reference
from hyptree.ops.backend import choose, needs_operator

__all__ = ["labels", "reference"]

MAX_TOKENS = 1024  # of the kernels


def labels(distance: Tensor, k: int, linkage: str = "average", backend: str = "auto") -> Tensor:
    """Labels 0..k-1 of every token, clusters numbered by their first member. No gradient, same on every backend.

    Args:
        distance: (B, N, N) symmetric, not negative.
        k: number of clusters, 1 to N.
        linkage: "average", "complete" or "single".
        backend: "auto", "torch" or "triton" (CUDA, float32, N <= 1024).

    Returns:
        (B, N) int64.
    """
    chosen = choose(backend, distance, _misfit(distance, linkage))
    distance = distance.detach()
    run = _operator if needs_operator(distance) else _run
    return run(distance, k, linkage, chosen)


def _misfit(distance: Tensor, linkage: str) -> str | None:
    """Why the kernel cannot take this input, or None."""
    if distance.dtype != torch.float32:
        return f"distances are {str(distance.dtype).removeprefix('torch.')}, the kernel needs float32"
    if distance.shape[-1] > MAX_TOKENS:
        return f"{distance.shape[-1]} tokens, the kernel takes up to {MAX_TOKENS}"
    if linkage not in ("average", "complete", "single"):
        return f"the kernel has no linkage {linkage!r}"
    return None


def _run(distance: Tensor, k: int, linkage: str, backend: str) -> Tensor:
    if backend == "triton":
        from hyptree.ops.agglomerate import triton

        return triton.labels(distance.contiguous(), k, linkage)
    N = distance.shape[-1]
    return reference.cut(reference.build_forest(distance, linkage, num_merges=N - k), k)


_operator = torch.library.custom_op("hyptree::agglomerate", _run, mutates_args=())


@_operator.register_fake
def _(distance: Tensor, k: int, linkage: str, backend: str) -> Tensor:
    return distance.new_empty(distance.shape[:2], dtype=torch.int64)
