"""The wrapped normal distribution: a Gaussian at the origin, carried to ``loc`` and wrapped there."""

import math
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from hyptree.geometry import lorentz, poincare
from hyptree.geometry.core.numerics import log_sinhc, root, safe_norm
from hyptree.geometry.manifold import Euclidean, Lorentz, Manifold, Poincare


class WrappedNormal(Distribution):
    """Wrapped normal on a hyperbolic space (or the plain normal on a flat one), reparametrised in every argument.

    A sample is ``expmap(loc, transport(v))`` with ``v`` normal at the origin; lengths of ``v`` are hyperbolic lengths
    in both models. The density is with respect to the Riemannian volume, so Lorentz and Poincaré agree on it.

    Args:
        loc: (..., n) points of ``manifold``.
        scale: positive, broadcasts to (..., n): the standard deviation of each component of ``v``.
        manifold: ``Lorentz()`` if None.
    """

    arg_constraints: ClassVar = {"scale": constraints.positive}
    support = constraints.real_vector
    has_rsample = True

    def __init__(
        self, loc: Tensor, scale: Tensor | float, manifold: Manifold | None = None, validate_args: bool | None = None
    ):
        self.manifold = Lorentz() if manifold is None else manifold
        if not isinstance(self.manifold, (Lorentz, Poincare, Euclidean)):
            raise ValueError(
                f"WrappedNormal: expected Lorentz, Poincare or Euclidean, got {type(self.manifold).__name__}"
            )
        scale = torch.as_tensor(scale, dtype=loc.dtype, device=loc.device)
        shape = torch.broadcast_shapes(loc.shape, scale.shape if scale.dim() else (1,))
        self.loc, self.scale = loc.expand(shape), scale.expand(shape)
        super().__init__(shape[:-1], shape[-1:], validate_args=validate_args)

    def rsample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = ()) -> Tensor:
        """Samples of shape ``sample_shape + batch + (n,)`` that carry gradients to loc, scale and c."""
        shape = self._extended_shape(torch.Size(sample_shape))
        v = self.scale * torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        if isinstance(self.manifold, Euclidean):
            return self.loc + v
        c, loc = self.manifold.c, self._lorentz(self.loc)
        z = lorentz.expmap(loc, lorentz.transport_from_origin(loc, v, c), c)
        return poincare.from_lorentz(z, c) if isinstance(self.manifold, Poincare) else z

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density with respect to the Riemannian volume: (..., n) -> (...)."""
        if isinstance(self.manifold, Euclidean):
            return self._log_normal(value - self.loc)
        c, loc = self.manifold.c, self._lorentz(self.loc)
        v = lorentz.transport_to_origin(loc, lorentz.logmap(loc, self._lorentz(value), c), c)
        volume = log_sinhc(root(c) * safe_norm(v)).squeeze(-1)
        return self._log_normal(v) - (v.shape[-1] - 1) * volume

    def _lorentz(self, x: Tensor) -> Tensor:
        return poincare.to_lorentz(x, self.manifold.c) if isinstance(self.manifold, Poincare) else x

    def _log_normal(self, v: Tensor) -> Tensor:
        standard = (v / self.scale).square() + math.log(2 * math.pi)
        return -(standard / 2 + self.scale.log()).sum(-1)
