"""High precision reference for the accuracy suite, written from the definitions and not from the formulas under test.

Every quantity is the textbook one: geodesic distance on the hyperboloid is ``arccosh(-c <X, Y>_L) / s`` of ambient
vectors, on the ball ``arccosh(1 + 2c|x-y|^2 / ((1-c|x|^2)(1-c|y|^2))) / s``, the exterior angle is the ``arccos`` of an
inner product of ambient tangent vectors, Moebius addition has its usual numerator and denominator. All of them cancel
badly, which does not matter with 150 digits: coincident to 1e-16 still leaves more than a hundred correct ones.

All functions are rotation invariant, so a function of two points depends on ``A = |x|^2``, ``B = |y|^2``, ``G = x.y``
and ``c`` alone. Derivatives are central differences in these scalars (step 1e-50 relative, error below 1e-30) followed
by the chain rule; ``brute_force_jacobian`` differentiates by components instead and is used to check that shortcut.

Vectors are lists of ``mpf``; numbers come in through ``exact``, which converts floats without rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from mpmath import mp, mpf

DIGITS = 150
STEP = mpf(10) ** -50

mp.dps = DIGITS

Vector = list[mpf]
Matrix = list[Vector]


def exact(values: torch.Tensor) -> list:
    """Nested lists of ``mpf`` that equal the entries of a floating tensor bit for bit."""
    return _exact_nested(values.detach().double().tolist())


def _exact_nested(values):
    return [_exact_nested(value) for value in values] if isinstance(values, list) else mpf(values)


def dot(a: Sequence[mpf], b: Sequence[mpf]) -> mpf:
    return mp.fdot(a, b)


def norm(a: Sequence[mpf]) -> mpf:
    return mp.sqrt(dot(a, a))


def combine(p: mpf, a: Vector, q: mpf, b: Vector) -> Vector:
    """The vector ``p a + q b``."""
    return [p * u + q * v for u, v in zip(a, b, strict=True)]


def difference(a: Vector, b: Vector) -> Vector:
    return [u - v for u, v in zip(a, b, strict=True)]


# ---- definitions, as functions of the invariants --------------------------------------------------------------------


def lorentz_dist(A: mpf, B: mpf, G: mpf, c: mpf) -> mpf:
    """Distance on the hyperboloid ``<X, X>_L = -1/c``: ``arccosh(-c <X, Y>_L) / s``."""
    minkowski = G - mp.sqrt(1 / c + A) * mp.sqrt(1 / c + B)
    return _arccosh(-c * minkowski) / mp.sqrt(c)


def poincare_dist(A: mpf, B: mpf, G: mpf, c: mpf) -> mpf:
    """Distance in the ball of radius ``1/s``, the ``arccosh`` form of the metric ``4 |dx|^2 / (1 - c|x|^2)^2``."""
    return _arccosh(1 + 2 * c * (A + B - 2 * G) / ((1 - c * A) * (1 - c * B))) / mp.sqrt(c)


def klein_dist(A: mpf, B: mpf, G: mpf, c: mpf) -> mpf:
    """Cayley-Klein distance: ``arccosh((1 - c x.y) / sqrt((1 - c|x|^2)(1 - c|y|^2))) / s``."""
    return _arccosh((1 - c * G) / mp.sqrt((1 - c * A) * (1 - c * B))) / mp.sqrt(c)


def exterior_angle(A: mpf, B: mpf, G: mpf, c: mpf) -> mpf:
    """Angle at X between the initial velocity of X -> Y and the continuation of the geodesic O -> X."""
    tx, ty, to = mp.sqrt(1 / c + A), mp.sqrt(1 / c + B), 1 / mp.sqrt(c)
    xy, xo, yo = G - tx * ty, -tx * to, -ty * to
    # Components tangent at X: U = Y + c<X,Y>X towards Y, W = O + c<X,O>X towards the origin.
    uw = yo + c * xy * xo
    uu = c * xy**2 - 1 / c
    ww = c * xo**2 - 1 / c
    cosine = -uw / mp.sqrt(uu * ww)
    return mp.acos(min(mpf(1), max(mpf(-1), cosine)))


def _arccosh(value: mpf) -> mpf:
    return mp.acosh(value) if value > 1 else mpf(0)


def lorentz_exp0_factor(A: mpf, c: mpf) -> mpf:
    """``f`` of ``expmap0(v) = f v``: the space part of ``cosh(s|v|) O + sinh(s|v|) v / (s|v|)``."""
    z = mp.sqrt(c * A)
    return mp.sinh(z) / z if z else mpf(1)


def lorentz_log0_factor(A: mpf, c: mpf) -> mpf:
    """``f`` of ``logmap0(x) = f x``: space part of ``arccosh(b) / sqrt(b^2 - 1) (X - b O)``, ``b = -c <O, X>_L``."""
    beta = mp.sqrt(c) * mp.sqrt(1 / c + A)
    return mp.acosh(beta) / mp.sqrt(beta**2 - 1) if beta > 1 else mpf(1)


def poincare_exp0_factor(A: mpf, c: mpf) -> mpf:
    z = mp.sqrt(c * A)
    return mp.tanh(z) / z if z else mpf(1)


def poincare_log0_factor(A: mpf, c: mpf) -> mpf:
    z = mp.sqrt(c * A)
    return mp.atanh(z) / z if z else mpf(1)


def mobius_add_factors(A: mpf, B: mpf, G: mpf, c: mpf) -> tuple[mpf, mpf]:
    """``(p, q)`` of ``mobius_add(x, y) = p x + q y``, textbook form."""
    denominator = 1 + 2 * c * G + c**2 * A * B
    return (1 + 2 * c * G + c * B) / denominator, (1 - c * A) / denominator


def mobius_matvec_factor(U: mpf, A: mpf, c: mpf) -> mpf:
    """``f`` of ``mobius_matvec(M, x) = f Mx``, that is ``exp0(M log0(x))``, with ``U = |Mx|^2``."""
    if not U or not A:
        return mpf(1)
    scale = poincare_log0_factor(A, c)
    return scale * poincare_exp0_factor(scale**2 * U, c)


# ---- derivatives -----------------------------------------------------------------------------------------------------


def partials(f: Callable[..., mpf | tuple], point: Sequence[mpf], scales: Sequence[mpf] | None = None) -> list:
    """Central differences of ``f`` in each of its scalar arguments (the step is relative to ``scales``)."""
    result = []
    for i, scale in enumerate(scales or point):
        h = STEP * abs(scale)
        up, down = list(point), list(point)
        up[i] += h
        down[i] -= h
        high, low = f(*up), f(*down)
        if isinstance(high, tuple):
            result.append(tuple((a - b) / (2 * h) for a, b in zip(high, low, strict=True)))
        else:
            result.append((high - low) / (2 * h))
    return result


def invariants(x: Vector, y: Vector) -> tuple[mpf, mpf, mpf]:
    return dot(x, x), dot(y, y), dot(x, y)


def pair_value(f: Callable[..., mpf], x: Vector, y: Vector, c: mpf) -> mpf:
    """Value of a scalar function of two points."""
    return f(*invariants(x, y), c)


def pair_gradient(f: Callable[..., mpf], x: Vector, y: Vector, c: mpf) -> tuple[mpf, Vector, Vector]:
    """Value of a scalar function of two points and its gradients in both."""
    A, B, G = invariants(x, y)
    fA, fB, fG = partials(lambda a, b, g: f(a, b, g, c), (A, B, G), (A, B, mp.sqrt(A * B)))
    return f(A, B, G, c), combine(2 * fA, x, fG, y), combine(2 * fB, y, fG, x)


def pair_curvature_gradient(f: Callable[..., mpf], x: Vector, y: Vector, c: mpf) -> mpf:
    """Derivative of a scalar function of two points in ``c``, coordinates held fixed."""
    A, B, G = invariants(x, y)
    return partials(lambda k: f(A, B, G, k), (c,))[0]


def radial_value(factor: Callable[..., mpf], v: Vector, c: mpf) -> Vector:
    """Value of the map ``v -> factor(|v|^2, c) v``."""
    f = factor(dot(v, v), c)
    return [f * a for a in v]


def radial_jacobian(factor: Callable[..., mpf], v: Vector, c: mpf) -> Matrix:
    """Jacobian of the map ``v -> factor(|v|^2, c) v``, rows are outputs."""
    A = dot(v, v)
    f = factor(A, c)
    slope = partials(lambda a: factor(a, c), (A,))[0] if A else mpf(0)
    return [[2 * slope * a * b + (f if i == j else 0) for j, b in enumerate(v)] for i, a in enumerate(v)]


def radial_curvature_gradient(factor: Callable[..., mpf], v: Vector, c: mpf) -> Vector:
    slope = partials(lambda k: factor(dot(v, v), k), (c,))[0]
    return [slope * a for a in v]


def mobius_add(x: Vector, y: Vector, c: mpf) -> Vector:
    p, q = mobius_add_factors(*invariants(x, y), c)
    return combine(p, x, q, y)


def mobius_add_jacobians(x: Vector, y: Vector, c: mpf) -> tuple[Matrix, Matrix]:
    """Jacobians of ``mobius_add`` in ``x`` and in ``y``."""
    A, B, G = invariants(x, y)
    p, q = mobius_add_factors(A, B, G, c)
    slopes = partials(lambda a, b, g: mobius_add_factors(a, b, g, c), (A, B, G), (A, B, mp.sqrt(A * B)))
    along_A, along_B, along_G = (combine(dp, x, dq, y) for dp, dq in slopes)
    n = range(len(x))
    in_x = [[2 * along_A[i] * x[j] + along_G[i] * y[j] + (p if i == j else 0) for j in n] for i in n]
    in_y = [[2 * along_B[i] * y[j] + along_G[i] * x[j] + (q if i == j else 0) for j in n] for i in n]
    return in_x, in_y


def mobius_matvec(M: Matrix, x: Vector, c: mpf) -> Vector:
    u = [dot(row, x) for row in M]
    f = mobius_matvec_factor(dot(u, u), dot(x, x), c)
    return [f * a for a in u]


def mobius_matvec_jacobians(M: Matrix, x: Vector, c: mpf) -> tuple[Matrix, list[Matrix]]:
    """Jacobians of ``mobius_matvec`` in ``x`` (m, n) and in ``M`` (m, m, n)."""
    u = [dot(row, x) for row in M]
    U, A = dot(u, u), dot(x, x)
    f = mobius_matvec_factor(U, A, c)
    fU, fA = partials(lambda a, b: mobius_matvec_factor(a, b, c), (U, A))
    m, n = range(len(u)), range(len(x))
    back = [mp.fsum(M[i][j] * u[i] for i in m) for j in n]  # M^T u
    in_x = [[f * M[i][j] + 2 * u[i] * (fU * back[j] + fA * x[j]) for j in n] for i in m]
    in_M = [[[(2 * fU * u[i] * u[k] + (f if i == k else 0)) * x[j] for j in n] for k in m] for i in m]
    return in_x, in_M


def brute_force_jacobian(f: Callable[[Vector], mpf | Vector], x: Vector) -> list:
    """Jacobian by central differences in every component: slow, free of any chain rule."""
    h = STEP * norm(x)
    columns = []
    for j in range(len(x)):
        up, down = list(x), list(x)
        up[j] += h
        down[j] -= h
        high, low = f(up), f(down)
        if isinstance(high, list):
            columns.append([(a - b) / (2 * h) for a, b in zip(high, low, strict=True)])
        else:
            columns.append((high - low) / (2 * h))
    return [list(row) for row in zip(*columns, strict=True)] if isinstance(columns[0], list) else columns


# ---- maps between models, ambient quantities -------------------------------------------------------------------------


def lorentz_to_poincare(x: Vector, c: mpf) -> Vector:
    """Stereographic projection of the hyperboloid from its opposite pole."""
    t = mp.sqrt(1 / c + dot(x, x))
    return [a / (1 + mp.sqrt(c) * t) for a in x]


def lorentz_to_klein(x: Vector, c: mpf) -> Vector:
    """Central projection of the hyperboloid onto the plane ``t = 1/s``."""
    t = mp.sqrt(1 / c + dot(x, x))
    return [a / (mp.sqrt(c) * t) for a in x]


def centroid(points: list[Vector], weights: Vector, c: mpf) -> Vector:
    """Space part of the ambient weighted sum, scaled back to the hyperboloid."""
    total = [dot(weights, column) for column in zip(*points, strict=True)]
    time = dot(weights, [mp.sqrt(1 / c + dot(x, x)) for x in points])
    scale = mp.sqrt(c * (time**2 - dot(total, total)))
    return [a / scale for a in total]


def riemannian_norm_of_gradient(x: Vector, g: Vector, c: mpf) -> mpf:
    """Length of a differential at the Lorentz point x; the inverse metric of the chart is ``1 + c x x^T``."""
    return mp.sqrt(dot(g, g) + c * dot(x, g) ** 2)


# ---- errors ----------------------------------------------------------------------------------------------------------


def flatten(values) -> list[mpf]:
    """One flat list from any nesting."""
    if isinstance(values, list | tuple):
        return [leaf for value in values for leaf in flatten(value)]
    return [values]


def relative_error(computed: torch.Tensor, reference) -> float:
    """Norm of the difference over the norm of the reference (0 for 0 against 0), as a float; NaN counts as infinite."""
    if not bool(torch.isfinite(computed).all()):
        return float("inf")
    actual, expected = flatten(exact(computed)), flatten(reference)
    size, gap = norm(expected), norm(difference(actual, expected))
    if not size:
        return 0.0 if not gap else float("inf")
    return float(gap / size)


def absolute_error(computed: torch.Tensor, reference) -> float:
    """Norm of the difference, as a float; NaN counts as infinite."""
    if not bool(torch.isfinite(computed).all()):
        return float("inf")
    return float(norm(difference(flatten(exact(computed)), flatten(reference))))
