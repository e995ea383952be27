"""MICE on kernels beside MICE in plain torch: values, gradients, what is kept, one graph."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from hyptree.lm.ambient import padded_width
from hyptree.lm.experts.mixture import Mice
from hyptree.ops import backend as backends
from hyptree.ops import bare
from tests.lm.experts.test_mixture import config, points, stir
from tests.lm.make import lift

pytest.importorskip("triton")

CLOSE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and not backends.interpreted():
        pytest.skip("kernels run on the GPU here, TRITON_INTERPRET=1 would run them on the CPU")
    return str(request.param)


def make(device: str, **changes: Any) -> Mice:
    mice = stir(Mice(config(**changes)).to(device))
    assert isinstance(mice, Mice)
    with torch.no_grad():  # near the origin t^2 - |s|^2 says something in float32
        for name, p in mice.named_parameters():
            p.mul_(1.0 if "curvature" in name else 0.35)
    mice.gate.balance_bias.copy_(0.1 * torch.randn(mice.gate.num_experts))
    return mice


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_experts_per_tok": 3, "n_shared_experts": 2, "curvature": 0.6, "route_scale": 2.5},
        {"n_shared_experts": 0, "num_experts_per_tok": 1, "hidden_size": 16},
        {"n_shared_experts": 2, "shared_curvature": True, "curvature": 0.5},
        {"expert_curvature": "const", "curvature": 2.0, "shared_curvature": True},
        {"expert_curvature": "const", "ffn_bias": False, "hidden_size": 15},
        {"ffn_bias": False, "shared_curvature": True},
        {"expert_norm": True},
    ],
    ids=str,
)
def test_kernels_say_the_same(changes: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mice = make(device, **changes).train()
    n, c = mice.sizes.features, mice.sizes.c
    space = points(c, 2, 3, dtype=torch.float32, n=n).to(device)
    grad, results = torch.randn_like(space), []
    for backend, own in (("triton", mice), ("torch", copy.deepcopy(mice).double())):  # the definition in float64
        monkeypatch.setenv("HYPTREE_BACKEND", backend)
        inputs = [space.to(own.gate.weight.dtype).requires_grad_(), *own.parameters()]
        out, aux = own(inputs[0])
        assert aux is not None and out.grad_fn is not None
        is_fused = "Mice" in str(out.grad_fn.next_functions)
        assert is_fused == (backend == "triton" and not mice.has_norm)
        actual = torch.autograd.grad((out * grad).sum() + aux, inputs, allow_unused=True)
        results.append([None if x is None else x.float() for x in (out.detach(), *actual)])
    names = ["out", "space", *(name for name, _ in mice.named_parameters())]
    for name, one, other in zip(names, *results, strict=True):
        if other is None:
            assert one is None or one.count_nonzero() == 0, name
            continue
        assert one is not None and (one.is_contiguous() or mice.has_norm), name
        size = other.abs().max().clamp(min=1.0)
        torch.testing.assert_close(one / size, other / size, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def test_only_what_products_wrote_is_kept(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows per choice the first product and the points alone, nothing sorted, nothing lifted."""
    mice = make(device, n_routed_experts=5, num_experts_per_tok=3).train()
    space = points(1.0, 2, 4, dtype=torch.float32).to(device)
    lifted = lift(space).requires_grad_()
    monkeypatch.setenv("HYPTREE_BACKEND", "triton")
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        mice(lifted)
    per_choice = sorted(x.numel() // 24 for x in kept.values() if x.is_floating_point() and x.shape[:1] == (24,))
    assert per_choice == [1, mice.sizes.features // 8 * 8 + 8, 2 * padded_width(10)]  # factor, points, gate and up


def test_kept_matrices_see_changed_weights(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPTREE_BACKEND", "triton")
    mice = make(device, shared_curvature=True).eval()
    space = points(1.0, 1, 4, dtype=torch.float32).to(device)
    with torch.no_grad():
        first = mice(space)[0]
        assert torch.equal(mice(space)[0], first)
        mice.routed.bias_in.add_(0.5)  # type: ignore[union-attr]
        second = mice(space)[0]
        monkeypatch.setenv("HYPTREE_BACKEND", "torch")
        expected = mice(space)[0]
    assert (second - first).abs().max() > 1e-3
    torch.testing.assert_close(second, expected, **CLOSE)


@pytest.mark.parametrize("name", ["routed", "shared"])
def test_experts_that_are_not_bare_are_called(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HYPTREE_BACKEND", "triton")
    mice, calls = make(device, shared_curvature=True), list[int]()
    space = points(1.0, 2, 4, dtype=torch.float32).to(device)
    bare._reported.clear()
    expected, _ = mice(space)
    mice.get_submodule(name).register_forward_hook(lambda *_: calls.append(1))
    with caplog.at_level(logging.WARNING):
        actual = [mice(space)[0] for _ in range(2)]
    assert len(calls) == 2
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["mix_experts"]
    for one in actual:
        torch.testing.assert_close(one, expected, **CLOSE)
