"""Doors of fused operations with the layers they read, and a whole model on kernels, beside plain torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from hyptree.lm import HelmConfig, HelmForCausalLM, preset
from hyptree.lm.ambient import AmbientLinear, padded_width
from hyptree.lm.experts.mixture import Mice
from hyptree.ops import backend as backends
from hyptree.ops import bare
from hyptree.ops.centroid import centroid_linear
from hyptree.ops.heads import Heads, lift_heads
from hyptree.ops.residual_norm import join, norm_linear
from hyptree.ops.swiglu import swiglu_linear
from tests.lm.make import lift

pytest.importorskip("triton")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu" and not backends.interpreted():
        pytest.skip("kernels run on the GPU here, TRITON_INTERPRET=1 would run them on the CPU")
    return str(request.param)


def drawn(in_features: int, out_features: int, device: str, **settings: object) -> AmbientLinear:
    """A map of points of curvature -0.5 with a bias that says something."""
    layer = AmbientLinear(in_features, out_features, c=0.5, device=device, **settings)  # type: ignore[arg-type]
    assert layer.bias is not None
    nn.init.normal_(layer.bias)
    return layer


def compare(
    run: Callable[[], Sequence[Tensor]], leaves: Sequence[Tensor], monkeypatch: pytest.MonkeyPatch
) -> Sequence[Tensor]:
    """Outputs, and gradients of a random scalar made from them, with the kernels and without."""
    results: list[Sequence[Tensor]] = []
    weights: list[Tensor] = []
    for backend in ("torch", "triton"):
        monkeypatch.setenv("HYPTREE_BACKEND", backend)
        outs = run()
        weights = weights or [torch.randn_like(out) for out in outs]
        total = sum(((out * weight).sum() for out, weight in zip(outs, weights, strict=True)), torch.zeros(()))
        results.append([*outs, *torch.autograd.grad(total, leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
    return outs


def calls_of(layer: nn.Module) -> list[int]:
    """Grows by one with every call of a layer, which is not bare from now on."""
    calls: list[int] = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("kind", ["bare", "hooked", "none"])
@pytest.mark.parametrize("with_branch", [True, False])
def test_norm_and_product(with_branch: bool, kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = (3 * torch.randn(2, 3, 13, device=device)).requires_grad_()
    y = torch.randn(2, 3, 13, device=device, requires_grad=True)
    raw = torch.randn(1, device=device, requires_grad=True)
    gain = torch.rand(13, device=device, requires_grad=True)
    layer = None if kind == "none" else drawn(13, 7, device)
    leaves = [x, gain, *([] if layer is None else layer.parameters()), *([y, raw] if with_branch else [])]
    branch = (y, raw, 2.0) if with_branch else None
    calls = calls_of(layer) if kind == "hooked" and layer is not None else []

    def run() -> tuple[Tensor, Tensor]:
        joined, out = norm_linear(x, gain, layer, residual=branch, c=0.5)
        return joined, lift(out, 0.5) if layer is None and out.shape[-1] == 13 else out  # plain torch gives the points

    compare(run, leaves, monkeypatch)
    assert len(calls) == (2 if kind == "hooked" else 0)


def test_join(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (torch.randn(4, 9, device=device, requires_grad=True) for _ in range(2))
    raw = torch.randn(1, device=device, requires_grad=True)
    compare(lambda: [join(x, y, raw, 3.0, 2.0)], [x, y, raw], monkeypatch)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("kind", ["bare", "hooked"])
def test_swiglu_and_product(kind: str, padded: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded as it comes from a fused product, or plain as it comes from a layer that was called."""
    up, down = drawn(6, 20, device, row_groups=(2, 10, padded_width(10))), drawn(10, 5, device)
    x = torch.randn(4, 6, device=device, requires_grad=True)
    gain = torch.ones(6, device=device)
    calls = calls_of(down) if kind == "hooked" else []
    if not padded:
        calls_of(up)
    leaves = [x, *up.parameters(), *down.parameters()]
    compare(lambda: [swiglu_linear(norm_linear(x, gain, up, c=0.5)[1], down, 10, 0.5)], leaves, monkeypatch)
    assert len(calls) == (2 if kind == "hooked" else 0)


