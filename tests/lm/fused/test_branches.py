"""Kernels joined with products, and a whole model that runs on them, against plain torch: values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hyptree.lm import HelmForCausalLM, preset
from hyptree.lm.ambient import AmbientLinear, lift, lift_padded, padded_width, residual, rms_norm
from hyptree.lm.fused import branches as fused
from hyptree.ops import backend as backends

pytest.importorskip("triton")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu" and not backends.interpreted():
        pytest.skip("kernels run on the GPU here, TRITON_INTERPRET=1 would run them on the CPU")
    monkeypatch.setenv("HYPTREE_BACKEND", "triton")
    return str(request.param)


def compare(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], leaves: list[Tensor]) -> None:
    """Outputs, and gradients of a random scalar made from them."""
    weights = [torch.randn_like(out) for out in expected]
    grads = []
    for outs in (actual, expected):
        total = sum((out * weight).sum() for out, weight in zip(outs, weights, strict=True))
        grads.append(torch.autograd.grad(total, leaves))  # type: ignore[arg-type]
    for one, other in (*zip(actual, expected, strict=True), *zip(*grads, strict=True)):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("with_layer", [True, False])
@pytest.mark.parametrize("with_branch", [True, False])
def test_norm_and_product(with_branch: bool, with_layer: bool, device: str) -> None:
    n, width = 13, padded_width(13)
    x = (3 * torch.randn(2, 3, n, device=device)).requires_grad_()
    y = torch.randn(2, 3, n, device=device, requires_grad=True)
    raw = torch.randn(1, device=device, requires_grad=True)
    gain = torch.rand(n, device=device, requires_grad=True)
    layer = AmbientLinear(n, 7, device=device)
    assert layer.bias is not None
    torch.nn.init.normal_(layer.bias)
    leaves = [x, gain]
    branch: dict[str, Tensor] = {}
    plain = x
    if with_branch:
        branch = {"y": y, "raw_weight": raw}
        plain = residual(x, y, raw, 2.0, 0.5)
        leaves += [y, raw]
    lifted = lift(rms_norm(plain, gain, 1e-6), 0.5)
    if with_layer:
        leaves += list(layer.parameters())
    settings = {"gain": 2.0, "eps": 1e-6, "c": 0.5, "width": width}
    actual = fused.norm_product(x, gain, layer if with_layer else None, **branch, **settings)  # type: ignore[arg-type]
    compare(actual, (plain, layer(lifted) if with_layer else lifted), leaves)


def test_join_and_swiglu(device: str) -> None:
    x = torch.randn(4, 9, device=device, requires_grad=True)
    y = torch.randn(4, 9, device=device, requires_grad=True)
    raw = torch.randn(1, device=device, requires_grad=True)
    compare((fused.join(x, y, raw, 3.0, 2.0),), (residual(x, y, raw, 3.0, 2.0),), [x, y, raw])
    hidden, width = 10, padded_width(10)
    half = torch.randn(4, 2, width, device=device)
    half[..., hidden:] = 0.0
    both = half.flatten(1).requires_grad_()
    layer = AmbientLinear(hidden, 5, device=device)
    gate, up = both.chunk(2, -1)
    expected = layer(lift_padded(torch.nn.functional.silu(gate) * up, hidden, both.dtype, 0.7))
    actual = fused.swiglu_product(both, layer, hidden, 0.7, True)
    weight = torch.randn_like(expected)
    one, other = (torch.autograd.grad((out * weight).sum(), [both, *layer.parameters()]) for out in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)
    is_space = (torch.arange(width, device=device) < hidden).repeat(2)  # the rest belongs to rows of zeros
    torch.testing.assert_close(one[0][:, is_space], other[0][:, is_space], rtol=2e-5, atol=2e-5)
    for a, b in zip(one[1:], other[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


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
