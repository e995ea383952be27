"""Agglomerative clustering of distance matrices: always merge the two closest clusters, down to k or to a threshold.

``agglomerate`` is the operation; ``reference`` holds its definition (and whole merge forests), ``triton`` its kernels,
``libraries`` the same from scipy and fastcluster. It is registered as ``hyptree::agglomerate``, so a compiled or
exported model holds it as one node.
"""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from hyptree.errors import UserError, require_one_of
from hyptree.ops.agglomerate import libraries
from hyptree.ops.agglomerate.reference import LINKAGES, Forest, build_forest, cut, cut_at
from hyptree.ops.backend import choose, has_data, needs_operator, operator

__all__ = ["BACKENDS", "LINKAGES", "agglomerate", "grow_forest", "libraries"]

BACKENDS = ("auto", "torch", "triton", *libraries.LIBRARIES)
MAX_TOKENS = 4096  # of the kernels
# Measured on one core, keeping 1/2 and 1/4 of the tokens, torch / fastcluster and torch / scipy:
# single 1.5 1.8 / 1.0 1.7 at N = 196, 1.3 2.2 / 1.3 1.9 at N = 576, 0.8 0.8 / 0.5 0.9 at N = 1024;
# average 1.5 1.5 / 1.0 1.0 at N = 576, 1.1 1.2 / 0.6 0.8 at N = 1024; complete never more than 1.1 of either.
LIBRARY_FROM = 256  # tokens, for average linkage; below, equal answers everywhere are worth more than the difference


