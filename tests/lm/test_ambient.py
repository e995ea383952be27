"""Lift, linear map, norm and residual of HELM against the geometry in float64."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.geometry import lorentz
from hyptree.lm.ambient import UNIT_WEIGHT, AmbientLinear, aligned, constant_weights, padded_width
from hyptree.ops.residual_norm.reference import residual, rms_norm, time_of
from hyptree.ops.rounding import rounded
from hyptree.train.optimizer.build import param_groups
from hyptree.train.run.recipe import OptimSettings
from tests.lm.make import lift

CURVATURES = [0.1, 1.0, 2.0]


def points(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


def test_widths_are_multiples_of_eight_with_room_for_time_and_bias() -> None:
    assert [padded_width(n) for n in (1, 6, 7, 384, 389, 1528)] == [8, 8, 16, 392, 392, 1536]
    assert [padded_width(n, bias=False) for n in (7, 8)] == [8, 16]
    assert aligned(65) == 72 and aligned(64) == 64


@pytest.mark.parametrize("c", CURVATURES)
def test_lift_is_the_ambient_point_with_a_one(c: float) -> None:
    s = points(3, 5, 9)
    lifted = lift(s, c)
    ambient = lorentz.to_ambient(s, c)
    assert lifted.shape == (3, 5, 16)
    torch.testing.assert_close(lifted[..., :9], ambient[..., 1:], rtol=0, atol=0)
    torch.testing.assert_close(lifted[..., 9], ambient[..., 0], rtol=1e-15, atol=0)
    assert bool((lifted[..., 10] == 1).all()) and bool((lifted[..., 11:] == 0).all())
    assert bool((lift(s, c, bias=False)[..., 10:] == 0).all())
    form = (lifted[..., :9] ** 2).sum(-1) - lifted[..., 9] ** 2 + 1 / c
    assert float((form.abs() / (1 + lifted[..., 9] ** 2)).max()) < 1e-15


def test_time_belongs_to_the_rounded_point() -> None:
    s = points(64, 100, scale=20, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        lifted = lift(s, 1.0)
    assert lifted.dtype == torch.bfloat16
    low = s.bfloat16()
    torch.testing.assert_close(lifted[..., :100], low, rtol=0, atol=0)
    torch.testing.assert_close(lifted[..., 100], time_of(low)[..., 0].bfloat16(), rtol=0, atol=0)


def test_rounding_by_bits_is_the_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    s = torch.cat([points(1000, scale=3, dtype=torch.float32), torch.tensor([0.0, -0.0, 1.0, 1.00390625, 1.01171875])])
    s.requires_grad_()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    cast = rounded(s, torch.bfloat16)
    torch.testing.assert_close(cast, s.bfloat16().float(), rtol=0, atol=0)
    assert bool((torch.autograd.grad(cast.sum(), s)[0] == 1).all())


@pytest.mark.parametrize("c", CURVATURES)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_the_map_of_the_ambient_point(c: float, bias: bool) -> None:
    layer = AmbientLinear(9, 7, bias, c, dtype=torch.float64)
    if layer.bias is not None:
        torch.nn.init.normal_(layer.bias)
    s = points(4, 9).requires_grad_()
    whole = torch.cat([layer.weight_time[:, None], layer.weight], 1)
    expected = F.linear(lorentz.to_ambient(s, c), whole, layer.bias)
    leaves = [s, *layer.parameters()]
    grad = torch.randn_like(expected)
    wanted_grads = torch.autograd.grad(expected, leaves, grad)
    for out in (layer(s), F.linear(lift(s, c, bias), layer.matrix(torch.float64))):  # called, and as kernels read it
        torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
        for ours, theirs in zip(torch.autograd.grad(out, leaves, grad), wanted_grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_linear_of_several_points_reads_each_time() -> None:
    layer = AmbientLinear(3 * 5, 7, c=0.7, points=3, dtype=torch.float64)
    assert layer.bias is not None
    torch.nn.init.normal_(layer.bias)
    s = points(4, 3, 5)
    expected = layer.bias + 0.0
    for h in range(3):
        ambient = lorentz.to_ambient(s[:, h], 0.7)
        block = torch.cat([layer.weight_time[:, h : h + 1], layer.weight[:, 5 * h : 5 * h + 5]], 1)
        expected = expected + F.linear(ambient, block)
    torch.testing.assert_close(layer(s.flatten(-2)), expected, rtol=1e-13, atol=1e-13)
    lifted = lift(s, 0.7, bias=False).flatten(-2)
    product = F.linear(lifted, layer.matrix(torch.float64), layer.bias)
    torch.testing.assert_close(product, expected, rtol=1e-13, atol=1e-13)


def test_padded_rows_are_zero_and_the_others_unchanged() -> None:
    plain = AmbientLinear(9, 6, dtype=torch.float64)
    padded = AmbientLinear(9, 6, row_groups=(2, 3, 4), dtype=torch.float64)
    padded.load_state_dict(plain.state_dict())
    s = points(5, 9)
    assert torch.equal(padded(s), plain(s))
    out = F.linear(lift(s), padded.matrix(torch.float64)).unflatten(-1, (2, 4))
    assert bool((out[..., 3] == 0).all())
    torch.testing.assert_close(out[..., :3].flatten(-2), plain(s), rtol=1e-14, atol=1e-14)


def test_first_weights_have_the_spread_of_xavier_over_each_projection() -> None:
    layer = AmbientLinear(384, 3 * 378, fused=3)
    bound = (2 * 6 / (378 + 385)) ** 0.5
    assert 0.99 * bound < float(layer.weight.detach().abs().max()) <= bound
    assert abs(float(layer.weight.detach().std()) / (bound / 3**0.5) - 1) < 0.01
    assert layer.bias is not None and not layer.bias.detach().any()


def test_matrices_are_kept_where_weights_are_constant_and_nowhere_else() -> None:
    layer = AmbientLinear(9, 4).eval()
    with torch.no_grad():
        assert layer.matrix(torch.float32) is not layer.matrix(torch.float32)
        with constant_weights(layer):
            first = layer.matrix(torch.float32)
            with constant_weights(layer):
                assert layer.matrix(torch.float32) is first
            assert layer.matrix(torch.float32) is first and layer.matrix(torch.float64) is not first
            for other in (copy.deepcopy(layer), AmbientLinear(9, 4)):  # its weights may change
                other.weight.data.mul_(3)
                assert torch.equal(other.matrix(torch.float32)[:, :9], other.weight)
                other.weight.data.mul_(3)
                assert torch.equal(other.matrix(torch.float32)[:, :9], other.weight)
        layer.weight.data.mul_(2)  # not counted as a version
        with constant_weights(layer):
            assert torch.equal(layer.matrix(torch.float32)[:, :9], layer.weight)
    assert layer._weight_cache._value is None
    with constant_weights(layer):  # and never where there are gradients
        assert layer.matrix(torch.float32).requires_grad


def test_an_error_inside_forgets_the_matrices() -> None:
    layer = AmbientLinear(9, 4).eval()

    def fail() -> None:
        with torch.no_grad(), constant_weights(layer):
            layer.matrix(torch.float32)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert layer._weight_cache._value is None


def test_linear_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="row_groups"):
        AmbientLinear(9, 6, row_groups=(2, 4, 4))
    with pytest.raises(ValueError, match="3 points"):
        AmbientLinear(10, 6, points=3)


def test_norm_has_unit_mean_square_and_keeps_the_dtype() -> None:
    s = points(4, 31, scale=7)
    gain = torch.rand(31, dtype=torch.float64) + 0.5
    expected = F.rms_norm(s, (31,), gain, eps=1e-6)
    torch.testing.assert_close(rms_norm(s, gain), expected, rtol=1e-13, atol=1e-13)
    ones = torch.ones(31, dtype=torch.float64)
    times = lorentz.time(rms_norm(s, ones, 0.0))  # with unit gain the time is the same for every token
    torch.testing.assert_close(times, torch.full_like(times, 32**0.5), rtol=1e-14, atol=0)
    assert rms_norm(s.bfloat16(), gain).dtype == torch.bfloat16


@pytest.mark.parametrize("c", CURVATURES)
def test_residual_is_the_scaled_centroid(c: float) -> None:
    x, y = points(40, 12, scale=3).requires_grad_(), points(40, 12, scale=2).requires_grad_()
    raw = torch.randn(1, dtype=torch.float64, requires_grad=True)
    out = residual(x, y, raw, gain=5.0, c=c)
    expected = 5.0 * lorentz.residual(x, y, F.softplus(raw), c)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, [x, y, raw], grad), torch.autograd.grad(expected, [x, y, raw], grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_residual_in_float32_is_close_for_far_points() -> None:
    x, y = points(500, 64, scale=40), points(500, 64, scale=3)
    raw = torch.tensor([UNIT_WEIGHT], dtype=torch.float64)
    exact = residual(x, y, raw, 20.0)
    low = residual(x.float(), y.float(), raw.float(), 20.0)
    error = (low - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(error.max()) < 1e-4
    assert residual(x.float(), y.bfloat16(), raw).dtype == torch.float32


@pytest.mark.parametrize("c", CURVATURES)
def test_no_raw_weight_leaves_the_cone(c: float) -> None:
    x = points(300, 8, scale=10)
    for raw in (-50.0, -3.0, 0.0, 4.0):
        for y in (points(300, 8, scale=10), x, -x):
            w = F.softplus(torch.tensor([raw], dtype=torch.float64))
            a = lorentz.to_ambient(x, c) + w * lorentz.to_ambient(y, c)
            form = a[:, 0] ** 2 - (a[:, 1:] ** 2).sum(-1)
            bound = float((1 + w) ** 2 / c)
            assert float(form.min()) >= bound - 1e-9 * float(a[:, 0].max()) ** 2
            out = residual(x, y, torch.tensor([raw], dtype=torch.float64), 1.0, c)
            assert bool(torch.isfinite(out).all())
            # never farther out than the vector divided by its smallest possible length
            limit = (x + w * y).norm(dim=-1) / (1 + w)
            assert bool((out.norm(dim=-1) <= limit * (1 + 1e-12)).all())


def test_residual_is_the_identity_without_weight_and_gain() -> None:
    x, y = points(20, 8, scale=5), points(20, 8, scale=5)
    out = residual(x, y, torch.tensor([-60.0], dtype=torch.float64))
    torch.testing.assert_close(out, x, rtol=1e-14, atol=1e-14)


def test_stream_settles_where_the_formula_says() -> None:
    gain, r, n = 60.0, 20.0, 500
    x = F.normalize(points(1, n), dim=-1)
    raw = torch.tensor([UNIT_WEIGHT], dtype=torch.float64)
    for _ in range(200):
        y = points(1, n)
        y = r * F.normalize(y - (y @ x.T) / (x @ x.T) * x, dim=-1)
        x = residual(x, y, raw, gain)
    radius = float(x.norm())
    assert abs(2 * r * radius**3 / (gain**2 * (radius**2 + r**2)) - 1) < 5e-3


def test_the_column_of_the_time_is_decayed_in_copies_and_loaded_layers_too() -> None:
    layer = AmbientLinear(9, 4)
    loaded = AmbientLinear(9, 4, device="meta")
    loaded.load_state_dict(layer.state_dict(), assign=True)
    for module in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        groups = param_groups(module, OptimSettings(lr=1.0, weight_decay=0.1))
        decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
        assert [decay[id(p)] for p in (module.weight, module.weight_time, module.bias)] == [0.1, 0.1, 0.0]
