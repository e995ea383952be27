"""Manifold objects, curvature, parameters that are points, distributions, means, precision of products."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.utils.checkpoint

from hyptree.geometry import (
    Curvature,
    Euclidean,
    Lorentz,
    Poincare,
    PointModule,
    Product,
    Sphere,
    WrappedNormal,
    curvature_from,
    curvature_parameters,
    euclidean,
    frechet_mean,
    lorentz,
    manifold_of,
    mark_points,
    poincare,
)
from hyptree.geometry.core import numerics


@pytest.mark.parametrize("c", [1e-3, 0.3, 1.0, 7.0, 1e3])
def test_the_curvature_passed_is_the_curvature_used(c):
    assert Curvature(c)() == c
    assert Curvature(1.0, learnable=True)() == 1.0
    assert Curvature(c, learnable=True)().item() == pytest.approx(c, rel=1e-6)
    assert Curvature(c, learnable=True, min=c / 10, max=c * 10)().item() == pytest.approx(c, rel=1e-5)


def test_learned_curvature_stays_in_its_bounds_and_gets_gradients():
    curvature = Curvature(1.0, learnable=True, min=0.5, max=2.0)
    for raw in (-1e3, 1e3):
        torch.nn.init.constant_(curvature.raw, raw)
        assert 0.5 - 1e-6 <= curvature().item() <= 2.0 + 1e-6
    manifold = Lorentz(1.0, learnable=True)
    x = manifold.random(5, 3)
    manifold.dist(x[:2], x[2:4]).sum().backward()
    assert manifold.curvature.raw.grad.abs() > 0
    model = torch.nn.Sequential(manifold, torch.nn.Linear(2, 2), Poincare(2.0))
    assert [id(p) for p in curvature_parameters(model)] == [id(manifold.curvature.raw)]
    assert manifold.curvature.raw.dtype == torch.float32
    with pytest.raises(ValueError, match="both bounds or none"):
        Curvature(1.0, min=0.1)
    with pytest.raises(ValueError, match="0 < min < c < max"):
        Curvature(1.0, min=2.0, max=3.0)


def test_one_curvature_can_be_shared():
    shared = Curvature(0.5, learnable=True)
    a, b = Lorentz(shared), Poincare(shared)
    assert a.c is not b.c and torch.equal(a.c, b.c)
    assert repr(a.curvature) == "Curvature(c=0.5, learnable)"
    assert repr(Curvature(torch.ones(3, 1, 1))) == "Curvature(c=(3, 1, 1))"
    assert len(list(torch.nn.ModuleList([a, b]).parameters())) == 1


@pytest.mark.parametrize("space", [Lorentz, Poincare, Sphere])
def test_manifolds_are_built_on_the_meta_device_and_come_back(space):
    """As large models are: shapes first, values where they are needed. The value given is not forgotten."""
    with torch.device("meta"):
        learned, fixed = space(c=0.5, learnable=True, min=0.1, max=2.0), space(c=0.5)
        assert learned.dist0(torch.empty(3, 4)).shape == (3,)
        assert repr(fixed.curvature) == "Curvature(c=0.5)" and repr(learned.curvature) == "Curvature(c=(), learnable)"
    assert learned.curvature.raw.is_meta and fixed.c == 0.5
    learned.to_empty(device="cpu").curvature.reset_parameters()
    assert learned.c.item() == pytest.approx(0.5, rel=1e-5) and learned.curvature.raw.requires_grad
    with torch.no_grad():
        learned.curvature.raw.add_(1.0)
    learned.curvature.reset_parameters()  # the value it started with, not one that shares its memory
    assert learned.c.item() == pytest.approx(0.5, rel=1e-5)
    with torch.device("meta"), pytest.raises(ValueError, match="positive"):
        space(c=-0.5, learnable=True)


def test_per_head_curvature_is_a_buffer():
    c = torch.tensor([0.5, 1.0, 2.0]).view(3, 1, 1)
    manifold = Lorentz(c)
    assert "curvature.value" in manifold.state_dict()
    x, y = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4)
    for head in range(3):
        torch.testing.assert_close(manifold.dist(x, y)[:, head], lorentz.dist(x[:, head], y[:, head], c[head].item()))


def test_poincare_and_lorentz_random_points_have_the_same_radii():
    torch.manual_seed(0)
    a = Lorentz(2.0).random(4000, 3, std=0.5)
    b = Poincare(2.0).random(4000, 3, std=0.5)
    assert Lorentz(2.0).dist0(a).mean().item() == pytest.approx(Poincare(2.0).dist0(b).mean().item(), rel=0.05)


def test_poincare_expmap0_doubles_lengths():
    """The literature's map: the conformal factor at the origin is 2."""
    v = torch.randn(6, 3)
    torch.testing.assert_close(Poincare(1.3).dist0(Poincare(1.3).expmap0(v)), 2 * v.norm(dim=-1))
    torch.testing.assert_close(Lorentz(1.3).dist0(Lorentz(1.3).expmap0(v)), v.norm(dim=-1))


