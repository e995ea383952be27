"""Radial embeddings: how far from the root, in which direction from there on, and losses that align text with it.

The root is the embedding of the empty text. What lies near it is general, and ``e`` entails ``f`` when ``f`` continues
outward from ``e``: the exterior angle at ``e`` of the triangle root, e, f is small. Three geometries measure it:

* ``chord``: straight lines between unit vectors (the paper). Never 0 on a sphere: for arcs a (root to e) and b (e to f)
  on one great circle the angle is (a + b) / 2, so only angles of texts at a similar distance compare.
* ``geodesic``: arcs of the sphere; 0 for perfect radial order.
* ``lorentz``: points of the hyperboloid by their space components, for MERU-like models; the root is its origin.

Angles come from ``atan2``, not from ``acos``: no clip, bounded slopes. Everything is computed in float64, also inside
autocast, and given back in the dtype of the input, at least float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hyptree.errors import require_one_of
from hyptree.geometry import lorentz, sphere
from hyptree.geometry.core.numerics import dot, safe_norm, unit, wide

GEOMETRIES = ("chord", "geodesic", "lorentz")


def exterior_angle(
    e: Tensor, further: Tensor, root: Tensor | None = None, *, geometry: str = "chord", c: float | Tensor = 1.0
) -> Tensor:
    """Angle at ``e`` between the way that comes from the root and the way on to ``further``, in [0, pi].

    Small: ``further`` continues outward, ``e`` entails it; pi: it goes straight back. 0 where both coincide to
    rounding, pi/2 where ``e`` is the root: there is no direction then, and the gradient is zero.

    Args:
        e, further: (..., d) more general and more specific points -> (...) radians.
        root: (d) or (..., d); not needed for "lorentz".
        geometry: see the module; "geodesic" expects unit vectors. The curvature of "lorentz" is ``-c``.
    """
    _check(geometry, root)
    with torch.autocast(e.device.type, enabled=False):
        dtype = _result_dtype(e)
        e, further = wide(e), wide(further)
        if geometry == "lorentz":
            apart = ~coincide(e, further, dtype)
            away = torch.where(apart[..., None], further, 2 * e)  # any harmless point; its angle is not used
            return torch.where(apart, lorentz.exterior_angle(e, away, wide(c)), 0.0).to(dtype)
        assert root is not None
        root = wide(root).expand_as(e)
        if geometry == "geodesic":
            outward, onward = -_tangent(e, root), _tangent(e, further)
        else:
            outward, onward = e - root, further - e
        at_root, same = coincide(e, root, dtype), coincide(e, further, dtype)
        angle = _angle(outward, onward, ~(at_root | same))
        return torch.where(at_root, math.pi / 2, torch.where(same, 0.0, angle)).to(dtype)


def root_distance(e: Tensor, root: Tensor | None = None, *, geometry: str = "chord", c: float | Tensor = 1.0) -> Tensor:
    """Distance from the root, small for general texts: chord, arc, or hyperbolic distance to the origin, (...)."""
    _check(geometry, root)
    with torch.autocast(e.device.type, enabled=False):
        dtype = _result_dtype(e)
        if geometry == "lorentz":
            return lorentz.dist0(wide(e), wide(c)).to(dtype)
        assert root is not None
        e, root = wide(e), wide(root).expand_as(e)
        return (sphere.dist(e, root) if geometry == "geodesic" else safe_norm(e - root).squeeze(-1)).to(dtype)


def cone_energy(
    e: Tensor,
    further: Tensor,
    root: Tensor | None = None,
    *,
    geometry: str = "chord",
    size: float = 0.1,
    c: float | Tensor = 1.0,
) -> Tensor:
    """How far ``further`` lies outside the entailment cone of ``e``: ``max(0, angle - asin(size / distance))``.

    The half-angle is pi/2 where ``e`` is closer to the root than ``size``. On the hyperboloid it is
    ``asin(2 size / (s|e|))``.
    """
    angle = exterior_angle(e, further, root, geometry=geometry, c=c)
    if geometry == "lorentz":
        half: Tensor = lorentz.half_aperture(wide(e), wide(c), K=size).to(angle.dtype)
    else:
        distance = wide(root_distance(e, root, geometry=geometry))
        opens = distance <= size
        inside = torch.asin(size / torch.where(opens, 2 * size, distance))
        half = torch.where(opens, math.pi / 2, inside).to(angle.dtype)
    return torch.relu(angle - half)


def coincide(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Whether two embeddings differ by no more than rounding in the dtype they were made in, (...) bool.

    Their difference has no direction then: an angle would be noise, and its slope, the inverse of the distance, huge.
    """
    eps = torch.finfo(dtype or _result_dtype(a)).eps
    a, b = a.detach(), b.detach()
    size = a.norm(dim=-1) + b.norm(dim=-1)
    return (a - b).norm(dim=-1) <= 64 * eps * size


