"""Matrix products with factors inside and an activation that is not kept: values, gradients, memory, transforms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from timm.layers import LayerScale
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hyptree.models.hcformer import model as hcformer
from hyptree.models.hcformer.model import HCFormer
from hyptree.nn import ClusterMixer
from hyptree.ops import backend as backends
from hyptree.ops import gelu_mlp as module
from hyptree.ops import linear as linears
from hyptree.ops.gelu_mlp import gelu_mlp
from hyptree.ops.linear import linear, scaled_linear
from hyptree.ops.map_norm import MapNorm

NONE = nn.Identity()


def grads(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return list(torch.autograd.grad((out * weight).sum(), inputs))


def gamma(scale: nn.Module) -> Tensor | None:
    return scale.gamma if isinstance(scale, LayerScale) else None


def is_kernel_s(out: Tensor) -> bool:
    """Whether the last operation was the product behind GELU with its own gradient."""
    return out.grad_fn is not None and "_GeluMlp" in out.grad_fn.name()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_values_and_gradients_are_those_of_the_definition(bias: bool, scaled: bool, seed: int) -> None:
    x = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    first, last = nn.Linear(7, 9, bias=bias, dtype=torch.float64), nn.Linear(9, 3, bias=bias, dtype=torch.float64)
    scale = LayerScale(3, dtype=torch.float64) if scaled else NONE
    for parameter in scale.parameters():
        nn.init.normal_(parameter)
    inputs = [x, *first.parameters(), *last.parameters(), *scale.parameters()]
    fast, slow = gelu_mlp(x, NONE, first, last, gamma(scale)), scale(last(F.gelu(first(x))))
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)
    for one, other in zip(grads(fast, *inputs), grads(slow, *inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert torch.autograd.gradgradcheck(lambda x: gelu_mlp(x, NONE, first, last, gamma(scale)), (x,))


def test_functional_transforms(seed: int) -> None:
    first, last, x = nn.Linear(6, 8), nn.Linear(8, 3), torch.randn(4, 6)
    rows = torch.func.vmap(torch.func.grad(lambda row: gelu_mlp(row, NONE, first, last).square().sum()))(x)
    inputs = x.clone().requires_grad_()
    expected = torch.autograd.grad(last(F.gelu(first(inputs))).square().sum(), inputs)[0]
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-6)


def test_a_small_factor_survives_float16(seed: int) -> None:
    """Inside the weight, 1e-6 times 0.02 would be zero in float16."""
    x, first, last, scale = torch.randn(16, 8), nn.Linear(8, 8), nn.Linear(8, 4), LayerScale(4, 1e-6)
    nn.init.normal_(last.weight, std=0.02)
    with torch.autocast("cpu", torch.float16):
        actual = [scaled_linear(x, last.weight, last.bias, scale.gamma), gelu_mlp(x, NONE, first, last, gamma(scale))]
    for one, other in zip(actual, [scale(last(x)), scale(last(F.gelu(first(x))))], strict=True):
        assert ((one.float() - other).norm() / other.norm()).item() < 5e-3


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, by Triton's interpreter."""
    if not (backends.HAS_TRITON and backends.interpreted()):
        pytest.skip("TRITON_INTERPRET=1 runs the kernels on the CPU")
    monkeypatch.setenv("HYPTREE_BACKEND", "triton")


