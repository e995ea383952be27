"""One step for rows that are points: pure tensor code, in place, any number of rows at once.

Tangent vectors are kept in the *radial frame*: the vector moved to the origin along the geodesic through it, in
orthonormal coordinates there. Lorentz and Poincaré then share their formulas, since

* the Euclidean length of a row is its Riemannian length, however far out the point is: nothing cancels or overflows;
* a move along a ray leaves the coordinates of every tangent vector alone, so weight decay has nothing to transport;
* parallel transport from ``x`` to ``y`` turns the plane of ``x`` and ``y`` by the angle at which the triangle
  (origin, x, y) falls short of pi, and leaves the rest alone.

Everything happens in the plane of ``x`` and the step, so a step costs a few numbers per row and about a dozen passes
over the (R, n) tensors. The sphere and flat space use their ambient coordinates, which are orthonormal already.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from hyptree.geometry import sphere
from hyptree.geometry.core.numerics import Scalar, ball_limit, dot, lorentz_limit, root, sinh

Kind = Literal["lorentz", "poincare", "euclidean", "sphere"]
Part = tuple[Kind, int]
"""A space and how many coordinates it has; a manifold is a sequence of parts, one unless it is a product."""


def row_gradient(x: Tensor, g: Tensor, parts: Sequence[Part], cs: Sequence[Scalar]) -> Tensor:
    """Riemannian gradient (R, n) in the radial frame, from the gradient ``g`` of the coordinates. May return ``g``."""
    if len(parts) == 1:
        return _part_gradient(x, g, parts[0][0], cs[0])
    sizes = [size for _, size in parts]
    each = zip(x.split(sizes, -1), g.split(sizes, -1), parts, cs, strict=True)
    return torch.cat([_part_gradient(xi, gi, part[0], c) for xi, gi, part, c in each], -1)


def _part_gradient(x: Tensor, g: Tensor, kind: Kind, c: Scalar) -> Tensor:
    if kind == "lorentz":
        # h = g + c (x.g) x, moved to the origin; its radial part is cosh(a) times that of g. Where a point sits at the
        # limit of the dtype that factor is 1e17: bounded, so that the squares taken later stay finite.
        r = _length(x)
        factor = c / (1 + torch.sqrt(1 + c * r * r))
        bound = _longest(x.dtype) / r.clamp_min(1.0)
        return torch.addcmul(g, x, torch.clamp(factor * dot(x, g), -bound, bound))
    if kind == "poincare":
        z = root(c) * _length(x)
        return g * ((1 - z.clamp_max(ball_limit(x.dtype))) * (1 + z) / 2)
    if kind == "sphere":
        return torch.addcmul(g, x, -c * dot(x, g))
    return g


def decay_rows(
    x: Tensor, vectors: Sequence[Tensor], factor: Scalar, parts: Sequence[Part], cs: Sequence[Scalar]
) -> None:
    """Pull ``x`` towards the origin to ``factor`` times its distance, ``expmap0(factor * logmap0(x))``, in place.

    Args:
        vectors: tangent vectors at ``x`` in the radial frame, carried along.
    """
    sizes = [size for _, size in parts]
    each = [[t] if len(parts) == 1 else t.split(sizes, -1) for t in (x, *vectors)]
    columns = zip(*each, strict=True)
    for (xi, *vi), (kind, _), c in zip(columns, parts, cs, strict=True):
        if kind == "sphere":
            y = sphere.expmap0(factor * sphere.logmap0(xi, c), c)
            for v in vi:
                v.copy_(sphere.transport(xi, y, v, c))
            xi.copy_(y)
        elif kind == "euclidean":
            xi.mul_(factor)
        else:
            z = root(c) * _length(xi)
            if kind == "lorentz":
                new = _sinh(factor * _asinh(z))
            else:
                new = torch.tanh(factor * torch.atanh(z.clamp_max(ball_limit(xi.dtype))))
            xi.mul_(torch.where(z > 0, new / torch.where(z > 0, z, 1.0), 1.0))


def limit_step(step: Scalar, direction: Tensor, max_step: float) -> Tensor:
    """``step`` shortened where ``step * |direction|`` is longer than ``max_step``."""
    length = step * torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
    over = length > max_step
    return torch.where(over, step * (max_step / torch.where(over, length, 1.0)), step)


def move_rows(
    x: Tensor,
    direction: Tensor,
    step: Scalar,
    carried: Tensor | None,
    parts: Sequence[Part],
    cs: Sequence[Scalar],
    first_order: bool,
    max_step: float | None = None,
    decay: Scalar | None = None,
) -> None:
    """Move ``x`` to ``expmap(x, -step * direction)`` and transport ``carried`` along, both in place.

    Args:
        direction: (R, n) tangent vectors in the radial frame.
        step: not negative, a number or (R, 1).
        carried: (R, n) tangent vectors in the radial frame, often ``direction`` itself; None if nothing is carried.
        first_order: add the step to the coordinates instead of following the geodesic.
        max_step: shortens longer steps to this length.
        decay: pulls the points to the origin before, see ``decay_rows``; changes ``direction`` in place too.
    """
    if max_step is not None:
        step = limit_step(step, direction, max_step)
    if decay is not None:
        decay_rows(
            x, [direction] if carried is None or carried is direction else [direction, carried], decay, parts, cs
        )
    if len(parts) == 1:
        return _move_part(x, direction, step, carried, parts[0][0], cs[0], first_order)
    sizes = [size for _, size in parts]
    same = carried is direction
    xs, ds = x.split(sizes, -1), direction.split(sizes, -1)
    ms = ds if same else [None] * len(parts) if carried is None else carried.split(sizes, -1)
    for xi, di, mi, (kind, _), c in zip(xs, ds, ms, parts, cs, strict=True):
        _move_part(xi, di, step, mi, kind, c, first_order)


def _move_part(
    x: Tensor, direction: Tensor, step: Scalar, carried: Tensor | None, kind: Kind, c: Scalar, first_order: bool
) -> None:
    if kind == "euclidean":
        x.sub_(step * direction)
    elif kind == "sphere":
        u = -step * direction
        y = sphere.project(x + u if first_order else sphere.expmap(x, u, c), c)  # project: rounding must not add up
        if carried is not None:
            carried.copy_(sphere.project_tangent(y, sphere.transport(x, y, carried, c), c))
        x.copy_(y)
    else:
        _move_hyperbolic(x, direction, step, carried, kind == "lorentz", c, first_order)


def _move_hyperbolic(
    x: Tensor, direction: Tensor, step: Scalar, carried: Tensor | None, lorentz: bool, c: Scalar, first_order: bool
) -> None:
    """``_move_part`` for both models of hyperbolic space."""
    s = root(c)
    r = _length(x)
    some = r > 0
    over_r = torch.where(some, 1 / torch.where(some, r, 1.0), 0.0)
    # The step in the plane of x and the direction: `along` the ray of x, and `across` it.
    d_along = dot(x, direction) * over_r
    across = torch.addcmul(direction, x, -d_along * over_r)
    d_across = _length(across)
    length = torch.hypot(d_along, d_across)
    moving = length > 0
    safe_length = torch.where(moving, length, 1.0)
    z = s * step * length
    cos, sin = -d_along / safe_length, d_across / safe_length

    # A point at radius a is stored as sinh(a)/s in the Lorentz model, as tanh(a/2)/s (`half`) in the ball.
    if lorentz:
        sinh_a = s * r
        half, short = _half_tanh(sinh_a)
        cosh_a = torch.sqrt(1 + sinh_a * sinh_a)
    else:
        half = (s * r).clamp_max(ball_limit(x.dtype))
        short = 1 - half
        gap = short * (1 + half)
        sinh_a, cosh_a = 2 * half / gap, (1 + half * half) / gap
    if first_order and not lorentz:
        new_along, new_across = half + (gap / 2) * z * cos, (gap / 2) * z * sin
        new_half = torch.hypot(new_along, new_across)
        new_short = 1 - new_half
    else:
        new_along, new_across = _new_position(z, cos, sin, sinh_a, cosh_a, lorentz_limit(s, x.dtype), first_order)
        radius = torch.hypot(new_along, new_across)
        new_half, new_short = _half_tanh(radius)
    if lorentz:
        to_half = new_half / torch.where(radius > 0, radius, 1.0)
        half_along, half_across = new_along * to_half, new_across * to_half
    else:
        if not first_order:
            to_half = new_half / torch.where(radius > 0, radius, 1.0)
            new_along, new_across = new_along * to_half, new_across * to_half
        over = new_half > ball_limit(x.dtype)
        shrink = torch.where(over, ball_limit(x.dtype) / torch.where(over, new_half, 1.0), 1.0)
        new_half, new_short = new_half * shrink, torch.where(over, 1 - ball_limit(x.dtype), new_short)
        half_along, half_across = new_along, new_across = new_along * shrink, new_across * shrink

    over_across = torch.where(d_across > 0, -1 / torch.where(d_across > 0, d_across, 1.0), 0.0)
    if carried is not None:
        # With e = tanh(a/2) tanh(a'/2) exp(i phi), phi the angle from x to y, the frame turns by 2 arg(1 - e). The real
        # part of 1 - e is a sum of positive terms, as far out e is close to 1.
        forward = half_along > 0
        bend = torch.where(
            forward, half_across.square() / torch.where(forward, new_half + half_along, 1.0), new_half - half_along
        )
        real, imag = short + half * (new_short + bend), -half * half_across
        total = real.square() + imag.square()
        total = torch.where(total > 0, total, 1.0)
        cos_minus_1, sin_turn = -2 * imag.square() / total, 2 * real * imag / total
        if carried is direction:
            m_along, m_across = d_along, -d_across
        else:
            m_along, m_across = dot(x, carried) * over_r, dot(across, carried) * over_across
        turn_x = (cos_minus_1 * m_along - sin_turn * m_across) * over_r
        turn_across = (sin_turn * m_along + cos_minus_1 * m_across) * over_across
    else:
        turn_x = turn_across = torch.zeros_like(over_across)

    # A row that does not move keeps its bits.
    keep = torch.where(some & moving, new_along * (over_r / s), 1.0)
    move = new_across * (over_across / s)
    if torch.compiler.is_compiling():
        # Laid out in memory, so that a compiler does not evaluate the formulas above again for every column.
        keep, move, turn_x, turn_across = torch.cat([keep, move, turn_x, turn_across], -1).split(1, -1)
    if carried is not None:
        carried.addcmul_(x, turn_x).addcmul_(across, turn_across)
    x.mul_(keep).addcmul_(across, move)


def _new_position(
    z: Tensor, cos: Tensor, sin: Tensor, sinh_a: Tensor, cosh_a: Tensor, limit: Scalar, first_order: bool
) -> tuple[Tensor, Tensor]:
    """Where a step of length ``z`` from radius ``a`` ends: ``sinh(a')`` along the old ray and across it, (R, 1) each.

    The textbook sum ``cosh(z) sinh(a) + sinh(z) cosh(a) cos`` loses digits when a long step goes inwards, and overflows
    when it ends beyond the limit of the dtype; there ``sinh(a +- z)`` is used. The result is capped at the limit.
    """
    longest = sinh(limit)
    if first_order:
        z = torch.clamp(z, max=longest)
        along, across = sinh_a + z * cos * cosh_a, z * sin
    else:
        a = _asinh(sinh_a)
        z = torch.minimum(z, limit + a)
        long = (a + z > limit) | ((z > 1) & (cos < 0))
        sinh_half = _sinh(z / 2)
        sinh_z = 2 * sinh_half * torch.sqrt(1 + sinh_half * sinh_half)
        near = sinh_a + (2 * sinh_half * sinh_half * sinh_a + sinh_z * cos * cosh_a)
        # 1 + |cos| and 1 - |cos|, the small one from the sine.
        large = 1 + cos.abs()
        small = sin * sin / large
        out, back = _sinh(torch.clamp(a + z, max=2 * limit)), _sinh(a - z)
        far = torch.where(cos > 0, out * large + back * small, out * small + back * large) / 2
        along, across = torch.where(long, far, near), sinh_z * sin
    radius = torch.hypot(along, across)
    shrink = torch.where(radius > longest, longest / torch.where(radius > 0, radius, 1.0), 1.0)
    return along * shrink, across * shrink


def _half_tanh(sinh_a: Tensor) -> tuple[Tensor, Tensor]:
    """``tanh(a/2)`` and ``1 - tanh(a/2)`` from ``sinh(a) >= 0``, both with all digits."""
    cosh_a = torch.sqrt(1 + sinh_a * sinh_a)
    return sinh_a / (1 + cosh_a), (1 + 1 / (cosh_a + sinh_a)) / (1 + cosh_a)


def _sinh(t: Tensor) -> Tensor:
    """``sinh(t)`` from ``expm1``, which the CPU computes ten times as fast as ``torch.sinh``."""
    e = torch.expm1(t.abs())
    return torch.copysign((e + e / (e + 1)) / 2, t)


def _asinh(u: Tensor) -> Tensor:
    """``asinh(u)`` for ``u >= 0`` from ``log1p``, likewise."""
    return torch.log1p(u + u * u / (1 + torch.sqrt(1 + u * u)))


def _length(x: Tensor) -> Tensor:
    """Euclidean length (R, 1); rows too short for their square to be a normal number count as zero."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.where(norm > torch.finfo(x.dtype).tiny ** 0.5, norm, 0.0)


def _longest(dtype: torch.dtype) -> float:
    """A tangent length whose product with the farthest point, and whose square, are finite."""
    return 1e150 if dtype == torch.float64 else 1e17