def _angle(a: Tensor, b: Tensor, ok: Tensor) -> Tensor:
    """Angle between vectors (...,), where ``ok``; elsewhere any number with zero gradient."""
    axis = F.one_hot(torch.zeros((), dtype=torch.long, device=a.device), a.shape[-1]).to(a)
    a, b = (torch.where(ok[..., None], v, axis) for v in (a, b))
    return sphere.dist(unit(a, safe_norm(a)), unit(b, safe_norm(b)))


def _tangent(x: Tensor, y: Tensor) -> Tensor:
    """Direction at ``x`` of the great circle to ``y``, of no particular length."""
    step = y - x
    return step - dot(x, step) * x / dot(x, x)


def _result_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _check(geometry: str, root: Tensor | None) -> None:
    require_one_of("geometry", geometry, GEOMETRIES)
    if root is None and geometry != "lorentz":
        raise ValueError(f"geometry {geometry!r} needs the root, the embedding of the empty text")


# ------------------------------------------------------------------------------------------------------------- losses


@dataclass
class RadialTerms:
    """What a loss is made of; ``total`` is to be minimised."""

    total: Tensor
    entail: Tensor
    hard: Tensor
    """The same for the worst pairs, 0 where it is off."""
    keep: Tensor
    """How far embeddings left their first place."""
    positive: Tensor
    """Mean angle from a caption to the next more specific one."""
    negative: Tensor
    """The same to its negative."""