@pytest.mark.parametrize(
    ("source", "value", "c"),
    [
        ("meru", 0.5, 0.5),
        ("himapper", math.log(2.0), 2.0),
        ("helm", -3.0, 3.0),
        ("hypercore", 4.0, 0.25),
        ("geoopt.Lorentz", 4.0, 0.25),
        ("geoopt.Stereographic", -2.0, 2.0),
        ("hypll", 0.0, math.log(2.0)),
    ],
)
def test_conventions_of_others(source, value, c):
    assert curvature_from(source, value) == pytest.approx(c)


def test_geoopt_agrees_through_the_converter():
    geoopt = pytest.importorskip("geoopt")
    k = 3.0
    c = curvature_from("geoopt.lorentz", k)
    theirs, ours = geoopt.Lorentz(k=k), Lorentz(c)
    x, y = (ours.random(20, 5, dtype=torch.float64) for _ in range(2))
    X, Y = ours.to_ambient(x), ours.to_ambient(y)
    theirs.k.data = theirs.k.data.double()
    torch.testing.assert_close(theirs.dist(X, Y), ours.dist(x, y), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(theirs.logmap(X, Y)[:, 1:], ours.logmap(x, y), rtol=1e-6, atol=1e-6)
    ball, mine = geoopt.PoincareBall(c=2.0), Poincare(2.0)
    ball = ball.double()
    p, q = (mine.random(20, 5, std=0.3, dtype=torch.float64) for _ in range(2))  # farther out, geoopt loses digits
    v = torch.randn(20, 5, dtype=torch.float64)
    torch.testing.assert_close(ball.dist(p, q), mine.dist(p, q), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ball.mobius_add(p, q), poincare.mobius_add(p, q, 2.0))
    torch.testing.assert_close(ball.transp(p, q, v), mine.transport(p, q, v))
    torch.testing.assert_close(ball.expmap(p, 0.1 * v), mine.expmap(p, 0.1 * v))
    torch.testing.assert_close(ball.gyration(p, q, v), poincare.gyration(p, q, v, 2.0))


class Holder(PointModule):
    def __init__(self):
        super().__init__()
        self.manifold = Lorentz(0.5, learnable=True)
        self.register_point("weight", self.manifold.random(4, 3).detach(), self.manifold)
        self.other = torch.nn.Parameter(torch.zeros(3))


def assert_marked(module: Holder) -> None:
    assert manifold_of(module.weight) is module.manifold
    assert manifold_of(module.other) is None


def test_points_stay_marked_through_copies_and_casts():
    holder = Holder()
    assert_marked(holder)
    assert_marked(copy.deepcopy(holder))
    assert_marked(pickle.loads(pickle.dumps(holder)))
    assert_marked(holder.to(torch.bfloat16).float())
    buffer = io.BytesIO()
    torch.save(holder, buffer)
    buffer.seek(0)
    assert_marked(torch.load(buffer, weights_only=False))
    fresh = Holder()
    fresh.load_state_dict(holder.state_dict())
    assert_marked(fresh)
    torch.testing.assert_close(fresh.weight, holder.weight)
    fresh.weight = torch.nn.Parameter(fresh.weight.detach().clone())  # as FSDP does
    assert_marked(fresh)
    fresh._parameters["weight"] = torch.nn.Parameter(fresh.weight.detach().clone())  # behind its back
    assert manifold_of(fresh.weight) is None
    mark_points(torch.nn.Sequential(fresh))
    assert_marked(fresh)


@pytest.mark.parametrize("c", [0.5, 1.0, 3.0])
def test_wrapped_normal_integrates_to_one(c):
    """Riemann sum of the density over a fine polar grid of the hyperbolic plane."""
    loc = lorentz.expmap0(torch.tensor([[0.4, -0.3]], dtype=torch.float64), c)
    scale = torch.tensor([0.3, 0.5], dtype=torch.float64)
    r = torch.linspace(0, 7, 3001, dtype=torch.float64)
    r = (r[1:] + r[:-1]) / 2
    angle = torch.arange(0, 360, dtype=torch.float64) * (2 * math.pi / 360)
    v = torch.stack([r[:, None] * angle.cos(), r[:, None] * angle.sin()], -1)
    s = c**0.5
    volume = torch.sinh(s * r) / s * (7 / 3000) * (2 * math.pi / 360)
    for manifold in (Lorentz(c), Poincare(c)):
        points = lorentz.expmap0(v, c)
        mean = loc
        if isinstance(manifold, Poincare):
            points, mean = lorentz.to_poincare(points, c), lorentz.to_poincare(loc, c)
        density = WrappedNormal(mean, scale, manifold).log_prob(points).exp()
        assert (density * volume[:, None]).sum().item() == pytest.approx(1.0, abs=1e-4)


def test_wrapped_normal_samples_follow_its_density_and_carry_gradients():
    manifold = Lorentz(1.5, learnable=True)
    loc = manifold.expmap0(torch.tensor([0.2, 0.5, -0.3])).detach().requires_grad_()
    scale = torch.tensor([0.2, 0.4, 0.3], requires_grad=True)
    normal = WrappedNormal(loc, scale, manifold)
    z = normal.rsample((2000,))
    assert z.shape == (2000, 3)
    v = lorentz.transport_to_origin(loc, lorentz.logmap(loc, z, manifold.c), manifold.c)
    torch.testing.assert_close(v.std(0), scale, rtol=0.1, atol=0)
    grads = torch.autograd.grad(normal.log_prob(z).mean(), [loc, scale, manifold.curvature.raw], retain_graph=True)
    assert all(torch.isfinite(g).all() and g.abs().sum() > 0 for g in grads)
    grads = torch.autograd.grad(z.square().sum(), [loc, scale, manifold.curvature.raw])
    assert all(torch.isfinite(g).all() and g.abs().sum() > 0 for g in grads)
    far = WrappedNormal(torch.zeros(3), 1.0).log_prob(lorentz.expmap0(torch.full((3,), 20.0)))
    assert torch.isfinite(far)
    flat = WrappedNormal(torch.ones(3), 0.5, Euclidean())
    expected = torch.distributions.Normal(torch.ones(3), 0.5).log_prob(torch.zeros(3)).sum()
    torch.testing.assert_close(flat.log_prob(torch.zeros(3)), expected)
    with pytest.raises(ValueError, match="got Sphere"):
        WrappedNormal(torch.ones(3), 1.0, Sphere())


@pytest.mark.parametrize(
    "manifold", [Lorentz(0.7), Poincare(2.0), Sphere(1.0), Euclidean()], ids=lambda m: type(m).__name__
)
def test_frechet_mean_gradient_equals_the_unrolled_one(manifold):
    x = manifold.random(2, 5, 3, std=0.5, dtype=torch.float64)
    if isinstance(manifold, Sphere):
        x = manifold.geodesic(manifold.origin(2, 5, 3, dtype=torch.float64), x, 0.3)
    x.requires_grad_()
    w = (torch.rand(2, 5, dtype=torch.float64) + 0.1).requires_grad_()
    target = manifold.random(2, 3, dtype=torch.float64)

    def grads(implicit: bool):
        mean = frechet_mean(x, w, manifold, implicit=implicit)
        return torch.autograd.grad(manifold.sqdist(mean, target).sum(), [x, w])

    for implicit, unrolled in zip(grads(True), grads(False), strict=True):
        torch.testing.assert_close(implicit, unrolled, rtol=1e-6, atol=1e-9)


def test_frechet_mean_of_curvature_and_under_transforms():
    manifold = Lorentz(0.8, learnable=True)
    x = manifold.random(4, 6, 3).detach()
    mean = frechet_mean(x, manifold=manifold)
    assert torch.autograd.grad(mean.sum(), manifold.curvature.raw)[0].isfinite()
    fixed = Lorentz(0.8)
    torch.testing.assert_close(
        torch.func.vmap(lambda s: frechet_mean(s, manifold=fixed))(x), frechet_mean(x, manifold=fixed)
    )
    assert frechet_mean(x.bfloat16(), manifold=fixed).dtype == torch.bfloat16
    single = frechet_mean(x[:, :1], manifold=fixed)
    torch.testing.assert_close(single, x[:, 0])
    with pytest.raises(ValueError, match="expected a manifold"):
        frechet_mean(x, manifold=torch.nn.Identity())


def test_frechet_mean_in_many_dimensions_uses_the_diagonal():
    x = Lorentz().random(4, 600, std=0.02, dtype=torch.float64).requires_grad_()
    grad = torch.autograd.grad(frechet_mean(x)[:3].sum(), x)[0]
    flat = torch.autograd.grad(x.mean(0)[:3].sum(), x)[0]  # points this close together live in flat space
    torch.testing.assert_close(grad, flat, rtol=0.2, atol=0.05)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_products_are_exact_whatever_the_network_allows(precision):
    """TF32 (or bf16 on CPU) must not reach the geometry; values and both derivatives stay at float32 accuracy."""
    x, y = Lorentz().random(33, 17).requires_grad_(), Lorentz().random(29, 17).requires_grad_()
    exact = lorentz.gram(x.double(), y.double())
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        out = lorentz.gram(x, y)
        grad = torch.autograd.grad(out.square().sum(), [x, y], create_graph=True)
        second = torch.autograd.grad(grad[0].sum(), y)[0]
        rows = torch.func.vmap(lambda a: lorentz.gram(a[None], y)[0])(x)
        with torch.no_grad():
            columns = torch.func.vmap(lambda b: lorentz.gram(x, b[None])[:, 0], out_dims=1)(y)
        torch._dynamo.reset()
        compiled = torch.compile(lorentz.gram, fullgraph=True)(x, y)
    finally:
        torch.set_float32_matmul_precision(before)
    for result in (out, rows, columns, compiled):
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(exact.square().sum(), [x, y], create_graph=True)
    pairs = [*zip(grad, expected, strict=True), (second, torch.autograd.grad(expected[0].sum(), y)[0])]
    for ours, theirs in pairs:
        assert (ours - theirs).norm() <= 2e-6 * theirs.norm()  # TF32 alone would give 3e-4


def test_autocast_does_not_reach_distances():
    x, y = torch.randn(8, 16), torch.randn(9, 16)
    expected = lorentz.pairwise_dist(x, y, mode="matmul")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(lorentz.pairwise_dist(x, y, mode="matmul"), expected)
        rough = lorentz.pairwise_dist(x, y, mode="matmul", allow_low_precision=True)
    assert rough.dtype == torch.float32
    assert 1e-5 < (rough - expected).abs().max() < 0.1


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_does_not_reach_gradients(compiled):
    """Neither when backward runs inside it, nor compiled, where backward is treated as the forward pass was."""
    x, y, weight = torch.randn(40, 16), torch.randn(30, 16), torch.randn(40, 30)
    args = [x.requires_grad_(), y.requires_grad_(), torch.tensor(0.7, requires_grad=True)]

    def loss(x, y, c):
        return (lorentz.pairwise_dist(x, y, c, mode="matmul") * weight).sum()

    expected = torch.autograd.grad(loss(*args), args)
    if compiled:
        torch._dynamo.reset()
        loss = torch.compile(loss, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(loss(*args), args)
        value = loss(*args)
    outside = torch.autograd.grad(value, args)
    sizes = [expected[0].norm(), expected[1].norm(), weight.norm()]  # the sum that gives the last may cancel
    for grads in (inside, outside):
        for ours, theirs, size in zip(grads, expected, sizes, strict=True):
            assert (ours - theirs).norm() <= 5e-6 * size  # bfloat16 would give 2e-3


def test_autocast_does_not_reach_means_and_second_derivatives():
    x, y = torch.randn(12, 16, requires_grad=True), torch.randn(9, 16)

    def curvature_of_sum():
        (slope,) = torch.autograd.grad(euclidean.pairwise_dist(x, y).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    def slope_of_mean():
        return torch.autograd.grad(frechet_mean(x.unsqueeze(0), None, Lorentz(0.7)).square().sum(), x)[0]

    for gradient in (curvature_of_sum, slope_of_mean):
        expected = gradient()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (gradient() - expected).norm() <= 2e-6 * expected.norm()  # bfloat16 would give 1e-4 and more


@pytest.mark.parametrize(
    ("left", "right"),
    [((5, 3), (3, 4)), ((2, 5, 3), (3, 4)), ((5, 3), (2, 3, 4)), ((2, 5, 3), (2, 3, 4)), ((6, 1, 5, 3), (2, 3, 4))],
)
def test_strict_product_has_the_derivatives_of_the_plain_one(left, right):
    a, b = torch.randn(left, requires_grad=True), torch.randn(right, requires_grad=True)
    results = []
    for product in (numerics.strict_matmul, torch.matmul):
        out = product(a, b)
        first = torch.autograd.grad(out.square().sum(), [a, b], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [a, b])
        alone = [torch.autograd.grad(product(a, b.detach()).square().sum(), a)[0]]
        alone += torch.autograd.grad(product(a.detach(), b).square().sum(), b)
        rows = torch.func.vmap(torch.func.grad(lambda row, product=product: product(row, b).square().sum()))(a[None])
        results.append([out, *first, *second, *alone, rows])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


def test_product_is_the_sum_of_its_parts():
    parts = [(Lorentz(0.5), 3), (Poincare(2.0), 2), (Euclidean(), 4), (Sphere(1.0), 3)]
    product = Product(parts)
    x, y = product.random(6, 12, dtype=torch.float64), product.random(6, 12, dtype=torch.float64)
    pairs = zip(parts, x.split([3, 2, 4, 3], -1), y.split([3, 2, 4, 3], -1), strict=True)
    squares = sum(m.dist(a, b) ** 2 for (m, _), a, b in pairs)
    torch.testing.assert_close(product.dist(x, y) ** 2, squares)
    torch.testing.assert_close(product.sqdist(x, y), squares)
    for wrong in ([], Lorentz(), [Lorentz(), Lorentz()], [(3, Lorentz())], [(Lorentz(), 0)]):
        with pytest.raises(ValueError, match=r"expected pairs of a manifold and its number of coordinates.*, got .+$"):
            Product(wrong)


@pytest.mark.parametrize("c", [0.5, 1.0, torch.tensor(1.7)])
def test_matmul_mode_is_exact_from_the_origin_and_never_below_the_difference_of_radii(c):
    """The product cannot tell small radii; there, and wherever it falls below it, the exact bound is the value."""
    y = torch.cat([torch.randn(20, 6) * 10.0 ** torch.linspace(-12, 1, 20)[:, None], torch.zeros(1, 6)])
    y.requires_grad_()
    radius = lorentz.dist0(y, c)
    from_origin = lorentz.pairwise_dist(torch.zeros(2, 6), y, c, mode="matmul")
    torch.testing.assert_close(from_origin, radius.expand(2, 21), rtol=1e-6, atol=0.0)
    (grad,) = torch.autograd.grad(from_origin[0, 10:].sum(), y, retain_graph=True)
    (expected,) = torch.autograd.grad(radius[10:].sum(), y)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)
    ray = torch.linspace(0.1, 30.0, 40)[:, None] * torch.nn.functional.normalize(torch.randn(1, 6), dim=-1)
    pairs = lorentz.pairwise_dist(ray, ray.clone(), c, mode="matmul")
    radii = lorentz.dist0(ray, c)
    assert (pairs >= (radii[:, None] - radii).abs() * (1 - 1e-6) - 1e-6).all()


def test_quick_asinh_is_right_everywhere():
    """Tiny, around 1/2 where its two halves meet, huge; both signs; the slope is that of the careful function."""
    sizes = torch.cat(
        [10.0 ** torch.empty(2000).uniform_(-37, 38), torch.empty(2000).uniform_(0.4, 0.6), torch.zeros(1)]
    )
    u = torch.cat([sizes, -sizes]).requires_grad_()
    torch._dynamo.reset()
    quick = torch.compile(numerics.quick_asinh, fullgraph=True, backend="aot_eager")
    out, expected = quick(u), torch.asinh(u.double())
    assert not torch.equal(out, numerics.asinh(u))  # it is another formula
    torch.testing.assert_close(out.double(), expected, rtol=3e-7, atol=0.0)
    (grad,) = torch.autograd.grad(out.sum(), u)
    torch.testing.assert_close(grad.double(), 1 / torch.hypot(torch.ones(()).double(), u.double()), rtol=1e-6, atol=0.0)
    wide = u.detach().double()
    assert torch.equal(quick(wide), numerics.asinh(wide))


def test_compiled_by_inductor_equals_eager():
    """The kernels that users get: real code generation for the hot functions, values and gradients."""
    torch._dynamo.reset()
    x, y = torch.randn(40, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)

    def loss(x, y):
        pairs = lorentz.pairwise_dist(x, y, 0.5, mode="matmul")
        return (
            pairs.mean() + lorentz.dist(x[:30], y, 0.5).mean() + poincare.dist0(lorentz.to_poincare(x, 0.5), 0.5).mean()
        )

    expected = torch.autograd.grad(loss(x, y), [x, y])
    out = torch.compile(loss, fullgraph=True)(x, y)
    torch.testing.assert_close(out, loss(x, y))
    for ours, theirs in zip(torch.autograd.grad(out, [x, y]), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["exact", "matmul"])
def test_all_pairs_can_be_computed_again_for_their_gradient(mode: str) -> None:
    space = Lorentz(0.7)
    x, y = space.random(5, 3).requires_grad_(), space.random(4, 3).requires_grad_()

    def distances(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return space.pairwise_dist(x, y, mode=mode)

    plain = torch.autograd.grad(distances(x, y).square().sum(), (x, y))
    again = torch.utils.checkpoint.checkpoint(distances, x, y, use_reentrant=False)
    for a, b in zip(plain, torch.autograd.grad(again.square().sum(), (x, y)), strict=True):
        assert torch.equal(a, b)
