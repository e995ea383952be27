"""One bad row spoils nothing, and the identities of the geometry hold to rounding.

The "Further assertions" of section 12 of the geometry specification. Readings:
    * A bad row is a zero row (all arguments, or one of them), a row with coincident or opposite points, or a row of
      norm 200 (all arguments, or one); ball models get it as it is, outside the ball. "Limit" is the point that
      ``expmap0`` makes of a tangent vector of norm 200.
    * "Right" for the other rows: bit-equal to a batch with a harmless row in that place; for shared weights and ``c``:
      float64 gradient of the other rows plus the share of the bad row, to 1e-5 of the sum of all contributions.
    * Triangle inequality: relative to the sum of the two sides. Isometry: error of ``s d``, ``r`` the largest radius.
    * Agreement of models: of ``s d``, relative where it exceeds 1; points drawn in the Klein ball and mapped to the
      others. It is the coarsest of the three (storing a point costs ``eps exp(2 s r)`` there); the other way round
      would test storage, not the maps.

Every public function of the three models runs through here by registry; a new one with an unknown argument name fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hyptree.geometry import Curvature, klein, lorentz, poincare
from hyptree.geometry.core.registry import FUNCTIONS

ROWS = 10_000
DIM = 4
EPS = torch.finfo(torch.float32).eps
TOLERANCE = {
    "shared gradient": 1e-5,  # of the sum of the sizes of all contributions
    "triangle": 8 * EPS,
    "isometry": 8 * EPS,  # times cosh(s r)
    "models": 1e-5,
}

HYPERBOLIC = sorted(name for name in FUNCTIONS if name.split(".")[0] in ("lorentz", "poincare", "klein"))
NO_GRADIENT = {"lorentz.saturation", "poincare.saturation"}

# What the point arguments of a function are, where its module does not tell.
POINT_MODEL = {
    "lorentz.from_poincare": "ball",
    "lorentz.from_klein": "ball",
    "lorentz.from_ambient": "ambient",
    "poincare.from_lorentz": "lorentz",
    "klein.from_lorentz": "lorentz",
}
POINTS, TANGENTS, NUMBERS = {"x", "y", "p"}, {"u", "v", "g"}, {"tau": 0.3, "a": 0.7, "r": 0.6}


def generator() -> tuple[torch.Generator, int]:
    """A generator of its own, seeded from the seed of the test, and that seed for the message."""
    seed = int(torch.randint(2**31 - 1, ()))
    return torch.Generator().manual_seed(seed), seed


class Case:
    """Arguments for one function: row tensors by name, and how to call it with them."""

    def __init__(self, name: str, rows: int, g: torch.Generator):
        self.name, self.entry = name, FUNCTIONS[name]
        self.model = POINT_MODEL.get(name, {"lorentz": "lorentz"}.get(name.split(".")[0], "ball"))
        self.reduces = name.endswith(".centroid")
        self.fixed: dict[str, object] = {}
        self.rows: dict[str, Tensor] = {}
        for arg in self.entry.args:
            if arg == "c":
                continue
            if arg in NUMBERS:
                self.fixed[arg] = NUMBERS[arg]
            elif arg == "M":
                self.fixed[arg] = torch.linalg.qr(torch.randn(DIM, DIM, generator=g))[0]
            elif arg == "weights":
                self.fixed[arg] = torch.rand(3, generator=g) + 0.1
            elif arg == "y" and name.endswith((".gram", ".pairwise_dist")):
                self.fixed[arg] = self.points(8, g)  # the other set of a matrix of distances
            elif arg in POINTS:
                self.rows[arg] = self.points(rows, g)
            elif arg in TANGENTS:
                self.rows[arg] = torch.randn(rows, DIM, generator=g) * 0.5
            else:
                raise KeyError(f"{name}: unknown argument {arg!r}; tell this test what it is")

    def points(self, rows: int, g: torch.Generator) -> Tensor:
        v = torch.randn(rows, DIM, generator=g)
        v = v / v.norm(dim=-1, keepdim=True) * (0.1 + 2.4 * torch.rand(rows, 1, generator=g))
        x = v * (v.norm(dim=-1, keepdim=True).tanh() / 1.3 if self.model == "ball" else 1.0)
        return x / x.norm(dim=-1, keepdim=True).clamp_min(0.95) * 0.9 if self.model == "ball" else x

    def bad_row(self, kind: str) -> dict[str, Tensor]:
        """One row (1, DIM) per argument."""
        g = torch.Generator().manual_seed(0)
        row = {arg: torch.randn(1, DIM, generator=g) * 0.3 for arg in self.rows}
        names = list(row)
        if kind == "zero":
            return {arg: torch.zeros(1, DIM) for arg in names}
        if kind == "norm 200":
            return {arg: value * (200 / value.norm()) for arg, value in row.items()}
        if kind == "limit":
            return {arg: self.limit(value) if arg in POINTS else value for arg, value in row.items()}
        if kind in ("coincident", "opposite"):
            points = [arg for arg in names if arg in POINTS]
            row[points[1]] = row[points[0]] * (1.0 if kind == "coincident" else -1.0)
            return row
        chosen = names[0] if kind.endswith("first") else names[-1]
        row[chosen] = torch.zeros(1, DIM) if kind.startswith("zero") else row[chosen] * (200 / row[chosen].norm())
        return row

    def limit(self, value: Tensor) -> Tensor:
        """The point a tangent vector of norm 200 is mapped to."""
        v = value * (200 / value.norm())
        return poincare.expmap0(v) if self.model == "ball" else lorentz.expmap0(v)

    def __call__(self, rows: dict[str, Tensor], c: Tensor | float) -> Tensor:
        inputs = dict(rows)
        if self.model == "ambient":
            inputs["x"] = torch.cat([(1 / c + inputs["x"].square().sum(-1, keepdim=True)).sqrt(), inputs["x"]], -1)
        if self.reduces:  # a set of three points per row, two of which depend on the row
            inputs["x"] = torch.stack([inputs["x"], 0.5 * inputs["x"].flip(-1), torch.full_like(inputs["x"], 0.1)], -2)
        dtype = next(iter(inputs.values())).dtype
        fixed = {arg: v.to(dtype) if isinstance(v, Tensor) else v for arg, v in self.fixed.items()}
        return self.entry.fn(**inputs, **fixed, c=c)


def gradients(
    case: Case, inputs: dict[str, Tensor], weight: Tensor, cotangent: Tensor | None, c: float, seed: int
) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor, Tensor]:
    """Value, gradients of the rows, of the shared weight (rows are ``inputs @ weight``) and of c; and the cotangent."""
    W, curvature = weight.clone().requires_grad_(), torch.tensor(c, dtype=weight.dtype, requires_grad=True)
    rows = {arg: u @ W for arg, u in inputs.items()}
    out = case(rows, curvature)
    if cotangent is None:
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)
    leaves = [*rows.values(), W, curvature]
    grads = torch.autograd.grad(out, leaves, cotangent.to(out.dtype), allow_unused=True)
    filled = [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads, strict=True)]
    return out.detach(), dict(zip(rows, filled, strict=False)), filled[-2], filled[-1], cotangent


def kinds_of(name: str) -> list[str]:
    """The bad rows that make sense for a function: one argument has no first and last, one point no coincidence."""
    rows = Case(name, 1, torch.Generator()).rows
    kinds = ["zero", "norm 200", "limit"]
    if len(rows) > 1:
        kinds += ["zero first", "zero last", "norm 200 first", "norm 200 last"]
    if len(POINTS & set(rows)) > 1:
        kinds += ["coincident", "opposite"]
    return kinds


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in HYPERBOLIC if name not in NO_GRADIENT for kind in kinds_of(name)]
)
def test_bad_row_alone_and_among_ten_thousand(name: str, kind: str) -> None:
    g, seed = generator()
    case = Case(name, ROWS, g)
    bad = case.bad_row(kind)
    where = f"{name}, {kind} row, seed={seed}"
    c = 1.0
    weight = torch.linalg.qr(torch.randn(DIM, DIM, generator=g))[0]  # a rotation: rows keep their norms
    good_inputs = {arg: x @ weight.T for arg, x in case.rows.items()}
    bad_inputs = {arg: x @ weight.T for arg, x in bad.items()}
    if kind in ("coincident", "opposite"):  # the product with the weight must not tear them apart
        points = [arg for arg in bad if arg in POINTS]
        bad_inputs[points[1]] = bad_inputs[points[0]] * (1.0 if kind == "coincident" else -1.0)

    alone, alone_rows, alone_W, alone_c, alone_cotangent = gradients(case, bad_inputs, weight, None, c, seed)
    for what, value in (("value", alone), ("weight", alone_W), ("c", alone_c), *alone_rows.items()):
        assert torch.isfinite(value).all(), f"{where}: alone, {what} is not finite: {value}"

    good = gradients(case, good_inputs, weight, None, c, seed)
    k = int(torch.randint(ROWS, (), generator=g))
    mixed_inputs = {arg: x.clone() for arg, x in good_inputs.items()}
    for arg, x in mixed_inputs.items():
        x[k] = bad_inputs[arg][0]
    others = torch.arange(ROWS) != k
    at_limit = kind == "limit" or (kind.startswith("norm 200") and case.model == "ball")

    # float64 truth for the other rows; contributions row by row give the size against which sums are judged.
    exact_rows = {arg: (u @ weight)[others].double().requires_grad_() for arg, u in good_inputs.items()}
    exact_c = torch.full((), c, dtype=torch.float64, requires_grad=True)
    out = case(exact_rows, exact_c)
    exact = torch.autograd.grad(out, [*exact_rows.values(), exact_c], good[4][others].to(out.dtype), allow_unused=True)
    true_W = torch.zeros(DIM, DIM, dtype=torch.float64)
    size_W = torch.zeros((), dtype=torch.float64)
    for (_, u), grad in zip(good_inputs.items(), exact[:-1], strict=True):
        if grad is not None:
            true_W += u[others].double().T @ grad
            size_W += (u[others].double().norm(dim=-1) * grad.norm(dim=-1)).sum()
    true_c = torch.zeros((), dtype=torch.float64) if exact[-1] is None else exact[-1]

    for mask_bad in (False, True):  # in the loss, and with weight zero: 0 * inf must not appear either
        cotangent = good[4].clone()
        cotangent[k] = 0.0 if mask_bad else alone_cotangent[0]
        value, rows, in_W, in_c, _ = gradients(case, mixed_inputs, weight, cotangent, c, seed)
        label = f"{where}, row {k}, {'masked' if mask_bad else 'in the loss'}"
        assert torch.equal(value[others], good[0][others]), f"{label}: values of other rows changed"
        for arg in rows:
            assert torch.isfinite(rows[arg]).all(), f"{label}: gradient of {arg} is not finite"
            assert torch.equal(rows[arg][others], good[1][arg][others]), f"{label}: gradient of {arg} changed elsewhere"
        share_W = sum(torch.outer(mixed_inputs[arg][k], rows[arg][k]).double() for arg in rows)
        share_c = 0.0 if mask_bad else alone_c.double()
        miss_W, miss_c = (in_W.double() - true_W - share_W).norm(), (in_c.double() - true_c - share_c).abs()
        scale_W = size_W + share_W.norm()
        scale_c = true_c.abs() + size_W + abs(share_c)
        assert torch.isfinite(in_W).all() and torch.isfinite(in_c), f"{label}: shared gradients are not finite"
        limit = TOLERANCE["shared gradient"]
        assert miss_W <= limit * scale_W, f"{label}: weight gradient off by {miss_W:.3g} of {scale_W:.3g}"
        if mask_bad or not at_limit:  # the share in c of a row at the limit hangs on the last bit of its input
            assert miss_c <= limit * scale_c, f"{label}: c gradient off by {miss_c:.3g} of {scale_c:.3g}"


@pytest.mark.parametrize("name", sorted(NO_GRADIENT))
@pytest.mark.parametrize("kind", ["zero", "norm 200", "limit"])
def test_saturation_is_finite_with_bad_rows(name: str, kind: str) -> None:
    g, _ = generator()
    case = Case(name, ROWS, g)
    rows = {arg: torch.cat([x[1:], case.bad_row(kind)[arg]]) for arg, x in case.rows.items()}
    value = case(rows, 1.0)
    expected = 1 / ROWS if kind == "limit" or (kind == "norm 200" and case.model == "ball") else 0.0
    assert value.item() == pytest.approx(expected, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("kind", ["zero", "coincident", "norm 200"])
@pytest.mark.parametrize("model", ["lorentz", "poincare"])
def test_learnable_curvature_survives_bad_rows(model: str, kind: str) -> None:
    """The path of a real layer: tangent vectors, expmap0, distance, with a shared weight and a learnable curvature."""
    g, seed = generator()
    space = {"lorentz": lorentz, "poincare": poincare}[model]
    u = torch.randn(ROWS, DIM, generator=g) * 0.5
    target = torch.randn(ROWS, DIM, generator=g) * 0.5
    weight = torch.linalg.qr(torch.randn(DIM, DIM, generator=g))[0]
    k = int(torch.randint(ROWS, (), generator=g))
    if kind == "norm 200":
        u[k] *= 200 / u[k].norm()
    elif kind == "coincident":
        target[k] = u[k]
    else:
        u[k] = target[k] = 0.0

    def run(dtype: torch.dtype, keep: Tensor) -> tuple[Tensor, Tensor]:
        W = weight.to(dtype).requires_grad_()
        if dtype is torch.float32:
            curvature = Curvature(0.8, learnable=True)
            c, leaf = curvature(), next(curvature.parameters())
        else:
            leaf = torch.full((), math.log(0.8), dtype=dtype, requires_grad=True)
            c = leaf.exp()
        x = space.expmap0((u.to(dtype) @ W)[keep], c)
        y = space.expmap0((target.to(dtype) @ W)[keep], c)
        return torch.autograd.grad(space.dist(x, y, c).mean() + space.sqdist(x, y, c).mean(), (W, leaf))

    everything = torch.arange(ROWS)
    others = everything[everything != k]
    in_W, in_c = run(torch.float32, everything)
    assert torch.isfinite(in_W).all() and torch.isfinite(in_c).all(), f"seed={seed}"
    # A row at the limit of float32 is elsewhere in float64, so there the truth leaves the bad row out of both.
    keep = everything if kind != "norm 200" else others
    in_W, in_c = run(torch.float32, keep)
    true_W, true_c = run(torch.float64, keep)
    torch.testing.assert_close(in_W.double(), true_W, rtol=0, atol=1e-5 * true_W.norm().item())
    torch.testing.assert_close(in_c.double().reshape(()), true_c, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dim", [2, 5, 64, 768])
@pytest.mark.parametrize("space", [lorentz, poincare])
def test_the_exterior_angle_on_the_ray_has_zero_gradient(space, dim: int, dtype: torch.dtype) -> None:
    """On the ray through ``x`` the angle has a kink, and any direction that rounding leaves would be a wrong one."""
    g, seed = generator()
    x = torch.randn(500, dim, generator=g)
    x = (x / x.norm(dim=-1, keepdim=True) * (0.05 + 0.35 * torch.rand(500, 1, generator=g))).to(dtype)
    for factor, expected in ((-1.0, math.pi), (0.5, math.pi), (-0.25, math.pi), (2.0, 0.0)):  # exact in every dtype
        a, b = x.clone().requires_grad_(), (factor * x).requires_grad_()
        angle = space.exterior_angle(a, b, 1.3)
        assert (angle.double() - expected).abs().max() <= 2e-7, f"seed={seed}"
        for grad in torch.autograd.grad(angle.sum(), (a, b)):
            assert not grad.any(), f"factor {factor}: {grad.abs().max():.3g}, seed={seed}"


@pytest.mark.parametrize("dim", [2, 5, 64])
@pytest.mark.parametrize("space", [lorentz, poincare])
def test_the_exterior_angle_next_to_the_ray_keeps_its_gradient(space, dim: int) -> None:
    """The zero belongs to the ray alone: one float32 step away from it the gradient is the one float64 finds."""
    g, seed = generator()
    x = torch.randn(500, dim, generator=g)
    x = x / x.norm(dim=-1, keepdim=True) * (0.05 + 0.7 * torch.rand(500, 1, generator=g))
    y = (-x).clone()
    y[:, 0] = torch.nextafter(y[:, 0], torch.full((), math.inf))
    actual, true = ([t.requires_grad_() for t in (x.to(d), y.to(d))] for d in (torch.float32, torch.float64))
    actual, true = (torch.autograd.grad(space.exterior_angle(*p, 1.3).sum(), p) for p in (actual, true))
    for f, t in zip(actual, true, strict=True):
        assert (t.norm(dim=-1) > 0.1).all(), f"seed={seed}"
        assert ((f.double() - t).norm(dim=-1) <= 1e-5 * t.norm(dim=-1)).all(), f"seed={seed}"


@pytest.mark.parametrize("c", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("space", [lorentz, poincare])
def test_the_half_aperture_keeps_its_digits_where_the_cone_is_widest(space, c: float) -> None:
    """Close to ``s|x| = 2K`` (K in the ball) the aperture bends away from pi/2 like a square root."""
    g, seed = generator()
    c = float(torch.tensor(c))
    widest = 0.2 if space is lorentz else (math.sqrt(1 + 4 * 0.01) - 1) / 0.2
    x = torch.randn(4000, 5, generator=g, dtype=torch.float64)
    excess = 10 ** (-7 * torch.rand(4000, 1, generator=g, dtype=torch.float64))
    x = (widest * (1 + excess) / math.sqrt(c) * x / x.norm(dim=-1, keepdim=True)).float().requires_grad_()
    exact = x.detach().double().requires_grad_()
    value, true = space.half_aperture(x, c), space.half_aperture(exact, c)
    assert (true < math.pi / 2).any() and (value.double() - true).abs().max() <= 2e-7, f"seed={seed}"
    (grad,), (true_grad,) = torch.autograd.grad(value.sum(), x), torch.autograd.grad(true.sum(), exact)
    assert ((grad.double() - true_grad).norm(dim=-1) <= 1e-6 * true_grad.norm(dim=-1)).all(), f"seed={seed}"


# ---- identities ------------------------------------------------------------------------------------------------------

CURVATURES = (1e-3, 0.3, 1.0, 1e3)
MODELS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor], float]] = {
    "lorentz": (lorentz.dist, torch.sinh, 20.0),
    "poincare": (poincare.dist, lambda r: torch.tanh(r / 2), 12.0),
    "klein": (klein.dist, torch.tanh, 5.0),
}
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def draw_points(
    radius_map: Callable[[Tensor], Tensor],
    radius: float,
    c: float,
    rows: int,
    dim: int,
    dtype: torch.dtype,
    g: torch.Generator,
) -> Tensor:
    """Random directions, radii uniform up to ``radius``; ``radius_map`` says how far out a model draws them."""
    v = torch.randn(rows, dim, generator=g, dtype=torch.float64)
    r = radius * torch.rand(rows, 1, generator=g, dtype=torch.float64)
    return (radius_map(r) / math.sqrt(c) * v / v.norm(dim=-1, keepdim=True)).to(dtype)


@both_dtypes
@pytest.mark.parametrize("c", CURVATURES)
@pytest.mark.parametrize("model", MODELS)
def test_distance_to_itself_is_zero_with_zero_gradient(model: str, c: float, dtype: torch.dtype) -> None:
    g, seed = generator()
    dist, radius_map, radius = MODELS[model]
    x = draw_points(radius_map, radius, c, 2000, 5, dtype, g).requires_grad_()
    y = x.detach().clone().requires_grad_()
    value = dist(x, y, c)
    assert not value.any(), f"seed={seed}"
    for grad in torch.autograd.grad(value.sum(), (x, y)):
        assert not grad.any(), f"seed={seed}"


@both_dtypes
@pytest.mark.parametrize("c", CURVATURES)
@pytest.mark.parametrize("model", MODELS)
def test_distance_is_symmetric_bit_for_bit(model: str, c: float, dtype: torch.dtype) -> None:
    g, seed = generator()
    dist, radius_map, radius = MODELS[model]
    x = draw_points(radius_map, radius, c, 5000, 5, dtype, g)
    y = draw_points(radius_map, radius, c, 5000, 5, dtype, g)
    same_norm = x[:, torch.randperm(5, generator=g)] * torch.where(torch.rand(5, generator=g) < 0.5, -1, 1).to(dtype)
    near = x * (1 + 8 * torch.finfo(dtype).eps * torch.randn(x.shape, generator=g).to(dtype))
    for other in (y, same_norm, near, torch.zeros_like(x)):
        assert torch.equal(dist(x, other, c), dist(other, x, c)), f"seed={seed}"


@pytest.mark.parametrize("name", ["lorentz.sqdist", "lorentz.lorentz_sqdist", "poincare.sqdist"])
def test_squared_distances_are_symmetric_bit_for_bit(name: str) -> None:
    g, seed = generator()
    x, y = (torch.randn(5000, 3, generator=g) * 0.3 for _ in range(2))
    function = FUNCTIONS[name].fn
    assert torch.equal(function(x, y, 1.3), function(y, x, 1.3)), f"seed={seed}"


@pytest.mark.parametrize("mode", ["exact", "matmul"])
def test_pairwise_distances_are_symmetric(mode: str) -> None:
    g, seed = generator()
    x, y = (draw_points(torch.sinh, 8.0, 1.3, 200, 5, torch.float32, g) for _ in range(2))
    there, back = lorentz.pairwise_dist(x, y, 1.3, mode=mode), lorentz.pairwise_dist(y, x, 1.3, mode=mode)
    if mode == "exact":
        assert torch.equal(there, back.T), f"seed={seed}"
    else:  # the order of summation in a matrix product is not ours
        torch.testing.assert_close(there, back.T, rtol=0, atol=1e-4)


@both_dtypes
@pytest.mark.parametrize("c", CURVATURES)
@pytest.mark.parametrize("dim", [2, 5, 16])
def test_triangle_inequality(dim: int, c: float, dtype: torch.dtype) -> None:
    """Random triangles, flat ones (the third point on the geodesic of the others: equality is reached), tiny ones."""
    g, seed = generator()
    limit = TOLERANCE["triangle"] * (torch.finfo(dtype).eps / EPS)
    x, y, z = (draw_points(torch.sinh, 5.0, c, 5000, dim, dtype, g) for _ in range(3))
    tau = torch.rand(len(x), 1, generator=g).to(dtype)
    tiny = 1e-4 * torch.randn(len(x), dim, generator=g).to(dtype) / math.sqrt(c)
    for a, b, middle in ((x, y, z), (x, y, lorentz.geodesic(x, y, tau, c)), (x, x + tiny, x + tau * tiny)):
        two_sides = lorentz.dist(a, middle, c) + lorentz.dist(middle, b, c)
        excess = (lorentz.dist(a, b, c) - two_sides).div(two_sides.clamp_min(torch.finfo(dtype).tiny)).max().item()
        assert excess <= limit, f"excess {excess:.3g} of {limit:.3g}, seed={seed}"


@both_dtypes
@pytest.mark.parametrize("c", CURVATURES)
@pytest.mark.parametrize("dim", [2, 5, 16])
def test_distance_is_invariant_under_boosts(dim: int, c: float, dtype: torch.dtype) -> None:
    """The boost is done in float64 and rounded, so that ``dist`` alone is tested; then ``lorentz.boost`` itself.

    A boost against the point passes through numbers of size ``exp(s (r_p + r_x))``, hence the radius for the second.
    """
    g, seed = generator()
    s, eps = math.sqrt(c), torch.finfo(dtype).eps
    x, y, p = (draw_points(torch.sinh, 5.0, c, 5000, dim, dtype, g) for _ in range(3))
    before = lorentz.dist(x, y, c).double()
    radius_x, radius_y, radius_p = (s * lorentz.dist0(q.double(), c) for q in (x, y, p))
    moved = [_boost(p.double(), q.double(), c).to(dtype) for q in (x, y)]
    largest = torch.stack([radius_x, radius_y, *(s * lorentz.dist0(q.double(), c) for q in moved)]).amax(0)
    own = [lorentz.boost(p, q, c) for q in (x, y)]
    cases = [(own, torch.maximum(radius_x, radius_y) + radius_p)]
    if dtype is torch.float32:  # float64 arithmetic is no exact boost for float64 points
        cases.append((moved, largest))
    for images, radius in cases:
        change = s * (lorentz.dist(*images, c).double() - before).abs()
        worst = (change / (TOLERANCE["isometry"] * (eps / EPS) * radius.cosh())).max().item()
        assert worst <= 1, f"{worst:.3g} of the limit, seed={seed}"


def _boost(p: Tensor, x: Tensor, c: float) -> Tensor:
    """Boost that takes the origin to p, as the matrix of special relativity acts on (t, x)."""
    tp, tx = ((1 / c + q.square().sum(-1, keepdim=True)).sqrt() for q in (p, x))
    gamma = math.sqrt(c) * tp
    length = p.norm(dim=-1, keepdim=True)
    axis = p / length
    along = (axis * x).sum(-1, keepdim=True)
    return x + axis * ((gamma - 1) * along + math.sqrt(c) * length * tx)


@both_dtypes
@pytest.mark.parametrize("c", CURVATURES)
@pytest.mark.parametrize("dim", [2, 5, 16])
def test_models_agree_on_distance(dim: int, c: float, dtype: torch.dtype) -> None:
    g, seed = generator()
    points = [draw_points(torch.tanh, 5.0, c, 5000, dim, dtype, g) for _ in range(2)]
    actual = {
        "klein": klein.dist(*points, c),
        "lorentz": lorentz.dist(*(klein.to_lorentz(k, c) for k in points), c),
        "poincare": poincare.dist(*(klein.to_poincare(k, c) for k in points), c),
        "via lorentz": poincare.dist(*(lorentz.to_poincare(klein.to_lorentz(k, c), c) for k in points), c),
        "via poincare": lorentz.dist(*(poincare.to_lorentz(klein.to_poincare(k, c), c) for k in points), c),
    }
    for a in actual:
        for b in actual:
            gap = _disagreement(actual[a], actual[b], c)
            assert gap <= TOLERANCE["models"], f"{a} and {b} differ by {gap:.3g}, seed={seed}"


@pytest.mark.parametrize("c", [1e-3, 1.0, 1e3])
def test_lorentz_and_poincare_agree_from_lorentz_points(c: float) -> None:
    g, seed = generator()
    x, y = (draw_points(torch.sinh, 5.0, c, 5000, 5, torch.float32, g) for _ in range(2))
    ball = poincare.dist(lorentz.to_poincare(x, c), lorentz.to_poincare(y, c), c)
    gap = _disagreement(ball, lorentz.dist(x, y, c), c)
    assert gap <= TOLERANCE["models"], f"differ by {gap:.3g}, seed={seed}"


def _disagreement(a: Tensor, b: Tensor, c: float) -> float:
    """Largest difference of two dimensionless distances, relative where they exceed 1."""
    return (math.sqrt(c) * (a - b).abs() / (math.sqrt(c) * b).clamp_min(1.0)).max().item()


# ---- no clamp inside the limits of rule 5 ----------------------------------------------------------------------------


@pytest.mark.parametrize("c", [1e-3, 1.0, 1e3])
def test_no_clamp_inside_the_limits_lorentz(c: float) -> None:
    """A million rows up to s r = 40 against float64. A clamp anywhere would be an error of order one."""
    g, seed = generator()
    c = float(torch.tensor(c))
    v = torch.randn(1_000_000, 2, generator=g)
    v = v / v.norm(dim=-1, keepdim=True) * (40 * (1 - 8 * EPS) / math.sqrt(c)) * torch.rand(len(v), 1, generator=g)
    x = lorentz.expmap0(v, c)
    worst = {
        "expmap0": _worst(x, lorentz.expmap0(v.double(), c)),
        "logmap0": _worst(lorentz.logmap0(x, c), lorentz.logmap0(x.double(), c)),
        "dist0": _worst(lorentz.dist0(x, c), lorentz.dist0(x.double(), c)),
    }
    half = len(x) // 2
    apart = (v[:half] * v[half:]).sum(-1) < math.cos(0.1) * v[:half].norm(dim=-1) * v[half:].norm(dim=-1)
    a, b = x[:half][apart], x[half:][apart]  # on one ray the inputs themselves have no digits left at s r = 40
    worst["dist"] = _worst(lorentz.dist(a, b, c), lorentz.dist(a.double(), b.double(), c))
    assert worst.pop("expmap0") <= 1e-5, f"seed={seed}"
    assert max(worst.values()) <= 1e-6, f"{worst}, seed={seed}"


@pytest.mark.parametrize("c", [1e-3, 1.0, 1e3])
def test_no_clamp_inside_the_limits_poincare(c: float) -> None:
    """A million points up to ``1 - s|x| = 1e-6``; errors are judged by the digits that ``1 - s|x|`` still has."""
    g, seed = generator()
    c = float(torch.tensor(c))
    x = torch.randn(1_000_000, 2, generator=g, dtype=torch.float64)
    gap = torch.exp(-math.log(1e6) * torch.rand(len(x), 1, generator=g, dtype=torch.float64))  # 1 - s|x|, 1e-6 to 1
    x = ((1 - gap) / math.sqrt(c) * x / x.norm(dim=-1, keepdim=True)).float()
    gap = 1 - math.sqrt(c) * x.double().norm(dim=-1)
    exact = poincare.dist0(x.double(), c)
    error = math.sqrt(c) * (poincare.dist0(x, c).double() - exact).abs()
    assert (error <= 8 * EPS * (1 / gap + math.sqrt(c) * exact)).all(), f"seed={seed}"
    inverse = poincare.logmap0(x, c).double().norm(dim=-1) * 2
    assert (math.sqrt(c) * (inverse - exact).abs() <= 8 * EPS * (1 / gap + math.sqrt(c) * exact)).all(), f"seed={seed}"


def _worst(actual: Tensor, true: Tensor) -> float:
    """Largest error of a row (or entry) relative to its size."""
    if actual.dim() == 1:
        actual, true = actual.unsqueeze(-1), true.unsqueeze(-1)
    size = true.norm(dim=-1)
    return ((actual.double() - true).norm(dim=-1) / torch.where(size > 0, size, 1.0)).max().item()
