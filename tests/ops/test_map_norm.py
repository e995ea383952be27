"""The norm of a map: the kernels against the definition, and MapNorm by them against itself in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from benchmarks.kernels.cases import MAPS
from benchmarks.kernels.check import poisoned
from hyptree.ops.gelu_mlp import gelu_mlp
from hyptree.ops.map_norm import MapNorm, _backward, _unsupported, map_norm, reference

pytest.importorskip("triton")

EPS = 1e-5
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
CLOSE = {F32: 1e-5, F16: 2e-3, BF16: 1e-2}
"""Of values and gradients of size one, by the coarser of the two dtypes."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of a few hundred numbers are cut into parts, smaller ones into pieces."""
    from hyptree.ops.map_norm import triton

    for name, value in {"WHOLE": 256, "PIECE": 64, "TILE": 128, "MAX_PARTS": 3}.items():
        monkeypatch.setattr(triton, name, value)
    triton._whole.cache_clear()


def drawn(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return (2 * torch.randn(shape) + 0.5).to(device, dtype)


def test_the_definition_has_one_mean_and_one_variance_per_sample() -> None:
    x = torch.randn(3, 4, 2, 5, dtype=F64)
    variance, mean = torch.var_mean(x, (1, 2, 3), keepdim=True, correction=0)
    torch.testing.assert_close(map_norm(x, 0.1, F64), (x - mean) / torch.sqrt(variance + 0.1), rtol=1e-12, atol=1e-12)
    assert map_norm(x.bfloat16(), 0.1, F32).dtype == F32 and map_norm(x.float(), 0.1, BF16).dtype == BF16


def test_the_plain_gradient_is_that_of_autograd_with_one_of_its_own() -> None:
    x = torch.randn(2, 3, 5, dtype=F64, requires_grad=True)
    normed = map_norm(x, 0.1, F64)
    rstd = torch.rsqrt(x.var((1, 2), correction=0) + 0.1)
    grad, to_rstd = torch.randn_like(normed, requires_grad=True), torch.randn(2, dtype=F64)
    (expected,) = torch.autograd.grad([normed, rstd], x, [grad, to_rstd], retain_graph=True)
    actual = reference.map_norm_grad(normed, rstd, grad, F64, to_rstd)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    assert torch.autograd.gradcheck(
        lambda g: reference.map_norm_grad(normed.detach(), rstd.detach(), g, F64, to_rstd), (grad,)
    )


@pytest.mark.parametrize("dtypes", [(F32, F32), (F32, BF16), (BF16, BF16), (BF16, F32), (F32, F16)])
@pytest.mark.parametrize("shape", [(3, 2, 3, 5), (2, 1), (2, 200), (3, 257), (2, 4, 8, 32), (2, 1000), (0, 7)])
@pytest.mark.usefixtures("small")
def test_kernels_equal_the_definition(shape: tuple[int, ...], dtypes: tuple[Any, Any], device: str) -> None:
    inputs, built = dtypes
    x = drawn(shape, inputs, device).requires_grad_()
    exact = x.detach().double().requires_grad_()
    with poisoned():
        actual = map_norm(x, EPS, built, backend="triton")
        grad = torch.randn(shape).to(device, built)
        (to_x,) = torch.autograd.grad(actual, x, grad)
    expected = reference.map_norm(exact, EPS, F64)
    (wanted_grad,) = torch.autograd.grad(expected, exact, grad.double())
    assert actual.dtype == built and to_x.dtype == inputs and actual.shape == to_x.shape == x.shape
    close = max(CLOSE[inputs], CLOSE[built])
    torch.testing.assert_close(actual.double(), expected, rtol=CLOSE[built], atol=CLOSE[built])
    torch.testing.assert_close(to_x.double(), wanted_grad, rtol=close, atol=close)


@pytest.mark.parametrize("shape", [(2, 7, 7, 512), (2, 14, 14, 320)])
def test_the_sizes_of_models_on_a_map_far_from_zero(shape: tuple[int, ...], device: str) -> None:
    x = (torch.randn(shape) + 1000).to(device)
    actual = map_norm(x, EPS, F32, backend="triton")
    expected = map_norm(x.double(), EPS, F64)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2000 * torch.finfo(F32).eps)  # of the mean