def test_the_norm_inside_a_product(seed: int, by_kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU runs is what a CPU runs, and what the layers give when they are called."""
    norm, first, last = MapNorm(6), nn.Linear(6, 5), nn.Linear(5, 4)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 4, 3, 6, requires_grad=True)
    inputs = [x, *norm.parameters(), *first.parameters(), *last.parameters()]
    outs = [gelu_mlp(x, norm, first, last)]
    assert is_kernel_s(outs[0])
    monkeypatch.delenv("HYPTREE_BACKEND")
    outs += [gelu_mlp(x, norm, first, last), last(F.gelu(first(norm(x))))]
    assert torch.equal(outs[1], outs[2])
    torch.testing.assert_close(outs[0], outs[2], rtol=1e-5, atol=1e-5)
    for one, two, other in zip(*(grads(out, *inputs) for out in outs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(two, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", ["norm", "first", "last"])
def test_layers_with_hooks_are_called(place: str, seed: int, by_kernel: None) -> None:
    layers = {"norm": MapNorm(6), "first": nn.Linear(6, 5), "last": nn.Linear(5, 4)}
    x, called = torch.randn(2, 4, 3, 6), []
    expected = gelu_mlp(x, *layers.values())
    layers[place].register_forward_hook(lambda *_: called.append(1))
    torch.testing.assert_close(gelu_mlp(x, *layers.values()), expected, rtol=1e-5, atol=1e-5)
    assert called == [1]


def mlp_parts(bias: bool, scaled: bool) -> tuple[nn.Linear, nn.Linear, nn.Module, list[Tensor]]:
    """Two products, and all that has a gradient: map, weights and biases, perhaps a factor at the end."""
    first, last = nn.Linear(6, 20, bias=bias), nn.Linear(20, 5, bias=bias)
    x = torch.randn(3, 4, 6).requires_grad_()
    scale = LayerScale(5) if scaled else NONE
    for parameter in scale.parameters():
        nn.init.uniform_(parameter)
    return first, last, scale, [x, *first.parameters(), *last.parameters(), *scale.parameters()]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_mlp_by_its_kernel(bias: bool, scaled: bool, dtype: torch.dtype, seed: int, by_kernel: None) -> None:
    first, last, scale, inputs = mlp_parts(bias, scaled)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        out = gelu_mlp(inputs[0], NONE, first, last, gamma(scale))
    assert is_kernel_s(out) or (scaled and dtype == torch.float16)
    # a factor that stays outside of a float16 product has its own dtype, as everywhere
    assert out.dtype == (torch.float32 if scaled and dtype == torch.float16 else dtype)
    exact = [leaf.detach().double().requires_grad_() for leaf in inputs]
    weights = exact[1:3] if bias else [exact[1], None], exact[3:5] if bias else [exact[2], None]
    plain = F.linear(F.gelu(F.linear(exact[0], *weights[0])), *weights[1])  # type: ignore[arg-type]
    plain = plain * exact[-1] if scaled else plain
    actual = [out.detach(), *grads(out, *inputs)]
    unit = {torch.float32: 2e-6, torch.bfloat16: 0.02, torch.float16: 0.003}[dtype]
    for one, other in zip(actual, [plain.detach(), *grads(plain, *exact)], strict=True):
        assert one.shape == other.shape and ((one - other).norm() / other.norm()).item() < unit
    assert all(one.dtype == torch.float32 for one in actual[1:])


def test_an_mlp_keeps_the_map_before_its_activation(seed: int, by_kernel: None) -> None:
    first, last, _, inputs = mlp_parts(True, False)
    seen: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        gelu_mlp(inputs[0], NONE, first, last)
    hidden = first(inputs[0])
    maps = [t for t in seen if t.numel() == hidden.numel() and t.dim() == hidden.dim()]
    assert len(seen) == 8 and len(maps) == 1  # both weights as they were and as they were multiplied
    torch.testing.assert_close(maps[0], hidden)


def test_a_bias_sums_many_small_gradients(seed: int, by_kernel: None) -> None:
    """Gradients of one size and sign: a sum that is rounded to bfloat16 on its way is off by more."""
    first, last, x = nn.Linear(3, 2), nn.Linear(2, 1, bias=False), torch.randn(3000, 3)
    weight, bias = first.weight, first.bias
    with torch.no_grad():  # numbers of bfloat16: the interpreter cuts off what a GPU rounds
        for parameter in (weight, bias, last.weight):
            parameter.copy_(parameter.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        out = gelu_mlp(x, NONE, first, last)
    (actual,) = torch.autograd.grad(out, bias, torch.ones_like(out))
    exact = bias.detach().double().requires_grad_()
    hidden = F.linear(x.bfloat16().double(), weight.detach().bfloat16().double(), exact)
    plain = F.gelu(hidden) @ last.weight.detach().bfloat16().double().mT
    (expected,) = torch.autograd.grad(plain, exact, torch.ones_like(plain))
    torch.testing.assert_close(actual.double(), expected, rtol=2e-3, atol=0.0)


def test_an_mlp_in_parts_that_learn(seed: int, by_kernel: None) -> None:
    """Whatever is frozen has no gradient, and the rest is as it was."""
    first, last, _, inputs = mlp_parts(True, False)
    whole = grads(gelu_mlp(inputs[0], NONE, first, last), *inputs)
    for place, leaf in enumerate(inputs):
        for other in inputs:
            other.requires_grad_(other is leaf)
        (alone,) = grads(gelu_mlp(inputs[0], NONE, first, last), leaf)
        torch.testing.assert_close(alone, whole[place], rtol=1e-6, atol=1e-6)


def test_second_derivatives_of_an_mlp(seed: int, by_kernel: None) -> None:
    first, last, scale, inputs = mlp_parts(True, True)
    twice = []
    for out in (gelu_mlp(inputs[0], NONE, first, last, gamma(scale)), scale(last(F.gelu(first(inputs[0]))))):
        inner = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        twice.append(torch.autograd.grad(sum(g.square().sum() for g in inner), inputs))
    for one, other in zip(*twice, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.fixture
def by_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers as on a GPU."""
    monkeypatch.setattr(linears, "_sums_by_product", lambda x: True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_linear_layer_with_a_gradient_of_its_own(dtype: torch.dtype, seed: int, by_product: None) -> None:
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    layer, x = nn.Linear(6, 9, dtype=kind), torch.randn(2, 150, 6, dtype=kind, requires_grad=True)
    inputs = [x, *layer.parameters()]
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        actual, plain = linear(x, layer), layer(x)
    assert actual.grad_fn is not None and "_Linear" in actual.grad_fn.name() and torch.equal(actual, plain)
    exact = [leaf.detach().double().requires_grad_() for leaf in inputs]
    weight = torch.rand(actual.shape).to(actual.dtype)  # of one sign, so that sums keep their digits
    expected = torch.autograd.grad(F.linear(exact[0], *exact[1:]), exact, weight.double())
    for one, other in zip(torch.autograd.grad(actual, inputs, weight), expected, strict=True):
        unit = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 0.01}[dtype]
        assert one.dtype == kind and ((one - other).norm() / other.norm()).item() < unit
    if dtype != torch.bfloat16:
        twice = []
        for y in (linear(x, layer), layer(x)):
            inner = torch.autograd.grad(y.pow(3).mean(), inputs, create_graph=True)
            twice.append(torch.autograd.grad(sum(g.square().sum() for g in inner), inputs, allow_unused=True))
        for one, other in zip(*twice, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_bias_sums_many_ones(by_product: None) -> None:
    """Of 3000 ones bfloat16 keeps 256 when it adds them one by one, and has no 3001 at all."""
    layer, x = nn.Linear(2, 3), torch.randn(3001, 2)
    with torch.autocast("cpu", torch.bfloat16):
        out = linear(x, layer)
    (actual,) = torch.autograd.grad(out, layer.bias, torch.ones_like(out))
    assert actual.tolist() == [3001.0] * 3


def test_only_half_precision_on_a_gpu_sums_by_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert not linears._sums_by_product(torch.zeros(2, 3, dtype=dtype))
    with FakeTensorMode():  # a GPU as far as shapes and dtypes go
        maps = {
            dtype: torch.empty(2, 3, dtype=dtype, device="cuda")
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        }
        assert [linears._sums_by_product(x) for x in maps.values()] == [False, True, True]
        with monkeypatch.context() as patched:  # autocast, which needs a GPU that computes
            patched.setattr(linears, "gemm_dtype", lambda x: torch.bfloat16)
            assert linears._sums_by_product(maps[torch.float32])
        called: list[torch.dtype] = []
        product = torch.mm
        monkeypatch.setattr(
            torch, "mm", lambda *args, **kwargs: called.append(args[1].dtype) or product(*args, **kwargs)
        )
        for x in maps.values():
            actual = linears.sum_rows(x)
            assert actual.shape == (3,) and actual.dtype == torch.float32 and actual.is_cuda
    assert called == [torch.bfloat16, torch.float16]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (7, 3), (3001, 96), (401408, 64), (6272, 512), (0, 16)])
