"""Attention on kernels of its own against plain torch: values and gradients, both variants."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from hyptree.lm.attention import HelmAttention
from hyptree.lm.config import HelmConfig
from hyptree.lm.latent.attention import LatentAttention
from hyptree.lm.rotary import HelmRotary
from hyptree.ops import backend as backends
from hyptree.ops.residual_norm import norm_linear

pytest.importorskip("triton")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and not backends.interpreted():
        pytest.skip("kernels run on the GPU here, TRITON_INTERPRET=1 would run them on the CPU")
    return str(request.param)


def perturbed(layer: torch.nn.Module, device: str) -> Any:
    """The layer with numbers in the place of zeros and ones."""
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return layer.to(device)


def left_padded(length: int, device: str) -> Tensor:
    """Causal order of two sequences, with two tokens of padding on the left of the second."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril().expand(2, 1, -1, -1).clone()
    mask[1, :, 2:, :2] = False
    return mask


def attend(layer: Any, s: Tensor, tables: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
    first = layer.down if isinstance(layer, LatentAttention) else layer.qkv_proj
    _, rows = norm_linear(s, torch.ones_like(s[0, 0]), first, eps=1.0, c=first.c)
    out: Tensor = layer(rows, tables, mask)[0]
    return out


def outcome(
    layer: Any, s: Tensor, tables: tuple[Tensor, Tensor], mask: Tensor | None, weight: Tensor, run: Any = attend
) -> tuple[Tensor, tuple[Tensor, ...]]:
    out = run(layer, s, tables, mask)
    return out, torch.autograd.grad((out * weight).sum(), [s, *layer.parameters()])


def compare(layer: Any, device: str, monkeypatch: pytest.MonkeyPatch, mask: Tensor | None, length: int) -> None:
    """Outputs and gradients of everything, with the kernels and without."""
    s = (0.5 * torch.randn(2, length, layer.config.hidden_size, device=device)).requires_grad_()
    tables = HelmRotary(layer.config).to(device)(s, torch.arange(length, device=device)[None])
    weight = torch.randn_like(s)
    monkeypatch.setenv("HYPTREE_BACKEND", "triton")
    out, grads = outcome(layer, s, tables, mask, weight)
    # The definition in float64: some gradients are small sums of large parts, and plain float32 is off by as much.
    monkeypatch.setenv("HYPTREE_BACKEND", "torch")
    exact = copy.deepcopy(layer).double(), s.detach().double().requires_grad_(), tuple(x.double() for x in tables)
    expected, wanted_grads = outcome(*exact, mask, weight.double())
    assert out.grad_fn is not None
    assert expected.grad_fn is not None
    assert out.grad_fn.name().startswith("_CentroidLinear")
    assert not expected.grad_fn.name().startswith("_CentroidLinear")
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
    largest = max(other.abs().max().item() for other in wanted_grads)
    for one, other in zip(grads, wanted_grads, strict=True):
        # The temperature's is one sum over all tokens, whose parts are as large as other gradients and cancel.
        scale = max(1.0, largest if other.numel() == 1 else other.abs().max().item())
        torch.testing.assert_close(one.double() / scale, other / scale, rtol=2e-5, atol=2e-5)


# Values near the origin: the gradient of a centroid grows with the square of their radius, and rounding with it.
DENSE = {
    "hidden_size": 20, "num_attention_heads": 3, "head_dim": 7, "value_scale": 0.1, "attn_implementation": "sdpa",
}  # fmt: skip
LATENT = {
    "variant": "mice", "hidden_size": 20, "num_attention_heads": 3, "kv_lora_rank": 9, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 7, "value_scale": 0.1, "attn_implementation": "sdpa",
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{}, {"rope_pairing": "half"}, {"attention_bias": False, "curvature": 0.5}, {"value_scale": 0.2, "head_dim": 10}],
)
@pytest.mark.parametrize("masked", [False, True])
def test_dense_attention(changes: dict[str, Any], masked: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = perturbed(HelmAttention(HelmConfig(**{**DENSE, **changes}), 0), device)
    compare(layer, device, monkeypatch, left_padded(5, device) if masked else None, 5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": 8, "curvature": 2.0, "value_scale": 0.2},
        {"rope_pairing": "half", "attention_bias": False, "v_head_dim": 17},
        {"qk_rope_head_dim": 5, "qk_nope_head_dim": 12, "v_head_dim": 3},
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_latent_attention(changes: dict[str, Any], masked: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = perturbed(LatentAttention(HelmConfig(**{**LATENT, **changes}), 0), device)
    compare(layer, device, monkeypatch, left_padded(5, device) if masked else None, 5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "latent"])
def test_attention_compiles_in_one_graph(kind: str) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 3, "attn_implementation": "sdpa"}
    if kind == "dense":
        layer = perturbed(HelmAttention(HelmConfig(**sizes, head_dim=63), 0), "cuda")
    else:
        heads = {"kv_lora_rank": 62, "qk_nope_head_dim": 47, "qk_rope_head_dim": 16, "v_head_dim": 63}
        layer = perturbed(LatentAttention(HelmConfig(**sizes, **heads, variant="mice"), 0), "cuda")
    s = (0.5 * torch.randn(2, 40, 128, device="cuda")).requires_grad_()
    tables = HelmRotary(layer.config).to("cuda")(s, torch.arange(40, device="cuda")[None])
    weight = torch.randn_like(s)
    with torch.autocast("cuda", torch.bfloat16):
        expected, wanted_grads = outcome(layer, s, tables, None, weight)
        run = torch.compile(attend, fullgraph=True)
        out, grads = outcome(layer, s, tables, None, weight, run)
    assert out.dtype == torch.bfloat16
    for one, other in ((out, expected), *zip(grads, wanted_grads, strict=True)):
        assert (one - other).norm() <= 2e-2 * other.norm()


def test_a_traced_length_stays_in_one_graph() -> None:
    layer = perturbed(HelmAttention(HelmConfig(**DENSE), 0), "cpu")
    compiled = torch.compile(attend, backend="eager", fullgraph=True, dynamic=True)
    for length in (6, 9):
        s = torch.randn(2, length, 20)
        tables = HelmRotary(layer.config)(s, torch.arange(length)[None])
        torch.testing.assert_close(compiled(layer, s, tables, None), attend(layer, s, tables, None))
