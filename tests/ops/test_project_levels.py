"""The end of a clustering mixer by its kernels: values and gradients of the definition, for every way it is called."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hyptree.models import HCFormer
from hyptree.ops.fold_norm import fold_norm, fold_norm_grad
from hyptree.ops.fold_norm import reference as folds
from hyptree.ops.map_norm import MapNorm
from hyptree.ops.project_levels import project_levels
from hyptree.ops.windows import Windows, plan, spread

SIZES = {
    "windows": ((8, 6), 2, False),
    "padded": ((7, 5), 3, False),
    "shifted": ((8, 8), 2, True),
    "one": ((5, 5), 1, False),
}
LEFT, RIGHT, OUT = 24, 40, 72
SMALL = {"img_size": 32, "dims": (8, 16, 16, 24), "depths": (1, 1, 1, 1), "head_dim": 8, "num_classes": 5}
SMALL |= {"num_heads": (1, 1, 1, 1), "folds": (2, 2, 1, 1), "mlp_ratios": (2, 2, 2, 2), "layer_scale": 1.0}


@pytest.fixture(autouse=True)
def by_kernel(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        monkeypatch.setenv("HYPTREE_BACKEND", "triton")


def close(actual: Tensor | None, expected: Tensor | None, rtol: float) -> None:
    assert (actual is None) == (expected is None)
    if actual is not None and expected is not None:
        assert actual.dtype == expected.dtype and actual.shape == expected.shape
        worst = float((actual.detach().double() - expected.detach().double()).abs().max())
        assert worst <= rtol * max(float(expected.detach().double().abs().max()), 1e-6), worst


def parts(windows: Windows, shares: bool, bias: bool, scaled: bool, device: str) -> dict[str, Tensor | None]:
    own = torch.randn(3, *windows.size, RIGHT, device=device)
    shared = torch.randn(3, *windows.grid, LEFT, device=device) + 0.3 if shares else None
    wide = LEFT * shares + RIGHT
    return {
        "own": own, "shared": shared, "weight": torch.randn(OUT, wide, device=device) / 8,
        "bias": torch.randn(OUT, device=device) if bias else None, "scale": torch.rand(wide, device=device) + 0.5,
        "offset": torch.randn(wide, device=device), "factor": torch.rand(OUT, device=device) if scaled else None,
        "residual": torch.randn(3, *windows.size, OUT, device=device),
    }  # fmt: skip


def layers(given: dict[str, Tensor | None], normed: bool) -> tuple[nn.Module, nn.Linear]:
    weight, bias = given["weight"], given["bias"]
    assert weight is not None
    proj = nn.Linear(weight.shape[1], OUT, bias is not None, device=weight.device)
    norm = MapNorm(weight.shape[1], device=weight.device) if normed else nn.Identity()
    named = {"weight": weight, "bias": bias}
    for key, value in named.items():
        if value is not None:
            setattr(proj, key, nn.Parameter(value.clone()))
    if isinstance(norm, MapNorm):
        norm.weight, norm.bias = (nn.Parameter(given[key].clone()) for key in ("scale", "offset"))  # type: ignore[union-attr]
    return norm, proj


def moments(x: Tensor) -> Tensor:
    return torch.stack([x.sum((1, 2, 3)), x.square().sum((1, 2, 3))], -1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("scaled", "bias", "adds"), [(True, True, True), (False, True, False), (True, False, False)])
def test_values_and_gradients_are_those_of_the_layers(
    size: str, normed: bool, scaled: bool, bias: bool, adds: bool, device: str, seed: int
) -> None:
    """In float32 beside the layers in float64: a norm over the whole map, a product, a factor, a sum."""
    patches, fold, shifted = SIZES[size]
    windows = plan(patches, fold=(fold, fold), shifted=shifted)
    given = parts(windows, not shifted, bias, scaled, device)
    norm, proj = layers(given, normed)
    leaves = {key: given[key] for key in ("own", "shared", "factor", "residual") if given[key] is not None}
    grad = torch.randn_like(given["residual"])  # type: ignore[arg-type]

    def run(dtype: torch.dtype, fast: bool) -> list[Tensor]:
        maps = {key: x.detach().to(dtype).requires_grad_() for key, x in leaves.items() if x is not None}
        norm.to(dtype), proj.to(dtype)
        own, shared, factor = maps["own"], maps.get("shared"), maps.get("factor")
        residual = maps["residual"] if adds else None
        if fast:
            sums = [moments(own)]
            if shared is not None:
                sums.append(moments(spread(shared, windows)))
            out = project_levels(own, shared, sums, windows, norm, proj, factor, residual)
            assert "_ProjectLevels" in out.grad_fn.name()  # type: ignore[union-attr]
        else:
            both = own if shared is None else torch.cat([spread(shared, windows), own], -1)
            if isinstance(norm, MapNorm):
                rows = both.flatten(1)
                both = torch.nn.functional.layer_norm(rows, rows.shape[1:], eps=norm.eps).view_as(both)
                both = both * norm.weight + norm.bias
            out = proj(both)
            out = out if factor is None else out * factor
            out = out if residual is None else out + residual
        wanted = [x for key, x in maps.items() if adds or key != "residual"]
        return [out, *torch.autograd.grad(out, [*wanted, *norm.parameters(), *proj.parameters()], grad.to(dtype))]

    expected, actual = run(torch.float64, False), run(torch.float32, True)
    for one, other in zip(actual, expected, strict=True):
        close(one, other.float(), 2e-5)


def test_half_precision_is_as_good_as_the_definition_in_it(
    device: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = plan((8, 8), fold=(2, 2))
    given = parts(windows, True, True, True, device)
    norm, proj = layers(given, True)
    own, shared, factor, residual = (given[key] for key in ("own", "shared", "factor", "residual"))
    assert own is not None and shared is not None and residual is not None and factor is not None

    def run(dtype: torch.dtype, backend: str) -> list[Tensor]:
        maps = [x.to(dtype).requires_grad_() for x in (own, shared)] + [
            x.clone().requires_grad_() for x in (factor, residual)
        ]
        sums = [moments(maps[0].float()), moments(spread(maps[1].float(), windows))]
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = project_levels(*maps[:2], sums, windows, norm, proj, *maps[2:], backend=backend)
        assert out.dtype == torch.float32
        wanted = [*maps, *norm.parameters(), *proj.parameters()]
        return [out, *torch.autograd.grad(out, wanted, torch.ones_like(out) + residual)]

    exact, fast, plain = run(torch.float32, "torch"), run(torch.bfloat16, "auto"), run(torch.bfloat16, "torch")
    for true, one, other in zip(exact, fast, plain, strict=True):
        off = [float((x.detach().float() - true.detach()).norm() / true.detach().norm()) for x in (one, other)]
        assert off[0] <= 1.5 * off[1] + 2e-3, off


def test_without_gradients_nothing_is_kept_and_the_values_are_the_same(device: str, seed: int) -> None:
    windows = plan((8, 8), fold=(2, 2))
    given = parts(windows, True, True, True, device)
    norm, proj = layers(given, True)
    own, shared = given["own"], given["shared"]
    assert own is not None and shared is not None
    arguments = (own, shared, [moments(own), moments(spread(shared, windows))], windows, norm, proj, given["factor"])
    with torch.no_grad():
        actual = project_levels(*arguments, given["residual"])
    assert actual.grad_fn is None
    assert torch.equal(actual, project_levels(*arguments, given["residual"]))


def test_second_derivatives_are_those_of_the_definition(device: str, seed: int) -> None:
    windows = plan((4, 4), fold=(2, 2))
    given = parts(windows, True, True, True, device)
    norm, proj = layers(given, True)
    seconds = []
    for backend in ("auto", "torch"):
        own, shared = (given[key].clone().requires_grad_() for key in ("own", "shared"))  # type: ignore[union-attr]
        sums = [moments(own), moments(spread(shared, windows))]
        out = project_levels(own, shared, sums, windows, norm, proj, given["factor"], backend=backend)
        (first,) = torch.autograd.grad(out.square().sum(), own, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), [own, shared, proj.weight]))
    for one, other in zip(*seconds, strict=True):
        close(one, other, 1e-4)


@pytest.mark.parametrize("place", ["norm1", "mixer", "drop_path"])
def test_a_block_does_not_pass_by_layers_with_hooks(place: str, device: str, seed: int) -> None:
    model = HCFormer(**SMALL, drop_path_rate=0.5).to(device).eval()  # type: ignore[arg-type]
    x, called = torch.randn(2, 3, 32, 32, device=device), []
    block = model.stages[1].blocks[0]  # type: ignore[union-attr]
    expected = model(x)
    getattr(block, place).register_forward_hook(lambda *_: called.append(1))
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert called


@pytest.mark.parametrize("has", ["norm factor bias", "norm", "factor bias", ""])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folded_weights_and_their_gradients(has: str, dtype: torch.dtype, device: str, seed: int) -> None:
    n, k = 37, 150
    weight = torch.randn(n, k, device=device, requires_grad=True)
    bias = torch.randn(n, device=device, requires_grad=True) if "bias" in has else None
    scale = torch.randn(k, device=device, requires_grad=True) if "norm" in has else None
    offset = torch.randn(k, device=device, requires_grad=True) if "norm" in has else None
    factor = torch.randn(n, device=device, requires_grad=True) if "factor" in has else None
    inputs = (weight, bias, scale, offset, factor)
    expected = folds.fold_norm(*inputs, torch.float32)
    actual = fold_norm(*inputs, dtype)
    assert actual[0].dtype == dtype
    for one, other in zip(actual, expected, strict=True):
        close(one.float(), other, 1e-5 if dtype == torch.float32 else 8e-3)  # the interpreter cuts off
    to_out, to_sums, to_shift = (torch.randn_like(x) for x in expected)
    for sums in (to_sums, None):
        grads = (to_out, torch.zeros_like(to_sums) if sums is None else sums, to_shift)
        wanted = [x for x in inputs if x is not None]
        outs = [(out, grad) for out, grad in zip(expected, grads, strict=True) if out.requires_grad]
        true = iter(torch.autograd.grad([out for out, _ in outs], wanted, [g for _, g in outs], retain_graph=True))
        for x, one in zip(inputs, fold_norm_grad(*inputs, to_out, sums, to_shift), strict=True):
            close(one, None if x is None else next(true), 1e-5)