def test_the_product_with_ones_is_the_sum(num_rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    """As near to float64 as torch's own sum in float32: nothing is rounded to half precision on the way."""
    x = (torch.randn(num_rows, width, device="cuda") + 0.1).to(dtype)
    exact, actual = x.double().sum(0), linears.sum_rows(x)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-5 * max(num_rows, 1) ** 0.5)
    assert torch.equal(linears.sum_rows(x), actual)


def test_a_layer_without_bias_has_nothing_to_sum(seed: int, by_product: None) -> None:
    layer, x = nn.Linear(4, 2, bias=False), torch.randn(3, 4)
    out = linear(x, layer)
    assert out.grad_fn is not None and "_Linear" not in out.grad_fn.name() and torch.equal(out, layer(x))


def test_layers_that_must_be_asked_are(seed: int, by_product: None) -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    x, seen = torch.randn(3, 4), []
    layer = Twice(4, 2)
    assert torch.equal(linear(x, layer), layer(x))
    layer = nn.Linear(4, 2)
    layer.register_forward_hook(lambda module, args, out: seen.append(out))
    assert torch.equal(linear(x, layer), seen[0])


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("checkpointing", [False, "mlp", True])
def test_the_network_s_mlps_by_their_kernel(
    norm: str, checkpointing: bool | str, seed: int, by_kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"img_size": 32, "dims": (8, 16, 16, 24), "depths": (1, 1, 1, 1), "head_dim": 8, "num_classes": 5}
    sizes |= {"num_heads": (1, 1, 1, 1), "folds": (1, 1, 1, 1), "patch_centres": (2, 2, 1, 1), "layer_scale": 1.0}
    model = HCFormer(**sizes, window_centres=(0, 0, 0, 0), mlp_ratios=(2, 2, 2, 2), norm=norm)  # type: ignore[arg-type]
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.set_grad_checkpointing(checkpointing)  # type: ignore[arg-type]
    x, results = torch.randn(2, 3, 32, 32), []
    calls: list[int] = []
    kernel = module.gelu_grad
    monkeypatch.setattr(module, "gelu_grad", lambda *args, **kwargs: calls.append(1) or kernel(*args, **kwargs))
    for is_plain in (False, True):
        monkeypatch.setattr(module, "on_host", lambda x, is_plain=is_plain: is_plain)
        out = model(x)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), list(model.parameters()))])
    assert len(calls) == 4
    for one, other in zip(*results, strict=True):
        assert ((one - other).norm() / other.norm().clamp_min(1e-3)).item() < 1e-3