@pytest.mark.parametrize("kind", ["bare", "hooked"])
def test_centroid_and_product(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = drawn(3 * 7, 5, device, points=3)
    space = torch.randn(2, 3, 4, 7, device=device)
    excess = 1.5 * torch.sqrt(space.square().sum(-1, keepdim=True) + 2) - 2**0.5
    mean = torch.cat([space, excess], -1).requires_grad_()
    calls = calls_of(layer) if kind == "hooked" else []
    compare(lambda: [centroid_linear(mean, layer, 7, 0.5)], [mean, *layer.parameters()], monkeypatch)
    assert len(calls) == (2 if kind == "hooked" else 0)


def test_a_layer_that_is_not_fused_is_reported_once(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bare, "_reported", set())
    layer, x, gain = drawn(6, 5, device), torch.randn(4, 6, device=device), torch.ones(6, device=device)
    calls_of(layer)
    with caplog.at_level(logging.WARNING):
        for backend in ("torch", "triton", "triton"):
            monkeypatch.setenv("HYPTREE_BACKEND", backend)
            norm_linear(x, gain, layer)
    (record,) = caplog.records
    assert record.getMessage().startswith("norm_linear: a AmbientLinear")


@pytest.mark.parametrize("name", ["helm-d-pico", "helm-mice-pico"])
def test_a_model_on_kernels_is_the_same_model(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_hidden_layers": 2, "vocab_size": 64}
    model = HelmForCausalLM(preset(name, **sizes)).to(device)
    ids = torch.randint(0, 64, (2, 5), device=device)
    actual = []
    for backend in ("triton", "torch"):
        monkeypatch.setenv("HYPTREE_BACKEND", backend)
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        actual.append((loss.detach(), grads))
    (loss, grads), (plain_loss, plain_grads) = actual
    torch.testing.assert_close(loss, plain_loss, rtol=1e-5, atol=1e-5)
    assert grads.keys() == plain_grads.keys()
    for key, grad in grads.items():
        scale = plain_grads[key].abs().max().clamp(min=1e-6)
        torch.testing.assert_close(grad / scale, plain_grads[key] / scale, rtol=1e-3, atol=1e-4, msg=key)


def second_derivatives(kind: str, device: str) -> Tensor:
    """Of one of the doors, by its points."""
    c, raw, layer = 0.5, torch.zeros(1, device=device), drawn(12, 5, device)
    x = torch.randn(1, 3, 12, device=device, requires_grad=True)
    tables = torch.rand(1, 3, 4, device=device), torch.rand(1, 3, 4, device=device)
    mice = Mice(HelmConfig(variant="mice", hidden_size=12, moe_intermediate_size=6)).to(device)
    doors: dict[str, Callable[[], Tensor]] = {
        "norm_linear": lambda: norm_linear(x, torch.ones(12, device=device), layer, c=c)[1],
        "join": lambda: join(x, 2 * x, raw),
        "swiglu_linear": lambda: swiglu_linear(torch.cat([x, x], -1), layer, 12),
        "centroid_linear": lambda: centroid_linear(x[None], drawn(11, 5, device), 11),
        "lift_heads": lambda: torch.cat(lift_heads(torch.cat([x, x, x], -1), *tables, raw, Heads(3, 8, 4, 4)), -1),
        "mix_experts": lambda: mice(x)[0],
    }
    (grad,) = torch.autograd.grad(doors[kind]().square().sum(), x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), x)[0]


@pytest.mark.parametrize(
    "kind", ["norm_linear", "join", "swiglu_linear", "centroid_linear", "lift_heads", "mix_experts"]
)
def test_second_derivatives_are_refused_and_not_wrong(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPTREE_BACKEND", "torch")
    assert second_derivatives(kind, device).abs().max() > 0
    monkeypatch.setenv("HYPTREE_BACKEND", "triton")
    with pytest.raises(RuntimeError, match="first derivatives only"):
        second_derivatives(kind, device)
