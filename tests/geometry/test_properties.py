"""Laws of geometry on generated input: metric axioms, isometries, inverse maps, agreement of models, means."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hyptree.geometry import Euclidean, Lorentz, Poincare, Product, Sphere, frechet_mean, klein, lorentz, poincare

curvatures = st.floats(1e-3, 1e3)
seeds = st.integers(0, 2**31 - 1)
dims = st.integers(1, 9)
radii = st.floats(0.01, 6.0)


def draw_points(seed: int, dim: int, radius: float, c: float, count: int = 7) -> list[Tensor]:
    """Sets of float64 Lorentz points with ``s * radius`` up to ``radius``, one of each set at the origin."""
    generator = torch.Generator().manual_seed(seed)
    sets = []
    for _ in range(3):
        v = torch.randn(count, dim, dtype=torch.float64, generator=generator)
        v = (
            v
            / v.norm(dim=-1, keepdim=True).clamp_min(1e-9)
            * torch.rand(count, 1, generator=generator).double()
            * radius
        )
        v[0] = 0
        sets.append(lorentz.expmap0(v / c**0.5, c))
    return sets


def random_rotation(seed: int, dim: int) -> Tensor:
    q, r = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
    return q * r.diagonal().sign()


@given(seeds, dims, radii, curvatures)
def test_dist_is_a_metric(seed, dim, radius, c):
    x, y, z = draw_points(seed, dim, radius, c)
    d = lorentz.dist(x, y, c)
    assert torch.equal(d, lorentz.dist(y, x, c))
    assert torch.equal(lorentz.dist(x, x, c), torch.zeros(7, dtype=torch.float64))
    assert (d >= 0).all()
    around = lorentz.dist(x, z, c) + lorentz.dist(z, y, c)
    assert (d <= around * (1 + 8 * torch.finfo(torch.float64).eps)).all()


@given(seeds, dims, radii, curvatures)
def test_boosts_and_rotations_are_isometries(seed, dim, radius, c):
    x, y, p = draw_points(seed, dim, radius, c)
    d = lorentz.dist(x, y, c)
    rotation = random_rotation(seed, dim)
    slack = 1e-12 * torch.cosh(torch.tensor(2 * radius, dtype=torch.float64)) / c**0.5
    assert ((lorentz.dist(x @ rotation, y @ rotation, c) - d).abs() <= slack).all()
    assert ((lorentz.dist(lorentz.boost(p, x, c), lorentz.boost(p, y, c), c) - d).abs() <= slack).all()
    torch.testing.assert_close(lorentz.boost(p, torch.zeros_like(p), c), p)
    back = lorentz.boost(-p, lorentz.boost(p, x, c), c)
    assert (lorentz.dist(back, x, c) <= slack).all()


@given(seeds, dims, radii, curvatures)
def test_exp_and_log_undo_each_other(seed, dim, radius, c):
    x, y, _ = draw_points(seed, dim, radius, c)
    slack = 1e-13 * torch.cosh(torch.tensor(2 * radius, dtype=torch.float64)) / c**0.5
    assert (lorentz.dist(lorentz.expmap(x, lorentz.logmap(x, y, c), c), y, c) <= slack).all()
    torch.testing.assert_close(
        lorentz.norm(x, lorentz.logmap(x, y, c), c), lorentz.dist(x, y, c), rtol=1e-8, atol=1e-12
    )
    torch.testing.assert_close(lorentz.expmap0(lorentz.logmap0(x, c), c), x)
    px, py = lorentz.to_poincare(x, c), lorentz.to_poincare(y, c)
    there = poincare.expmap(px, poincare.logmap(px, py, c), c)
    assert (poincare.dist(there, py, c) <= slack).all()
    torch.testing.assert_close(poincare.expmap0(poincare.logmap0(px, c), c), px)


@given(seeds, dims, st.floats(0.01, 5.0), curvatures)
def test_models_agree(seed, dim, radius, c):
    x, y, z = draw_points(seed, dim, radius, c)
    px, py, pz = (lorentz.to_poincare(a, c) for a in (x, y, z))
    kx, ky = lorentz.to_klein(x, c), lorentz.to_klein(y, c)
    d = lorentz.dist(x, y, c)
    close = {"rtol": 1e-8, "atol": 1e-10 / c**0.5}
    torch.testing.assert_close(poincare.dist(px, py, c), d, **close)
    torch.testing.assert_close(klein.dist(kx, ky, c), d, **close)
    torch.testing.assert_close(klein.to_poincare(kx, c), px)
    torch.testing.assert_close(poincare.to_lorentz(px, c), x)
    torch.testing.assert_close(lorentz.from_klein(kx, c), x)
    torch.testing.assert_close(lorentz.from_ambient(lorentz.to_ambient(x, c), c, check=True), x)
    torch.testing.assert_close(
        poincare.exterior_angle(px, py, c), lorentz.exterior_angle(x, y, c), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(poincare.half_aperture(px, c), lorentz.half_aperture(x, c))
    torch.testing.assert_close(poincare.midpoint(px, py, c), lorentz.to_poincare(lorentz.midpoint(x, y, c), c))
    for mode in ("exact", "matmul"):
        both = poincare.pairwise_dist(px, pz, c, mode=mode), lorentz.pairwise_dist(x, z, c, mode=mode)
        torch.testing.assert_close(both[0], both[1], rtol=1e-6, atol=1e-6 / c**0.5)


@given(seeds, dims, st.floats(0.01, 4.0), curvatures)
def test_transport_keeps_lengths_and_angles(seed, dim, radius, c):
    x, y, p = draw_points(seed, dim, radius, c)
    u, v = p, p.flip(0)  # any vectors are tangent vectors in the chart
    moved = lorentz.transport(x, y, u, c), lorentz.transport(x, y, v, c)
    scale = lorentz.norm(x, u, c) * lorentz.norm(x, v, c)
    slack = 1e-9 * scale + 1e-12 / c
    assert ((lorentz.inner(y, *moved, c) - lorentz.inner(x, u, v, c)).abs() <= slack).all()
    # The velocity of a geodesic is parallel along it: log at x, transported to y, is minus the log back.
    forward = lorentz.transport(x, y, lorentz.logmap(x, y, c), c)
    assert (
        lorentz.norm(y, forward + lorentz.logmap(y, x, c), c) <= 1e-8 * (lorentz.dist(x, y, c) + 1e-3 / c**0.5)
    ).all()
    origin = torch.zeros_like(y)
    torch.testing.assert_close(lorentz.transport_from_origin(y, u, c), lorentz.transport(origin, y, u, c))
    torch.testing.assert_close(lorentz.transport_to_origin(x, u, c), lorentz.transport(x, origin, u, c))

    px, py = lorentz.to_poincare(x, c), lorentz.to_poincare(y, c)
    moved = poincare.transport(px, py, u, c), poincare.transport(px, py, v, c)
    inner = poincare.inner(px, u, v, c)
    size = poincare.norm(px, u, c) * poincare.norm(px, v, c)
    assert ((poincare.inner(py, *moved, c) - inner).abs() <= 1e-9 * size + 1e-12).all()
    forward = poincare.transport(px, py, poincare.logmap(px, py, c), c)
    residue = poincare.norm(py, forward + poincare.logmap(py, px, c), c)
    assert (residue <= 1e-8 * (poincare.dist(px, py, c) + 1e-3 / c**0.5)).all()


@given(seeds, dims, radii, curvatures, st.floats(0.0, 1.0))
def test_geodesic_divides_the_distance(seed, dim, radius, c, tau):
    x, y, _ = draw_points(seed, dim, radius, c)
    g = lorentz.geodesic(x, y, tau, c)
    d = lorentz.dist(x, y, c)
    slack = 1e-12 * torch.cosh(torch.tensor(2 * radius, dtype=torch.float64)) / c**0.5
    assert ((lorentz.dist(x, g, c) - tau * d).abs() <= slack).all()
    assert ((lorentz.dist(g, y, c) - (1 - tau) * d).abs() <= slack).all()
    half = lorentz.geodesic(x, y, 0.5, c)
    assert (lorentz.dist(half, lorentz.midpoint(x, y, c), c) <= slack).all()


@given(seeds, st.integers(1, 6), st.floats(0.01, 3.0), curvatures)
def test_centroid_moves_with_the_points_and_ignores_the_scale_of_weights(seed, dim, radius, c):
    x, p, _ = draw_points(seed, dim, radius, c)
    w = torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    mean = lorentz.centroid(x, w, c)
    torch.testing.assert_close(lorentz.centroid(x, 1e-6 * w, c), mean)
    moved = lorentz.centroid(lorentz.boost(p[1], x, c), w, c)
    assert lorentz.dist(moved, lorentz.boost(p[1], mean, c), c) <= 1e-9 / c**0.5
    torch.testing.assert_close(lorentz.centroid(x, 0 * w, c), torch.zeros(dim, dtype=torch.float64))
    two = lorentz.residual(x[1], x[2], 0.3, c)
    torch.testing.assert_close(two, lorentz.centroid(x[1:3], torch.tensor([1.0, 0.3], dtype=torch.float64), c))


MANIFOLDS = {
    "lorentz": lambda c: Lorentz(c),
    "poincare": lambda c: Poincare(c),
    "euclidean": lambda c: Euclidean(),
    "sphere": lambda c: Sphere(c),
    "product": lambda c: Product([(Lorentz(c), 3), (Euclidean(), 1), (Sphere(c), 2)]),
}


@pytest.mark.parametrize("name", MANIFOLDS)
@given(seed=seeds, c=st.floats(0.05, 20.0))
def test_every_manifold_answers_the_same_questions(name, seed, c):
    manifold = MANIFOLDS[name](c)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return manifold.random(*shape, std=0.7 / c**0.5, generator=generator, dtype=torch.float64)

    x, y = random(5, 6), random(5, 6)
    manifold.check(x)
    v = manifold.logmap(x, y)
    tol = {"rtol": 1e-7, "atol": 1e-7}
    torch.testing.assert_close(manifold.expmap(x, v), y, **tol)
    torch.testing.assert_close(manifold.norm(x, v), manifold.dist(x, y), **tol)
    torch.testing.assert_close(manifold.inner(x, v, v), manifold.sqdist(x, y), **tol)
    torch.testing.assert_close(manifold.expmap0(manifold.logmap0(x)), x, **tol)
    origin = manifold.origin(5, 6, dtype=torch.float64)
    torch.testing.assert_close(manifold.dist0(x), manifold.dist(origin, x), **tol)
    torch.testing.assert_close(manifold.dist(manifold.geodesic(x, y, 0.25), x), manifold.dist(x, y) / 4, **tol)
    moved = manifold.transport(x, y, v)
    torch.testing.assert_close(manifold.norm(y, moved), manifold.norm(x, v), **tol)
    pairs = manifold.pairwise_dist(x, y)
    torch.testing.assert_close(pairs.diagonal(), manifold.dist(x, y), **tol)
    torch.testing.assert_close(manifold.pairwise_dist(x, y, mode="matmul"), pairs, rtol=1e-5, atol=1e-5)
    assert manifold.centroid(x).shape == (6,)
    assert manifold.saturation(x) == 0
    # A geodesic step along the negative gradient of the squared distance to y goes straight to y.
    leaf = x.clone().requires_grad_()
    grad = torch.autograd.grad(manifold.sqdist(leaf, y).sum() / 2, leaf)[0]
    torch.testing.assert_close(-manifold.egrad2rgrad(x, grad), v, **tol)


@pytest.mark.parametrize("name", MANIFOLDS)
@given(seed=seeds, c=st.floats(0.1, 10.0))
def test_frechet_mean_has_zero_gradient(name, seed, c):
    """At the mean the weighted tangent vectors to the points balance."""
    manifold = MANIFOLDS[name](c)
    generator = torch.Generator().manual_seed(seed)
    x = manifold.random(6, 6, std=0.4 / c**0.5, generator=generator, dtype=torch.float64)
    if name in ("sphere", "product"):  # a mean is unique inside a half sphere
        x = manifold.geodesic(manifold.origin(6, 6, dtype=torch.float64), x, 0.3)
    w = torch.rand(6, dtype=torch.float64, generator=generator) + 0.1
    mean = frechet_mean(x, w, manifold)
    balance = (w[:, None] * manifold.logmap(mean.expand(6, 6), x)).sum(0)
    assert manifold.norm(mean, balance) <= 1e-9 / c**0.5
