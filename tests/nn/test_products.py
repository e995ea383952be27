"""Matrix products with factors inside and an activation that is not kept: values, gradients, memory, transforms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ramify.models import hcformer
from ramify.models.hcformer import HCFormer
from ramify.nn import ClusterMixer, products
from ramify.nn.cluster import MapNorm
from ramify.nn.products import gelu_linear, scaled_linear
from ramify.ops import backend as backends


def grads(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return list(torch.autograd.grad((out * weight).sum(), inputs))


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "keeps_gelu", lambda x: False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_values_and_gradients_are_those_of_the_definition(bias: bool, scaled: bool, seed: int) -> None:
    x = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    linear = nn.Linear(7, 3, bias=bias, dtype=torch.float64)
    factor = torch.randn(3, dtype=torch.float64, requires_grad=True) if scaled else None
    given = [x, *linear.parameters(), *([] if factor is None else [factor])]
    times = 1.0 if factor is None else factor
    for fast, slow in (
        (scaled_linear(x, linear.weight, linear.bias, factor), times * linear(x)),
        (gelu_linear(x, linear, factor), times * linear(F.gelu(x))),
    ):
        torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)
        for one, other in zip(grads(fast, *given), grads(slow, *given), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert torch.autograd.gradgradcheck(lambda x: gelu_linear(x, linear, factor), (x,))


def test_the_activation_is_not_kept(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, linear = torch.randn(64, 32, requires_grad=True), nn.Linear(32, 4)

    def kept() -> list[bool]:
        """Of all kept tensors as large as the input, whether they are it."""
        seen: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
            gelu_linear(x, linear)
        return [t.data_ptr() == x.data_ptr() for t in seen if t.numel() == x.numel()]

    assert kept() == [True]
    monkeypatch.undo()  # a CPU
    assert sorted(kept()) == [False, True]


def test_functional_transforms(seed: int) -> None:
    linear, x = nn.Linear(6, 3), torch.randn(4, 6)
    rows = torch.func.vmap(torch.func.grad(lambda row: gelu_linear(row.unsqueeze(0), linear).square().sum()))(x)
    given = x.clone().requires_grad_()
    expected = torch.autograd.grad(linear(F.gelu(given)).square().sum(), given)[0]
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-6)


def test_a_small_factor_survives_float16(seed: int) -> None:
    """Inside the weight, 1e-6 times 0.02 would be zero in float16."""
    x, linear = torch.randn(16, 8), nn.Linear(8, 4)
    nn.init.normal_(linear.weight, std=0.02)
    factor = torch.full((4,), 1e-6)
    with torch.autocast("cpu", torch.float16):
        found = [scaled_linear(x, linear.weight, linear.bias, factor), gelu_linear(x, linear, factor)]
    expected = [linear(x) * factor, linear(F.gelu(x)) * factor]
    for one, other in zip(found, expected, strict=True):
        assert ((one.float() - other).norm() / other.norm()).item() < 5e-3


def test_autocast_computes_in_its_dtype(seed: int) -> None:
    x, linear, factor = torch.randn(16, 8, requires_grad=True), nn.Linear(8, 4), torch.rand(4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = gelu_linear(x, linear, factor)
    assert out.dtype == torch.bfloat16
    slow = linear(F.gelu(x)) * factor
    for one, other in zip(
        grads(out.float(), x, factor, linear.weight), grads(slow, x, factor, linear.weight), strict=True
    ):
        assert one.dtype == torch.float32 and ((one - other).norm() / other.norm()).item() < 0.02


def test_the_norm_inside_a_product(seed: int) -> None:
    """What a GPU runs is what a CPU runs."""
    norm, linear = MapNorm(6, dtype=torch.float64), nn.Linear(6, 5, dtype=torch.float64)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 4, 3, 6, dtype=torch.float64, requires_grad=True)
    given = [x, *norm.parameters(), *linear.parameters()]
    inside, plain = norm.inside(x, linear), linear(norm(x))
    torch.testing.assert_close(inside, plain, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(norm.before(x, linear), plain, rtol=0, atol=0)
    for one, other in zip(grads(inside, *given), grads(plain, *given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("window_centres", "norm", "size"), [(2, True, 8), (2, False, 8), (0, True, 8), (2, True, 7)])
def test_a_factor_of_the_mixer(
    backend: str, window_centres: int, norm: bool, size: int, seed: int, monkeypatch
) -> None:  # type: ignore[no-untyped-def]

    if backend == "triton" and not (backends.has_triton() and backends.interpreted()):
        pytest.skip("TRITON_INTERPRET=1 runs the kernels on the CPU")
    monkeypatch.setenv("RAMIFY_BACKEND", backend)
    mixer = ClusterMixer(6, 2, 8, (size, size), 2, 2, window_centres, norm=norm)
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5)
    x, factor = torch.randn(2, size, size, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    given = [x, factor, *mixer.parameters()]
    fast, slow = mixer(x, None, factor), mixer(x) * factor
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)
    for one, other in zip(grads(fast, *given), grads(slow, *given), strict=True):
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