def test_evaluation_does_without_the_kernel(seed: int, by_kernel: None) -> None:
    first, last, _, (x, *_) = mlp_parts(True, False)
    with_grad = gelu_mlp(x, NONE, first, last)
    with torch.no_grad():
        without = gelu_mlp(x, NONE, first, last)
    assert is_kernel_s(with_grad) and without.grad_fn is None
    torch.testing.assert_close(without, with_grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("window_centres", "norm", "size"), [(2, True, 8), (2, False, 8), (0, True, 8), (2, True, 7)])
def test_a_factor_of_the_mixer(
    backend: str, window_centres: int, norm: bool, size: int, seed: int, monkeypatch
) -> None:  # type: ignore[no-untyped-def]

    if backend == "triton" and not (backends.HAS_TRITON and backends.interpreted()):
        pytest.skip("TRITON_INTERPRET=1 runs the kernels on the CPU")
    monkeypatch.setenv("HYPTREE_BACKEND", backend)
    mixer = ClusterMixer(6, 2, 8, (size, size), 2, 2, window_centres, norm=norm)
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5)
    x, scale = torch.randn(2, size, size, 6, requires_grad=True), LayerScale(6)
    nn.init.normal_(scale.gamma)
    inputs = [x, scale.gamma, *mixer.parameters()]
    fast, slow = mixer(x, None, scale.gamma), scale(mixer(x))
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)
    for one, other in zip(grads(fast, *inputs), grads(slow, *inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_a_batch_in_parts_gives_the_same(norm: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"img_size": 64, "dims": (16, 24, 32, 40), "depths": (1, 1, 1, 1), "head_dim": 8, "num_classes": 5}
    sizes |= {"num_heads": (2, 2, 2, 2), "folds": (4, 2, 1, 1), "patch_centres": (2, 2, 2, 2), "layer_scale": 1.0}
    model = HCFormer(**sizes, window_centres=(2, 2, 1, 0), norm=norm)  # type: ignore[arg-type]
    x = torch.randn(5, 3, 64, 64)
    parts: list[int] = []
    model.stages[0].blocks[0].register_forward_hook(lambda module, args, out: parts.append(len(args[0])))  # type: ignore[union-attr,index]
    whole = model.eval()(x)  # with gradients: all at once
    with torch.no_grad():
        monkeypatch.setattr(hcformer, "CACHE", 2 * 16 * 16 * 128 * 4)  # two pictures of the first stage
        cut = model(x)
        shown = model.assignments(x)  # records all pictures of a block together
        model.train()(x)  # as one batch, which batch norms average over
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-5)
    assert parts == [5, 2, 2, 1, 5, 5] and shown[0].patch.shape[0] == 5
