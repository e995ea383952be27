"""Every figure of section 12 of the geometry specification, asserted against 150-digit arithmetic.

How the table is read
    * Inputs are drawn in the tested dtype; the reference sees exactly these numbers (``c`` too is a float32 number in
      the float32 and bfloat16 tests). Points are scaled by ``1/s``, so every case is the same figure at seven sizes.
    * "Forward": relative error for distances; norm of the error over norm of the result for vectors; absolute error in
      radians for the exterior angle, whose range is [0, pi]; absolute error of the dimensionless ``s d`` for the
      pairwise matrices; the dimensionless distance ``s d(result, truth)`` for the centroid.
    * "Gradient": what autograd gives in that dtype, norm of the error over norm of the gradient, for every argument
      separately. For vector-valued functions the gradient is the Jacobian in the Frobenius norm; for pairwise matrices
      it is the gradient of a random weighted sum, row by row. Same-ray distances: Riemannian norm of the error (the
      true gradient has length 1), ``r`` the larger radius.
    * "bf16 input": bfloat16 numbers go in, the value must be right for these numbers, after the rounding of points to
      bfloat16 on return. Gradients come back in bfloat16 and are held to the same figure. The centroid at s r = 3: the
      rounding of the exact answer to bfloat16 already moves it by 0.7e-2 to 1.5e-2 on average, so the figure is for the
      error beyond that: ``s d(result, truth) - s d(bf16(truth), truth)``.
    * "Near": the separation is the length of the coordinate difference times ``s`` (Poincare: its hyperbolic length);
      where it is below the resolution of the dtype, the points are one unit in the last place apart in one coordinate.
      For the exterior angle it is relative to ``|x|``, and at least 0.2 rad away from the ray through ``x``.
    * "Generic": independent directions at least 0.2 rad apart.
    * "Child": float32 parents down to s r = 19, children up to 1 further, at 0.05 to 1 rad before rounding (which, deep
      down, moves a child sideways by ``eps exp(s r)``; the reference sees it where it landed). And, in all dtypes,
      parents at s r in [0.2, 2] with children down to s r = 20, seen under 0.2 to 1 rad.
    * float64: 1e-14, value and gradient, for all of these rows.

Every failure prints the seed of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hyptree.geometry import lorentz, poincare
from tests.geometry import oracle

CURVATURES = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3)
DIMS = (2, 5, 16)
ROWS = 6
DTYPES = (torch.float32, torch.float64, torch.bfloat16)

# Section 12, exactly. "value" and "grad" are the float32 columns.
TOLERANCE: dict[str, dict[str, float]] = {
    "lorentz.expmap0": {"value": 4e-6, "grad": 4e-6, "bf16": 8e-3},
    "lorentz.logmap0": {"value": 5e-7, "grad": 5e-7, "bf16": 8e-3},
    "lorentz.dist near": {"value": 5e-7, "grad": 1e-6, "bf16": 8e-3},
    "lorentz.dist generic": {"value": 5e-7, "grad": 1e-6, "bf16": 8e-3},
    "lorentz.dist same ray 5": {"value": 5e-7, "bf16": 1e-2},
    "lorentz.dist same ray 9": {"value": 5e-7, "bf16": 1e-2},
    "lorentz.dist same ray 12": {"value": 1e-4, "bf16": 1e-2},
    "exterior_angle generic": {"value": 1e-6, "grad": 3e-6, "bf16": 8e-3},
    "exterior_angle near": {"value": 1e-6, "grad": 3e-6, "bf16": 8e-3},
    "exterior_angle child": {"value": 1e-6, "grad": 3e-6, "bf16": 8e-3},
    "centroid 3": {"value": 5e-7, "bf16": 1e-2},
    "centroid 5": {"value": 1e-5},
    "centroid 7": {"value": 1e-4},
    "centroid 9": {"value": 1e-3},
    "pairwise exact": {"value": 5e-6, "diagonal": 0.0, "grad": 1e-5},
    "pairwise matmul": {"value": 1e-5, "grad": 1e-4},
    "poincare.dist near": {"value": 1e-6, "grad": 1e-6, "bf16": 8e-3},
    "poincare.dist generic 5": {"value": 1e-6, "grad": 1e-5, "bf16": 8e-3},
    "poincare.dist generic 8": {"value": 1e-5, "grad": 2e-4},
    "poincare.dist generic 10": {"value": 1e-4, "grad": 1e-3},
    "poincare.dist generic 12": {"value": 5e-4, "grad": 5e-3},
    "mobius_add near": {"value": 1e-6, "grad": 1e-6, "bf16": 8e-3},
    "mobius_matvec": {"value": 5e-7, "grad": 2e-6, "bf16": 8e-3},
    "round trip lorentz": {"value": 5e-7},
    "round trip poincare 3": {"value": 2e-6},
    "round trip poincare 5": {"value": 3e-4},
    "round trip poincare 7": {"value": 5e-3},
}
SAME_RAY_GRADIENT = 8.0  # times eps cosh(s r), Riemannian norm
FLOAT64 = 1e-14
EPS_RATIO = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
CURVATURE_GRADIENT = 1e-5  # our own addition: d/dc, relative to the larger of itself and value/c


def tolerance(name: str, column: str, dtype: torch.dtype) -> float:
    """The figure of the table for a case, a column ("value" or "grad") and a dtype."""
    if dtype is torch.bfloat16:
        return TOLERANCE[name]["bf16"]
    if dtype is torch.float32:
        return TOLERANCE[name][column]
    return FLOAT64


class Draw:
    """Random inputs of one test: drawn in float64 from a seed of its own, then rounded to the tested dtype."""

    def __init__(self, c: float, dtype: torch.dtype):
        self.seed = int(torch.randint(2**31 - 1, ()))
        self.generator = torch.Generator().manual_seed(self.seed)
        self.dtype = dtype
        self.c = c if dtype is torch.float64 else float(torch.tensor(c, dtype=torch.float32))
        self.s = math.sqrt(self.c)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def log_uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return self.uniform(math.log(low), math.log(high), *shape).exp()

    def radii(self, low: float, high: float, rows: int) -> Tensor:
        """(rows, 1) radii, the first half uniform up to ``high``, the others spread over all orders of magnitude."""
        half = rows // 2
        return torch.cat([self.uniform(0, high, rows - half, 1), self.log_uniform(low, high, half, 1)])

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def direction(self, rows: int, dim: int) -> Tensor:
        v = self.normal(rows, dim)
        return v / v.norm(dim=-1, keepdim=True)

    def generic_directions(self, rows: int, dim: int, angle: float = 0.2) -> tuple[Tensor, Tensor]:
        """Two independent unit vectors per row, at least ``angle`` apart."""
        a, b = self.direction(rows, dim), self.direction(rows, dim)
        while (close := (a * b).sum(-1) > math.cos(angle)).any():
            b = torch.where(close.unsqueeze(-1), self.direction(rows, dim), b)
        return a, b

    def perpendicular(self, u: Tensor) -> Tensor:
        """A random unit vector orthogonal to each unit vector."""
        v = self.normal(*u.shape)
        v = v - u * (u * v).sum(-1, keepdim=True)
        return v / v.norm(dim=-1, keepdim=True)

    def round(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    def lorentz(self, radius: Tensor, direction: Tensor) -> Tensor:
        return self.round(torch.sinh(radius) / self.s * direction)

    def poincare(self, radius: Tensor, direction: Tensor) -> Tensor:
        return self.round(torch.tanh(radius / 2) / self.s * direction)

    def neighbour(self, x: Tensor, length: Tensor) -> Tensor:
        """``x`` moved by ``length`` in a random direction; by one unit in the last place where rounding undoes it."""
        y = self.round(x.double() + length * self.direction(*x.shape))
        same = (x == y).all(-1)
        smallest = torch.nn.functional.one_hot(x.double().abs().argmin(-1), x.shape[-1]).bool()
        return torch.where(same.unsqueeze(-1) & smallest, torch.nextafter(x, torch.zeros_like(x)), y)

    def neighbour_off_the_ray(self, x: Tensor, length: Tensor, angle: float = 0.2) -> Tensor:
        """As ``neighbour``; the step, after rounding, is at least ``angle`` away from the ray through ``x``."""
        y = self.neighbour(x, length)
        while (along := (_cosine(y.double() - x.double(), x.double()).abs() > math.cos(angle))).any():
            y = torch.where(along.unsqueeze(-1), self.neighbour(x, length), y)
            length = torch.where(along.unsqueeze(-1), 1.1 * length, length)  # one ulp may have no other direction
        return y


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))


def boost(p: Tensor, x: Tensor, s: float) -> Tensor:
    """The Lorentz boost that takes the origin to ``p``, applied to ``x`` (plain float64, used to build inputs)."""
    tx, tp = (s**-2 + x.square().sum(-1, keepdim=True)).sqrt(), (s**-2 + p.square().sum(-1, keepdim=True)).sqrt()
    return x + (s * tx + s * s * (p * x).sum(-1, keepdim=True) / (1 + s * tp)) * p


def assert_below(errors: list[float], limit: float, what: str, draw: Draw, *inputs: Tensor) -> None:
    """Fail with everything that is needed to reproduce the worst row."""
    worst = max(range(len(errors)), key=errors.__getitem__)
    rows = "; ".join(str(t[worst].tolist()) for t in inputs)
    assert errors[worst] <= limit, (
        f"{what}: error {errors[worst]:.3g} exceeds {limit:.3g}, {draw.dtype}, c={draw.c!r}, seed={draw.seed}, "
        f"row {worst} of {len(errors)}: {rows}"
    )


def output_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype is torch.bfloat16 else dtype


def check_pair(name: str, function: Callable, reference: Callable, x: Tensor, y: Tensor, draw: Draw) -> None:
    """Value and both gradients of a scalar function of two points, row by row."""
    c = oracle.exact(torch.tensor(draw.c, dtype=torch.float64))
    a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
    value = function(a, b, draw.c)
    assert value.dtype is output_dtype(draw.dtype) and value.shape == x.shape[:-1]
    grad_a, grad_b = torch.autograd.grad(value.sum(), (a, b))
    value_error = oracle.absolute_error if reference is oracle.exterior_angle else oracle.relative_error
    truth = [oracle.pair_gradient(reference, *pair, c) for pair in zip(oracle.exact(x), oracle.exact(y), strict=True)]
    values = [value_error(value[i], truth[i][0]) for i in range(len(x))]
    in_x = [oracle.relative_error(grad_a[i], truth[i][1]) for i in range(len(x))]
    in_y = [oracle.relative_error(grad_b[i], truth[i][2]) for i in range(len(x))]
    assert_below(values, tolerance(name, "value", draw.dtype), f"{name}, value", draw, x, y)
    assert_below(in_x, tolerance(name, "grad", draw.dtype), f"{name}, gradient in x", draw, x, y)
    assert_below(in_y, tolerance(name, "grad", draw.dtype), f"{name}, gradient in y", draw, x, y)


def jacobian(function: Callable[..., Tensor], *inputs: Tensor, size: int) -> tuple[Tensor, ...]:
    """Jacobians (rows, size, ...) of a row-wise function in each input, one backward pass over repeated rows."""
    rows = inputs[0].shape[0]
    repeated = [t.repeat_interleave(size, 0).requires_grad_() for t in inputs]
    value = function(*repeated)
    cotangent = torch.eye(size, dtype=value.dtype).repeat(rows, 1)
    grads = torch.autograd.grad(value, repeated, cotangent)
    return tuple(g.reshape(rows, size, *g.shape[1:]) for g in grads)


def check_radial(name: str, function: Callable, factor: Callable, v: Tensor, draw: Draw) -> None:
    """Value and Jacobian of a map ``v -> factor(|v|) v``."""
    c = oracle.exact(torch.tensor(draw.c, dtype=torch.float64))
    value = function(v, draw.c)
    assert value.dtype is draw.dtype and value.shape == v.shape
    (jac,) = jacobian(lambda u: function(u, draw.c), v, size=v.shape[-1])
    rows = oracle.exact(v)
    values = [oracle.relative_error(value[i], oracle.radial_value(factor, row, c)) for i, row in enumerate(rows)]
    slopes = [oracle.relative_error(jac[i], oracle.radial_jacobian(factor, row, c)) for i, row in enumerate(rows)]
    assert_below(values, tolerance(name, "value", draw.dtype), f"{name}, value", draw, v)
    assert_below(slopes, tolerance(name, "grad", draw.dtype), f"{name}, gradient", draw, v)


grid = pytest.mark.parametrize(("c", "dim"), [(c, dim) for c in CURVATURES for dim in DIMS])
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64", "bfloat16"])
full_precision = pytest.mark.parametrize("dtype", DTYPES[:2], ids=["float32", "float64"])


# ---- the reference itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separation", [1.0, 1e-8])
def test_reference_models_agree_and_derivatives_are_right(separation: float) -> None:
    draw = Draw(0.37, torch.float64)
    x = draw.normal(5) * 3
    c, mp = oracle.mpf(draw.c), oracle.mp
    X, Y = oracle.exact(x), oracle.exact(x + separation * draw.normal(5))
    M = oracle.exact(draw.normal(3, 5))
    tiny = oracle.mpf(10) ** -50

    def close(actual, expected) -> bool:
        actual, expected = oracle.flatten([actual]), oracle.flatten([expected])
        return oracle.norm(oracle.difference(actual, expected)) <= tiny * oracle.norm(expected)

    px, py = (oracle.lorentz_to_poincare(z, c) for z in (X, Y))
    kx, ky = (oracle.lorentz_to_klein(z, c) for z in (X, Y))
    d = oracle.pair_value(oracle.lorentz_dist, X, Y, c)
    assert close(oracle.pair_value(oracle.poincare_dist, px, py, c), d)
    assert close(oracle.pair_value(oracle.klein_dist, kx, ky, c), d)
    gap = oracle.mobius_add([-a for a in px], py, c)
    assert close(2 / mp.sqrt(c) * mp.atanh(mp.sqrt(c) * oracle.norm(gap)), d)
    image = oracle.radial_value(oracle.lorentz_exp0_factor, oracle.radial_value(oracle.lorentz_log0_factor, X, c), c)
    assert close(image, X)

    for f in (oracle.lorentz_dist, oracle.exterior_angle):
        _, in_x, in_y = oracle.pair_gradient(f, X, Y, c)
        assert close(in_x, oracle.brute_force_jacobian(lambda z, f=f: oracle.pair_value(f, z, Y, c), X))
        assert close(in_y, oracle.brute_force_jacobian(lambda z, f=f: oracle.pair_value(f, X, z, c), Y))
    # Closed form of the gradient: d' = -c (y - (t_y / t_x) x) / sinh(s d) / s.
    A, B, _ = oracle.invariants(X, Y)
    ratio = mp.sqrt(1 / c + B) / mp.sqrt(1 / c + A)
    scale = -mp.sqrt(c) / mp.sinh(mp.sqrt(c) * d)
    in_x = oracle.pair_gradient(oracle.lorentz_dist, X, Y, c)[1]
    assert close(in_x, oracle.combine(scale, Y, -scale * ratio, X))

    in_x, in_y = oracle.mobius_add_jacobians(px, py, c)
    assert close(in_x, oracle.brute_force_jacobian(lambda z: oracle.mobius_add(z, py, c), px))
    assert close(in_y, oracle.brute_force_jacobian(lambda z: oracle.mobius_add(px, z, c), py))
    in_x, in_M = oracle.mobius_matvec_jacobians(M, px, c)
    assert close(in_x, oracle.brute_force_jacobian(lambda z: oracle.mobius_matvec(M, z, c), px))
    by_entry = oracle.brute_force_jacobian(
        lambda z: oracle.mobius_matvec([z[:5], z[5:10], z[10:]], px, c), oracle.flatten(M)
    )
    assert close(in_M, by_entry)
    for f in (oracle.lorentz_exp0_factor, oracle.lorentz_log0_factor):
        assert close(
            oracle.radial_jacobian(f, X, c),
            oracle.brute_force_jacobian(lambda z, f=f: oracle.radial_value(f, z, c), X),
        )


# ---- Lorentz ---------------------------------------------------------------------------------------------------------


@grid
@all_dtypes
def test_lorentz_expmap0(c: float, dim: int, dtype: torch.dtype) -> None:
    draw = Draw(c, dtype)
    longest = 40 * (1 - 4 * torch.finfo(dtype).eps)  # rounding must not carry a row over the limit of rule 5
    v = draw.round(draw.radii(1e-20, longest, ROWS) / draw.s * draw.direction(ROWS, dim))
    v[0] = draw.round(longest / draw.s * draw.direction(1, dim))[0]
    v[1] = 0.0
    check_radial("lorentz.expmap0", lorentz.expmap0, oracle.lorentz_exp0_factor, v, draw)


@grid
@all_dtypes
def test_lorentz_logmap0(c: float, dim: int, dtype: torch.dtype) -> None:
    draw = Draw(c, dtype)
    radius = torch.cat([draw.radii(1e-20, 40.0, ROWS - 2), torch.tensor([[1e-20], [40.0]], dtype=torch.float64)])
    x = draw.lorentz(radius, draw.direction(ROWS, dim))
    check_radial("lorentz.logmap0", lorentz.logmap0, oracle.lorentz_log0_factor, x, draw)


@grid
@all_dtypes
def test_lorentz_dist_near(c: float, dim: int, dtype: torch.dtype) -> None:
    draw = Draw(c, dtype)
    x = draw.lorentz(draw.radii(1e-8, 3.0, ROWS), draw.direction(ROWS, dim))
    y = draw.neighbour(x, draw.log_uniform(1e-8, 1e-1, ROWS, 1) / draw.s)
    check_pair("lorentz.dist near", lorentz.dist, oracle.lorentz_dist, x, y, draw)


@grid
@all_dtypes
def test_lorentz_dist_generic(c: float, dim: int, dtype: torch.dtype) -> None:
    draw = Draw(c, dtype)
    a, b = draw.generic_directions(ROWS, dim)
    x, y = draw.lorentz(draw.radii(1e-8, 20.0, ROWS), a), draw.lorentz(draw.radii(1e-8, 20.0, ROWS).flip(0), b)
    check_pair("lorentz.dist generic", lorentz.dist, oracle.lorentz_dist, x, y, draw)


@grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("radius", [5, 9, 12])
def test_lorentz_dist_same_ray(radius: int, c: float, dim: int, dtype: torch.dtype) -> None:
    """Both points on one ray as far as the dtype can say so; the shorter one at 10 to 99 percent of the radius."""
    draw = Draw(c, dtype)
    name = f"lorentz.dist same ray {radius}"
    ray = draw.direction(ROWS, dim)
    far = draw.lorentz(torch.full((ROWS, 1), float(radius), dtype=torch.float64), ray)
    close = draw.lorentz(draw.uniform(0.1, 0.99, ROWS, 1) * radius, ray)
    swap = torch.arange(ROWS).unsqueeze(-1) % 2 == 0
    x, y = torch.where(swap, far, close), torch.where(swap, close, far)
    exact_c = oracle.mpf(draw.c)
    a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
    value = lorentz.dist(a, b, draw.c)
    grad_a, grad_b = torch.autograd.grad(value.sum(), (a, b))
    values, slopes = [], []
    for i, (X, Y) in enumerate(zip(oracle.exact(x), oracle.exact(y), strict=True)):
        d, in_x, in_y = oracle.pair_gradient(oracle.lorentz_dist, X, Y, exact_c)
        values.append(oracle.relative_error(value[i], d))
        for point, actual, expected in ((X, grad_a[i], in_x), (Y, grad_b[i], in_y)):
            miss = oracle.difference(oracle.exact(actual), expected)
            slopes.append(float(oracle.riemannian_norm_of_gradient(point, miss, exact_c)))
    assert_below(values, tolerance(name, "value", dtype), f"{name}, value", draw, x, y)
    if dtype is torch.float32:
        limit = SAME_RAY_GRADIENT * torch.finfo(dtype).eps * math.cosh(radius)
        x2, y2 = x.repeat_interleave(2, 0), y.repeat_interleave(2, 0)
        assert_below(slopes, limit, f"{name}, gradient in the Riemannian norm", draw, x2, y2)


@grid
@all_dtypes
def test_exterior_angle_generic(c: float, dim: int, dtype: torch.dtype) -> None:
    draw = Draw(c, dtype)
    a, b = draw.generic_directions(ROWS, dim)
    x, y = draw.lorentz(draw.radii(1e-3, 20.0, ROWS), a), draw.lorentz(draw.radii(1e-3, 20.0, ROWS).flip(0), b)
    check_pair("exterior_angle generic", lorentz.exterior_angle, oracle.exterior_angle, x, y, draw)


@grid
@all_dtypes
def test_exterior_angle_near(c: float, dim: int, dtype: torch.dtype) -> None:
    draw = Draw(c, dtype)
    x = draw.lorentz(draw.radii(1e-3, 20.0, ROWS), draw.direction(ROWS, dim))
    separation = draw.log_uniform(1e-8, 1e-1, ROWS, 1) * x.double().norm(dim=-1, keepdim=True)
    y = draw.neighbour_off_the_ray(x, separation)
    check_pair("exterior_angle near", lorentz.exterior_angle, oracle.exterior_angle, x, y, draw)


def draw_children(
    draw: Draw, dim: int, depth: tuple[float, float], angle: float, length: float
) -> tuple[Tensor, Tensor]:
    """Parents between two radii; their children at most ``length`` further, ``angle`` to 1 rad off the outward ray."""
    outward = draw.direction(ROWS, dim)
    x = draw.lorentz(draw.uniform(*depth, ROWS, 1), outward)
    turn, step = draw.uniform(angle, 1.0, ROWS, 1), draw.uniform(0.1, length, ROWS, 1)
    way = torch.cos(turn) * outward + torch.sin(turn) * draw.perpendicular(outward)
    return x, draw.round(boost(x.double(), torch.sinh(step) / draw.s * way, draw.s))


@grid
@all_dtypes
def test_exterior_angle_child(c: float, dim: int, dtype: torch.dtype) -> None:
    draw = Draw(c, dtype)
    x, y = draw_children(draw, dim, (0.2, 2.0), 0.2, 18.0)
    check_pair("exterior_angle child", lorentz.exterior_angle, oracle.exterior_angle, x, y, draw)


@grid
def test_exterior_angle_child_of_a_deep_parent(c: float, dim: int) -> None:
    draw = Draw(c, torch.float32)
    x, y = draw_children(draw, dim, (2.0, 19.0), 0.05, 1.0)
    check_pair("exterior_angle child", lorentz.exterior_angle, oracle.exterior_angle, x, y, draw)


@grid
@pytest.mark.parametrize(
    ("dtype", "radius"), [*((torch.float32, r) for r in (3, 5, 7, 9)), (torch.bfloat16, 3)], ids=str
)
def test_centroid_of_a_cluster(radius: int, c: float, dim: int, dtype: torch.dtype) -> None:
    """Clusters of 8 points, hyperbolic spread 0.3 around a centre, random weights."""
    name = f"centroid {radius}"
    draw = Draw(c, dtype)
    clusters, points = 3, 8
    centre = torch.sinh(torch.tensor(float(radius), dtype=torch.float64)) / draw.s * draw.direction(clusters, dim)
    spread = 0.3 * draw.normal(clusters, points, dim) / math.sqrt(dim)
    length = spread.norm(dim=-1, keepdim=True)
    x = draw.round(boost(centre.unsqueeze(1), torch.sinh(length) / length / draw.s * spread, draw.s))
    weights = draw.round(draw.uniform(0.1, 1.0, clusters, points))
    result = lorentz.centroid(x, weights, draw.c)
    assert result.dtype is dtype and result.shape == (clusters, dim)
    exact_c, errors = oracle.mpf(draw.c), []
    for i, (X, W) in enumerate(zip(oracle.exact(x), oracle.exact(weights), strict=True)):
        truth = oracle.centroid(X, W, exact_c)
        d = oracle.pair_value(oracle.lorentz_dist, oracle.exact(result[i]), truth, exact_c)
        if dtype is torch.bfloat16:
            stored = torch.tensor([float(a) for a in truth], dtype=torch.float64).to(dtype)
            d -= oracle.pair_value(oracle.lorentz_dist, oracle.exact(stored), truth, exact_c)
        errors.append(float(oracle.mp.sqrt(exact_c) * d))
    assert_below(errors, tolerance(name, "value", dtype), name, draw, x, weights)


def check_pairwise(name: str, mode: str, x: Tensor, y: Tensor, draw: Draw, angle: float) -> None:
    """Distances and gradient for a few rows of a pairwise matrix (``y is x`` for the symmetric one)."""
    exact_c, scale = oracle.mpf(draw.c), oracle.mp.sqrt(oracle.mpf(draw.c))
    weight = torch.rand(len(x), len(y), generator=draw.generator, dtype=torch.float64).float()
    unit_x, unit_y = (z.double() / z.double().norm(dim=-1, keepdim=True) for z in (x, y))
    checked = (unit_x @ unit_y.T).clamp(-1, 1).acos() > angle
    if y is x:
        checked.fill_diagonal_(False)
    weight = torch.where(checked, weight, torch.zeros(()))
    a = x.clone().requires_grad_()
    b = a if y is x else y.clone().requires_grad_()
    matrix = lorentz.pairwise_dist(a, b, draw.c, mode=mode)
    assert matrix.dtype is torch.float32 and matrix.shape == (len(x), len(y))
    (grad,) = torch.autograd.grad((matrix * weight).sum(), (a,))
    X, Y, W = oracle.exact(x), oracle.exact(y), oracle.exact(weight)
    rows = torch.randperm(len(x), generator=draw.generator)[:4].tolist()
    values, slopes = [], []
    for i in rows:
        total, worst = [oracle.mpf(0)] * x.shape[-1], 0.0
        for j in range(len(y)):
            if not W[i][j]:
                continue
            d, slope, _ = oracle.pair_gradient(oracle.lorentz_dist, X[i], Y[j], exact_c)
            worst = max(worst, oracle.absolute_error(matrix[i, j], d) * float(scale))
            both = W[i][j] + W[j][i] if y is x else W[i][j]
            total = oracle.combine(oracle.mpf(1), total, both, slope)
        values.append(worst)
        slopes.append(oracle.relative_error(grad[i], total))
    assert_below(values, TOLERANCE[name]["value"], f"{name}, s d off the diagonal", draw, x[rows])
    if x.dtype is torch.float32:
        assert_below(slopes, TOLERANCE[name]["grad"], f"{name}, gradient", draw, x[rows])
    if y is x and "diagonal" in TOLERANCE[name]:
        assert matrix.diagonal().abs().max().item() <= TOLERANCE[name]["diagonal"]


@pytest.mark.parametrize("c", CURVATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["exact", "matmul"])
def test_pairwise_64_by_64(mode: str, c: float, dtype: torch.dtype) -> None:
    """Matmul in dimensions 5 and 16: its ``eps / (1 - cos(angle))`` is 2e-5 at 0.1 rad, an angle met in the plane."""
    draw = Draw(c, dtype)
    dims = DIMS if mode == "exact" else DIMS[1:]
    dim = dims[int(torch.randint(len(dims), (), generator=draw.generator))]
    if mode == "exact":
        angle, radius_x, radius_y = 0.0, draw.radii(1e-3, 20.0, 64), draw.radii(1e-3, 20.0, 64)
    else:  # this mode is documented to be poor for nearly equal points, as all points close to the origin are
        angle, radius_x, radius_y = 0.1, draw.uniform(0.5, 20.0, 64, 1), draw.uniform(0.5, 20.0, 64, 1)
    x, y = draw.lorentz(radius_x, draw.direction(64, dim)), draw.lorentz(radius_y, draw.direction(64, dim))
    check_pairwise(f"pairwise {mode}", mode, x, y, draw, angle)
    check_pairwise(f"pairwise {mode}", mode, x, x, draw, angle)


@pytest.mark.parametrize("c", CURVATURES)
def test_pairwise_matmul_has_an_exactly_zero_diagonal(c: float) -> None:
    draw = Draw(c, torch.float32)
    x = draw.lorentz(draw.radii(1e-3, 20.0, 64), draw.direction(64, 5))
    assert not lorentz.pairwise_dist(x, x, draw.c, mode="matmul").diagonal().any(), f"seed={draw.seed}"


# ---- Poincare --------------------------------------------------------------------------------------------------------


def poincare_near(draw: Draw, radius: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    x = draw.poincare(radius, draw.direction(ROWS, dim))
    metric = 2 / (1 - draw.c * x.double().square().sum(-1, keepdim=True))
    return x, draw.neighbour(x, draw.log_uniform(1e-8, 1e-1, ROWS, 1) / draw.s / metric)


@grid
@all_dtypes
def test_poincare_dist_near(c: float, dim: int, dtype: torch.dtype) -> None:
    draw = Draw(c, dtype)
    x, y = poincare_near(draw, draw.radii(1e-8, 3.0, ROWS), dim)
    check_pair("poincare.dist near", poincare.dist, oracle.poincare_dist, x, y, draw)


@grid
@pytest.mark.parametrize(
    ("dtype", "radius"),
    [*((dtype, r) for dtype in (torch.float32, torch.float64) for r in (5, 8, 10, 12)), (torch.bfloat16, 5)],
    ids=str,
)
def test_poincare_dist_generic(radius: int, c: float, dim: int, dtype: torch.dtype) -> None:
    name = f"poincare.dist generic {radius}"
    draw = Draw(c, dtype)
    a, b = draw.generic_directions(ROWS, dim)
    x, y = (draw.poincare(torch.full((ROWS, 1), float(radius), dtype=torch.float64), u) for u in (a, b))
    check_pair(name, poincare.dist, oracle.poincare_dist, x, y, draw)


@grid
@all_dtypes
def test_mobius_add_near(c: float, dim: int, dtype: torch.dtype) -> None:
    draw = Draw(c, dtype)
    x, y = poincare_near(draw, torch.full((ROWS, 1), 3.0, dtype=torch.float64), dim)
    exact_c = oracle.mpf(draw.c)
    value = poincare.mobius_add(x, -y, draw.c)
    assert value.dtype is dtype
    jac_x, jac_y = jacobian(lambda a, b: poincare.mobius_add(a, b, draw.c), x, -y, size=dim)
    values, in_x, in_y = [], [], []
    for i, (X, Y) in enumerate(zip(oracle.exact(x), oracle.exact(-y), strict=True)):
        values.append(oracle.relative_error(value[i], oracle.mobius_add(X, Y, exact_c)))
        true_x, true_y = oracle.mobius_add_jacobians(X, Y, exact_c)
        in_x.append(oracle.relative_error(jac_x[i], true_x))
        in_y.append(oracle.relative_error(jac_y[i], true_y))
    assert_below(values, tolerance("mobius_add near", "value", dtype), "mobius_add(x, -y), value", draw, x, y)
    assert_below(in_x, tolerance("mobius_add near", "grad", dtype), "mobius_add(x, -y), gradient in x", draw, x, y)
    assert_below(in_y, tolerance("mobius_add near", "grad", dtype), "mobius_add(x, -y), gradient in y", draw, x, y)


@grid
@all_dtypes
def test_mobius_matvec(c: float, dim: int, dtype: torch.dtype) -> None:
    """Singular values between 0.5 and 1, so that the image too stays within s r = 5."""
    draw = Draw(c, dtype)
    out_dim = min(dim, 4) + 1
    radius = torch.cat([draw.log_uniform(1e-8, 5.0, 2, 1), draw.uniform(0.0, 5.0, 1, 1), torch.tensor([[5.0]])])
    x = draw.poincare(radius.double(), draw.direction(4, dim))
    left, _, right = torch.linalg.svd(draw.normal(out_dim, dim), full_matrices=False)
    M = draw.round(left * draw.uniform(0.5, 1.0, min(out_dim, dim)) @ right)
    exact_c, exact_M = oracle.mpf(draw.c), oracle.exact(M)
    value = poincare.mobius_matvec(M, x, draw.c)
    assert value.dtype is dtype and value.shape == (4, out_dim)
    (jac_x,) = jacobian(lambda a: poincare.mobius_matvec(M, a, draw.c), x, size=out_dim)
    values, in_x, in_M = [], [], []
    for i, X in enumerate(oracle.exact(x)):
        values.append(oracle.relative_error(value[i], oracle.mobius_matvec(exact_M, X, exact_c)))
        true_x, true_M = oracle.mobius_matvec_jacobians(exact_M, X, exact_c)
        in_x.append(oracle.relative_error(jac_x[i], true_x))
        leaf = M.clone().requires_grad_()
        image = poincare.mobius_matvec(leaf, x[i], draw.c)
        jac_M = torch.stack([torch.autograd.grad(image[k], leaf, retain_graph=True)[0] for k in range(out_dim)])
        in_M.append(oracle.relative_error(jac_M, true_M))
    assert_below(values, tolerance("mobius_matvec", "value", dtype), "mobius_matvec, value", draw, x)
    assert_below(in_x, tolerance("mobius_matvec", "grad", dtype), "mobius_matvec, gradient in x", draw, x)
    assert_below(in_M, tolerance("mobius_matvec", "grad", dtype), "mobius_matvec, gradient in M", draw, x)


# ---- round trips and curvature ---------------------------------------------------------------------------------------


@grid
def test_round_trip_lorentz(c: float, dim: int) -> None:
    draw = Draw(c, torch.float32)
    longest = 40 * (1 - 4 * torch.finfo(torch.float32).eps)
    v = draw.round(draw.radii(1e-20, longest, 64) / draw.s * draw.direction(64, dim))
    back = lorentz.logmap0(lorentz.expmap0(v, draw.c), draw.c)
    errors = [oracle.relative_error(b, a) for a, b in zip(oracle.exact(v), back, strict=True)]
    assert_below(errors, TOLERANCE["round trip lorentz"]["value"], "logmap0(expmap0(v)), Lorentz", draw, v)


@grid
@pytest.mark.parametrize("radius", [3, 5, 7])
def test_round_trip_poincare(radius: int, c: float, dim: int) -> None:
    draw = Draw(c, torch.float32)
    name = f"round trip poincare {radius}"
    radii = torch.cat([draw.radii(1e-20, radius, 30), torch.full((10, 1), float(radius), dtype=torch.float64)])
    v = draw.round(radii / draw.s * draw.direction(40, dim))
    back = poincare.logmap0(poincare.expmap0(v, draw.c), draw.c)
    errors = [oracle.relative_error(b, a) for a, b in zip(oracle.exact(v), back, strict=True)]
    assert_below(errors, TOLERANCE[name]["value"], "logmap0(expmap0(v)), Poincare", draw, v)


@grid
@full_precision
def test_curvature_gradient_of_distance(c: float, dim: int, dtype: torch.dtype) -> None:
    draw = Draw(c, dtype)
    a, b = draw.generic_directions(ROWS, dim)
    radius_x, radius_y = draw.uniform(0.1, 5.0, ROWS, 1), draw.uniform(0.1, 5.0, ROWS, 1)
    limit = CURVATURE_GRADIENT * (1 if dtype is torch.float32 else EPS_RATIO)
    for function, reference, place in (
        (lorentz.dist, oracle.lorentz_dist, draw.lorentz),
        (poincare.dist, oracle.poincare_dist, draw.poincare),
    ):
        x, y = place(radius_x, a), place(radius_y, b)
        curvature = torch.full((ROWS, 1), draw.c, dtype=dtype, requires_grad=True)
        value = function(x, y, curvature)
        (grad,) = torch.autograd.grad(value.sum(), curvature)
        errors = []
        for i, (X, Y) in enumerate(zip(oracle.exact(x), oracle.exact(y), strict=True)):
            true = oracle.pair_curvature_gradient(reference, X, Y, oracle.mpf(draw.c))
            size = max(abs(float(true)), value[i].item() / draw.c)
            errors.append(oracle.absolute_error(grad[i], [true]) / size)
        assert_below(errors, limit, f"d/dc of {reference.__name__}", draw, x, y)


@grid
@full_precision
def test_curvature_gradient_of_origin_maps(c: float, dim: int, dtype: torch.dtype) -> None:
    draw = Draw(c, dtype)
    u = draw.direction(ROWS, dim)
    limit = CURVATURE_GRADIENT * (1 if dtype is torch.float32 else EPS_RATIO)
    radius = draw.uniform(0.1, 10.0, ROWS, 1)
    for name, function, factor, inputs in (
        ("expmap0", lorentz.expmap0, oracle.lorentz_exp0_factor, draw.round(radius / draw.s * u)),
        ("logmap0", lorentz.logmap0, oracle.lorentz_log0_factor, draw.lorentz(radius, u)),
    ):
        rows = inputs.repeat_interleave(dim, 0)
        curvature = torch.full((ROWS * dim, 1), draw.c, dtype=dtype, requires_grad=True)
        value = function(rows, curvature)
        (grad,) = torch.autograd.grad(value, curvature, torch.eye(dim, dtype=dtype).repeat(ROWS, 1))
        errors = []
        for i, V in enumerate(oracle.exact(inputs)):
            true = oracle.radial_curvature_gradient(factor, V, oracle.mpf(draw.c))
            size = max(float(oracle.norm(true)), value[i * dim].double().norm().item() / draw.c)
            errors.append(oracle.absolute_error(grad.reshape(ROWS, dim)[i], true) / size)
        assert_below(errors, limit, f"d/dc of {name}", draw, inputs)
