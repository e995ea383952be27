"""Joining and re-reading points: residual connection, concatenation, change of curvature."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hyptree.geometry import Lorentz, lorentz
from hyptree.geometry.core.numerics import Scalar, root
from hyptree.nn.point_layer import require_space
from hyptree.nn.precision import like
from hyptree.ops.rounding import wide


def change_curvature(x: Tensor, c_in: Scalar, c_out: Scalar | None) -> Tensor:
    """The point with the same ``s x`` on the hyperboloid (or ball) of curvature ``-c_out``: ``x sqrt(c_in/c_out)``.

    Hyperbolic lengths scale by the same factor, angles and ratios of distances stay.

    Args:
        x: (..., n). c_in: its curvature. c_out: the new one; None means unchanged.
    """
    if c_out is None or c_in is c_out or (isinstance(c_in, float) and isinstance(c_out, float) and c_in == c_out):
        return x
    point = wide(x)
    return (point * root(like(c_in, point) / like(c_out, point))).to(x.dtype)


def concat(points: Sequence[Tensor]) -> Tensor:
    """The Lorentz concatenation: (..., n_1), (..., n_2), ... -> (..., n_1 + n_2 + ...).

    Space components are joined; the time component that follows is ``sqrt(sum t_i^2 - (N - 1)/c)``. The points must
    share one curvature: see :func:`change_curvature`.
    """
    return torch.cat(list(points), -1)


def split(x: Tensor, sizes: int | Sequence[int]) -> tuple[Tensor, ...]:
    """The inverse of :func:`concat`: parts of the given sizes along the last axis, each a point of its own.

    A fused projection is one wide ``LorentzLinear`` followed by this: ``q, k, v = split(layer(x), dim)``.
    """
    total = x.shape[-1]
    if (total % sizes if isinstance(sizes, int) else sum(sizes) - total) != 0:
        raise ValueError(f"split: the last axis has {total} components, got sizes {sizes}; they must add up to it")
    return x.split(sizes if isinstance(sizes, int) else list(sizes), -1)


def lorentz_residual(
    x: Tensor, y: Tensor, weight: Tensor | float = 1.0, c: Scalar = 1.0, gain: Tensor | float | None = None
) -> Tensor:
    """Weighted centroid of ``x`` and ``y``, the residual connection of the hyperboloid: (..., n), (..., n) -> (..., n).

    Args:
        weight: weight ``a >= 0`` of ``y`` (that of ``x`` is 1); broadcasts with a trailing 1.
        gain: factor on the space components of the result; a centroid pulls inwards, a gain lets go again.
    """
    dtype = torch.promote_types(x.dtype, y.dtype)  # a float32 weight does not widen bfloat16 points
    point = lorentz.residual(x, y, weight, c)
    return (point if gain is None else wide(point) * gain).to(dtype)


class LorentzResidual(nn.Module):
    """Residual connection: the weighted centroid of a point and the output of a branch.

    Args:
        manifold: Lorentz manifold of both inputs and the output.
        weight: positive weight of the branch against weight 1 of the skip.
        gain: factor on the space components of the result; None for none.
        learnable: learn the weight, and the gain if there is one (their logarithms are the parameters).

    Shape:
        x (..., n), y (..., n) -> (..., n)
    """

    def __init__(self, manifold: Lorentz, weight: float = 1.0, gain: float | None = None, learnable: bool = False):
        super().__init__()
        require_space("LorentzResidual", Lorentz, manifold)
        for name, value in (("weight", weight), ("gain", gain)):
            if value is not None and not value > 0:
                raise ValueError(
                    f"LorentzResidual: {name} must be positive, got {value}; a weight of 0 is no branch at all"
                )
        self.manifold = manifold
        self.learnable = learnable
        self.init_weight, self.init_gain = float(weight), None if gain is None else float(gain)
        if learnable:
            # (1,) and not (): fully_shard takes no parameter without an axis
            self.log_weight = nn.Parameter(torch.empty(1))
            self.log_gain = None if gain is None else nn.Parameter(torch.empty(1))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight and the gain back to the values given at construction."""
        if self.learnable:
            nn.init.constant_(self.log_weight, math.log(self.init_weight))
            if self.log_gain is not None and self.init_gain is not None:
                nn.init.constant_(self.log_gain, math.log(self.init_gain))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight: Tensor | float = self.init_weight
        gain: Tensor | float | None = self.init_gain
        if self.learnable:
            weight = self.log_weight.exp()
            gain = None if self.log_gain is None else self.log_gain.exp()
        return lorentz_residual(x, y, weight, self.manifold.c, gain)

    def extra_repr(self) -> str:
        gain = "" if self.init_gain is None else f", gain={self.init_gain:g}"
        return f"weight={self.init_weight:g}{gain}, learnable={self.learnable}"
