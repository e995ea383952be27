"""Distances between the tokens of each image, in a precision that a clustering can rely on.

Half-precision distances are full of ties, and a tie decides which tokens merge. So features of any dtype go to float32
(float64 stays), the product is taken with autocast and TF32 off, and what comes out is symmetric, not negative and zero
on the diagonal. Nothing here carries a gradient: the assignment of tokens to clusters has none.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hyptree.errors import UserError
from hyptree.geometry import Manifold
from hyptree.ops.cosine import cosine_distance
from hyptree.ops.cosine.reference import wide_features

Metric = Literal["cosine"] | Manifold
"""How far apart two features are: the angle between them, or the distance on a manifold they are lifted to."""

GRID = 2.0**24
"""Distances in float32 are whole multiples of ``1 / GRID``: their sums in float64 are exact, in any order."""


@torch.no_grad()
def manifold_distance(
    features: Tensor, manifold: Manifold, scale: float | None = None, mode: Literal["exact", "matmul"] = "exact"
) -> Tensor:
    """Distance between any two tokens of an image on a manifold, to which ``expmap0`` lifts them: -> (..., N, N).

    The length of a feature becomes the distance of its point to the origin: ``scale * |f|`` (twice that in the
    Poincaré ball, whose metric at the origin is ``4 |v|^2``: halve the scale for the same points). Keys of a
    transformer have a length of about ``sqrt(D)`` and more; unscaled, all of them would lie so far out that hyperbolic
    distance says little but how long two keys are, and points in the ball would reach its boundary. With the default
    ``scale = 1 / sqrt(D)`` a key with entries of size 1 has radius 1, and curvature ``c`` says how much is seen of
    hyperbolic space: on radius ``r`` it acts through ``sqrt(c) r``, near 0 is flat, above 3 is a tree.

    Args:
        features: (..., N, D) of any floating dtype; computed in float32 (float64 stays).
        manifold: Lorentz, Poincare, Euclidean or a product of them. (Sphere ignores the first entry of a feature.)
        scale: factor on the features before they are lifted.
        mode: of ``manifold.pairwise_dist``. "matmul" is several times faster and blurs distances below about 1e-3,
            those of tokens that are nearly the same.

    Returns:
        (..., N, N), symmetric, zero on the diagonal; float32 values are rounded to multiples of 2^-24, as cosine
        distances are, so that average linkage is exact here too.
    """
    if features.dim() < 2 or not features.is_floating_point():
        kind = f"{str(features.dtype).removeprefix('torch.')} of shape {tuple(features.shape)}"
        raise ValueError(f"manifold_distance: expected floating-point features (..., N, D), got {kind}")
    if scale is None:
        scale = features.shape[-1] ** -0.5
    if not 0 < scale < float("inf"):
        raise ValueError(f"manifold_distance: scale must be positive and finite, got {scale}")
    # Outside autocast: the exact distance takes differences that a half-precision product would lose.
    with torch.autocast(features.device.type, enabled=False):
        points = manifold.expmap0(wide_features(features) * scale)
        D = manifold.pairwise_dist(points, points, mode=mode).clamp_min(0)
    if D.dtype == torch.float32:
        D = (D * GRID).round_() / GRID
    D = torch.minimum(D, D.mT)
    D.diagonal(dim1=-2, dim2=-1).zero_()
    return D


def pairwise_distance(features: Tensor, metric: Metric = "cosine", scale: float | None = None) -> Tensor:
    """The distances that ``metric`` names: (..., N, D) -> (..., N, N).

    Args:
        metric: "cosine", or a manifold the features are lifted to.
        scale: of :func:`manifold_distance`; cosine has none.
    """
    if isinstance(metric, Manifold):
        return manifold_distance(features, metric, scale)
    if metric != "cosine":
        raise UserError(f"metric must be 'cosine' or a manifold such as hyptree.geometry.Lorentz(), got {metric!r}")
    return cosine_distance(features)


def check_finite(features: Tensor, where: str) -> None:
    """Raise one line that names ``where`` if ``features`` (B, ..., D) hold a NaN or an infinity.

    Reads one value back from the device, so it waits for the work queued there. Does nothing while being compiled.
    """
    if torch.compiler.is_compiling():
        return
    bad = ~torch.isfinite(features)
    if not bool(bad.any()):
        return
    what = "NaN" if bool(features.isnan().any()) else "infinity"
    images = bad.flatten(1).any(-1).nonzero().flatten().tolist() if features.dim() > 1 else []
    of = f" of image {images[0]}" if images else ""
    more = f" (and {len(images) - 1} more)" if len(images) > 1 else ""
    raise UserError(
        f"{where}: {what} in the features{of}{more}, shape {tuple(features.shape)}; tokens cannot be compared: "
        "look for it in the input and the weights before this place"
    )
