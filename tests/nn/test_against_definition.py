"""Fast layers against tests/nn/naive.py in float64: values and the gradients of inputs, parameters and curvature."""

from functools import partial

import pytest
import torch
from torch import Tensor

from hyptree import nn as rn
from hyptree.geometry import Lorentz, Poincare, lorentz, poincare
from tests.nn import naive

CURVATURES = [0.1, 1.0, 10.0]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}


def compare(fast, slow, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Both functions on the same numbers; errors are relative to the largest entry of each compared tensor.

    The gradient of a single number is a sum over all outputs that may cancel; its error is relative to what is summed.
    """
    ours = {name: t.detach().to(dtype).requires_grad_() for name, t in tensors.items()}
    exact = {name: t.detach().double().requires_grad_() for name, t in ours.items()}
    got, expected = fast(**ours), slow(**exact)
    assert got.dtype == dtype and got.shape == expected.shape
    cotangent = torch.randn_like(expected)
    got_grads = torch.autograd.grad(got, list(ours.values()), cotangent.to(dtype))
    expected_grads = torch.autograd.grad(expected, list(exact.values()), cotangent)
    pairs = {"value": (got, expected)}
    pairs |= {f"gradient of {n}": (g, e) for n, g, e in zip(ours, got_grads, expected_grads, strict=True)}
    for name, (g, e) in pairs.items():
        assert e.abs().max() > 0, f"{name} vanishes, so the comparison says nothing"
        scale = e.abs().max()
        if e.numel() == 1:
            scale = torch.maximum(
                scale, contributions(slow, exact, name.removeprefix("gradient of "), cotangent).norm()
            )
        error = ((g - e).abs().max() / scale).item()
        assert error < TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


def contributions(function, tensors: dict[str, Tensor], name: str, cotangent: Tensor) -> Tensor:
    """What each entry of the output adds to the gradient of the number ``name``."""
    at = {n: t.detach() for n, t in tensors.items()}
    _, slopes = torch.autograd.functional.jvp(
        lambda value: function(**{**at, name: value}), at[name], torch.ones_like(at[name])
    )
    return slopes * cotangent


def tensor(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def points(*shape: int, c: float) -> Tensor:
    """Lorentz points at a typical distance of one radius of curvature, whatever the number of coordinates."""
    return torch.randn(*shape, dtype=torch.float64) / (c * shape[-1]) ** 0.5


def weights(m: int, n: int) -> Tensor:
    return torch.randn(m, n, dtype=torch.float64) / n**0.5


def ball(*shape: int, c: float) -> Tensor:
    return lorentz.to_poincare(points(*shape, c=c), c)


both = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
curved = pytest.mark.parametrize("c", CURVATURES)
sized = pytest.mark.parametrize("n", [63, 1000])


@both
@curved
@sized
def test_lorentz_linear(dtype, c, n):
    inputs = {
        "x": points(5, n, c=c),
        "weight": weights(7, n),
        "weight_time": weights(7, n)[:, 0],
        "bias": torch.randn(7) / n**0.5,
        "c": tensor(c),
        "c_out": tensor(1.7),
    }
    compare(rn.lorentz_linear, naive.linear, inputs, dtype)


@both
@curved
@sized
def test_lorentz_linear_bounded(dtype, c, n):
    inputs = {
        "x": points(5, n, c=c),
        "weight": weights(8, n),
        "weight_time": weights(8, n)[:, 0],
        "bias": torch.randn(8) / n**0.5,
        "lam": tensor(3.0),
        "c": tensor(c),
        "c_out": tensor(1.7),
    }

    compare(rn.lorentz_linear_bounded, partial(naive.linear_bounded, eps_t=0.1), inputs, dtype)


def hyperplane_inputs(x: Tensor, c: float) -> dict[str, Tensor]:
    offset = 0.5 * torch.randn(7, dtype=torch.float64) / c**0.5
    return {"x": x, "weight": weights(7, x.shape[-1]), "offset": offset, "c": tensor(c)}


@both
@curved
@sized
def test_lorentz_mlr(dtype, c, n):
    compare(rn.lorentz_mlr, naive.lorentz_mlr, hyperplane_inputs(points(5, n, c=c), c), dtype)


@both
@curved
@sized
def test_poincare_mlr(dtype, c, n):
    compare(rn.poincare_mlr, naive.poincare_mlr, hyperplane_inputs(ball(5, n, c=c), c), dtype)


@both
@curved
@sized
def test_lorentz_fc(dtype, c, n):
    inputs = hyperplane_inputs(points(5, n, c=c), c) | {"c_out": tensor(1.7)}
    compare(rn.lorentz_fc, naive.lorentz_fc, inputs, dtype)


@both
@curved
@sized
def test_poincare_fc(dtype, c, n):
    inputs = hyperplane_inputs(ball(5, n, c=c), c) | {"c_out": tensor(1.7)}
    compare(rn.poincare_fc, naive.poincare_fc, inputs, dtype)


@both
@curved
@sized
def test_mobius_linear(dtype, c, n):
    inputs = {
        "x": ball(5, n, c=c),
        "weight": weights(7, n),
        "bias": torch.randn(7, dtype=torch.float64) / (7 * c) ** 0.5,
        "c": tensor(c),
        "c_out": tensor(1.7),
    }
    compare(rn.mobius_linear, naive.mobius_linear, inputs, dtype)


@both
@curved
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("N", "d"), [(63, 15), (7, 64)])
def test_attention(dtype, c, is_causal, N, d):
    inputs = {name: points(2, 3, N, d, c=c) for name in "qkv"} | {"c": tensor(c), "tau": tensor(2.0 / c)}

    fast, slow = partial(rn.lorentz_attention, is_causal=is_causal), partial(naive.attention, is_causal=is_causal)
    compare(fast, slow, inputs, dtype)


@both
def test_attention_with_one_curvature_and_temperature_per_head(dtype):
    c = torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64).reshape(3, 1, 1)
    tau = torch.tensor([3.0, 1.0, 0.5], dtype=torch.float64).reshape(3, 1, 1)
    inputs = {name: points(2, 3, 9, 5, c=1.0) for name in "qkv"} | {"c": c, "tau": tau}
    compare(rn.lorentz_attention, naive.attention, inputs, dtype)


@both
@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_attention_with_mask_and_bias(dtype, kind):
    inputs = {name: points(2, 3, 9, 5, c=1.0) for name in "qkv"} | {"c": tensor(1.0)}
    options = {"tau": 1.5}
    if kind == "bias":
        inputs["bias"] = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    else:
        options["bias"] = (torch.rand(9, 9) > 0.5) | torch.eye(9, dtype=torch.bool)
    compare(partial(rn.lorentz_attention, **options), partial(naive.attention, **options), inputs, dtype)


@pytest.mark.parametrize("a", [-0.7, 0.0, 1.2])
def test_the_naive_foot_is_the_nearest_point_of_the_hyperplane(a):
    """The definition that the MLR is tested against is itself tested: no point of the hyperplane is nearer."""
    c = tensor(0.8)
    x, z, a = points(4, c=0.8), torch.randn(4, dtype=torch.float64), tensor(a)
    foot, _ = naive.hyperplane_foot(x, z, a, c)
    best = lorentz.dist(x, foot[1:], c)
    others, _ = naive.hyperplane_foot(points(200, 4, c=0.8), z, a, c)  # 200 random points of the hyperplane
    again, _ = naive.hyperplane_foot(others[:, 1:], z, a, c)
    torch.testing.assert_close(others, again)  # they lie in it: each is its own foot
    assert (lorentz.dist(x, others[:, 1:], c) >= best - 1e-12).all()
    through = lorentz.expmap0(a * z / z.norm(), c)
    torch.testing.assert_close(naive.hyperplane_foot(through, z, a, c)[0][1:], through)  # it passes at distance a


@curved
def test_poincare_mlr_is_twice_the_lorentz_mlr(c):
    t = hyperplane_inputs(points(6, 9, c=c), c)
    p = lorentz.to_poincare(t["x"], c)
    expected = 2 * rn.lorentz_mlr(t["x"], t["weight"], 2 * t["offset"], c)
    torch.testing.assert_close(rn.poincare_mlr(p, t["weight"], t["offset"], c), expected)


@curved
def test_the_two_fully_connected_layers_agree(c):
    t = hyperplane_inputs(points(6, 9, c=c), c)
    p = lorentz.to_poincare(t["x"], c)
    expected = rn.lorentz_fc(t["x"], 2 * t["weight"], 2 * t["offset"], c, 1.7)
    got = rn.poincare_fc(p, t["weight"], t["offset"], c, 1.7)
    torch.testing.assert_close(poincare.to_lorentz(got, 1.7), expected)


@curved
def test_outputs_of_the_fully_connected_layer_have_the_logits_as_distances(c):
    """What defines the layer: the output's signed distance to the hyperplane across axis k is logit k."""
    t = hyperplane_inputs(points(6, 9, c=c), c)
    y = rn.lorentz_fc(t["x"], t["weight"], t["offset"], c)
    axes = torch.eye(7, dtype=torch.float64)
    distances = rn.lorentz_mlr(y, axes, torch.zeros(7, dtype=torch.float64), c)
    torch.testing.assert_close(distances, rn.lorentz_mlr(t["x"], t["weight"], t["offset"], c))


@curved
def test_residual_is_the_weighted_centroid(c):
    x, y = points(5, 63, c=c), points(5, 63, c=c)
    layer = rn.LorentzResidual(Lorentz(c), weight=0.3, gain=1.5, learnable=True).double()
    both_points = torch.stack([x, y], -2)
    expected = 1.5 * lorentz.centroid(both_points, torch.tensor([1.0, 0.3], dtype=torch.float64), c)
    torch.testing.assert_close(layer(x, y), expected, rtol=1e-7, atol=1e-7)  # log(0.3) is stored in float32


@curved
def test_time_after_concatenation(c):
    parts = [points(4, n, c=c) for n in (3, 5, 2)]
    joined = rn.concat(parts)
    implied = torch.sqrt(sum(lorentz.time(p, c) ** 2 for p in parts) - 2 / c)
    torch.testing.assert_close(lorentz.time(joined, c), implied)
    for part, back in zip(parts, rn.split(joined, [3, 5, 2]), strict=True):
        assert torch.equal(part, back)


def test_change_of_curvature_scales_all_distances_alike():
    x, y = points(5, 8, c=0.5), points(5, 8, c=0.5)
    there = lorentz.dist(rn.change_curvature(x, 0.5, 3.0), rn.change_curvature(y, 0.5, 3.0), 3.0)
    torch.testing.assert_close(there * 3.0**0.5, lorentz.dist(x, y, 0.5) * 0.5**0.5)
    p = Poincare(0.5).random(5, 8, dtype=torch.float64)
    q = Poincare(0.5).random(5, 8, dtype=torch.float64)
    there = poincare.dist(rn.change_curvature(p, 0.5, 3.0), rn.change_curvature(q, 0.5, 3.0), 3.0)
    torch.testing.assert_close(there * 3.0**0.5, poincare.dist(p, q, 0.5) * 0.5**0.5)


def test_lorentz_mlr_near_the_origin_is_a_linear_classifier():
    x, w = 1e-5 * torch.randn(6, 9, dtype=torch.float64), weights(4, 9)
    torch.testing.assert_close(rn.lorentz_mlr(x, w, torch.zeros(4, dtype=torch.float64), 2.0), x @ w.T)
