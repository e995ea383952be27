"""Manifolds as small modules: the pure functions of each space with the curvature filled in.

All answer the same questions, so a model takes a ``Manifold`` and never asks which one it is.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hyptree.geometry import euclidean, lorentz, poincare, sphere
from hyptree.geometry.core import debug
from hyptree.geometry.core.curvature import Curvature
from hyptree.geometry.core.numerics import Scalar, root, safe_norm


class Manifold(nn.Module):
    """A space of constant curvature. ``c`` is a float, or a tensor if it is learned or differs between heads."""

    functions: ModuleType
    curvature: Curvature | None

    def __init__(self, curvature: Curvature | None = None):
        super().__init__()
        self.curvature = curvature

    @property
    def c(self) -> Scalar:
        """The curvature constant; the sectional curvature is ``-c`` (``+c`` on a sphere)."""
        return self.curvature() if self.curvature is not None else 0.0

    def _call(self, name: str, *args: Any, **options: Any) -> Tensor:
        tail = () if self.curvature is None else (self.c,)
        return getattr(self.functions, name)(*args, *tail, **options)

    def expmap0(self, v: Tensor) -> Tensor:
        """Point reached from the origin with velocity ``v``."""
        return self._call("expmap0", v)

    def logmap0(self, x: Tensor) -> Tensor:
        """Tangent vector at the origin that points to ``x``."""
        return self._call("logmap0", x)

    def expmap(self, x: Tensor, v: Tensor) -> Tensor:
        """Point reached from ``x`` with velocity ``v``."""
        return self._call("expmap", x, v)

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """Tangent vector at ``x`` that points to ``y``."""
        return self._call("logmap", x, y)

    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        """Distance of ``x`` and ``y``."""
        return self._call("dist", x, y)

    def dist0(self, x: Tensor) -> Tensor:
        """Distance to the origin."""
        return self._call("dist0", x)

    def sqdist(self, x: Tensor, y: Tensor) -> Tensor:
        """Squared distance, smooth where the points meet."""
        return self._call("sqdist", x, y)

    def pairwise_dist(self, x: Tensor, y: Tensor, mode: str = "exact", **options: Any) -> Tensor:
        """All distances of two sets: (..., N, n), (..., M, n) -> (..., N, M); ``mode`` is "exact" or "matmul"."""
        return self._call("pairwise_dist", x, y, mode=mode, **options)

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Riemannian inner product of two tangent vectors at ``x``."""
        return self._call("inner", x, u, v)

    def norm(self, x: Tensor, v: Tensor) -> Tensor:
        """Riemannian length of a tangent vector at ``x``."""
        return self._call("norm", x, v)

    def centroid(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Weighted centroid: (..., N, n), weights (..., N) -> (..., n)."""
        return self._call("centroid", x, weights)

    def transport(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Parallel transport of ``v`` from ``x`` to ``y``."""
        return self._call("transport", x, y, v)

    def geodesic(self, x: Tensor, y: Tensor, tau: Scalar) -> Tensor:
        """Point at the fraction ``tau`` of the way from ``x`` to ``y``."""
        return self._call("geodesic", x, y, tau)

    def egrad2rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        """Riemannian gradient from the gradient of the coordinates."""
        return self._call("egrad2rgrad", x, g)

    def origin(self, *shape: int, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """The origin, repeated to ``shape`` (last axis: coordinates)."""
        return torch.zeros(*shape, dtype=dtype, device=device)

    def random(
        self,
        *shape: int,
        std: float = 1.0,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> Tensor:
        """Random points: the exponential map of normal tangent vectors with ``std`` per component."""
        return self.expmap0(torch.randn(*shape, generator=generator, dtype=dtype, device=device) * std)

    def saturation(self, x: Tensor) -> Tensor:
        """Fraction of rows at the limit of the dtype, a number to log during training."""
        return self._call("saturation", x)

    def check(self, x: Tensor) -> Tensor:
        """``x`` itself if every row is a point, else a :class:`GeometryError` that names the first row that is not."""
        if not x.is_floating_point():
            raise ValueError(f"{type(self).__name__}: points have a floating dtype, got {x.dtype}; call .float()")
        debug.require_finite(type(self).__name__, "the points", x)
        bad = self._outside(x)
        if bool(bad.any()):
            raise debug.GeometryError(
                f"{type(self).__name__}: not a point of the space, {debug.first_bad_row(bad)} of shape "
                f"{tuple(x.shape)}; {self._membership}"
            )
        return x

    _membership = ""

    def _outside(self, x: Tensor) -> Tensor:
        return torch.zeros(x.shape[:-1], dtype=torch.bool, device=x.device)


class _Curved(Manifold):
    def __init__(
        self,
        c: float | Tensor | Curvature = 1.0,
        learnable: bool = False,
        min: float | None = None,
        max: float | None = None,
    ):
        super().__init__(c if isinstance(c, Curvature) else Curvature(c, learnable, min, max))


class _Hyperbolic(_Curved):
    def exterior_angle(self, x: Tensor, y: Tensor) -> Tensor:
        """Angle at ``x`` between the ray from the origin and the geodesic to ``y``."""
        return self._call("exterior_angle", x, y)

    def half_aperture(self, x: Tensor, K: float = 0.1) -> Tensor:
        """Half aperture of the entailment cone at ``x``."""
        return self._call("half_aperture", x, K=K)

    def cone_energy(self, x: Tensor, y: Tensor, K: float = 0.1, eta: float = 1.0) -> Tensor:
        """How far ``y`` lies outside the entailment cone of ``x``."""
        return self._call("cone_energy", x, y, K=K, eta=eta)


class Lorentz(_Hyperbolic):
    """The hyperboloid of curvature ``-c``; points are their space components (..., n).

    Args:
        c: positive float, tensor that broadcasts with a trailing 1, or a :class:`Curvature` to share.
        learnable: learn ``c`` (its logarithm is the parameter). min, max: optional bounds of a learned ``c``.
    """

    functions = lorentz

    def to_ambient(self, x: Tensor) -> Tensor:
        """Ambient coordinates, time first: (..., n) -> (..., n + 1)."""
        return lorentz.to_ambient(x, self.c)

    def from_ambient(self, x: Tensor, check: bool = False) -> Tensor:
        """Space components of ambient points, time first."""
        return lorentz.from_ambient(x, self.c, check=check)


class Poincare(_Hyperbolic):
    """The Poincaré ball of radius ``1/sqrt(c)`` and curvature ``-c``; arguments as for :class:`Lorentz`."""

    functions = poincare
    _membership = "points of the ball satisfy sqrt(c) |x| < 1, use expmap0 to map into it"

    def to_ambient(self, x: Tensor) -> Tensor:
        """Ambient hyperboloid coordinates, time first: (..., n) -> (..., n + 1)."""
        return lorentz.to_ambient(poincare.to_lorentz(x, self.c), self.c)

    def from_ambient(self, x: Tensor, check: bool = False) -> Tensor:
        """Ball point of ambient hyperboloid coordinates, time first."""
        return poincare.from_lorentz(lorentz.from_ambient(x, self.c, check=check), self.c)

    def random(self, *shape: int, std: float = 1.0, **options: Any) -> Tensor:
        """Random points with the same distances from the origin as ``Lorentz.random`` gives."""
        return super().random(*shape, std=std / 2, **options)

    def _outside(self, x: Tensor) -> Tensor:
        return (root(self.c) * safe_norm(x) >= 1).squeeze(-1)


class Euclidean(Manifold):
    """Flat space, the twin that every comparison needs."""

    functions = euclidean

    def saturation(self, x: Tensor) -> Tensor:
        """Zero: flat space has no limit."""
        return x.new_zeros(())


class Sphere(_Curved):
    """The sphere of curvature ``+c``; points are ambient vectors of length ``1/sqrt(c)``, origin at the pole."""

    functions = sphere
    _membership = "points of the sphere satisfy sqrt(c) |x| = 1, use functions.project"

    def origin(self, *shape: int, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """The pole ``(1/s, 0, ..., 0)``, repeated to ``shape``."""
        return sphere.project(torch.zeros(*shape, dtype=dtype, device=device), self.c)

    def random(self, *shape: int, std: float = 1.0, **options: Any) -> Tensor:
        """Points spread evenly over the sphere; ``std`` has no meaning here."""
        return sphere.project(torch.randn(*shape, **options), self.c)

    def saturation(self, x: Tensor) -> Tensor:
        """Zero: the sphere has no limit."""
        return x.new_zeros(())

    def _outside(self, x: Tensor) -> Tensor:
        return ((root(self.c) * safe_norm(x) - 1).abs() > 1e-3).squeeze(-1)


def _is_part(part: object) -> bool:
    if not isinstance(part, Sequence) or len(part) != 2:
        return False
    return isinstance(part[0], Manifold) and isinstance(part[1], int) and part[1] > 0


class Product(Manifold):
    """A product of spaces on consecutive parts of the last axis.

    Args:
        parts: pairs of a manifold and its number of coordinates, as in ``Product([(Lorentz(), 8), (Euclidean(), 4)])``.
    """

    def __init__(self, parts: Sequence[tuple[Manifold, int]]):
        super().__init__()
        if not isinstance(parts, Sequence) or not parts or not all(_is_part(part) for part in parts):
            raise ValueError(
                f"Product: expected pairs of a manifold and its number of coordinates, as in "
                f"Product([(Lorentz(), 8), (Euclidean(), 4)]), got {' '.join(repr(parts).split())}"
            )
        self.factors = nn.ModuleList([manifold for manifold, _ in parts])
        self.sizes = [int(size) for _, size in parts]

    @property
    def parts(self) -> list[Manifold]:
        """The manifolds, in the order of their coordinates."""
        return list(self.factors)  # type: ignore[arg-type]

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        if x.shape[-1] != sum(self.sizes):
            raise ValueError(
                f"Product: the parts have {' + '.join(map(str, self.sizes))} = {sum(self.sizes)} coordinates, "
                f"got a last axis of {x.shape[-1]}"
            )
        return x.split(self.sizes, -1)

    def _call(self, name: str, *args: Any, **options: Any) -> Tensor:
        split = [self._split(a) for a in args]
        each = [getattr(part, name)(*(s[i] for s in split), **options) for i, part in enumerate(self.parts)]
        if name in ("dist", "dist0", "norm", "pairwise_dist"):
            return _root_of_sum([d.square() for d in each])
        if name in ("sqdist", "inner"):
            return torch.stack(each).sum(0)
        return torch.cat(each, -1)

    def centroid(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Weighted centroid of each part."""
        return torch.cat([p.centroid(xi, weights) for p, xi in zip(self.parts, self._split(x), strict=True)], -1)

    def geodesic(self, x: Tensor, y: Tensor, tau: Scalar) -> Tensor:
        """Point at the fraction ``tau`` of the way, in each part."""
        pairs = zip(self.parts, self._split(x), self._split(y), strict=True)
        return torch.cat([p.geodesic(xi, yi, tau) for p, xi, yi in pairs], -1)

    def origin(self, *shape: int, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """The origin of every part, repeated to ``shape``."""
        sizes = zip(self.parts, self._split(torch.empty(*shape, device="meta")), strict=True)
        return torch.cat([p.origin(*part.shape, dtype=dtype, device=device) for p, part in sizes], -1)

    def random(self, *shape: int, **options: Any) -> Tensor:
        """Random points of every part."""
        sizes = zip(self.parts, self._split(torch.empty(*shape, device="meta")), strict=True)
        return torch.cat([p.random(*part.shape, **options) for p, part in sizes], -1)

    def saturation(self, x: Tensor) -> Tensor:
        """Largest saturation of the parts."""
        return torch.stack([p.saturation(xi) for p, xi in zip(self.parts, self._split(x), strict=True)]).amax()

    def check(self, x: Tensor) -> Tensor:
        """``x`` itself if every part of every row is a point."""
        for part, xi in zip(self.parts, self._split(x), strict=True):
            part.check(xi)
        return x


def _root_of_sum(squares: list[Tensor]) -> Tensor:
    total = torch.stack(squares).sum(0)
    ok = total != 0
    return torch.where(ok, torch.where(ok, total, 1.0).sqrt(), 0.0)
