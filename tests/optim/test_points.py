"""Parameters that are points: the update against loops, geoopt, the Fréchet mean, isometries and hard input."""

import copy

import pytest
import torch
from torch import nn

from hyptree.geometry import (
    Curvature,
    Euclidean,
    Lorentz,
    Poincare,
    PointModule,
    Product,
    Sphere,
    frechet_mean,
    lorentz,
    mark_manifold,
    poincare,
)
from hyptree.optim import RiemannianAdam, RiemannianAdamW, RiemannianSGD, param_groups, rows
from tests.optim.reference import LorentzPoint, PoincarePoint, adam_loop, sgd_loop

SPACES = [(Lorentz, LorentzPoint), (Poincare, PoincarePoint)]
KINDS = [RiemannianSGD, RiemannianAdam]


def point(manifold, *shape, dtype=torch.float64, std=0.7, value=None):
    value = manifold.random(*shape, std=std, dtype=dtype) if value is None else value
    value = value.detach().clone()
    return mark_manifold(nn.Parameter(value), manifold)


def steps(optimizer, params, grads):
    for g in grads:
        for p, gi in zip(params, g, strict=True):
            p.grad = gi.clone()
        optimizer.step()


@pytest.mark.parametrize("c", [1.0, 0.3, 5.0])
@pytest.mark.parametrize(("space", "reference"), SPACES)
@pytest.mark.parametrize("options", [
    {},
    {"wd": 0.3},
    {"amsgrad": True, "betas": (0.5, 0.6)},
    {"first_order": True},
    {"first_order": True, "wd": 0.1},
    {"max_step": 0.04},
])  # fmt: skip
def test_adam_equals_the_loop(space, reference, c, options):
    p = point(space(c), 5, 3, std=0.7 / c**0.5)
    start = p.detach().clone()
    grads = [torch.randn(5, 3, dtype=torch.float64) * 0.3 for _ in range(8)]
    expected = adam_loop(reference(c), start, grads, lr=0.05, **options)
    options = dict(options)
    if options.pop("first_order", False):
        options["retraction"] = "first_order"
    optimizer = RiemannianAdam([p], lr=0.05, weight_decay=options.pop("wd", 0.0), **options)
    steps(optimizer, [p], [[g] for g in grads])
    torch.testing.assert_close(p.detach(), expected, rtol=1e-11, atol=1e-13)
    assert optimizer.state[p]["exp_avg_sq"].shape == (5, 1)
    assert set(optimizer.state[p]) >= {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("c", [1.0, 3.0])
@pytest.mark.parametrize(("space", "reference"), SPACES)
@pytest.mark.parametrize("options", [
    {},
    {"wd": 0.3},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.4, "wd": 0.2},
    {"momentum": 0.8, "nesterov": True},
    {"momentum": 0.8, "nesterov": True, "wd": 0.2, "first_order": True},
])  # fmt: skip
def test_sgd_equals_the_loop(space, reference, c, options):
    p = point(space(c), 5, 3, std=0.7 / c**0.5)
    start = p.detach().clone()
    grads = [torch.randn(5, 3, dtype=torch.float64) * 0.2 for _ in range(8)]
    expected = sgd_loop(reference(c), start, grads, lr=0.1, **options)
    options = dict(options)
    if options.pop("first_order", False):
        options["retraction"] = "first_order"
    steps(RiemannianSGD([p], lr=0.1, weight_decay=options.pop("wd", 0.0), **options), [p], [[g] for g in grads])
    torch.testing.assert_close(p.detach(), expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("space", [Lorentz, Poincare])
def test_transport_is_the_one_of_the_geometry(space):
    functions, c, n = space.functions, 2.0, 5
    name = functions.__name__.rsplit(".", 1)[-1]
    unit = 1.0 if space is Lorentz else 2.0  # length at the origin of a coordinate vector of the ball
    x = space(c).random(200, n, std=1.0, dtype=torch.float64)
    d, m = torch.randn(2, 200, n, dtype=torch.float64)
    y_expected = functions.expmap(x, functions.transport_from_origin(x, -0.5 * d / unit, c), c)
    at_x = functions.transport_from_origin(x, m / unit, c)
    expected = unit * functions.transport_to_origin(y_expected, functions.transport(x, y_expected, at_x, c), c)
    y, carried = x.clone(), m.clone()
    rows.move_rows(y, d, 0.5, carried, [(name, n)], [c], False)
    torch.testing.assert_close(y, y_expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(carried, expected, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(carried.norm(dim=-1), m.norm(dim=-1), rtol=1e-13, atol=0)
    itself, z = d.clone(), x.clone()
    rows.move_rows(z, itself, 0.5, itself, [(name, n)], [c], False)
    other = d.clone()
    rows.move_rows(x.clone(), d, 0.5, other, [(name, n)], [c], False)
    torch.testing.assert_close(itself, other, rtol=1e-12, atol=1e-13)


def test_float32_keeps_its_digits_far_out():
    for radius in (1.0, 8.0, 15.0, 30.0):
        v = torch.randn(100, 4)
        x = lorentz.expmap0(v / v.norm(dim=-1, keepdim=True) * radius)
        d, m = torch.randn(2, 100, 4)
        fine, fine_m = x.double(), m.double()
        rows.move_rows(fine, d.double(), 0.3, fine_m, [("lorentz", 4)], [1.0], False)
        rows.move_rows(x, d, 0.3, m, [("lorentz", 4)], [1.0], False)
        assert ((m - fine_m).norm(dim=-1) / m.norm(dim=-1)).max() < 1e-6
        assert ((x - fine).norm(dim=-1) / fine.norm(dim=-1)).max() < 1e-5


@pytest.mark.parametrize("c", [1.0, 2.5])
@pytest.mark.parametrize(("ball", "retraction"), [("PoincareBallExact", "exp"), ("PoincareBall", "first_order")])
def test_sgd_agrees_with_geoopt(c, ball, retraction):
    geoopt = pytest.importorskip("geoopt")
    start = poincare.expmap0(torch.randn(6, 4, dtype=torch.float64) * 0.2 / c**0.5, c)
    grads = [torch.randn(6, 4, dtype=torch.float64) for _ in range(10)]
    theirs = geoopt.ManifoldParameter(
        start.clone(), manifold=getattr(geoopt, ball)(c=torch.tensor(c, dtype=torch.float64))
    )
    ours = point(Poincare(c), value=start)
    steps(geoopt.optim.RiemannianSGD([theirs], lr=0.1), [theirs], [[g] for g in grads])
    steps(RiemannianSGD([ours], lr=0.1, retraction=retraction), [ours], [[g] for g in grads])
    torch.testing.assert_close(ours.detach(), theirs.detach().as_subclass(torch.Tensor), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("c", [1.0, 2.5])
def test_sgd_agrees_with_geoopt_on_the_hyperboloid(c):
    geoopt = pytest.importorskip("geoopt")
    start = lorentz.expmap0(torch.randn(6, 4, dtype=torch.float64) * 0.6, c)
    target = lorentz.expmap0(torch.randn(6, 4, dtype=torch.float64) * 0.6, c)
    manifold = geoopt.Lorentz(k=torch.tensor(1 / c, dtype=torch.float64))  # geoopt's k is our 1/c
    theirs = geoopt.ManifoldParameter(lorentz.to_ambient(start, c), manifold=manifold)
    ours = point(Lorentz(c), value=start)
    optimizers = geoopt.optim.RiemannianSGD([theirs], lr=0.05), RiemannianSGD([ours], lr=0.05)
    ambient_target = lorentz.to_ambient(target, c)
    for _ in range(10):
        for optimizer in optimizers:
            optimizer.zero_grad()
        # the same function, -<x, y>_L, of the ambient coordinates and of the space components
        product = theirs * ambient_target
        (product[:, 0] - product[:, 1:].sum(-1)).sum().backward()
        (-lorentz.minkowski(ours, target, c)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours.detach(), theirs.detach().as_subclass(torch.Tensor)[:, 1:], rtol=1e-8, atol=1e-9)
    assert lorentz.dist(ours.detach(), start, c).min() > 1e-2


@pytest.mark.parametrize(
    "manifold", [Lorentz(0.5), Poincare(2.0), Sphere(), Product([(Lorentz(), 3), (Euclidean(), 2)])]
)
@pytest.mark.parametrize("make", [
    lambda p: RiemannianSGD(p, lr=0.2, momentum=0.5),
    lambda p: RiemannianSGD(p, lr=0.2, momentum=0.5, nesterov=True),
    lambda p: RiemannianAdam(p, lr=0.05),
])  # fmt: skip
def test_optimisation_finds_the_frechet_mean(manifold, make):
    cloud = manifold.random(20, 5, std=0.4, dtype=torch.float64)
    if isinstance(manifold, Sphere):
        cloud = manifold.expmap0(torch.randn(20, 5, dtype=torch.float64) * 0.3)
    p = point(manifold, 1, 5, std=0.4, value=cloud[:1])
    optimizer = make([p])
    adam = isinstance(optimizer, RiemannianAdam)
    for i in range(200 if adam else 80):
        if i == 130 and adam:
            optimizer.param_groups[0]["lr"] = 0.002
        optimizer.zero_grad()
        (manifold.sqdist(p, cloud).mean() / 2).backward()
        optimizer.step()
    mean = frechet_mean(cloud, manifold=manifold)
    assert manifold.dist(p.detach()[0], mean) < (2e-3 if adam else 1e-7)
    assert manifold.dist(cloud[0], mean) > 0.05


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("space", [Lorentz, Poincare])
@pytest.mark.parametrize("retraction", ["exp", "first_order"])
@pytest.mark.parametrize("num_steps", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_wild_steps_stay_finite(kind, space, retraction, num_steps):
    manifold = space(1.0)
    p = point(manifold, 100, 4, dtype=torch.float32, std=3.0)
    options = {"momentum": 0.9} if kind is RiemannianSGD else {}
    optimizer = kind([p], lr=5.0, retraction=retraction, **options)
    generator = torch.Generator().manual_seed(torch.initial_seed())
    noise = torch.randn(500, 100, 4, generator=generator)
    for i in range(num_steps):
        p.grad = noise[i % 500] * (100.0 if i % 50 == 0 else 1.0)
        optimizer.step()
    assert torch.isfinite(p).all()
    assert all(torch.isfinite(t).all() for t in optimizer.state[p].values())
    manifold.check(p.detach())


def test_gradients_scaled_beyond_reason_stay_finite():
    for scale in (0.0, 1e-30, 1e4, 1e12):
        for manifold in (Lorentz(), Poincare()):
            p = point(manifold, 30, 3, dtype=torch.float32, std=20.0)
            p.data[0] = 0
            for kind in KINDS:
                optimizer = kind([p], lr=1.0)
                steps(optimizer, [p], [[torch.randn(30, 3) * scale] for _ in range(3)])
                assert torch.isfinite(p).all(), (scale, manifold, kind)


@pytest.mark.parametrize("space", [Lorentz, Poincare])
def test_rows_without_gradient_keep_their_bits(space):
    p = point(space(1.3), 40, 4, dtype=torch.float32, std=2.0)
    before = p.detach().clone()
    for kind in KINDS:
        grad = torch.randn(40, 4)
        grad[::2] = 0
        steps(kind([p], lr=0.1), [p], [[grad]] * 5)
        assert torch.equal(p[::2], before[::2])
        assert not torch.equal(p[1::2], before[1::2])


@pytest.mark.parametrize("make", [
    lambda p: RiemannianSGD(p, lr=0.1, momentum=0.9),
    lambda p: RiemannianSGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: RiemannianAdam(p, lr=0.1, amsgrad=True),
])  # fmt: skip
def test_an_isometry_of_the_problem_is_one_of_the_path(make):
    c = 0.8
    start, target = lorentz.expmap0(torch.randn(2, 6, 3, dtype=torch.float64), c)
    shift = lorentz.expmap0(torch.randn(3, dtype=torch.float64) * 0.8, c)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q

    def path(move):
        p = point(Lorentz(c), value=move(start))
        optimizer = make([p])
        for _ in range(25):
            optimizer.zero_grad()
            (lorentz.sqdist(p, move(target), c).sum() + lorentz.dist(p[:1], p[1:], c).sum()).backward()
            optimizer.step()
        return p.detach()

    plain = path(lambda x: x)
    moved = path(lambda x: lorentz.boost(shift, x @ turn.T, c))
    torch.testing.assert_close(moved, lorentz.boost(shift, plain @ turn.T, c), rtol=1e-7, atol=1e-8)
    assert lorentz.dist(plain, start, c).min() > 0.05


def test_the_models_take_the_same_path():
    start = lorentz.expmap0(torch.randn(6, 3, dtype=torch.float64))
    target = lorentz.expmap0(torch.randn(6, 3, dtype=torch.float64))
    p, q = point(Lorentz(), value=start), point(Poincare(), value=poincare.from_lorentz(start))
    for kind, options in ((RiemannianAdam, {"weight_decay": 0.1}), (RiemannianSGD, {"momentum": 0.9})):
        first, second = kind([p], lr=0.1, **options), kind([q], lr=0.1, **options)
        for _ in range(20):
            first.zero_grad()
            second.zero_grad()
            lorentz.dist(p, target).sum().backward()
            poincare.dist(q, poincare.from_lorentz(target)).sum().backward()
            first.step()
            second.step()
        torch.testing.assert_close(poincare.to_lorentz(q.detach()), p.detach(), rtol=1e-8, atol=1e-9)


def test_points_of_a_sphere_stay_on_it():
    manifold = Sphere(4.0)
    p = point(manifold, 10, 4)
    grads = torch.randn(50, 10, 4, dtype=torch.float64)
    steps(RiemannianAdamW([p], lr=0.3, weight_decay=0.01), [p], [[g] for g in grads])
    torch.testing.assert_close(p.detach().norm(dim=-1), torch.full((10,), 0.5, dtype=torch.float64), rtol=1e-14, atol=0)


def test_flat_points_share_one_second_moment_per_row():
    p = point(Euclidean(), 4, 3)
    start, g = p.detach().clone(), torch.randn(4, 3, dtype=torch.float64)
    steps(RiemannianAdam([p], lr=0.1, eps=0.0), [p], [[g]])
    torch.testing.assert_close(p.detach(), start - 0.1 * g / g.norm(dim=-1, keepdim=True), rtol=1e-12, atol=1e-13)


class TwoTables(PointModule):
    def __init__(self):
        super().__init__()
        manifold = Lorentz(1.0, learnable=True)
        self.manifold = manifold
        self.register_point("a", manifold.random(6, 3, std=0.5).detach(), manifold)
        self.register_point("b", manifold.random(4, 3, std=0.5).detach(), manifold)
        self.head = nn.Linear(3, 2)
        self.norm = nn.LayerNorm(3)

    def forward(self):
        return self.head(self.norm(self.a)).square().mean() + self.manifold.sqdist(self.a[:4], self.b).mean()


def train(model, optimizer, num_steps):
    for _ in range(num_steps):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()


@pytest.mark.parametrize("make", [
    lambda p: RiemannianAdamW(p, lr=0.01, amsgrad=True),
    lambda p: RiemannianSGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    lambda p: RiemannianAdam(p, lr=0.01, rescale_points=True),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_continues_bit_for_bit(make, dtype, tmp_path):
    model = TwoTables()
    for name, p in model.named_parameters():
        if not name.startswith("manifold"):
            p.data = p.data.to(dtype)
    if dtype == torch.bfloat16:
        plain_make = make
        make = lambda p: plain_make([{"params": list(p), "master_weights": True}])  # noqa: E731
    optimizer = make(model.parameters())
    train(model, optimizer, 5)
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "run.pt")
    weights, state = torch.load(tmp_path / "run.pt", weights_only=True)
    clone = copy.deepcopy(model)
    resumed = make(clone.parameters())
    clone.load_state_dict(weights)
    resumed.load_state_dict(state)
    train(model, optimizer, 5)
    train(clone, resumed, 5)
    for p, q in zip(model.parameters(), clone.parameters(), strict=True):
        assert torch.equal(p, q)
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, resumed.state[q][key]) and value.dtype == resumed.state[q][key].dtype


def test_foreach_and_one_by_one_agree():
    manifolds = [Lorentz(), Lorentz(2.0), Poincare(), Product([(Lorentz(), 2), (Sphere(), 3)])]
    values = [m.random(*shape, std=0.5) for m in manifolds for shape in [(3, 5), (2, 4, 5), (5,)]]
    grads = [[torch.randn(v.shape) for v in values] for _ in range(5)]
    results = []
    for foreach in (None, False):
        params = [point(m, value=values[i * 3 + j]) for i, m in enumerate(manifolds) for j in range(3)]
        optimizer = RiemannianAdam(params, lr=0.1, foreach=foreach)
        steps(optimizer, params[:7], [g[:7] for g in grads[:2]])  # some start later, so their step counts differ
        steps(optimizer, params, grads)
        results.append(params)
        assert optimizer.state[params[1]]["exp_avg_sq"].shape == (2, 4, 1)
    for p, q, start in zip(*results, values, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        assert not torch.equal(p, start)


@pytest.mark.parametrize("space", [Lorentz, Poincare])
def test_gradients_of_points_come_back_untouched(space):
    for kind in KINDS:
        p = point(space(), 5, 3)
        p.grad = torch.randn(5, 3, dtype=torch.float64)
        before, version = p.grad.clone(), p.grad._version
        kind([p], lr=0.1, weight_decay=0.1, maximize=True).step()
        assert torch.equal(p.grad, before) and p.grad._version == version
    flat = point(Euclidean(), 5, 3)
    flat.grad = before.clone()
    RiemannianSGD([flat], lr=0.1, weight_decay=0.1).step()
    assert torch.equal(flat.grad, before)


def test_maximize_is_the_step_of_the_negative_gradient():
    for kind in KINDS:
        p = point(Lorentz(), 5, 3)
        q = point(Lorentz(), value=p.detach())
        g = torch.randn(5, 3, dtype=torch.float64)
        steps(kind([p], lr=0.1, maximize=True), [p], [[g]] * 3)
        steps(kind([q], lr=0.1), [q], [[-g]] * 3)
        assert torch.equal(p, q)


def test_max_step_bounds_the_length_of_every_step():
    for kind in KINDS:
        for manifold in (Lorentz(3.0), Poincare(0.5), Product([(Lorentz(), 2), (Poincare(), 2)])):
            p = point(manifold, 50, 4)
            optimizer = kind([p], lr=10.0, max_step=0.25)
            for scale in (1.0, 1e-3, 1e3):
                before = p.detach().clone()
                steps(optimizer, [p], [[scale * torch.randn(50, 4, dtype=torch.float64)]])
                assert manifold.dist(before, p.detach()).max() < 0.25 + 1e-6
            assert manifold.dist(before, p.detach()).max() > 0.2


def test_weight_decay_pulls_to_the_origin_by_its_share():
    for manifold in (Lorentz(2.0), Poincare(0.7), Sphere(1.5), Euclidean()):
        for kind in KINDS:
            p = point(manifold, 20, 4)
            before = manifold.dist0(p.detach())
            steps(kind([p], lr=0.1, weight_decay=0.5), [p], [[torch.zeros(20, 4, dtype=torch.float64)]])
            torch.testing.assert_close(manifold.dist0(p.detach()), 0.95 * before, rtol=1e-10, atol=1e-12)


def test_closure_zero_grads_and_debug():
    p = point(Lorentz(), 5, 3)
    optimizer = RiemannianAdam([p], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = lorentz.dist0(p).sum()
        loss.backward()
        return loss.detach()

    losses = [float(optimizer.step(closure)) for _ in range(20)]
    assert losses[-1] < losses[0]
    optimizer.zero_grad()
    before = p.detach().clone()
    optimizer.step()
    assert torch.equal(p, before) and optimizer.state[p]["step"] == 20


def test_tensor_learning_rate_and_scheduler():
    p = point(Lorentz(), 5, 3)
    q = point(Lorentz(), value=p.detach())
    g = [[torch.randn(5, 3, dtype=torch.float64)] for _ in range(3)]
    steps(RiemannianAdam([p], lr=torch.tensor(0.1, dtype=torch.float64), weight_decay=0.1), [p], g)
    steps(RiemannianAdam([q], lr=0.1, weight_decay=0.1), [q], g)
    torch.testing.assert_close(p, q, rtol=1e-13, atol=1e-14)
    optimizer = RiemannianSGD([p], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_learned_curvature_may_carry_its_points_along():
    for rescale in (True, False):
        model = TwoTables()
        optimizer = RiemannianAdam(
            [{"params": [model.a, model.b], "lr": 0.0}, {"params": list(model.manifold.parameters()), "lr": 0.1}],
            rescale_points=rescale,
        )
        before = (model.manifold.c.sqrt() * model.a).detach()
        for _ in range(4):
            optimizer.zero_grad()
            model().backward()
            model.b.grad = None  # moved along even without a gradient
            optimizer.step()
        after = (model.manifold.c.sqrt() * model.a).detach()
        assert abs(float(model.manifold.c.detach()) - 1) > 0.1
        assert torch.allclose(before, after, rtol=1e-5) == rescale


def test_tables_with_one_learned_curvature_share_their_kernels():
    manifold = Lorentz(1.5, learnable=True)
    params = [point(manifold, k, 3, dtype=torch.float32).requires_grad_() for k in (2, 5, 3)]
    optimizer = RiemannianAdam(params, lr=0.1)
    calls = []
    plain_update = optimizer._update
    optimizer._update = lambda group, work, step: (calls.append(work.x.shape), plain_update(group, work, step))
    steps(optimizer, params, [[torch.randn_like(p) for p in params]])
    assert calls == [(10, 3)]


def test_curvature_per_head():
    c = torch.tensor([0.5, 1.0, 4.0]).reshape(3, 1, 1)
    value = torch.randn(3, 4, 2, dtype=torch.float64) * 0.3
    together = point(Lorentz(c), value=value)
    apart = [point(Lorentz(float(ci)), value=v) for ci, v in zip(c, value, strict=True)]
    grads = [torch.randn(3, 4, 2, dtype=torch.float64) for _ in range(4)]
    steps(RiemannianAdam([together], lr=0.1, weight_decay=0.1), [together], [[g] for g in grads])
    steps(RiemannianAdam(apart, lr=0.1, weight_decay=0.1), apart, [list(g) for g in grads])
    torch.testing.assert_close(together.detach(), torch.stack(list(apart)).detach(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("space", [Lorentz, Poincare])
def test_master_weights_of_points(space):
    manifold = space()
    start = (0.25 + torch.rand(30, 3) / 4).bfloat16()
    kept, rounded, exact = (point(manifold, value=v) for v in (start, start, start.float()))
    options = {"lr": 3e-4}  # shorter than the spacing of bfloat16: without a master nothing moves
    with_master, without = RiemannianAdam([kept], master_weights=True, **options), RiemannianAdam([rounded], **options)
    reference = RiemannianAdam([exact], **options)
    for _ in range(60):
        g = (torch.randn(30, 3) * 0.1 + 1).bfloat16()
        steps(with_master, [kept], [[g]])
        steps(without, [rounded], [[g]])
        steps(reference, [exact], [[g.float()]])
    assert torch.equal(with_master.state[kept]["master_param"], exact)
    assert torch.equal(kept.detach(), exact.detach().bfloat16())
    assert torch.equal(rounded.detach(), start) and (kept.detach() < start).float().mean() > 0.8
    assert without.state[rounded]["exp_avg"].dtype == torch.float32


def test_bad_points():
    flat = mark_manifold(nn.Parameter(torch.zeros(3, 4)), Product([(Lorentz(), 3)]))
    with pytest.raises(ValueError, match="has 4 coordinates, its Product has 3"):
        RiemannianAdam([flat])
    with pytest.raises(ValueError, match="a point parameter is a floating tensor"):
        RiemannianAdam([mark_manifold(nn.Parameter(torch.zeros(())), Lorentz())])


def test_param_groups():
    model = TwoTables()
    groups = {g["name"]: g for g in param_groups(model, weight_decay=0.1, lr=1e-2, curvature_lr=1e-4)}
    assert {k: len(g["params"]) for k, g in groups.items()} == {"decay": 1, "no_decay": 3, "points": 2, "curvature": 1}
    assert [g["weight_decay"] for g in groups.values()] == [0.1, 0, 0, 0]
    assert groups["curvature"]["lr"] == 1e-4 and groups["points"]["lr"] == 1e-2
    train(model, RiemannianAdamW(groups.values()), 2)
    model.head.requires_grad_(False)
    assert "decay" not in {g["name"] for g in param_groups(model)}
    del model.a.manifold
    assert len(next(g for g in param_groups(model) if g["name"] == "points")["params"]) == 2
    assert isinstance(Curvature(1.0, learnable=True).raw, nn.Parameter)


def test_a_copied_model_trains_on():
    model = TwoTables()
    train(model, RiemannianAdam(param_groups(model), lr=0.01), 2)
    clone = copy.deepcopy(model)
    start = model.a.detach().clone()
    train(clone, RiemannianAdam(param_groups(clone), lr=0.01), 3)
    assert torch.equal(model.a, start) and not torch.equal(clone.a, start)
    train(model, RiemannianAdam(param_groups(model), lr=0.01), 3)
    assert torch.equal(model.a, clone.a)
