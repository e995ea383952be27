"""Multinomial logistic regression: logits are signed distances to hyperplanes, times the length of their normals.

The hyperplane of class k is orthogonal to the direction ``z_k`` and passes at signed distance ``a_k`` from the origin
along it. On the hyperboloid its equation is linear in ``[t, x]``, so all classes are one matrix product and a few
operations per logit; nothing of shape (B, n, K) exists. The Poincaré version lifts its input and is the same code.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hyptree.geometry import Lorentz, Poincare, poincare
from hyptree.geometry.core.numerics import Scalar, root, safe_norm
from hyptree.geometry.core.rows import by_kernels, on_gpu
from hyptree.nn.point_layer import PointLayer, Space, require_features, uniform_
from hyptree.nn.precision import gemm_input
from hyptree.ops.lorentz_mlr import hyperplane_logits
from hyptree.ops.rounding import wide


def lorentz_mlr(x: Tensor, weight: Tensor, offset: Tensor, c: Scalar = 1.0) -> Tensor:
    """``(|z|/s) asinh(s al/|z|)`` with ``al = cosh(s a) x.z - sinh(s a) |z| t`` for every hyperplane ``(z, a)``.

    The logit is ``|z|`` times the signed distance of ``x`` to the hyperplane. ``asinh`` is odd, so no sign and absolute
    value are needed. A hyperplane with ``z = 0`` has logit 0 and no gradient.

    Args:
        x: (..., n) Lorentz points. weight: (K, n) normals ``z``. offset: (K,) signed distances ``a``.

    Returns:
        (..., K) logits, float32 at least.
    """
    return hyperplane_logits(*planes(x, weight, offset, c), c)


def planes(x: Tensor, weight: Tensor, offset: Tensor, c: Scalar) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the operations on hyperplanes take: points as the product reads them, its matrix, time column and scale."""
    if isinstance(c, Tensor) and c.numel() != 1:
        raise ValueError(f"lorentz_mlr: expected one curvature for all points, got c of shape {tuple(c.shape)}")
    x = gemm_input(x)
    dtype = wide(x).dtype
    c = c.to(dtype).reshape(()) if isinstance(c, Tensor) else c
    normal, distance = weight.to(dtype), offset.to(dtype).unsqueeze(-1)
    arranged = by_kernels(_by_class, normal, distance, c) if on_gpu(x) else None
    matrix, time_column, scale = _by_class(normal, distance, c) if arranged is None else arranged
    if torch.compiler.is_compiling():
        # Laid out in memory, so that a compiler does not evaluate them again for every point.
        time_column, scale = torch.cat([time_column.mT, scale.mT]).unbind()
    return x, matrix.to(x.dtype), time_column.view(-1), scale.view(-1)


def _by_class(normal: Tensor, distance: Tensor, c: Scalar) -> tuple[Tensor, Tensor, Tensor]:
    """``s al/|z|`` as a linear map of [x, t], (K, n) and (K, 1), and what its ``asinh`` is multiplied with (K, 1)."""
    s, length, angle = root(c), safe_norm(normal), root(c) * distance
    matrix = normal * (s * torch.cosh(angle) / torch.where(length > 0, length, 1.0))
    return matrix, -s * torch.sinh(angle), length / s


def poincare_mlr(x: Tensor, weight: Tensor, offset: Tensor, c: Scalar = 1.0) -> Tensor:
    """``(2|z|/s) asinh(s lam_x x.z/|z| cosh(2 s r) - (lam_x - 1) sinh(2 s r))`` for every hyperplane ``(z, r)``.

    ``lam_x`` is the conformal factor. This is twice :func:`lorentz_mlr` of the lifted point with ``a = 2r``, and
    is computed as that.

    Args:
        x: (..., n) points of the ball. weight: (K, n) normals ``z``. offset: (K,) ``r`` (Shimizu et al.).

    Returns:
        (..., K) logits, float32 at least.
    """
    return 2 * lorentz_mlr(poincare.to_lorentz(x, c), weight, 2 * offset, c)


class Hyperplanes(PointLayer[Space]):
    """``m`` hyperplanes of R^n as parameters: normals ``weight`` (m, n) and signed distances ``offset`` (m,)."""

    def add_parameters(self, **factory: Any) -> None:
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features, **factory))
        offset = torch.empty(self.out_features, **factory)
        if self.has_bias:
            self.offset = nn.Parameter(offset)
        else:
            self.register_buffer("offset", offset, persistent=False)

    def reset_parameters(self) -> None:
        """Draw normals as the weight of ``nn.Linear``; every hyperplane starts through the origin."""
        uniform_(self.weight, self.in_features)
        nn.init.zeros_(self.offset)


class _Classifier(Hyperplanes[Space]):
    """Hyperplanes whose distances are logits, so nothing has to live on a manifold afterwards."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        manifold: Space,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, num_classes, manifold, bias=bias, device=device, dtype=dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, num_classes={self.out_features}, bias={self.has_bias}"


class LorentzMLR(_Classifier[Lorentz]):
    """Classifier on the hyperboloid: :func:`lorentz_mlr`. Near the origin it is ``nn.Linear`` without bias.

    Args:
        in_features: n. num_classes: K. manifold: Lorentz manifold of the input.
        bias: learn the offsets; without it every hyperplane contains the origin.

    Shape:
        x (..., n) -> (..., K) logits, float32 at least
    """

    space = Lorentz

    def forward(self, x: Tensor) -> Tensor:
        require_features(type(self).__name__, x, self.in_features)
        return lorentz_mlr(x, self.weight, self.offset, self.manifold.c)


class PoincareMLR(_Classifier[Poincare]):
    """Classifier on the Poincaré ball: :func:`poincare_mlr`; arguments and shapes as for :class:`LorentzMLR`."""

    space = Poincare

    def forward(self, x: Tensor) -> Tensor:
        require_features(type(self).__name__, x, self.in_features)
        return poincare_mlr(x, self.weight, self.offset, self.manifold.c)