class RadialLoss(nn.Module):
    """Aligns chains of captions outward from the root: ``entail + hard + keep``, weighted.

    With ``P = angle(e_l, e_l+1)`` and ``N = angle(e_l, n_l)`` over all levels but the last::

        entail = mean(P) - mean(N)
        hard   = (P - N)[argmax P] + (P - N)[argmin N]
        keep   = mean over all texts of (1 - cos(e, e*)) / 2,     e* = embedding before training

    The negative of the last level is used by ``keep`` alone. A negative that coincides with its caption is never the
    hardest: it has no direction.

    Embeddings are normalised for "chord" (the paper) and "geodesic"; the curvature of "lorentz" is ``-c``.

    Shape:
        positive, negative (B, L, d); root (d,); first_positive, first_negative (B, L, d) or None -> RadialTerms
    """

    def __init__(
        self,
        weights: Sequence[float] = (1.0, 1.0, 10.0),
        geometry: str = "chord",
        hard: bool = True,
        c: float = 1.0,
    ):
        super().__init__()
        if len(weights) != 3 or not all(math.isfinite(weight) and weight >= 0 for weight in weights):
            raise ValueError(f"weights must be three numbers from 0 on (entail, hard, keep), got {tuple(weights)}")
        require_one_of("geometry", geometry, GEOMETRIES)
        self.weights, self.geometry, self.hard, self.c = tuple(map(float, weights)), geometry, hard, c

    def forward(
        self,
        positive: Tensor,
        negative: Tensor,
        root: Tensor | None = None,
        first_positive: Tensor | None = None,
        first_negative: Tensor | None = None,
    ) -> RadialTerms:
        """The terms; without first embeddings ``keep`` is 0."""
        if positive.ndim != 3 or positive.shape != negative.shape or positive.shape[1] < 2:
            raise ValueError(
                "expected positive and negative of one shape (B, L, d) with at least two levels, "
                f"got {tuple(positive.shape)} and {tuple(negative.shape)}"
            )
        keep = (_moved(positive, first_positive) + _moved(negative, first_negative)) / 2
        if self.geometry != "lorentz" and root is not None:
            positive, negative, root = (F.normalize(x, dim=-1) for x in (positive, negative, root))
        entail, hard, P, N = self._entailment(positive, negative, root)
        total = self.weights[0] * entail + self.weights[1] * hard + self.weights[2] * keep
        return RadialTerms(total, entail, hard, keep, P.mean(), N.mean())

    def _entailment(
        self, positive: Tensor, negative: Tensor, root: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The entailment and the hard term, and the angles (B, L - 1) of positives and negatives."""
        e, further, wrong = positive[:, :-1], positive[:, 1:], negative[:, :-1]
        P = exterior_angle(e, further, root, geometry=self.geometry, c=self.c)
        N = exterior_angle(e, wrong, root, geometry=self.geometry, c=self.c)
        hard = P.new_zeros(())
        if self.hard:
            gap = (P - N).flatten()
            closest = N.detach().masked_fill(coincide(e, wrong), math.inf)
            hard = gap[P.detach().argmax()] + gap[closest.argmin()]
        return P.mean() - N.mean(), hard, P, N

    def extra_repr(self) -> str:
        """For ``print(loss)``."""
        return f"weights={self.weights}, geometry={self.geometry!r}, hard={self.hard}"


class ConeLoss(RadialLoss):
    """The same with entailment cones, for comparison: ``mean(E_P) + mean(max(0, margin - E_N))``.

    ``E`` is :func:`cone_energy`. Once a caption is inside its cone it is not pulled further; ``hard`` adds the same for
    the worst positive and the worst negative.

    Args:
        size: of the cones: the distance to the root at which they open to a half space.
        margin: how far outside a negative must lie, in radians.
    """

    def __init__(self, *args: Any, size: float = 0.1, margin: float = 0.5, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if not size > 0 or not margin >= 0:
            raise ValueError(f"size must be positive and margin 0 or more, got {size} and {margin}")
        self.size, self.margin = size, margin

    def _entailment(
        self, positive: Tensor, negative: Tensor, root: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        e, further, wrong = positive[:, :-1], positive[:, 1:], negative[:, :-1]
        options: dict[str, Any] = {"geometry": self.geometry, "c": self.c}
        inside = cone_energy(e, further, root, size=self.size, **options)
        outside = torch.relu(self.margin - cone_energy(e, wrong, root, size=self.size, **options))
        hard = inside.max() + outside.max() if self.hard else inside.new_zeros(())
        with torch.no_grad():
            P, N = (exterior_angle(e, other, root, **options) for other in (further, wrong))
        return inside.mean() + outside.mean(), hard, P, N


def _moved(now: Tensor, first: Tensor | None) -> Tensor:
    """Mean of ``(1 - cos) / 2`` between embeddings and their first place, in at least float32."""
    if first is None:
        return now.new_zeros((), dtype=_result_dtype(now))
    with torch.autocast(now.device.type, enabled=False):
        dtype = _result_dtype(now)
        a, b = F.normalize(now.to(dtype), dim=-1), F.normalize(first.to(now.device, dtype), dim=-1)
        return (a - b).square().sum(-1).mean() / 4  # (1 - cos) / 2 of unit vectors, exactly 0 where nothing moved
