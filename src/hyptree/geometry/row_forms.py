"""The functions of rows by their sums, for curvature -1, each with its derivative written out.

In ``compute`` capital letters are sums: ``A = |x|^2``, ``B = |y|^2`` (or ``|v|^2``), ``D = x.y`` (or ``x.v``). A form
returns its outputs, the rows it can be trusted with, and ``pull``, which takes the gradients of the outputs to those of
the sums. The tests for trust bound the rounding errors of float64 that a subtraction leaves, well below one float32.
"""

from __future__ import annotations

from typing import Any

import torch

from hyptree.geometry.core.numerics import ball_limit
from hyptree.geometry.core.rows import Numbers, Pull, RowForm, np

_Result = tuple[tuple[Any, ...], Any, Pull]
_ONE = ((0, 0),)
_PAIR = ((0, 0), (1, 1), (0, 1))
_LONGEST = ball_limit(torch.float32)
_GAP = 1 - _LONGEST**2


# ------------------------------------------------------------------------------------------- one variable at a time


def _or_limit(q: Numbers, closed: Numbers, limit: float) -> Numbers:
    """A derivative by ``q = z^2``, and its value at 0 where its closed form cancels: either is right to 1e-8."""
    return np.where(q < 1e-7, limit, closed)


def _cosh_sinhc(q: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """``cosh z``, ``sinh z / z``, and the derivative of the latter, for ``q = z^2``."""
    q = np.maximum(q, 1e-30)
    z = np.sqrt(q)
    cosh, sinhc = np.cosh(z), np.sinh(z) / z
    return cosh, sinhc, _or_limit(q, (cosh - sinhc) / (2 * q), 1 / 6)


# -------------------------------------------------------------------------------------------------------- Lorentz


def _cosh_minus_1(A: Numbers, B: Numbers, D: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """``cosh d - 1``, the product ``t_x t_y``, and that minus one."""
    product = A + B * (A + 1)  # of the squares, minus one
    tt = np.sqrt(product + 1)
    excess = product / (tt + 1)
    return excess - D, tt, excess


def _lorentz_dist(A: Numbers, B: Numbers, D: Numbers) -> _Result:
    h, tt, excess = _cosh_minus_1(A, B, D)
    narrow = h.dtype == np.float32  # whose squares may overflow
    sinh = np.sqrt(h) * np.sqrt(h + 2) if narrow else np.sqrt(h * (h + 2))

    def pull(g: Numbers) -> tuple[Numbers, ...]:
        g = g / sinh
        half, ratio = g * 0.5, tt / (A + 1)
        return half * ratio, half / ratio, -g

    return (np.log1p(h + sinh),), h > excess * (0.5 if narrow else 1e-8), pull


def _lorentz_logmap(A: Numbers, B: Numbers, D: Numbers) -> _Result:
    h, tt, excess = _cosh_minus_1(A, B, D)
    sinh2 = h * (h + 2)
    sinh, cosh = np.sqrt(sinh2), 1 + h
    f = np.log1p(h + sinh) / sinh

    def pull(in_x: Numbers, in_y: Numbers) -> tuple[Numbers, ...]:
        slope = (1 - f * cosh) / sinh2
        g = (in_y - cosh * in_x) * slope - f * in_x
        half, ratio = g * 0.5, tt / (A + 1)
        return half * ratio, half / ratio, -g

    trusted = (h > 1e-8 * excess) & (sinh > 1e-8 * tt * (1 + A))
    return (-f * cosh, f), trusted, pull


def _lorentz_expmap0(A: Numbers) -> _Result:
    _, sinhc, slope = _cosh_sinhc(A)
    return (sinhc,), A < 400, lambda g: (g * slope,)


def _lorentz_expmap(A: Numbers, B: Numbers, E: Numbers) -> _Result:
    X = 1 + A
    along = E / X
    q = B - along * E  # squared length of the tangent vector
    cosh, sinhc, slope = _cosh_sinhc(q)

    def pull(in_x: Numbers, in_v: Numbers) -> tuple[Numbers, ...]:
        g = in_x * sinhc * 0.5 + in_v * slope
        return g * along * along, g, -2 * g * along

    return (cosh, sinhc), (q >= 1e-7 * B) & (cosh * X < 1e8), pull


def _lorentz_transport(A: Numbers, B: Numbers, D: Numbers, xv: Numbers, yv: Numbers) -> _Result:
    h, tt, _ = _cosh_minus_1(A, B, D)
    ratio = tt / (A + 1)  # t_y / t_x
    scale = 1 / (2 + h)
    k = (yv - ratio * xv) * scale  # <y, v>_L / (1 - <x, y>_L)

    def pull(in_x: Numbers, in_y: Numbers, _: Numbers) -> tuple[Numbers, ...]:
        in_yv = (in_x + in_y) * scale
        in_h = -in_yv * k
        half, in_ratio = in_h * 0.5, -in_yv * xv
        in_xx = half * ratio - in_ratio * ratio * (0.5 / (1 + A))
        in_yy = half / ratio + in_ratio * (0.5 / tt)
        return in_xx, in_yy, -in_h, -ratio * in_yv, in_yv

    return (k, k, 1.0), tt < 1e7, pull


# ------------------------------------------------------------------------------------------------------- Poincare


def _poincare_dist(A: Numbers, B: Numbers, D: Numbers) -> _Result:
    gx, gy, both = 1 - A, 1 - B, A + B
    e = both - 2 * D
    w2 = e / (gx * gy)
    w = np.sqrt(w2)

    def pull(g: Numbers) -> tuple[Numbers, ...]:
        in_w2 = g / (w * np.sqrt(1 + w2))
        in_e, in_gap = in_w2 / (gx * gy), in_w2 * w2
        return in_e + in_gap / gx, in_e + in_gap / gy, -2 * in_e

    return (2 * np.arcsinh(w),), (e > 1e-8 * both) & _inside(gx) & _inside(gy), pull


def _inside(gap: Numbers) -> Any:
    """Points that the limit of the ball does not touch."""
    return gap > 1.5 * _GAP


def _poincare_expmap0(A: Numbers) -> _Result:
    q = np.maximum(A, 1e-30)
    tanh = np.tanh(np.sqrt(q))
    tanhc = tanh / np.sqrt(q)
    slope = _or_limit(q, (1 - tanh * tanh - tanhc) / (2 * q), -1 / 3)
    return (tanhc,), _inside(1 - tanh * tanh), lambda g: (g * slope,)


def _poincare_logmap0(A: Numbers) -> _Result:
    q, gap = np.maximum(A, 1e-30), 1 - A
    inside = _inside(gap)
    gap = np.where(inside, gap, 1.0)
    z = np.sqrt(np.where(inside, q, 0.25))
    atanhc = np.arctanh(z) / z
    slope = _or_limit(q, (1 / gap - atanhc) / (2 * q), 1 / 3)
    return (atanhc,), inside, lambda g: (g * slope,)


def _to_lorentz(A: Numbers) -> _Result:
    factor = 2 / (1 - A)
    return (factor,), _inside(1 - A), lambda g: (g * 0.5 * factor * factor,)


def _to_poincare(A: Numbers) -> _Result:
    t = np.sqrt(1 + A)
    factor = 1 / (1 + t)
    return (factor,), _inside(2 * factor), lambda g: (g * -0.5 * factor * factor / t,)


def _mobius_add(A: Numbers, B: Numbers, D: Numbers) -> _Result:
    outputs, trusted, pull = _add(A, B, D)
    return outputs, trusted & _inside(1 - A) & _inside(1 - B), pull


def _add(A: Numbers, B: Numbers, D: Numbers) -> _Result:
    """The Möbius sum of points of which only the first may be trusted to be inside, moved to the limit beyond it."""
    gx, gy = 1 - A, 1 - B
    both, gap = A + B, gx * gy
    q = both + 2 * D
    scale = 1 / (gap + q)
    a, b = (gx + q) * scale, gx * scale
    rest = gap * scale  # one minus the squared length of the sum
    over = rest < _GAP
    capped = bool(over.any())
    cap = np.where(over, _LONGEST / np.sqrt(1 - rest), 1.0) if capped else 1.0

    def pull(in_x: Numbers, in_y: Numbers) -> tuple[Numbers, ...]:
        in_total = -(in_x * a + in_y * b) * scale * cap  # of gap + q
        in_gap = in_total
        if capped:
            in_rest = np.where(over, (in_x * a + in_y * b) * cap * (0.5 / (1 - rest)), 0.0)
            in_total = in_total - in_rest * rest * scale
            in_gap = in_total + in_rest * scale
            in_x, in_y = in_x * cap, in_y * cap
        in_q, in_gx = in_x * scale + in_total, (in_x + in_y) * scale + in_gap * gy
        return in_q - in_gx, in_q - in_gap * gx, 2 * in_q

    return (a * cap, b * cap), (q > 1e-10 * both) & (scale < 1e7), pull


def _poincare_expmap(A: Numbers, B: Numbers, E: Numbers) -> _Result:
    gx = 1 - A
    H = np.maximum(B / (gx * gx), 1e-30)
    z = np.sqrt(H)
    tanh = np.tanh(z)
    over = tanh > _LONGEST
    sech2 = np.where(over, 0.0, 1 - tanh * tanh)
    tanhc = np.minimum(tanh, _LONGEST) / z
    stretch = tanhc / gx
    (a, b), trusted, add_pull = _add(A, stretch * stretch * B, stretch * E)

    def pull(in_x: Numbers, in_v: Numbers) -> tuple[Numbers, ...]:
        in_A, in_length, in_D = add_pull(in_x, in_v * stretch)
        in_stretch = in_v * b + 2 * stretch * B * in_length + E * in_D
        slope = _or_limit(H, (sech2 - tanhc) / (2 * H), -1 / 3)
        in_H = in_stretch / gx * slope
        in_gx = -(in_stretch * stretch + 2 * in_H * H) / gx
        return in_A - in_gx, stretch * stretch * in_length + in_H / (gx * gx), stretch * in_D

    return (a, b * stretch), trusted & _inside(gx), pull


def _poincare_logmap(A: Numbers, B: Numbers, D: Numbers) -> _Result:
    gx, gy = 1 - A, 1 - B
    both, gap = A + B, gx * gy
    e = both - 2 * D
    scale = 1 / (gap + e)
    z2, rest = e * scale, gap * scale  # squared length of (-x) (+) y, and one minus it
    f = np.arcsinh(np.sqrt(e / gap)) / np.sqrt(z2)
    factor = gx * f * scale

    def pull(in_x: Numbers, in_y: Numbers) -> tuple[Numbers, ...]:
        in_factor = (in_y - in_x) * gx - in_x * e
        slope = _or_limit(z2, (1 / rest - f) / (2 * z2), 1 / 3)
        in_z2 = in_factor * gx * scale * slope
        in_total = -(in_factor * factor + in_z2 * z2) * scale  # of gap + e
        in_e = in_z2 * scale + in_total - in_x * factor
        in_gx = (in_y - in_x) * factor + in_factor * f * scale + in_total * gy
        return in_e - in_gx, in_e - in_total * gx, -2 * in_e

    trusted = _inside(gx) & _inside(gy) & _inside(rest) & (e > 1e-10 * both) & (scale < 1e7)
    return (-factor * (gx + e), factor * gx), trusted, pull


lorentz_dist = RowForm(_PAIR, _lorentz_dist, is_length=True, narrow=True)
lorentz_logmap = RowForm(_PAIR, _lorentz_logmap)
lorentz_expmap0 = RowForm(_ONE, _lorentz_expmap0)
lorentz_expmap = RowForm(_PAIR, _lorentz_expmap)
lorentz_transport = RowForm((*_PAIR, (0, 2), (1, 2)), _lorentz_transport)
poincare_dist = RowForm(_PAIR, _poincare_dist, is_length=True)
lorentz_to_poincare = RowForm(_ONE, _to_poincare)
poincare_expmap0 = RowForm(_ONE, _poincare_expmap0)
poincare_logmap0 = RowForm(_ONE, _poincare_logmap0)
poincare_to_lorentz = RowForm(_ONE, _to_lorentz)
poincare_mobius_add = RowForm(_PAIR, _mobius_add)
poincare_expmap = RowForm(_PAIR, _poincare_expmap)
poincare_logmap = RowForm(_PAIR, _poincare_logmap)