@pytest.mark.usefixtures("small")
def test_more_tiles_than_parts_keep_a_far_mean(device: str) -> None:
    x = (torch.randn(2, 2000) + 1000 * torch.linspace(-1, 1, 2000)).to(device)
    actual, expected = map_norm(x, EPS, F32, backend="triton"), map_norm(x.double(), EPS, F64)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 100), (2, 600)])
@pytest.mark.usefixtures("small")
def test_the_gradient_of_a_kept_result_is_as_exact_as_the_gradient_that_arrives(
    shape: tuple[int, ...], device: str
) -> None:
    """Along the normed map nothing is left but rounding, which is not more than that of the arriving gradient."""
    exact = drawn(shape, F32, device).double().requires_grad_()
    normed = map_norm(exact.detach(), EPS, F64).to(BF16)  # rounded as a GPU does; Triton's interpreter cuts off
    rstd = torch.rsqrt(exact.detach().var(1, correction=0) + EPS)
    grad = 3 * normed
    actual = _backward(normed, rstd.float(), grad, F32, None)
    (expected,) = torch.autograd.grad(map_norm(exact, EPS, F64), exact, grad.double())
    size = grad.double().norm(dim=1) * rstd
    assert actual.dtype == F32 and ((actual - expected).norm(dim=1) / size).max() < torch.finfo(BF16).eps / 2


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 700)])
@pytest.mark.usefixtures("small")
def test_second_derivatives_are_those_of_the_definition(shape: tuple[int, ...], device: str) -> None:
    start, direction = drawn(shape, F32, device), torch.randn(shape).to(device)

    def outcome(dtype: torch.dtype, backend: str) -> list[Tensor]:
        x, g = start.to(dtype, copy=True).requires_grad_(), direction.to(dtype, copy=True).requires_grad_()
        y = map_norm(x, EPS, dtype, backend=backend)
        (first,) = torch.autograd.grad((y**3 + y * g).sum(), x, create_graph=True)
        return [first, *torch.autograd.grad(first.square().sum(), (x, g))]

    for actual, expected in zip(outcome(F32, "triton"), outcome(F64, "torch"), strict=True):
        scale = expected.abs().max()
        torch.testing.assert_close(actual.double() / scale, expected / scale, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("small")
def test_a_sample_is_the_same_alone_and_again_and_bad_ones_stay_alone(device: str) -> None:
    for numbers in (90, 900):
        x, grad = drawn((4, numbers), F32, device), torch.randn(4, numbers).to(device)

        def both(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
            leaf = x.clone().requires_grad_()
            y = map_norm(leaf, EPS, F32, backend="triton")
            return y.detach(), torch.autograd.grad(y, leaf, grad)[0]

        whole, alone = both(x, grad), both(x[2:3], grad[2:3])
        assert all(torch.equal(a, b) for a, b in zip(whole, both(x, grad), strict=True))
        assert all(torch.equal(a[2:3], b) for a, b in zip(whole, alone, strict=True))
        x[1, 5] = torch.nan
        for spoilt, clean in zip(both(x, grad), whole, strict=True):
            assert spoilt[1].isnan().all() and torch.equal(spoilt[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.usefixtures("small")
def test_maps_and_gradients_in_any_order_of_memory(device: str) -> None:
    for width in (3, 60):
        x = drawn((2, 5, width, 4), F32, device).permute(0, 2, 3, 1).requires_grad_()
        y = map_norm(x, EPS, F32, backend="triton")
        (actual,) = torch.autograd.grad(y, x, torch.ones((), device=device).expand_as(y))
        assert actual.abs().max() < 1e-5  # a shift of all numbers changes nothing
        torch.testing.assert_close(y, map_norm(x, EPS, F32, backend="torch"), rtol=1e-5, atol=1e-5)


def test_transforms_of_functions_take_the_definition(device: str) -> None:
    x = drawn((3, 2, 6), F32, device)
    rows = torch.func.vmap(lambda one: map_norm(one, EPS, F32))(x)
    torch.testing.assert_close(rows, torch.stack([map_norm(one, EPS, F32, backend="torch") for one in x]))


def test_what_the_kernel_cannot_take(device: str) -> None:
    x = drawn((2, 6), F32, device)
    assert _unsupported(x.double(), F64) and not _unsupported(x, BF16)
    with pytest.raises(ValueError, match=r"torch.float64 to torch.bfloat16, the kernel takes float32"):
        map_norm(x.double(), EPS, BF16, backend="triton")


# -------------------------------------------------------------------------------------------------------------- MapNorm


def made_norm(device: str) -> tuple[MapNorm, nn.Linear, Tensor]:
    norm, linear = MapNorm(12), nn.Linear(12, 9)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm.to(device), linear.to(device), drawn((2, 5, 7, 12), F32, device).requires_grad_()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.usefixtures("small")
def test_map_norm_by_the_kernel_is_its_definition(autocast: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norm, _, x = made_norm(device)
    grad = (1 + torch.randn(2, 5, 7, 12)).to(device)

    def outcome(dtype: torch.dtype) -> list[Tensor]:
        norm.to(dtype)
        leaf = x.detach().to(dtype).requires_grad_()
        with torch.autocast(device, BF16, enabled=autocast and dtype == F32):
            if dtype == F64:
                y = nn.functional.group_norm(leaf.movedim(-1, 1), 1, norm.weight, norm.bias, EPS).movedim(1, -1)
            else:
                y = norm(leaf)
        assert y.dtype == dtype
        return [y, *torch.autograd.grad(y, [leaf, *norm.parameters()], grad.to(y.dtype))]

    monkeypatch.setenv("HYPTREE_BACKEND", "triton")
    actual = outcome(F32)
    monkeypatch.delenv("HYPTREE_BACKEND")
    for one, other in zip(actual, outcome(F64), strict=True):
        assert one.dtype != F64 and ((one - other).norm() / other.norm()).item() < 1e-5


def test_the_map_itself_is_not_kept(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product keeps the normed map in its own dtype, and the norm the same one."""
    monkeypatch.setenv("HYPTREE_BACKEND", "triton")
    norm, linear, x = made_norm(device)
    kept: dict[int, Tensor] = {}

    def keep(one: Tensor) -> Tensor:
        kept[one.untyped_storage().data_ptr()] = one
        return one

    last = nn.Linear(9, 4).to(device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one), torch.autocast(device, BF16):
        gelu_mlp(x, norm, linear, last)
    maps = [one for one in kept.values() if one.numel() == x.numel()]
    assert [one.dtype for one in maps] == [BF16]


def test_graphs_hold_each_kernel_as_one_call(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPTREE_BACKEND", "triton")
    norm, _, x = made_norm(device)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return make_boxed_func(graph)

    def outcome(run: Any) -> list[Tensor]:
        y = run(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *norm.parameters()])]

    expected = outcome(norm)
    actual = outcome(torch.compile(norm, backend=aot_autograd(fw_compiler=keep), fullgraph=True))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    calls = [str(node.target) for graph in graphs for node in graph.graph.nodes if "hyptree" in str(node.target)]
    assert calls == ["hyptree.map_norm.default", "hyptree.map_norm_grad.default"]


def test_shapes_of_the_benchmark_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("timm")
    import hyptree.models  # noqa: F401
    from hyptree.ops import gelu_mlp as gelu_mlp_module
    from hyptree.ops import map_norm as map_norm_layer

    seen: list[tuple[int, ...]] = []

    def spy(x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        seen.append(tuple(x.shape[1:]))
        return reference.map_norm(x, eps, dtype)

    for place in (map_norm_layer, gelu_mlp_module):
        monkeypatch.setattr(place, "map_norm", spy)
        monkeypatch.setattr(place, "on_host", lambda x: False)
    model = timm.create_model("hcformer_medium", mixer_norm=False).eval()
    with torch.no_grad():
        model(torch.zeros(1, 3, 224, 224))
    assert list(dict.fromkeys(seen)) == list(MAPS.values()) and len(seen) == 25
