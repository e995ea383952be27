"""Exterior angles, cones and the loss: known triangles, invariances, gradients."""

import math

import pytest
import torch
from torch.nn import functional as F

from hyptree.geometry import lorentz
from hyptree.vlm.radial.loss import ConeLoss, RadialLoss, coincide, cone_energy, exterior_angle, root_distance

D = 12


def random_rotation(d):
    return torch.linalg.qr(torch.randn(d, d, dtype=torch.float64))[0]


def units(*shape):
    return F.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)


def great_circle(*angles):
    """Points of one random great circle at these angles from the first axis of it."""
    basis = random_rotation(D)
    return [math.cos(t) * basis[0] + math.sin(t) * basis[1] for t in angles]


def test_points_in_a_row_and_the_way_back(seed):
    root, way = torch.randn(2, 50, D, dtype=torch.float64)
    e, further = root + way, root + 1.7 * way
    assert exterior_angle(e, further, root).max() < 1e-7
    assert torch.allclose(exterior_angle(e, root, root), torch.full((50,), math.pi, dtype=torch.float64), atol=1e-12)


def test_angle_is_that_of_the_definition_and_invariant(seed):
    root, e, further = torch.randn(3, 100, D, dtype=torch.float64)
    actual = exterior_angle(e, further, root)
    a, b = e - root, further - e
    expected = torch.acos((a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)))
    assert torch.allclose(actual, expected, atol=1e-12)
    turn, shift = random_rotation(D), torch.randn(D, dtype=torch.float64)
    moved = [3.5 * (x @ turn) + shift for x in (e, further, root)]
    assert torch.allclose(exterior_angle(*moved), actual, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_great_circle_identity(seed, dtype):
    for a, b in torch.rand(20, 2).mul(1.2).add(0.1).tolist():
        root, e, further = (x.to(dtype) for x in great_circle(0, a, a + b))
        chord = exterior_angle(e, further, root)
        assert chord.item() == pytest.approx((a + b) / 2, abs=1e-6)
        if dtype == torch.float64:  # float32 points are themselves off the circle by 1e-7 / b
            assert exterior_angle(e, further, root, geometry="geodesic").item() == pytest.approx(0, abs=1e-6)
        back = exterior_angle(further, e, root, geometry="geodesic")
        assert back.item() == pytest.approx(math.pi, abs=1e-6 if dtype == torch.float64 else 1e-5)


def test_geodesic_angle_is_that_of_the_tangents(seed):
    e, further, root = units(3, 60, D)
    u, v = ((e * root).sum(-1, keepdim=True) * e - root), further - (e * further).sum(-1, keepdim=True) * e
    expected = torch.acos((u * v).sum(-1) / (u.norm(dim=-1) * v.norm(dim=-1)))
    assert torch.allclose(exterior_angle(e, further, root, geometry="geodesic"), expected, atol=1e-10)


def test_lorentz_angle_is_that_of_the_formula(seed):
    c = 0.7
    x, y = torch.randn(2, 40, D, dtype=torch.float64)
    xt, yt = (torch.sqrt(1 / c + v.square().sum(-1)) for v in (x, y))
    u = c * ((x * y).sum(-1) - xt * yt)
    expected = torch.acos((yt + u * xt) / (x.norm(dim=-1) * torch.sqrt(u.square() - 1)))
    actual = exterior_angle(x, y, geometry="lorentz", c=c)
    assert torch.allclose(actual, expected, atol=1e-9)
    assert torch.allclose(root_distance(x, geometry="lorentz", c=c), lorentz.dist0(x, c))


def test_root_distances(seed):
    root, e = great_circle(0, 0.9)
    assert root_distance(e, root).item() == pytest.approx(2 * math.sin(0.45), abs=1e-12)
    assert root_distance(e, root, geometry="geodesic").item() == pytest.approx(0.9, abs=1e-12)


@pytest.mark.parametrize("geometry", ["chord", "geodesic", "lorentz"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_finite_where_points_meet(seed, geometry, dtype):
    root = units(D).to(dtype)
    e = units(6, D).to(dtype)
    e[1] = root
    further = units(6, D).to(dtype)
    further[2], further[3] = e[2], e[3] * (1 + 4 * torch.finfo(dtype).eps)
    e.requires_grad_(), further.requires_grad_(), root.requires_grad_()
    angle = exterior_angle(e, further, root, geometry=geometry)
    assert angle.dtype == dtype and angle[2] == 0 and angle[3] == 0
    if geometry != "lorentz":
        assert angle[1].item() == pytest.approx(math.pi / 2)
    inputs = (e, further) if geometry == "lorentz" else (e, further, root)
    gradients = torch.autograd.grad(angle.sum(), inputs)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[1][0].norm() > 0 and not gradients[1][2].any() and not gradients[0][3].any()


@pytest.mark.parametrize("geometry", ["chord", "geodesic"])
def test_slopes_stay_bounded_near_a_straight_line(seed, geometry):
    """acos would have an infinite slope here; the angle's own slope is at most 1 / distance on either side."""
    for tilt in (1e-3, 1e-5, 1e-7, 0.0):
        root, e, further = (x.requires_grad_() for x in great_circle(0, 0.5, 1.0))
        aside = units(D) * tilt
        angle = exterior_angle(e, further + aside, root, geometry=geometry)
        for gradient in torch.autograd.grad(angle, (e, further, root)):
            assert gradient.norm() < 5


@pytest.mark.parametrize("geometry", ["chord", "geodesic", "lorentz"])
def test_gradcheck(seed, geometry):
    e, further, root = (x.requires_grad_() for x in units(3, 4, D))
    assert torch.autograd.gradcheck(lambda *x: exterior_angle(*x, geometry=geometry), (e, further, root.detach()))
    if geometry != "lorentz":
        assert torch.autograd.gradcheck(lambda *x: exterior_angle(*x, geometry=geometry), (e, further, root))


def test_half_precision_gives_float32(seed):
    e, further, root = units(3, 5, D).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        actual = exterior_angle(e, further, root)
    assert actual.dtype == torch.float32
    assert torch.allclose(actual.double(), exterior_angle(e.double(), further.double(), root.double()), atol=1e-6)


def test_cones(seed):
    root, e, further = great_circle(0, 0.8, 1.3)
    half = math.asin(0.1 / (2 * math.sin(0.4)))
    assert cone_energy(e, further, root).item() == pytest.approx(1.3 / 2 - half, abs=1e-9)
    assert cone_energy(e, further, root, geometry="geodesic").item() == 0
    near = great_circle(0, 0.05, 1.0)
    assert cone_energy(near[1], near[2], near[0]).item() == 0  # within `size` of the root the cone is a half space
    x, y = torch.randn(2, 20, D, dtype=torch.float64)
    assert torch.allclose(cone_energy(x, y, geometry="lorentz", c=0.5), lorentz.cone_energy(x, y, 0.5), atol=1e-12)


def test_loss_is_that_of_the_formula(seed):
    B, L = 5, 4
    positive, negative, first_p, first_n = units(4, B, L, D)
    root = units(D)
    terms = RadialLoss()(positive, negative, root, first_p, first_n)
    P = torch.stack([exterior_angle(positive[:, k], positive[:, k + 1], root) for k in range(L - 1)], 1)
    N = torch.stack([exterior_angle(positive[:, k], negative[:, k], root) for k in range(L - 1)], 1)
    gap = (P - N).flatten()
    keep = torch.cat([(1 - (positive * first_p).sum(-1)) / 2, (1 - (negative * first_n).sum(-1)) / 2]).mean()
    assert terms.entail.item() == pytest.approx((P.mean() - N.mean()).item(), abs=1e-12)
    assert terms.hard.item() == pytest.approx((gap[P.argmax()] + gap[N.argmin()]).item(), abs=1e-12)
    assert terms.keep.item() == pytest.approx(keep.item(), abs=1e-12)
    assert terms.total.item() == pytest.approx((terms.entail + terms.hard + 10 * terms.keep).item(), abs=1e-12)
    assert terms.positive.item() == pytest.approx(P.mean().item(), abs=1e-12)
    assert terms.negative.item() == pytest.approx(N.mean().item(), abs=1e-12)
    plain = RadialLoss(weights=(2, 1, 0), hard=False)(positive, negative, root, first_p, first_n)
    assert plain.total.item() == pytest.approx(2 * terms.entail.item(), abs=1e-12) and plain.hard == 0
    scaled = RadialLoss()(3 * positive, 0.1 * negative, 7 * root, first_p, first_n)
    assert scaled.total.item() == pytest.approx(terms.total.item(), abs=1e-12)  # it normalises itself


def test_keep_is_exactly_zero_at_the_start_and_there_without_first_places(seed):
    positive, negative = units(2, 3, 4, D).float()
    root = units(D).float()
    assert RadialLoss()(positive, negative, root, positive, negative).keep == 0
    assert RadialLoss()(positive, negative, root).keep == 0


@pytest.mark.parametrize(
    "loss", [RadialLoss(), RadialLoss(geometry="geodesic"), RadialLoss(geometry="lorentz"), ConeLoss()]
)
def test_identical_captions_leave_finite_gradients(seed, loss):
    base = torch.randn(2, 4, D)
    base[0, 1], base[1, 2] = base[0, 0], base[1, 1]
    positive, negative = base.clone().requires_grad_(), torch.randn(2, 4, D)
    negative[0, 0] = base[0, 0]
    negative.requires_grad_()
    root = torch.randn(D, requires_grad=True)
    terms = loss(positive, negative, root, base, negative.detach())
    terms.total.backward()
    assert positive.grad is not None and positive.grad.isfinite().all() and positive.grad.abs().sum() > 0
    assert negative.grad is not None and negative.grad.isfinite().all()


def test_a_negative_that_equals_its_caption_is_not_the_hardest(seed):
    positive, negative = units(2, 3, 4, D)
    root = units(D)
    negative[1, 1] = positive[1, 1]
    terms = RadialLoss()(positive, negative, root)
    P = exterior_angle(positive[:, :-1], positive[:, 1:], root)
    N = exterior_angle(positive[:, :-1], negative[:, :-1], root)
    assert N[1, 1] == 0
    gap, others = (P - N).flatten(), N.flatten().clone()
    others[4] = math.inf
    assert terms.hard.item() == pytest.approx((gap[P.argmax()] + gap[others.argmin()]).item(), abs=1e-12)


def test_cone_loss_is_that_of_the_formula(seed):
    positive, negative = units(2, 3, 4, D)
    root = units(D)
    terms = ConeLoss(size=0.2, margin=0.3)(positive, negative, root)
    inside = cone_energy(positive[:, :-1], positive[:, 1:], root, size=0.2)
    outside = torch.relu(0.3 - cone_energy(positive[:, :-1], negative[:, :-1], root, size=0.2))
    assert terms.entail.item() == pytest.approx((inside.mean() + outside.mean()).item(), abs=1e-12)
    assert terms.hard.item() == pytest.approx((inside.max() + outside.max()).item(), abs=1e-12)


def test_coincide_follows_the_precision(seed):
    a = units(D)
    b = a + 1e-7 * units(D)
    assert not coincide(a, b) and coincide(a.float(), b.float()) and coincide(a, b, torch.float32)


def test_mistakes_are_one_line(seed):
    e = torch.randn(2, D)
    with pytest.raises(
        ValueError, match="geometry must be one of chord, geodesic, lorentz, got 'geodsic'; did you mean"
    ):
        exterior_angle(e, e, e, geometry="geodsic")
    with pytest.raises(ValueError, match="needs the root"):
        exterior_angle(e, e)
    with pytest.raises(ValueError, match="three numbers"):
        RadialLoss(weights=(1, 1))
    with pytest.raises(ValueError, match=r"one shape \(B, L, d\)"):
        RadialLoss()(e, e, e[0])
    with pytest.raises(ValueError, match="size must be positive"):
        ConeLoss(size=0)