def agglomerate(
    D: Tensor,
    k: int | None = None,
    *,
    threshold: float | None = None,
    linkage: str = "average",
    backend: str = "auto",
    deterministic: bool = False,
    check: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Labels of the tokens after merging the closest clusters: exactly k of them, or up to a distance.

    Clusters are numbered in ascending order of their smallest token. With equal distances the pair of the smaller
    tokens goes first, see ``hyptree.ops.agglomerate.reference``: the answer depends on D alone, not on the device, the
    batch around an image or the number of threads, and always has exactly k clusters. Renumbering the tokens then may
    give another, equally valid answer. No gradient flows.

    Args:
        D: (N, N) or (B, N, N) symmetric finite distances in float32 or float64; the diagonal is not read. Half
            precision is refused: rounding makes most distances equal. For ward the squared distances.
        k: number of clusters; more than N means N.
        threshold: merge while the closest clusters are at most this far apart, instead of ``k``.
        linkage: distance of two clusters: "average", "complete" (largest), "single" (smallest), or "ward".
        backend: "torch" (any device), "triton" (CUDA, float32, N <= 4096, only ``k``, not ward; needed for CUDA graphs
            and whenever the host must not wait for the device), "scipy", "fastcluster" (CPU, image by image; ties as
            they like), or "auto": triton on CUDA where it can, else torch; on the CPU, if installed, fastcluster or
            else scipy for single linkage, fastcluster for average linkage with N > 256, otherwise torch.
        deterministic: leave only torch and triton to "auto", whose answers are the same bit for bit, ties included.
        check: look for NaN, inf and asymmetry. By default on the CPU only, where it does not have to wait for a device,
            and not while compiling.

    Returns:
        labels, (N,) or (B, N) int64; with ``threshold`` also the number of clusters, () or (B,) int64.
    """
    if (k is None) == (threshold is None):
        raise UserError(f"give either k or threshold, got k={k} and threshold={threshold}")
    batch = _as_batch(D, linkage, check)
    chosen = _choose(batch, linkage, backend, deterministic, threshold is not None)
    if threshold is not None:
        threshold = as_threshold(threshold, D.dtype)
        labels, num_clusters = cut_at(_forest(batch, linkage, chosen, threshold), threshold)
        return (labels, num_clusters) if D.ndim == 3 else (labels[0], num_clusters[0])
    num_tokens = batch.shape[-1]
    if k is None or isinstance(k, bool | float):
        raise UserError(f"agglomerate: k must be a whole number, got {k!r}; k = {num_tokens} keeps every token")
    if k < 1:
        raise UserError(f"agglomerate: k must be at least 1, got {k}; k = {num_tokens} keeps every token")
    run = _operator if needs_operator(batch) else _run
    labels = run(batch, min(k, num_tokens), linkage, chosen)
    return labels if D.ndim == 3 else labels[0]


def grow_forest(D: Tensor, linkage: str, backend: str, deterministic: bool, check: bool | None) -> Forest:
    """All merges of each image; the arguments are those of :func:`agglomerate`."""
    batch = _as_batch(D, linkage, check)
    return _forest(batch, linkage, _choose(batch, linkage, backend, deterministic, needs_forest=True))


def as_threshold(threshold: float, dtype: torch.dtype) -> float:
    """The threshold rounded as distances of this type are, so that 0.2 does not fall short of 0.2 in float32."""
    if math.isnan(threshold):
        raise UserError("threshold is NaN, expected a distance")
    return torch.tensor(threshold, dtype=dtype).item()


def _choose(batch: Tensor, linkage: str, backend: str, deterministic: bool, needs_forest: bool) -> str:
    """The implementation to run: "torch", "triton" or the name of a library."""
    if backend not in BACKENDS:
        require_one_of("backend", backend, BACKENDS)
    num_tokens = batch.shape[-1]
    if backend in libraries.LIBRARIES:
        if deterministic:
            raise UserError(
                f"deterministic=True needs backend 'auto', 'torch' or 'triton': ties in {backend} are its own"
            )
        return backend
    if needs_forest and backend == "triton":
        raise UserError("backend 'triton' gives labels of k clusters only; use backend='auto' or 'torch' for this")
    is_free = backend == "auto" and not deterministic and os.environ.get("HYPTREE_BACKEND", "auto") == "auto"
    if is_free and batch.device.type == "cpu" and not torch.compiler.is_compiling():
        library = libraries.installed()
        if library and (
            linkage == "single" or ((linkage, library) == ("average", "fastcluster") and num_tokens > LIBRARY_FROM)
        ):
            return library
    if needs_forest:
        return "torch"
    unsupported = None
    if batch.dtype != torch.float32:
        unsupported = f"distances are {str(batch.dtype).removeprefix('torch.')}, the kernel needs float32"
    elif num_tokens > MAX_TOKENS:
        unsupported = f"{num_tokens} tokens, the kernel takes up to {MAX_TOKENS}"
    elif linkage == "ward":
        unsupported = "the kernel has no linkage 'ward'"
    return choose(backend, batch, unsupported)


def _forest(batch: Tensor, linkage: str, backend: str, threshold: float | None = None) -> Forest:
    if backend in libraries.LIBRARIES:
        return libraries.build_forest(batch, linkage, backend)
    return build_forest(batch, linkage, threshold=threshold)


def _run(distance: Tensor, k: int, linkage: str, backend: str) -> Tensor:
    if backend == "triton":
        from hyptree.ops.agglomerate import triton

        return triton.labels(distance.contiguous(), k, linkage)
    if backend in libraries.LIBRARIES:
        return cut(libraries.build_forest(distance, linkage, backend), k)
    return cut(build_forest(distance, linkage, num_merges=distance.shape[-1] - k), k)


def _traced(distance: Tensor, k: int, linkage: str, backend: str) -> Tensor:
    if has_data(distance):
        return _run(distance, k, linkage, backend)
    return distance.new_empty(distance.shape[:2], dtype=torch.int64)


_operator = operator("agglomerate", _traced)


def _as_batch(D: Tensor, linkage: str, check: bool | None) -> Tensor:
    """D as (B, N, N) without gradient, after a look at everything that can be wrong with it."""
    if linkage not in LINKAGES:
        require_one_of("linkage", linkage, LINKAGES)
    if not isinstance(D, Tensor) or D.ndim not in (2, 3) or D.shape[-1] != D.shape[-2] or D.shape[-1] == 0:
        what = f"D has shape {tuple(D.shape)}" if isinstance(D, Tensor) else f"D is {type(D).__name__}, not a tensor"
        raise UserError(f"{what}, expected (N, N) or (B, N, N); make distances of features by cosine_distance")
    if D.dtype not in (torch.float32, torch.float64):
        name = str(D.dtype).removeprefix("torch.")
        raise UserError(f"D is {name}, expected float32 or float64; compute distances in float32, not D.float()")
    batch = D.detach() if D.ndim == 3 else D.detach()[None]
    if check is None:
        check = D.device.type == "cpu" and not torch.compiler.is_compiling()
    if check:
        _check_values(batch)
    return batch


def _check_values(batch: Tensor) -> None:
    """Finds the first distance that is not finite or differs from its mirror image."""
    if not batch.sum().isfinite():  # one fast pass; only then look where
        is_bad = ~batch.isfinite() & ~torch.eye(batch.shape[1], dtype=torch.bool, device=batch.device)
        if is_bad.any():
            i, a, b = is_bad.nonzero()[0].tolist()
            raise UserError(
                f"D[{i}, {a}, {b}] is {batch[i, a, b].item()}, expected finite distances; look for NaN in the features"
            )
    if not torch.equal(batch, batch.mT):
        differs = (batch != batch.mT).triu(1)
        if differs.any():
            i, a, b = differs.nonzero()[0].tolist()
            there, back = batch[i, a, b].item(), batch[i, b, a].item()
            raise UserError(
                f"D is not symmetric: D[{i}, {a}, {b}] is {there:.9g}, D[{i}, {b}, {a}] is {back:.9g}; "
                "use torch.minimum(D, D.mT)"
            )
