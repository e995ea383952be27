"""Linear layers between hyperbolic spaces: Lorentz, Lorentz with a bounded radius, Möbius.

Each is a function and a module that calls it.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.geometry import Lorentz, Poincare, poincare
from hyptree.geometry.core.numerics import Scalar, root, safe_norm, unit
from hyptree.nn.point_layer import PointLayer, require_features, uniform_
from hyptree.nn.precision import ball_store, gemm_input, like, store
from hyptree.nn.residual import change_curvature
from hyptree.ops.affine import affine
from hyptree.ops.bare import readable
from hyptree.ops.rounding import wide


def lorentz_linear(
    x: Tensor,
    weight: Tensor,
    weight_time: Tensor,
    bias: Tensor | None = None,
    c: Scalar = 1.0,
    c_out: Scalar | None = None,
) -> Tensor:
    """``(W [t; x] + b) sqrt(c_in/c_out)`` as space components, one matrix product (Hypformer, HELM).

    Args:
        x: (..., n) Lorentz points. weight: (m, n). weight_time: (m,), the column of ``W`` for ``t``. bias: (m,).
        c: curvature of the input. c_out: of the output, the same if None.

    Returns:
        (..., m) points in the dtype of the matrix product, so bfloat16 inside autocast, as ``F.linear`` gives.
    """
    x = gemm_input(x)
    return change_curvature(affine(x, weight, weight_time, bias, c), c, c_out).to(x.dtype)


class _LorentzAffine(PointLayer[Lorentz]):
    """Weights of ``W [t; x] + b``."""

    space = Lorentz
    extra_rows = 0
    """Rows of ``W`` beyond the m coordinates of the output."""

    def add_parameters(self, **factory: Any) -> None:
        num_rows = self.extra_rows + self.out_features
        self.weight = nn.Parameter(torch.empty(num_rows, self.in_features, **factory))
        self.weight_time = nn.Parameter(torch.empty(num_rows, **factory))
        self.bias = nn.Parameter(torch.empty(num_rows, **factory)) if self.has_bias else None

    def reset_parameters(self) -> None:
        """Draw the weights as ``nn.Linear`` with n + 1 inputs does."""
        for parameter in (self.weight, self.weight_time, self.bias):
            if parameter is not None:
                uniform_(parameter, self.in_features + 1)


@readable
class LorentzLinear(_LorentzAffine):
    """Linear map of ``[t; x]``, read as the space components of a point: :func:`lorentz_linear`.

    For several outputs make one wide layer and :func:`hyptree.nn.split` its result: one product instead of many.

    Args:
        in_features: n, the number of space components. out_features: m.
        manifold: Lorentz manifold of the input; share one object between layers to share a learned curvature.
        manifold_out: of the output, by default the same.
        bias: add a bias to the space components.

    Shape:
        x (..., n) -> (..., m)
    """

    def forward(self, x: Tensor) -> Tensor:
        require_features(type(self).__name__, x, self.in_features)
        return lorentz_linear(x, self.weight, self.weight_time, self.bias, self.manifold.c, self.c_out)


def lorentz_linear_bounded(
    x: Tensor,
    weight: Tensor,
    weight_time: Tensor,
    bias: Tensor | None,
    lam: Tensor | float,
    c: Scalar = 1.0,
    c_out: Scalar | None = None,
    eps_t: float = 0.1,
) -> Tensor:
    """Linear layer whose output has a bounded radius (Chen et al., Fully Hyperbolic Neural Networks).

    With ``u = W [t; x] + b`` the first output sets the time, ``T = lam sigmoid(u_0) + eps_t + 1/s``, and the others the
    direction: ``sqrt(T^2 - 1/c) u/|u|``. If all others are 0 the result is the origin, with zero gradient.

    Args:
        x: (..., n). weight: (1 + m, n). weight_time: (1 + m,). bias: (1 + m,) or None.
        lam: positive, the largest excess of the time over ``1/s``. eps_t: the smallest.
        c: curvature of the input. c_out: of the output, the same if None.

    Returns:
        (..., m) points.
    """
    x = gemm_input(x)
    u = affine(x, weight, weight_time, bias, c)
    s = root(like(c if c_out is None else c_out, u))
    gate, direction = u[..., :1], u[..., 1:]
    excess = lam * torch.sigmoid(gate) + eps_t
    radius = torch.sqrt(excess * (excess + 2 / s))  # T^2 - 1/c, factored so that nothing cancels
    return store(radius * unit(direction, safe_norm(direction)), x.dtype)


class LorentzLinearBounded(_LorentzAffine):
    """Fully hyperbolic linear layer with a bounded, learned output radius: :func:`lorentz_linear_bounded`.

    Args:
        in_features: n. out_features: m. manifold, manifold_out, bias: as for :class:`LorentzLinear`.
        lam: initial largest excess of the time component; learned through its logarithm.
        eps_t: smallest excess, which keeps outputs away from the origin.

    Shape:
        x (..., n) -> (..., m)
    """

    extra_rows = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        manifold: Lorentz,
        manifold_out: Lorentz | None = None,
        bias: bool = True,
        lam: float = 10.0,
        eps_t: float = 0.1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        if not lam > 0 or not eps_t > 0:
            raise ValueError(f"LorentzLinearBounded: lam and eps_t must be positive, got {lam} and {eps_t}")
        self.init_lam, self.eps_t = float(lam), float(eps_t)  # before the parameters are drawn, which reads them
        super().__init__(in_features, out_features, manifold, manifold_out, bias, device, dtype)

    def add_parameters(self, **factory: Any) -> None:
        super().add_parameters(**factory)
        self.log_lam = nn.Parameter(torch.empty(1, device=factory["device"]))  # float32: it scales every output

    def reset_parameters(self) -> None:
        """Draw the weights as ``nn.Linear`` does and set ``lam`` back."""
        super().reset_parameters()
        nn.init.constant_(self.log_lam, math.log(self.init_lam))

    def forward(self, x: Tensor) -> Tensor:
        require_features(type(self).__name__, x, self.in_features)
        lam, c = self.log_lam.exp(), self.manifold.c
        return lorentz_linear_bounded(x, self.weight, self.weight_time, self.bias, lam, c, self.c_out, self.eps_t)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, lam={self.init_lam:g}, eps_t={self.eps_t:g}"


def mobius_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, c: Scalar = 1.0, c_out: Scalar | None = None
) -> Tensor:
    """``(M (x) x) (+) expmap0(b)`` on the Poincaré ball (Ganea et al.).

    ``M (x) x`` is the matrix applied in the tangent space of the origin, ``expmap0(M logmap0(x))``; the product alone
    runs in low precision inside autocast.

    Args:
        x: (..., n) points of the ball. weight: (m, n). bias: (m,) tangent vector at the origin.
        c: curvature of the input. c_out: of the output, the same if None.

    Returns:
        (..., m) points in the dtype of ``x``; close to the boundary every digit of a ball point counts.
    """
    dtype = x.dtype
    tangent = gemm_input(poincare.logmap0(x, c))
    v = wide(F.linear(tangent, weight))
    y = poincare.expmap0(v, c)
    if bias is not None:
        y = poincare.mobius_add(y, poincare.expmap0(wide(bias), c), c)
    return ball_store(change_curvature(y, c, c_out), dtype, c if c_out is None else c_out)


class MobiusLinear(PointLayer[Poincare]):
    """Linear layer of the Poincaré ball: :func:`mobius_linear`.

    Args:
        in_features: n. out_features: m. manifold: Poincare manifold of the input.
        manifold_out: of the output, by default the same. bias: Möbius-add a learned point, stored as tangent vector.

    Shape:
        x (..., n) -> (..., m)
    """

    space = Poincare

    def add_parameters(self, **factory: Any) -> None:
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features, **factory))
        self.bias = nn.Parameter(torch.empty(self.out_features, **factory)) if self.has_bias else None

    def reset_parameters(self) -> None:
        """Draw the weight as ``nn.Linear`` does; the bias starts at the origin."""
        uniform_(self.weight, self.in_features)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        require_features(type(self).__name__, x, self.in_features)
        return mobius_linear(x, self.weight, self.bias, self.manifold.c, self.c_out)
